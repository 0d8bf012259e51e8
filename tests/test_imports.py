"""Imports point one way, and the command line answers before torch is loaded."""

import ast
import subprocess
import sys
from pathlib import Path

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
