"""Callers ask a group, a keyspace, a residency or a store; which kind it is stays inside its room."""

import ast
import functools
from pathlib import Path

import pytest

import hotbed

PACKAGE = Path(hotbed.__file__).parent
GROUPS, STORES = PACKAGE / "tables" / "group", PACKAGE / "store"
SEAMS = [GROUPS / f"{name}.py" for name in ("group", "keyspace", "dynamic", "resident", "cached")]
SEAMS += [STORES / name for name in ("__init__.py", "memory.py", "tiered.py", "ssd/store.py")]
KINDS = {node.name for path in SEAMS for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
KINDS |= {"CachedGroup"}
OUTSIDE = [
    path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(GROUPS) and not path.is_relative_to(STORES)
]
INTRINSIC = PACKAGE / "ops" / "precision" / "numba.py"  # whose body Numba has
PROCESS_GROUP = PACKAGE / "parallel" / "order.py"  # which is torch's


def kinds_asked(tree: ast.AST):
    """(line, kind) of every question for the type of a group, a keyspace, a residency or a store."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            names = {name for one in node.args[1:] for name in names_in(one)}
        elif isinstance(node, ast.MatchClass):
            names = set(names_in(node.cls))
        elif isinstance(node, ast.Compare) and any(is_type_call(one) for one in (node.left, *node.comparators)):
            names = {name for one in (node.left, *node.comparators) for name in names_in(one)}
        else:
            continue
        yield from ((node.lineno, name) for name in sorted(names & KINDS))


def names_in(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def is_type_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def stubs(tree: ast.AST):
    """Lines that raise NotImplementedError."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in names_in(node.exc):
            yield node.lineno


def private_reaches(tree: ast.AST):
    """(line, name) of every private attribute of something called a group, a cache, a store or tables."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if name.lstrip("_") in ("group", "tables", "store", "keyspace", "residency"):
            yield node.lineno, f"{name}.{node.attr}"


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def found_in(paths, check):
    return [f"{path.relative_to(PACKAGE)}: {one}" for path in paths for one in check(parsed(path))]


def test_nobody_outside_asks_for_a_kind():
    assert found_in(OUTSIDE, kinds_asked) == []


def test_groups_and_stores_do_not_ask_each_other_for_a_kind():
    kinds = {"MemoryStore", "SsdStore", "TieredStore"}
    assert [one for path in GROUPS.rglob("*.py") for _, one in kinds_asked(parsed(path)) if one in kinds] == []
    assert [one for path in STORES.rglob("*.py") for _, one in kinds_asked(parsed(path)) if one not in kinds] == []


def test_nobody_outside_reaches_into_a_group():
    assert found_in([path for path in OUTSIDE if path != PROCESS_GROUP], private_reaches) == []


def test_no_class_stubs_for_another():
    assert found_in([path for path in PACKAGE.rglob("*.py") if path != INTRINSIC], stubs) == []


def test_kinds_are_those_of_the_rooms():
    assert {"TableGroup", "PresetKeys", "DynamicIds", "ResidentRows", "CachedRows", "MemoryStore", "SsdStore"} <= KINDS


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(group, CachedRows)",
        "isinstance(group.store, (SsdStore, store.TieredStore))",
        "isinstance(store, SsdStore | MemoryStore)",
        "type(group) is CachedGroup",
        "match store:\n    case MemoryStore():\n        pass",
    ],
)
def test_the_check_sees_a_question_for_a_kind(text):
    assert list(kinds_asked(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["def f():\n    raise NotImplementedError", "def f():\n    raise NotImplementedError('x')"]
)
def test_the_check_sees_a_stub(text):
    assert list(stubs(ast.parse(text)))


@pytest.mark.parametrize("text", ["group._read(keys)", "self._tables._claim()", "store._first = 1"])
def test_the_check_sees_a_reach_into_a_group(text):
    assert list(private_reaches(ast.parse(text)))
