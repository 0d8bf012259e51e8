"""Make careless one-line changes and see whether a test notices each: `python -m benchmarks.mutants --count 160 --seed 0`.

A comparison at equality, one more or less, and for or, a condition turned round, a statement left out, arguments swapped, a
constant, min for max, a slice off by one, a function that returns early: drawn over cache, pipeline, store, checkpoint, ids,
parallel, train and tables. Every change is made in a copy of the tree, and the test files near it are run until a test fails,
for --limit seconds of processor time (near.py; `--near` ends here). For those that no near test notices all tests run once, to
learn which functions each runs (`--work` keeps this; a test file that has changed is run again), and the tests that run the
changed function are run until one fails: quick ones first, as many as --limit allows. Slow and gpu tests are never run. A test
that runs out of time has noticed.

What was learned (WORK/seen) may be carried to another machine. A test that is only known to pass elsewhere and fails for a
change runs once more without it: where it fails there too, it has noticed nothing, and the change is tried without that test.

Results are written to --out as they come; a second call continues, and runs again what survived and has no reason. A change
that known.py says nobody can notice is not tried, and counts as one that survived. --minutes
ends a call in time. --known makes the changes of known.py instead, each before the test that must notice it. The run exits with
1 where one does not, or where less than --share of the changes are noticed, with 2 where some are left for another call.
`--jobs 14` takes minutes on 16 cores, one job an hour or two.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from benchmarks.mutants.changes import Change, choose
from benchmarks.mutants.known import EQUIVALENT, KNOWN, known_changes
from benchmarks.mutants.near import NONE_FOUND, NearTests
from benchmarks.mutants.seen import Case, cases_for, see, test_files
from benchmarks.mutants.trees import Ended, Tree, failures

ROOT = Path(__file__).resolve().parent.parent.parent
_NAMED_SECONDS = 60.0  # a guess at the time of a test that was not run before
_GRACE = 45.0  # seconds for changes that were begun in time
_MORE = 2  # the code of a call that left changes for another
COLUMNS = ("outcome", "file", "line", "function", "kind", "before", "after", "test", "seconds", "tests", "reason")


class Job(NamedTuple):
    """One change, and the tests to run."""

    change: Change
    before: str
    after: str
    tests: list[Case]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.change.file, self.change.function, self.before, self.after

    @property
    def reason(self) -> str:
        """Why no test can notice; nothing where one should."""
        return EQUIVALENT.get((self.change.file, self.before, self.after), "")

    def among(self, tests: list[Case], limit: float) -> Job:
        """The same with the tests that run what is changed."""
        return self._replace(tests=cases_for(self.change, tests, limit, ROOT))

    def row(self, outcome: str, test: str, seconds: float, num_tests: int) -> dict[str, str]:
        """What is written of it."""
        change = self.change
        reason = "" if outcome == "killed" else self.reason
        values = (
            outcome, change.file, change.line, change.function, change.kind, self.before, self.after, test,
            f"{seconds:.1f}", num_tests, reason,
        )  # fmt: skip
        return dict(zip(COLUMNS, map(str, values), strict=True))


def _is_killed(rows: dict[tuple[str, ...], dict[str, str]], job: Job) -> bool:
    return rows.get(job.key, {}).get("outcome") == "killed"


def main() -> int:
    asked = _arguments()
    began = time.perf_counter()
    trees = [Tree(ROOT, asked.work.resolve() / f"copy-{number}") for number in range(asked.jobs)]
    files = [] if asked.known else asked.tests or test_files(ROOT)
    deadline = began + 60 * asked.minutes
    jobs = _known_jobs() if asked.known else _drawn_jobs(asked)
    rows = _read(asked.out)
    left = [job for job in jobs if not _is_killed(rows, job)]
    print(f"{len(jobs)} changes, {len(jobs) - len(left)} of them noticed before", flush=True)
    run = _Run(trees, rows, asked.out, began, deadline)
    if not (asked.known or asked.learn or asked.tests):
        run.near(left, asked.limit, _read(asked.earlier))
        left = [job for job in left if not (_is_killed(rows, job) or rows.get(job.key, {}).get("reason"))]
    if asked.learn or (left and not asked.near):
        tests = see(ROOT, asked.work, trees, files, lambda text: print(f"{_minutes(began)} {text}", flush=True))
        if asked.learn:
            return 0
        compiled = [(tree.path, tree.kernels) for tree in trees]
        for tree in trees:
            tree.take_kernels(compiled)
        print(f"{_minutes(began)} {len(tests):,} tests of {len(files)} files pass and are known", flush=True)
        run.learned([job if asked.known else job.among(tests, asked.limit) for job in left])
    tried = [rows[job.key] for job in jobs if job.key in rows]
    code = _tell(tried, asked)
    if len(tried) < len(jobs):
        print(f"{len(jobs) - len(tried)} changes are left for another call")
        return _MORE
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=160, help="changes to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="copies at work (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of tests for each change (%(default)s)")
    parser.add_argument("--known", action="store_true", help="make the changes of known.py instead")
    parser.add_argument("--only", default="", help="changes whose file holds this text, such as hotbed/store")
    parser.add_argument(
        "--tests", nargs="*", help="test files to choose from; those of the changed folders if not given"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".cache" / "mutants", help="copies and what was learned (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / "mutants" / "mutants.csv", help="results (%(default)s)"
    )
    parser.add_argument(
        "--earlier", type=Path, default=ROOT / "benchmarks" / "results" / "mutants.csv",
        help="results of another run: the tests that noticed changes then are tried first (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no change later than this, and end soon")
    parser.add_argument("--near", action="store_true", help="try near tests alone")
    parser.add_argument("--learn", action="store_true", help="only learn which functions tests run")
    parser.add_argument("--share", type=float, default=0.95, help="of the changes that must be noticed (%(default)s)")
    return parser.parse_args()


def _drawn_jobs(asked: argparse.Namespace) -> list[Job]:
    drawn = [change for change in choose(ROOT, asked.count, asked.seed) if asked.only in change.file]
    return [Job(change, *change.shown((ROOT / change.file).read_bytes()), []) for change in drawn]


def _known_jobs() -> list[Job]:
    """Each with the test that it names; where none is named yet, no test notices."""
    found = []
    for known, change in zip(KNOWN, known_changes(ROOT), strict=True):
        named = [Case(known.test, _NAMED_SECONDS, frozenset())] if known.test else []
        found.append(Job(change, *change.shown((ROOT / change.file).read_bytes()), named))
    return found


class _Run:
    """The changes of one call, in as many copies as there are."""

    def __init__(
        self,
        trees: list[Tree],
        rows: dict[tuple[str, ...], dict[str, str]],
        out: Path,
        began: float,
        deadline: float,
    ) -> None:
        self._trees, self._rows, self._out = trees, rows, out
        self._began, self._deadline = began, deadline
        self._lock, self._done, self._num_jobs = threading.Lock(), 0, 0
        self._passing, self._failing = set[str](), set[str]()  # tests, on the tree as it is

    def near(self, jobs: list[Job], limit: float, earlier: dict[tuple[str, ...], dict[str, str]]) -> None:
        """Each before the test that noticed it earlier and the tests near it; one counts that passes without the change."""
        tests = NearTests(ROOT, limit)

        def outcome(job: Job, tree: Tree) -> dict[str, str] | None:
            if time.perf_counter() > self._deadline:
                return None
            began = time.perf_counter()
            if job.reason:  # why no test can notice
                return job.row("survived", "", 0.0, 0)
            failed, tried = tests.failed(job.change, tree, earlier.get(job.key, {}).get("test", ""))
            return job.row("failed" if failed else "survived", failed, time.perf_counter() - began, tried)

        left = [job for job in jobs if self._rows.get(job.key, {}).get("outcome") != "failed"]
        while True:
            self._run(left, outcome)
            found = [job for job in jobs if self._rows.get(job.key, {}).get("outcome") == "failed"]
            failing = tests.failing((self._rows[job.key]["test"] for job in found), self._trees[0])
            left = [job for job in found if self._rows[job.key]["test"] in failing]
            for job in found:
                if job not in left:
                    self._rows[job.key]["outcome"] = "killed"
            for job in left:  # noticed by a test that fails anyway
                del self._rows[job.key]
            _write(self._out, self._rows)
            if not left:
                return

    def learned(self, jobs: list[Job]) -> None:
        """Each before its own tests."""
        self._run(jobs, self._outcome)

    def _run(self, jobs: list[Job], outcome: Callable[[Job, Tree], dict[str, str] | None]) -> None:
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in self._trees:
            free.put(tree)
        self._done, self._num_jobs = 0, len(jobs)

        def run(job: Job) -> None:
            tree = free.get()
            try:
                row = outcome(job, tree)
            finally:
                free.put(tree)
            if row is not None:
                self._keep(job, row)

        with ThreadPoolExecutor(len(self._trees)) as pool:
            list(pool.map(run, jobs))

    def _keep(self, job: Job, row: dict[str, str]) -> None:
        with self._lock:
            self._done += 1
            self._rows[job.key] = row
            _write(self._out, self._rows)
            where = f"{row['file']}:{row['line']} {row['kind']}: {row['before']} -> {row['after']}"
            count = f"{self._done}/{self._num_jobs}"
            print(
                f"{_minutes(self._began)} {count} {row['outcome']} {row['test']} {row['seconds']} s  {where}",
                flush=True,
            )

    def _outcome(self, job: Job, tree: Tree) -> dict[str, str] | None:
        """The row of a change; None where there was no time for it."""
        change, began = job.change, time.perf_counter()
        outcome, found, tests = "", "", job.tests
        while not outcome:
            tests = [test for test in tests if test.name not in self._failing]
            ended = self._ended(change, tests, tree)
            if ended is None:
                return None
            outcome = _word_of(ended) if tests else "no test"
            found = failures(ended)[-1] if outcome == "killed" else ""
            if found and not self._passes(found, tests, tree):
                outcome = found = ""
        return job.row(outcome, found, time.perf_counter() - began, len(tests))

    def _ended(self, change: Change, tests: list[Case], tree: Tree) -> Ended | None:
        """The tests with the change made."""
        wanted = 60 + 4 * sum(test.seconds for test in tests)
        limit = min(wanted, self._deadline + _GRACE - time.perf_counter())
        if time.perf_counter() > self._deadline:
            return None
        if not tests:
            return Ended(NONE_FOUND, "")
        with tree.changed(change.file, change.apply((ROOT / change.file).read_bytes())):
            ended = _pytest(tree, tests, limit)
        return None if ended.code is None and limit < wanted else ended

    def _passes(self, name: str, tests: list[Case], tree: Tree) -> bool:
        """Whether a test that failed passes on the tree as it is."""
        case = next((test for test in tests if name in (test.name, test.file)), None)
        if case is None or case.passes_here or case.name in self._passing:
            return True
        ended = _pytest(tree, [case], 60 + 4 * case.seconds)
        (self._passing if ended.code == 0 else self._failing).add(case.name)
        return ended.code == 0


def _pytest(tree: Tree, tests: list[Case], limit: float) -> Ended:
    """These tests, in this order, until one fails."""
    names = tree.path.parent / "tests.txt"
    names.write_text("\n".join(test.name for test in tests))
    return tree.pytest(["-x", *sorted({test.file for test in tests})], {"MUTANTS_TESTS": str(names)}, limit)


def _word_of(ended: Ended) -> str:
    is_there = ended.code != NONE_FOUND and "file or directory not found" not in ended.output
    return ("survived" if ended.code == 0 else "killed") if is_there else "no test"


def _read(out: Path) -> dict[tuple[str, ...], dict[str, str]]:
    if not out.exists():
        return {}
    with out.open(newline="") as lines:
        return {(row["file"], row["function"], row["before"], row["after"]): row for row in csv.DictReader(lines)}


def _write(out: Path, rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(".new")
    with new.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())
    new.replace(out)


def _tell(rows: list[dict[str, str]], asked: argparse.Namespace) -> int:
    """A line for every change that no test noticed, and the share of the others."""
    left = [row for row in rows if row["outcome"] != "killed"]
    for row in left:
        print(
            f"{row['outcome']}: {row['file']}:{row['line']} {row['function']}\n  - {row['before']}\n  + {row['after']}"
        )
        if row["reason"]:
            print(f"    {row['reason']}")
    share = 1 - len(left) / max(1, len(rows))
    same = sum(bool(row["reason"]) for row in left)
    print(
        f"{len(rows) - len(left)} of {len(rows)} changes noticed, {100 * share:.1f} %; of the others {same} change nothing"
    )
    if asked.known:
        return int(
            any(known.test not in row["test"] or not row["test"] for row, known in zip(rows, KNOWN, strict=True))
        )
    return int(share < asked.share)


def _minutes(began: float) -> str:
    seconds = int(time.perf_counter() - began)
    return f"[{seconds // 60:3}:{seconds % 60:02}]"


if __name__ == "__main__":
    sys.exit(main())
