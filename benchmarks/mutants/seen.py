"""Which tests notice a change, best first: those that run the function it is in, near ones and quick ones before others.

Every test file is run once, alone, and what its tests ran and how long they took is kept until the file changes.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from benchmarks.mutants.changes import Change
from benchmarks.mutants.trees import Tree

_NEAR = {"parallel": "distributed"}  # folder of hotbed: of tests, where they differ
_OTHERS = (  # what is not about the changed areas
    "bench", "cli", "crash", "data", "examples", "export", "gpu", "models", "report", "scorer", "serve", "run",
    "test_docs.py", "test_figures.py", "test_imports.py", "host", "test_notebooks.py", "test_site.py",
)  # fmt: skip
_MOST_SECONDS = 900.0  # of one file


class Case(NamedTuple):
    """A test that passes on the tree as it is."""

    name: str
    seconds: float
    functions: frozenset[str]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def test_files(root: Path) -> list[str]:
    """Those that concern what is changed; long ones first."""
    tests = root / "tests"
    found = [file for file in tests.rglob("test_*.py") if file.relative_to(tests).parts[0] not in _OTHERS]
    return [str(file.relative_to(root)) for file in sorted(found, key=lambda file: -file.stat().st_size)]


def see(root: Path, work: Path, trees: list[Tree], files: list[str], tell: Callable[[str], None]) -> list[Case]:
    """Run what is not known yet, in as many copies as there are."""
    places = {file: work / "seen" / (file.replace("/", "-") + f"-{_digest(root / file)}.json") for file in files}
    missing = [file for file in files if not places[file].exists()]
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def run(file: str) -> None:
        tree = free.get()
        try:
            ended = _run(tree, file, places[file])
        finally:
            free.put(tree)
        tell(f"{file}: {ended}")

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(run, missing))
    found = [json.loads(place.read_text())["tests"] for place in places.values()]
    return [
        Case(name, one["seconds"], frozenset(one["functions"])) for tests in found for name, one in tests.items()
    ]  # fmt: skip


def _run(tree: Tree, file: str, place: Path) -> str:
    site = tree.path.parent / "site"
    for folder in (site, place.parent):
        folder.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text("import benchmarks.mutants.hook\n")
    new = tree.path.parent / "seen.json"
    for old in (new, Path(f"{new}.others")):
        old.unlink(missing_ok=True)
    more = {"MUTANTS_SEEN": str(new), "PYTHONPATH": f"{site}:{tree.path}"}
    ended = tree.pytest([file], more, _MOST_SECONDS)
    if not new.exists():
        new.write_text(json.dumps({"tests": {}, "not_passed": [file]}))
    place.write_text(new.read_text())
    last = ended.output.strip().rpartition("\n")[2]
    return last if ended.code is not None else "left out, it did not end"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def cases_for(change: Change, tests: Iterable[Case], limit: float) -> list[Case]:
    """As many as `limit` seconds allow: of every test function one case first, near and quick ones first."""
    wanted = f"{change.file}:{change.function}"
    running = [test for test in tests if wanted in test.functions]
    if not running:  # a kernel, or nothing that was seen
        running = [test for test in tests if any(name.startswith(f"{change.file}:") for name in test.functions)]
    if not running:
        running = [test for test in tests if _is_near(change.file, test)]
    cases: dict[str, list[Case]] = defaultdict(list)
    for test in sorted(running, key=lambda test: test.seconds):
        cases[test.name.partition("[")[0]].append(test)
    order = [
        (number, test.seconds * (1 if _is_near(change.file, test) else 4), test)
        for same in cases.values()
        for number, test in enumerate(same)
    ]
    chosen, spent = [], 0.0
    for _, _, test in sorted(order):
        if spent + test.seconds <= limit or not chosen:
            chosen.append(test)
            spent += test.seconds
    return chosen


def _is_near(file: str, test: Case) -> bool:
    """Whether a test is in the folder of the same name, or in the file of it."""
    parts = Path(file).with_suffix("").parts[1:]
    folder = _NEAR.get(parts[0], parts[0])
    return test.name.startswith(f"tests/{folder}/") or f"test_{parts[-1]}" in test.file
