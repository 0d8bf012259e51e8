"""No loop of compiled code without an end: a kernel that never returns cannot be interrupted, and says nothing.

A `while` in a kernel, Numba's or Triton's, must be a count (its condition compares a name that every turn of the body moves
on), or say in a comment `# ends: ...`, beside it or on the line above, why it does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotbed

PACKAGE = Path(hotbed.__file__).parent
PROOF = "# ends: "


def is_kernel_file(path: Path) -> bool:
    """Whose plain functions are compiled, too: under other names, or with parts put in."""
    return path.stem in ("numba", "triton") or path.stem.endswith("kernels")


def is_compiled(function: ast.AST) -> bool:
    if not isinstance(function, ast.FunctionDef):
        return False
    return any("njit" in text or "triton.jit" in text for text in map(ast.unparse, function.decorator_list))


def is_count(loop: ast.While) -> bool:
    """Whether the condition compares a name, or a name and something, that the body moves on at every turn."""
    if any(isinstance(node, ast.Continue) for node in ast.walk(loop)):
        return False
    moved = {
        step.target.id for step in loop.body if isinstance(step, ast.AugAssign) and isinstance(step.target, ast.Name)
    }
    parts = loop.test.values if isinstance(loop.test, ast.BoolOp) and isinstance(loop.test.op, ast.And) else [loop.test]
    for part in parts:
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            left = part.left.left if isinstance(part.left, ast.BinOp) else part.left
            if isinstance(left, ast.Name) and left.id in moved:
                return True
    return False


def unproven(source: str, kernel_file: bool) -> Iterator[int]:
    """The lines of loops of compiled code that neither count nor say why they end."""
    lines, tree = source.splitlines(), ast.parse(source)
    roots = [tree] if kernel_file else [node for node in ast.walk(tree) if is_compiled(node)]
    for loop in {node for root in roots for node in ast.walk(root) if isinstance(node, ast.While)}:
        here, above = lines[loop.lineno - 1], lines[loop.lineno - 2].strip()
        if PROOF not in here and not above.startswith(PROOF) and not is_count(loop):
            yield loop.lineno


def test_every_loop_of_compiled_code_ends() -> None:
    missing = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in unproven(path.read_text(), is_kernel_file(path))
    ]
    assert not missing, f"why do these loops end? {', '.join(missing)}"


@pytest.mark.parametrize(
    ("loop", "lines"),
    [
        ("while True:\n        pass", [3]),
        ("while True:  # ends: it does not\n        pass", []),
        ("# ends: it does not\n    while True:\n        pass", []),
        ("while i < n:\n        i += 1", []),
        ("while i + 8 <= n and x[i]:\n        i += 8", []),
        ("while i < n:\n        if x[i]:\n            continue\n        i += 1", [3]),
        ("while i < n:\n        if x[i]:\n            i += 1", [3]),
        ("while x[i] != key:\n        i += 1", [3]),
    ],
)
def test_what_counts_as_an_end(loop: str, lines: list[int]) -> None:
    assert list(unproven(f"@njit(cache=True)\ndef f(i, n, x):\n    {loop}\n", kernel_file=False)) == lines
    assert not list(unproven(f"def f(i, n, x):\n    {loop}\n", kernel_file=False))
