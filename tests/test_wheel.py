"""What `pip install hotbed` brings: the wheel of a clone trains, evaluates and reports without the clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator

import hotbed

ROOT = Path(hotbed.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """dist/ as `python -m build` leaves it: the source archive, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hotbed", source / "hotbed", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def test_the_source_archive_holds_the_package(built):
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "hotbed").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_it_holds_all_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.startswith(f"hotbed-{hotbed.__version__}.dist-info/")}
        metadata = file.read(f"hotbed-{hotbed.__version__}.dist-info/METADATA").decode()
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "hotbed").rglob("*") if path.is_file()}
    assert names == {name for name in ours if "__pycache__" not in name}
    assert "Operating System :: POSIX :: Linux" in metadata
    assert f"Version: {hotbed.__version__}\n" in metadata


def share_kernels(installed, kernels):
    """The clone's compiled kernels are found: they are of the same sources, and compiling them again takes 40 s."""
    kernels.mkdir()
    for path in (installed / "hotbed").rglob("*.py"):
        ours = ROOT / path.relative_to(installed)
        shutil.copystat(ours, path)  # Numba looks at the time of a source
        theirs = kernels / _CacheLocator.get_suitable_cache_subpath(str(path))
        if not theirs.exists():
            shared = Path(os.environ["NUMBA_CACHE_DIR"], _CacheLocator.get_suitable_cache_subpath(str(ours)))
            shared.mkdir(parents=True, exist_ok=True)
            theirs.symlink_to(shared)


def test_it_trains_outside_the_clone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    share_kernels(tmp_path / "installed", tmp_path / "kernels")
    where = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "HOTBED_CACHE": str(tmp_path / "cache")}
    where["NUMBA_CACHE_DIR"] = str(tmp_path / "kernels")

    def run(*words):
        command = [sys.executable, "-m", "hotbed", *words]
        return subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=True, timeout=300)

    assert run("--version").stdout == f"hotbed {hotbed.__version__}\n"
    run("train", "--data", "criteo-like:3000", "--cache", "20%", "--batch-size", "64", "--out", "run", "--quiet")
    assert (tmp_path / "run" / "report.html").is_file()
    assert "AUC" in run("evaluate", "run").stdout


def test_another_system_is_refused_with_a_way_out():
    code = "import sys; sys.platform = 'darwin'; import hotbed"
    plain = {name: value for name, value in os.environ.items() if name != "HOTBED_ANY_SYSTEM"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "hotbed runs on Linux, and this is darwin" in done.stderr
    assert "WSL 2" in done.stderr
