"""Copies of the tree for changes to be made in, each with compiled kernels of its own that are already there.

Numba keeps kernels in folders named by the path of their source, and takes one as new when that file's time or size is
another. So kernels can be carried from copy to copy under other names. A change makes those of its own file stale: they are
moved aside meanwhile. Kernels of other files are kept under the code that they reach (hotbed/host/jit.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.warm import WarmPytest
from tests.kernel_sources import kernel_digest

_LEFT_OUT = (".git", ".venv", ".cache", ".carry", "*_cache", "_build", "runs", ".hypothesis")


class Ended(NamedTuple):
    """How a call of pytest ended; None: it ran out of time."""

    code: int | None
    output: str


def failures(ended: Ended) -> list[str]:
    """The tests that failed; where none is named, how it ended."""
    if ended.code is None:
        return ["out of time"]
    lines = [line.split(" - ")[0] for line in ended.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.partition(" ")[2] for line in lines] or [f"ended with {ended.code}"]


class Tree:
    """One copy."""

    def __init__(self, root: Path, folder: Path) -> None:
        digest = kernel_digest(
            root / "hotbed"
        )  # a kernel in a cache of the same name is not stale, see tests/conftest.py
        self.path, self.kernels = folder / "tree", folder / f"numba-{digest}"
        self._num_changes = 0
        self._warm: WarmPytest | None = None
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(root, self.path, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
        self.kernels.mkdir(parents=True, exist_ok=True)
        self.take_kernels([(root, root / ".cache" / self.kernels.name)])
        data = Path(os.environ.get("HOTBED_DATA", root.parent / "shared" / "data"))
        self._environment = {
            "PYTHONPATH": os.pathsep.join([str(self.path), *_others_of(root)]), "NUMBA_CACHE_DIR": str(self.kernels),
            "HOTBED_DATA": str(data.absolute()),
            "MUTANTS_ROOT": str(self.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
            "CI": "1",  # hypothesis draws the same examples every time
        }  # fmt: skip

    def pytest(self, arguments: Sequence[str], more: dict[str, str], limit: float, site: Path | None = None) -> Ended:
        """Run some tests of this copy, in a session of their own that ends with them; modules of `site` come first."""
        marks = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "benchmarks.mutants.plugin"]
        command = [*marks, f"--basetemp={self.path.parent / 'tmp'}", *arguments]
        environment = {**os.environ, **self._environment}
        if site is None:
            if self._warm is None:
                self._warm = WarmPytest(self.path, environment)
            output = self.path.parent / "output.txt"
            code = self._warm.run(command, more, output, limit)
            return Ended(code, output.read_text(errors="replace"))
        environment |= {**more, "PYTHONPATH": os.pathsep.join([str(site), environment["PYTHONPATH"]])}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *command], cwd=self.path, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output_text, _ = process.communicate(timeout=limit)
            return Ended(process.returncode, output_text)
        except subprocess.TimeoutExpired:
            return Ended(None, "")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    @contextmanager
    def changed(self, file: str, source: bytes) -> Iterator[None]:
        """While the file is another one. Python and Numba both know a file by its time."""
        path, aside = self.path / file, self.path.parent / "aside"
        before, times = path.read_bytes(), path.stat()
        stale = self._kernels_of(path)
        shutil.rmtree(aside, ignore_errors=True)
        for kernel in stale:
            (aside / kernel.parent.name).mkdir(parents=True, exist_ok=True)
            kernel.rename(aside / kernel.parent.name / kernel.name)
        self._num_changes += 1
        path.write_bytes(source)
        os.utime(path, (times.st_atime, times.st_mtime + self._num_changes))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for kernel in self._kernels_of(path):
                kernel.unlink()
            for kernel in stale:
                (aside / kernel.parent.name / kernel.name).rename(kernel)

    def take_kernels(self, others: Sequence[tuple[Path, Path]]) -> None:
        """From (tree, folder of kernels), of every kernel the files of the one that has compiled it for most types."""
        best: dict[tuple[Path, str], Path] = {}
        for path, kernels in others:
            for source in _sources(path):
                for index in (kernels / _folder_of(source.parent)).glob(f"{source.stem}.*.nbi"):
                    name = (source.relative_to(path).parent, index.stem)
                    if name not in best or index.stat().st_size > best[name].stat().st_size:
                        best[name] = index
        for (folder, stem), index in best.items():
            target = self.kernels / _folder_of(self.path / folder)
            if target == index.parent:
                continue
            target.mkdir(parents=True, exist_ok=True)
            for old in target.glob(f"{stem}.*"):
                old.unlink()
            for file in index.parent.glob(f"{stem}.*"):
                shutil.copy2(file, target)

    @property
    def has_kernels(self) -> bool:
        return any(self.kernels.rglob("*.nbi"))

    def _kernels_of(self, source: Path) -> list[Path]:
        return list((self.kernels / _folder_of(source.parent)).glob(f"{source.stem}.*"))


def _others_of(root: Path) -> list[str]:
    """Where else Python looks for modules, as whoever called this said; not in the tree itself."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(one).resolve()) for one in given if one and Path(one).resolve() != root.resolve()]


@cache
def _sources(path: Path) -> list[Path]:
    return sorted((path / "hotbed").rglob("*.py"))


def _folder_of(directory: Path) -> str:
    """As Numba names it."""
    return f"{directory.name}_{hashlib.sha1(str(directory).encode()).hexdigest()}"
