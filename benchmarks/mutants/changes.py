"""Source text in, the careless changes that somebody could make to it out, each of one place.

Left alone is what no test should notice: texts of errors, assertions, annotations, what only people read. A change keeps the
text around it, so that it can be shown as the line before and after.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

AREAS = (
    "cache",
    "pipeline",
    "store",
    "checkpoint",
    "ids",
    "parallel",
    "train",
    "tables",
)  # of hotbed
_COMPARED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in",
}  # fmt: skip
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_UNSEEN_CALLS = {
    "enter",
    "stage",
    "say",
    "print",
    "warn",
    "debug",
    "info",
    "warning",
    "super",
    "be_nice",
    "start_writing_out",
}
_UNSEEN_KEYWORDS = {"non_blocking", "pin_memory", "threads", "huge", "daemon"}  # they change time alone
_CUDA_CALLS = {
    "synchronize",
    "wait_event",
    "wait_stream",
    "record_stream",
    "record",
}  # no test sees them without a device
_UNSEEN_FUNCTIONS = {"__repr__", "__str__", "text", "check_integrity"}
_ANY_ORDER = {*_EXTREMES, "isinstance", "equal", "array_equal", "zip", "print", "getattr"}


class Change(NamedTuple):
    """Bytes start..end of a file become `new`."""

    file: str  # from the root of the tree
    line: int
    kind: str
    function: str  # as Python qualifies it
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        """The whole file, changed."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> tuple[str, str]:
        """(before, after), the lines that differ."""
        begin = source.rfind(b"\n", 0, self.start) + 1
        stop = source.find(b"\n", self.end)
        changed = source[begin : self.start] + self.new.encode() + source[self.end : stop]
        before, after = (" ".join(text.decode().split()) for text in (source[begin:stop], changed))
        return before, after


def files_of(root: Path, area: str) -> list[Path]:
    """The sources of an area, less what tests compare and check with."""
    package = root / "hotbed"
    left_out = ("reference.py", "integrity.py", "first_use.py", "__init__.py")  # first_use: loads early, no more
    found = (package / area).rglob("*.py")
    return sorted(file for file in found if file.name not in left_out)


def choose(root: Path, count: int, seed: int) -> list[Change]:
    """So many changes, as many of every area, of the kinds in turn; the same for the same sources and seed."""
    draw, left = random.Random(seed), {}
    for area in AREAS:
        by_kind: dict[str, list[Change]] = {}
        for file in files_of(root, area):
            for change in changes_of(str(file.relative_to(root)), file.read_bytes()):
                by_kind.setdefault(change.kind, []).append(change)
        left[area] = [draw.sample(by_kind[kind], len(by_kind[kind])) for kind in sorted(by_kind)]
    chosen: list[Change] = []
    turn = 0
    while len(chosen) < count and any(kinds for area in left.values() for kinds in area):
        kinds = [kind for kind in left[AREAS[turn % len(AREAS)]] if kind]
        if kinds:
            change = kinds[turn // len(AREAS) % len(kinds)].pop()
            if not _compiles(change.apply((root / change.file).read_bytes())):
                continue
            chosen.append(change)
        turn += 1
    return chosen


def changes_of(file: str, source: bytes) -> list[Change]:
    """All that can be made in one file."""
    return list(_Finder(file, source).found(ast.parse(source), ""))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "changed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    """Walks one file; only bodies of functions are changed."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._starts = [0, *(match.end() for match in re.finditer(b"\n", source))]

    def found(self, node: ast.AST, function: str) -> Iterator[Change]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from self.found(child, _inner(function, child.name, "."))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name not in _UNSEEN_FUNCTIONS:
                    inside = _inner(function, child.name, "." if isinstance(node, ast.ClassDef) else ".<locals>.")
                    yield from self._early(child, inside)
                    for statement in child.body:
                        yield from self._within(statement, inside)
            elif not isinstance(node, ast.ClassDef | ast.Module):
                yield from self.found(child, function)

    def _within(self, node: ast.AST, function: str) -> Iterator[Change]:
        """A node of a body and all below it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self.found(ast.Module([node], []), function)
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.ImportFrom) or _is_unseen(node):
            return
        for kind, start, end, new in self._here(node, function):
            yield Change(self._file, 1 + self._source.count(b"\n", 0, start), kind, function, start, end, new)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                yield from self._within(child, function)

    def _here(self, node: ast.AST, function: str) -> Iterator[tuple[str, int, int, str]]:
        match node:
            case ast.Compare(left=left, comparators=[right]):
                yield from self._between("compare", left, right, _COMPARED)
                yield from self._constant(right)
            case ast.BoolOp(values=values):
                for left, right in pairwise(values):
                    yield from self._between("and/or", left, right, {"and": "or", "or": "and"})
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp):
                yield "negate", *self._span(test), f"not ({self._text(test)})"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) if not _is_text(left) and not _is_text(
                right
            ):
                if isinstance(right, ast.Constant) and right.value == 1:
                    yield "off by one", self._span(left)[1], self._span(node)[1], ""
                else:
                    yield from self._between("sign", left, right, {"+": "-", "-": "+"})
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield "delete", *self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not function.endswith("__init__"):
                yield "delete", *self._span(node), "pass"
            case ast.Call():
                yield from self._call(node)
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
                for edge, step in ((lower, "+ 1"), (upper, "- 1")):
                    if edge is not None:
                        yield "slice", *self._span(edge), f"{self._text(edge)} {step}"
            case ast.Return(value=ast.Constant() as value):
                yield from self._constant(value)
            case ast.Assign(value=ast.Constant() as value):
                yield from self._constant(value)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        name = _name_of(node)
        if name in _EXTREMES:
            _, end = self._span(node.func)
            yield "min/max", end - len(name), end, _EXTREMES[name]
        match node.args:
            case [ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two, *_] if (
                name not in _ANY_ORDER
            ):
                both = self._span(one)[0], self._span(two)[1]
                between = self._source[self._span(one)[1] : self._span(two)[0]].decode()
                yield "swap", *both, f"{self._text(two)}{between}{self._text(one)}"
        for keyword in (one for one in node.keywords if one.arg not in _UNSEEN_KEYWORDS):
            yield from self._constant(keyword.value)

    def _early(self, node: ast.FunctionDef | ast.AsyncFunctionDef, function: str) -> Iterator[Change]:
        """A function that gives nothing back does nothing."""
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        is_none = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if is_none and len(body) > 1 and node.name != "__init__":
            start, end = self._span(body[0])
            if not _is_unseen(body[0]):
                yield Change(self._file, body[0].lineno, "return early", function, start, end, "return")

    def _constant(self, node: ast.expr) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int) and node.value in (0, 1):
            new = repr(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield "constant", *self._span(node), new

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, others: dict[str, str]
    ) -> Iterator[tuple[str, int, int, str]]:
        """An operator, with whatever brackets and spaces are around it."""
        start, end = self._span(left)[1], self._span(right)[0]
        text = self._source[start:end].decode()
        operator = " ".join(text.strip("() \n\\").split())
        if operator in others and operator in text:
            yield kind, start, end, text.replace(operator, others[operator], 1)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _inner(outer: str, name: str, joint: str) -> str:
    return f"{outer}{joint}{name}" if outer else name


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _is_unseen(node: ast.AST) -> bool:
    """A call that only people or a device notice, one that makes an error, or a question whether there is a device."""
    if isinstance(node, ast.If | ast.IfExp):
        return "cuda" in ast.dump(node.test)
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    return _name_of(call) in _UNSEEN_CALLS | _CUDA_CALLS or _name_of(call).endswith(("Error", "Warning"))
