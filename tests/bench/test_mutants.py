"""The mutation runner: what it changes and leaves alone, and that it tells a test that notices from one that does not."""

import csv
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants.changes import AREAS, Change, changes_of, choose
from benchmarks.mutants.known import KNOWN, known_changes
from benchmarks.mutants.seen import Case, cases_for
from tests.kernel_sources import importers_of

ROOT = Path(__file__).resolve().parent.parent.parent


def changed_lines(source):
    """{(kind, line as it becomes)} of all changes of a text."""
    found = changes_of("file.py", source.encode())
    return {(change.kind, change.shown(source.encode())[1]) for change in found}


@pytest.mark.parametrize(
    ("line", "kind", "after"),
    [
        ("if a < b: pass", "compare", "if a <= b: pass"),
        ("if a is not None: pass", "compare", "if a is None: pass"),
        ("if (a) in (b): pass", "compare", "if (a) not in (b): pass"),
        ("x = a and b", "and/or", "x = a or b"),
        ("if a: pass", "negate", "if not (a): pass"),
        ("x = a + 1", "off by one", "x = a"),
        ("x = a - b", "sign", "x = a + b"),
        ("x = min(a, 2)", "min/max", "x = max(a, 2)"),
        ("os.fsync(a)", "delete", "pass"),
        ("a.b = 3", "delete", "pass"),
        ("x = f(a, b)", "swap", "x = f(b, a)"),
        ("x = f(a=False)", "constant", "x = f(a=True)"),
        ("if a > 0: pass", "constant", "if a > 1: pass"),
        ("x = a[b:]", "slice", "x = a[b + 1:]"),
        ("x = a[:b]", "slice", "x = a[:b - 1]"),
    ],
)
def test_kinds(line, kind, after):
    assert (kind, after) in changed_lines(f"def f(a, b):\n    {line}\n    return 7\n")


def test_a_function_returns_early():
    assert changed_lines("def f(a) -> None:\n    '''Text.'''\n    x = 5\n    y = 6\n") == {("return early", "return")}


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError(f'{a + 1} is more than {b < 2}')",
        "assert a < b, 'more'",
        "x: Literal[1] = a",
        "self.clock.enter(a)",
        "torch.cuda.synchronize(a)",
        "return f'{a + b}'",
        "if torch.cuda.is_available(): a.b = 1",
    ],
)
def test_what_no_test_should_notice_is_left_alone(body):
    assert changed_lines(f"X = 1 + 1\nclass A:\n    def f(self, a=1 + 1):\n        {body}\n") == set()
    assert changed_lines("class A:\n    def __repr__(self):\n        return self.a < self.b\n") == set()


def test_functions_are_named_as_python_does():
    source = "class A:\n    def f(self):\n        def g():\n            return a < b\n        return g\n"
    (change,) = changes_of("file.py", source.encode())
    assert (change.function, change.line) == ("A.f.<locals>.g", 4)


def test_a_draw_is_repeatable_spread_and_made_of_programs():
    drawn = choose(ROOT, 160, 0)
    assert drawn == choose(ROOT, 160, 0)
    assert len(set(drawn)) == 160
    places = [change.file.split("/")[1] if change.file.count("/") > 1 else "" for change in drawn]
    assert {area: places.count(area) for area in AREAS} == dict.fromkeys(AREAS, 20)
    assert len({change.kind for change in drawn}) == 11
    for change in drawn:
        compile(change.apply((ROOT / change.file).read_bytes()), change.file, "exec")


def test_known_changes_can_be_made_and_name_tests_that_are_there():
    for known, change in zip(KNOWN, known_changes(ROOT), strict=True):
        compile(change.apply((ROOT / known.file).read_bytes()), known.file, "exec")
        if known.test:
            file, _, name = known.test.partition("::")
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            for part in name.split("::"):
                module = getattr(module, part)
            assert callable(module), known.test


def test_near_and_quick_tests_come_first_one_case_of_each():
    change = Change("hotbed/store/memory.py", 3, "sign", "Store.read", 0, 1, "")
    runs, other = frozenset({"hotbed/store/memory.py:Store.read"}), frozenset({"hotbed/store/memory.py:Store.write"})
    tests = [
        Case("tests/laws/test_a.py::test_far", 1.0, runs),
        Case("tests/store/test_b.py::test_near[1]", 2.0, runs),
        Case("tests/store/test_b.py::test_near[0]", 1.0, runs),
        Case("tests/store/test_b.py::test_long", 9.0, runs),
        Case("tests/store/test_b.py::test_other", 0.1, other),
    ]

    def names(limit):
        return [test.name.partition("::test_")[2] for test in cases_for(change, tests, limit)]

    assert names(100.0) == ["near[0]", "far", "long", "near[1]"]
    assert names(4.0) == ["near[0]", "far", "near[1]"]
    assert names(0.0) == ["near[0]"]
    assert [test.name for test in cases_for(change, tests[4:], 1.0)] == [tests[4].name]


def test_kernels_made_of_a_file():
    found = {str(one.relative_to(ROOT)) for one in importers_of(ROOT / "hotbed", ROOT / "hotbed/host/intrinsics.py")}
    assert {"hotbed/host/intrinsics.py", "hotbed/ops/move/numba.py", "hotbed/tables/module.py"} <= found
    assert "hotbed/errors.py" not in found


SOURCE = """def bigger(a, b):
    return a > b

def far(a):
    return a + 1
"""
TEST = """import subprocess, sys

from hotbed.cache.small import bigger

def test_bigger():
    assert bigger(2, 1)

def test_far():
    code = "from hotbed.cache.small import far; print(far(1))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2\\n"
"""


def test_a_small_tree(tmp_path):
    """One change that no test notices, one that is noticed in a process of its own; a second call runs only the first."""
    shutil.copytree(ROOT / "benchmarks" / "mutants", tmp_path / "benchmarks" / "mutants")
    shutil.copy(ROOT / "benchmarks" / "__init__.py", tmp_path / "benchmarks")
    for folder in ("hotbed", "hotbed/cache", "tests", "tests/cache"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "hotbed/cache/small.py").write_text(SOURCE)
    (tmp_path / "tests/cache/test_small.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n    gpu\n")
    shutil.copy(ROOT / "tests/kernel_sources.py", tmp_path / "tests")
    command = [sys.executable, "-m", "benchmarks.mutants", "--jobs", "2", "--share", "0.5", "--out", "found.csv"]

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call():
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    done = call()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 changes noticed, 50.0 %" in done.stdout
    with (tmp_path / "found.csv").open(newline="") as lines:
        rows = {row["function"]: row for row in csv.DictReader(lines)}
    assert (rows["bigger"]["outcome"], rows["bigger"]["after"]) == ("survived", "return a >= b")
    assert (rows["far"]["outcome"], rows["far"]["test"]) == ("killed", "tests/cache/test_small.py::test_far")
    (tmp_path / "tests/cache/test_small.py").write_text(TEST + "\ndef test_equal():\n    assert not bigger(1, 1)\n")
    done = call()
    assert "2 changes, 1 of them noticed before" in done.stdout
    assert "2 of 2 changes noticed, 100.0 %" in done.stdout
