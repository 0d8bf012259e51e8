"""A change before the tests near it, of which nothing has to be learned first: most changes are noticed there.

In: a change, and a copy of the tree. Out: the test that failed. A failure counts when the test passes without the change: all
those that failed are run once more together on the tree as it is (`failing`), and what fails there is left out from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from benchmarks.mutants.changes import Change
from benchmarks.mutants.seen import NEAR, SLOW, test_files
from benchmarks.mutants.trees import Tree, failures

NONE_FOUND = 5  # pytest's word for it
_WALL = 10.0  # seconds on a busy machine for one of processor time


class NearTests:
    """`limit`: seconds of processor time for each change, half of it for each of three lots of files."""

    def __init__(self, root: Path, limit: float) -> None:
        self._root, self._limit = root, limit
        self._lock = threading.Lock()
        self._left_out: set[str] = set()

    def failed(self, change: Change, tree: Tree, first: str = "") -> tuple[str, int]:
        """(the test that failed, or nothing; how many files were tried). `first`: a test to try before the others."""
        without, listed = tree.path.parent / "without.txt", tree.path.parent / "tests.txt"
        with self._lock:
            without.write_text("\n".join(sorted(self._left_out)))
            has_first = "::" in first and first not in self._left_out
        listed.write_text(first)
        lots = [(files, {"MUTANTS_SECONDS": str(self._limit / 2)}) for files in near_files(change, self._root)]
        if has_first:
            lots.insert(0, ([first.partition("::")[0]], {"MUTANTS_TESTS": str(listed)}))
        tried = 0
        with tree.changed(change.file, change.apply((self._root / change.file).read_bytes())):
            for files, more in lots:
                ended = tree.pytest(["-x", *files], {**more, "MUTANTS_WITHOUT": str(without)}, _WALL * self._limit)
                if ended.code == NONE_FOUND:
                    continue
                tried += len(files)
                if ended.code != 0:
                    return failures(ended)[-1], tried
        return "", tried

    def failing(self, names: Iterable[str], tree: Tree) -> set[str]:
        """Of tests that failed with a change, those that fail without it."""
        wanted = sorted({name for name in names if "::" in name})
        if not wanted:
            return set()
        listed = tree.path.parent / "tests.txt"
        listed.write_text("\n".join(wanted))
        files = sorted({name.partition("::")[0] for name in wanted})
        ended = tree.pytest(files, {"MUTANTS_TESTS": str(listed)}, _WALL * self._limit * (1 + len(wanted)))
        found = set(wanted) if ended.code is None else {name for name in failures(ended) if name in wanted}
        with self._lock:
            self._left_out |= found
        return found


def near_files(change: Change, root: Path) -> list[list[str]]:
    """Test files to try a change with before anything is learned, a few at a time, nearest first.

    The file of the same name, files that import what is changed, files of the same folder; the slow ones only where it has
    no others.
    """
    parts = Path(change.file).with_suffix("").parts
    module, folder = ".".join(parts), NEAR.get(parts[1], parts[1])
    ranks: dict[str, tuple[int, int]] = {}
    for file in test_files(root):
        path, text = root / file, (root / file).read_text()
        is_here = file.startswith(f"tests/{folder}/")
        if path.parent.name in SLOW and not is_here:
            continue
        if path.name == f"test_{parts[-1]}.py":
            ranks[file] = 0, path.stat().st_size
        elif f"{module} import" in text or f"import {module}" in text:
            ranks[file] = 1 + (not is_here), path.stat().st_size
        elif is_here:
            ranks[file] = 3, path.stat().st_size
    found = sorted(ranks, key=ranks.__getitem__)
    return [chunk for chunk in (found[:3], found[3:9], found[9:]) if chunk]
