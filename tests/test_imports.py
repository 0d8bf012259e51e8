"""Imports point one way, and the command line answers before torch is loaded."""

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import hotbed

PACKAGE = Path(hotbed.__file__).parent

# A room may import from the floors below its own (earlier in this list). The first is the ground, which imports nothing.
FLOORS = [
    {"types", "errors"},
    {"host", "optim", "models"},
    {"telemetry", "ops", "ids", "files"},
    {"data", "cache", "store"},
    {"checkpoint", "tables"},
    {"run", "pipeline", "parallel", "embedding_bag", "bench"},
    {"train", "scorer", "report", "interop", "retrieval", "verify"},
    {"forecast", "export", "serve", "testing", "tune"},
    {"cli"},
]
FLOOR_OF_ROOM = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    if inside.name == "__main__.py":  # `python -m hotbed` is the command line
        return "cli"
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_rooms(tree: ast.AST):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names = [f"hotbed.{alias.name}" for alias in node.names] if node.module == "hotbed" else [node.module or ""]
        for name in names:
            parts = name.split(".")
            if parts[0] == "hotbed" and len(parts) > 1:
                yield parts[1], node.lineno


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def wrong_imports(path: Path, text: str):
    room = room_of(path)
    if room not in FLOOR_OF_ROOM:
        return [f"{path}: room {room} has no floor; give it one in {Path(__file__).name}"]
    wrong = []
    for other, line in imported_rooms(ast.parse(text)):
        if other == room:
            continue
        if other not in FLOOR_OF_ROOM:
            wrong.append(f"{path}:{line}: {other} has no floor")
        elif FLOOR_OF_ROOM[other] >= FLOOR_OF_ROOM[room]:
            wrong.append(f"{path}:{line}: {room} must not import {other}")
    return wrong


def test_imports_point_down():
    assert [wrong for path in SOURCES for wrong in wrong_imports(path, path.read_text())] == []


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("ops", "import hotbed.tables"),
        ("data", "from hotbed.train.loop import Training"),
        ("models", "def f():\n    from hotbed.tables.module import EmbeddingTables"),
        ("train", "from hotbed import cli"),
        ("attic", "import hotbed.types"),
    ],
)
def test_the_check_sees_a_wrong_import(room, text):
    assert wrong_imports(PACKAGE / room / "some.py", text)


ROOT = PACKAGE.parent
OURS = {"benchmarks", "hotbed", "tests"}
REQUIRED = {"click", "llvmlite", "numba", "numpy", "pyarrow", "rich", "safetensors", "torch", "triton", "typer", "yaml"}
FOR_TESTS = {"hypothesis", "pytest", "sklearn"}  # which most of them cannot do without


class FirstImports(NamedTuple):
    """What happens when a module is imported."""

    packages: frozenset[str]
    ours: frozenset[Path]
    skips: frozenset[str]  # packages without which a module of tests is skipped


@functools.cache
def first_imports(path: Path) -> FirstImports:
    """Without what functions and type checkers import."""
    names, skips = set[str](), set[str]()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    for node in waiting:  # it grows
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "importorskip":
            skips.add(ast.literal_eval(node.args[0]).split(".")[0])
        elif isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        else:
            waiting += ast.iter_child_nodes(node)
    parts = [name.split(".") for name in names]
    stems = [ROOT.joinpath(*part[:n]) for part in parts if part[0] in OURS for n in range(1, len(part) + 1)]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
    return FirstImports(frozenset(part[0] for part in parts) - OURS, frozenset(files), frozenset(skips))


def unguarded_packages(path: Path) -> set[str]:
    """Packages without which a module of tests fails when it is imported, and is not skipped."""
    conftests = [file for folder in path.parents if (file := folder / "conftest.py").is_file()]
    known, waiting = {path}, [path, *conftests]
    for one in waiting:  # it grows
        waiting += first_imports(one).ours - known
        known |= first_imports(one).ours
    found = [first_imports(one) for one in waiting]
    return set().union(*(one.packages for one in found)) - set().union(*(one.skips for one in found))


def test_tests_are_collected_without_optional_packages():
    """One module that cannot be imported stops all others."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))  # with all that these import
    missing = {path.name: unguarded_packages(path) - REQUIRED - FOR_TESTS - sys.stdlib_module_names for path in paths}
    assert {name: packages for name, packages in missing.items() if packages} == {}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


HEAVY = "import sys; print([name for name in ('torch', 'numba', 'pyarrow') if name in sys.modules])"


def test_import_hotbed_is_quick():
    assert run_python(f"import hotbed; {HEAVY}").strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["trian"], ["train", "--help"], ["prepare", "--help"]]
)
def test_help_does_not_load_torch(arguments):
    code = f"""
from hotbed.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
{HEAVY}
"""
    assert run_python(code).strip().splitlines()[-1] == "[]"
