"""A test that asserts nothing cannot fail: every test asserts itself, or calls a helper of the tests that does."""

import ast
from pathlib import Path

from tests.conftest import FIRST

TESTS = Path(__file__).parent
FILES = {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def calls_of(node):
    return {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(node) if isinstance(one, ast.Call)}


def asserts_itself(node):
    found = any(isinstance(one, ast.Assert) for one in ast.walk(node))
    return found or any(name in ("raises", "warns") or name.startswith("assert_") for name in calls_of(node))


def helpers_of(files):
    """Names of functions of the tests that assert, by themselves or by another one."""
    functions = [one for tree in files for one in ast.walk(tree) if isinstance(one, FUNCTIONS)]
    calls = [(one.name, calls_of(one)) for one in functions]
    found, before = {one.name for one in functions if asserts_itself(one)}, set()
    while found != before:
        before, found = found, found | {name for name, called in calls if called & found}
    return found


def known_names(tree):
    """What a file defines, or imports from the tests."""
    imports = [
        one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("tests")
    ]
    defined = {one.name for one in ast.walk(tree) if isinstance(one, FUNCTIONS)}
    return defined | {alias.asname or alias.name for one in imports for alias in one.names}


def without_assertion(tree, helpers):
    tests = [one for one in ast.walk(tree) if isinstance(one, FUNCTIONS) and one.name.startswith("test_")]
    known = helpers & known_names(tree)
    return [one.name for one in tests if not asserts_itself(one) and not calls_of(one) & known]


def test_every_test_asserts_something():
    helpers = helpers_of(FILES.values())
    found = {str(path.relative_to(TESTS)): without_assertion(tree, helpers) for path, tree in FILES.items()}
    assert {path: tests for path, tests in found.items() if tests} == {}


def test_the_check_sees_a_test_that_asserts_nothing():
    tree = ast.parse(
        "def check(x):\n    assert x\n\ndef idle(x):\n    return x\n\n"
        "def test_a():\n    check(1)\n\ndef test_b():\n    idle(1)\n\ndef test_c():\n    assert idle(1)\n"
    )
    assert without_assertion(tree, helpers_of([tree])) == ["test_b"]


def test_the_files_that_begin_first_are_there():
    assert [name for name in FIRST if not (TESTS / name).is_file()] == []
