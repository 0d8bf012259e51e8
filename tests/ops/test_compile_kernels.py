"""The interpreter runs kernels that no compiler takes; this compiles them for an H200, with or without one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_kernels_compile_for_an_h200(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compiled here and now
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels, seconds = run.stdout.split()[-2:]
    assert int(kernels) > 20, "Triton tells of what it compiles"
    assert float(seconds) > 1
    wanted = {
        "_bring",
        "_make_keys",
        "_lay_bags",
        "_arrive_unsorted",
        "_collect",
        "_place",
        "_assign",
        "_chunks",
        "_unpack",
    }
    assert wanted <= set(run.stdout.split())
