"""Which tests notice a change, best first: those that run the function it is in, near ones and quick ones before others.

Every test file is run once, alone, and what its tests ran and how long they took is kept until the file changes. What is kept
may come from another machine; then it is not known that a test passes here (`Case.passes_here`).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from benchmarks.mutants.changes import Change
from benchmarks.mutants.trees import Tree
from tests.kernel_sources import importers_of

NEAR = {"parallel": "distributed"}  # folder of hotbed: of tests, where they differ
_OTHERS = (  # what is not about the changed areas
    "bench", "cli", "crash", "data", "examples", "export", "gpu", "models", "report", "scorer", "serve", "run",
    "test_docs.py", "test_figures.py", "test_imports.py", "host", "test_notebooks.py", "test_site.py", "forecast", "golden",
    "interop", "ops", "optim", "sizing", "telemetry", "test_assertions.py", "test_pairs.py", "test_seams.py", "test_wheel.py",
    "verify",
)  # fmt: skip
_LONG = ("test_walk.py", "test_storm.py")  # minutes for a test: none is chosen in time
SLOW = ("distributed", "laws", "power", "faults")  # whose files take longest
_MOST_SECONDS = 900.0  # of one file
_COMPILING = (  # what runs most kernels, each others
    "tests/train/test_dynamic_run.py", "tests/train/test_cached_run.py", "tests/checkpoint/test_tables.py",
    "tests/checkpoint/test_dynamic.py", "tests/store/test_tiered.py", "tests/tables/test_module.py",
    "tests/ids/test_translator.py", "tests/tables/test_tiers.py",
)  # fmt: skip
HERE = f"{platform.node()} {sys.version}"


class Case(NamedTuple):
    """A test that passes on the tree as it is."""

    name: str
    seconds: float
    functions: frozenset[str]
    passes_here: bool = True  # else it passed on another machine

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def test_files(root: Path) -> list[str]:
    """Those that concern what is changed; slow and long ones first."""
    tests = root / "tests"
    found = [file for file in tests.rglob("test_*.py") if file.relative_to(tests).parts[0] not in _OTHERS]
    found = sorted(found, key=lambda file: (file.parent.name not in SLOW, -file.stat().st_size))
    return [str(file.relative_to(root)) for file in found if file.name not in _LONG]


def see(root: Path, work: Path, trees: list[Tree], files: list[str], report: Callable[[str], None]) -> list[Case]:
    """Run what is not known yet, in as many copies as there are; where nothing is compiled, what compiles most."""
    places = {file: work / "seen" / (file.replace("/", "-") + f"-{_digest(root / file)}.json") for file in files}
    again = () if any(tree.has_kernels for tree in trees) else _COMPILING  # else every copy would compile them all
    missing = [file for file in files if not places[file].exists() or file in again]
    missing.sort(key=lambda file: file not in again)
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def run(file: str) -> None:
        tree = free.get()
        try:
            ended = _run(tree, file, places[file])
        finally:
            free.put(tree)
        report(f"{file}: {ended}")

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(run, missing))
    return [case for place in places.values() for case in _cases(json.loads(place.read_text()))]


def _cases(found: dict[str, Any]) -> Iterator[Case]:
    names = found["functions"]
    for test, (seconds, numbers) in found["tests"].items():
        yield Case(test, seconds, frozenset(names[number] for number in numbers), found["where"] == HERE)


def _run(tree: Tree, file: str, place: Path) -> str:
    site = tree.path.parent / "site"
    for folder in (site, place.parent):
        folder.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text("import benchmarks.mutants.hook\n")
    new = tree.path.parent / "seen.json"
    for old in (new, Path(f"{new}.others")):
        old.unlink(missing_ok=True)
    ended = tree.pytest([file], {"MUTANTS_SEEN": str(new)}, _MOST_SECONDS, site)
    tests = json.loads(new.read_text())["tests"] if new.exists() else {}
    names = sorted({name for one in tests.values() for name in one["functions"]})
    number_of = {name: number for number, name in enumerate(names)}
    short = {test: (one["seconds"], [number_of[name] for name in one["functions"]]) for test, one in tests.items()}
    written = new.with_suffix(".short")
    written.write_text(json.dumps({"where": HERE, "functions": names, "tests": short}))
    written.replace(place)
    last = ended.output.strip().rpartition("\n")[2]
    return last if ended.code is not None else "left out, it did not end"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def cases_for(change: Change, tests: Sequence[Case], limit: float, root: Path | None = None) -> list[Case]:
    """As many as `limit` seconds allow: of every test function one case first, near and quick ones first."""
    wanted = f"{change.file}:{change.function}"
    running = [test for test in tests if wanted in test.functions]
    if not running:  # a kernel, or nothing that was seen
        users = _users(root, change.file) if root is not None else {change.file}
        running = [test for test in tests if _is_near(change.file, test) or not users.isdisjoint(_files(test))]
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


def _files(test: Case) -> Iterator[str]:
    return (name.partition(":")[0] for name in test.functions)


@cache
def _users(root: Path, file: str) -> set[str]:
    """The file and those that import it."""
    return {str(one.relative_to(root)) for one in importers_of(root / "hotbed", root / file, most=1)}


def _is_near(file: str, test: Case) -> bool:
    """Whether a test is in the folder of the same name, or in the file of it."""
    parts = Path(file).with_suffix("").parts[1:]
    folder = NEAR.get(parts[0], parts[0])
    return test.name.startswith(f"tests/{folder}/") or f"test_{parts[-1]}" in test.file
