"""Shared by all tests: where real data is, and compiled kernels that belong to these very sources."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import quick_interpreter
from tests.kernel_sources import kernel_digest

ROOT = Path(__file__).resolve().parent.parent
# Files of half a minute and more. Where several processes take a file each, one of these does not come last.
LONG = (
    "faults/test_walk.py",
    "laws/test_cache_invisible.py",
    "laws/test_dynamic_invisible.py",
    "pipeline/test_feed.py",
    "pipeline/test_recorded.py",
    "distributed/test_replicated.py",
    "distributed/test_sharded.py",
    "distributed/test_train.py",
    "crash/test_kills.py",
    "power/test_data.py",
    "golden/test_golden.py",
    "interop/test_compile.py",
    "test_notebooks.py",
    "test_docs.py",
)

os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / f"numba-{kernel_digest(ROOT / 'hotbed')}"))

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.relative_to(ROOT / "tests").as_posix() not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
