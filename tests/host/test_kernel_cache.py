"""Compiled kernels find a place on every machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.host import startup
from hotbed.host.startup import VARIABLE, find_kernel_cache

PACKAGE = Path(startup.__file__).parent.parent


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No variable, no Numba yet, a home that cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(startup.atexit, "register", lambda *_, **__: None)
    monkeypatch.setattr(startup.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_package_that_can_be_written_keeps_its_own(bare):
    find_kernel_cache(bare / "package")
    assert VARIABLE not in os.environ


def test_a_home_that_can_be_written_is_left_to_numba(bare, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "home"))
    find_kernel_cache(bare / "file")
    assert VARIABLE not in os.environ


def test_what_the_user_says_stands(bare, monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    find_kernel_cache(bare / "file")
    assert os.environ[VARIABLE] == "mine"


def test_with_neither_there_is_a_temporary_place(bare):
    find_kernel_cache(bare / "file")
    assert Path(os.environ[VARIABLE]).parent == bare


def test_kernels_load_where_nothing_can_be_written(bare):
    """A file in the place of every __pycache__ stops even root, as a read-only file system would."""
    shutil.copytree(PACKAGE, bare / "hotbed", ignore=shutil.ignore_patterns("__pycache__"))
    for directory in [bare / "hotbed", *(path for path in (bare / "hotbed").rglob("*") if path.is_dir())]:
        (directory / "__pycache__").write_text("")
    environment = {**os.environ, "HOME": str(bare / "file"), "PYTHONPATH": str(bare), "TMPDIR": str(bare)}
    code = "import hotbed.data.draws; print(hotbed.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=bare, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bare / "hotbed" / "__init__.py")
    assert not list(bare.glob("hotbed-kernels-*"))
