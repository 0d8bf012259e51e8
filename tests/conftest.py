"""Shared by all tests: where real data is, and compiled kernels that belong to these very sources."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.kernel_sources import kernel_digest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / f"numba-{kernel_digest(ROOT / 'hotbed')}"))

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

hypothesis.settings.register_profile("hotbed", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("hotbed")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real click logs, or a skip."""
    directory = Path(os.environ.get("HOTBED_DATA", ROOT.parent / "shared" / "data"))
    if not (directory / "criteo_60k.tsv.xz").exists():
        pytest.skip(f"real data is not in {directory}; set HOTBED_DATA")
    return directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
