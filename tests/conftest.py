"""Shared by all tests: where real data is, and compiled kernels that belong to these very sources."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import quick_interpreter
from tests.kernel_sources import kernel_digest

ROOT = Path(__file__).resolve().parent.parent
# Where several processes take a file each, these come first, in this order.
FIRST = (
    # It compiles most kernels. Ranks and killed runs come later: what is not there, each of them compiles for itself.
    "train/test_dynamic_run.py",
    # Meanwhile, what needs none of these.
    "ops/test_compile_kernels.py",
    "host/test_threads.py",
    "test_site.py",
    "data/test_malformed.py",
    # The other kernels.
    "train/test_cached_run.py",
    "checkpoint/test_tables.py",
    "checkpoint/test_dynamic.py",
    "train/test_build.py",
    # It waits for processes of Ray most of the time, while others work.
    "distributed/test_ray.py",
    # It takes what is compiled so far.
    "test_wheel.py",
    # Long files: none of them comes last.
    "faults/test_walk.py",
    "faults/test_tier_walk.py",
    "laws/test_cache_invisible.py",
    "laws/test_dynamic_invisible.py",
    "pipeline/test_feed.py",
    "distributed/test_replicated.py",
    "crash/test_kills.py",
    "distributed/test_sharded.py",
    "distributed/test_train.py",
    "distributed/test_train_dynamic.py",
    "distributed/test_kstep.py",
    "distributed/test_train_ways.py",
    "distributed/test_pooled.py",
    "faults/test_interrupted.py",
    "pipeline/test_recorded_tiers.py",
    "files/test_end_to_end.py",
    "test_notebooks.py",
    "test_docs.py",
    "power/test_data.py",
    "power/test_ssd.py",
    "golden/test_golden.py",
    "interop/test_compile.py",
    "cli/test_verify.py",
    "scorer/test_update.py",
    "cache/test_victims.py",
    "pipeline/test_recorded_bags.py",
    "export/test_scores.py",
    "cli/test_train.py",
    "bench/test_check.py",
    "forecast/test_real_traces.py",
    "tables/test_snapshot_ids.py",
    "train/test_storage_lines.py",
)

if "NUMBA_CACHE_DIR" not in os.environ:  # processes that take a share of the tests are told by the one that starts them
    os.environ["NUMBA_CACHE_DIR"] = str(ROOT / ".cache" / f"numba-{kernel_digest(ROOT / 'hotbed')}")

# Tests flush thousands of files. In memory some take a quarter of the time, where there is room for the 3 GB that all leave.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # before anything asks for a folder

# Batches of the tests are so small that threads only wait for each other: 2 to 3 s of processor time with one, 7 with two.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    if os.environ["TRITON_INTERPRET"] == "1":
        quick_interpreter.install()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("hotbed", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("hotbed")


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """A test that turns them off for good fails itself, instead of all that follow in its process."""
    yield
    was_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_on, "gradients are off after this test"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests of what is done by several."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real click logs, or a skip."""
    directory = Path(os.environ.get("HOTBED_DATA", ROOT.parent / "shared" / "data"))
    if not (directory / "criteo_60k.tsv.xz").exists():
        pytest.skip(f"real data is not in {directory}; set HOTBED_DATA")
    return directory


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import stay for good: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
