"""Faults at every point: an exception before any line of hotbed, and after any of its functions has done its work.

    with record() as points: work()             # every point that the work passes, in all its threads
    with fault_at(points[n]): work()            # raises Fault there

A point is a line, or the return of a function, and which time it is passed. An allocation, a copy, a kernel launch, a
hand-over between threads and a call of a file all stand on lines of their own, so all of them are among the points; and so is
everything in between, where a signal handler may raise. That happens in the main thread alone, and also inside `threading`
and `contextlib`, which are Python.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hotbed
from hotbed.host import handover

_PACKAGE = str(Path(hotbed.__file__).parent)
_ALSO = (threading.__file__, contextlib.__file__, handover.__file__)  # in the main thread
_FRAMES = ("Reader._work", "Reader._end")  # of a thread: what they call may fail, they cannot
_MAIN = threading.main_thread().ident
_NEVER = ("clock.py", "spans.py", "compiling.py")  # they note times, and change nothing else


class Fault(BaseException):
    """What is raised."""


class Point(NamedTuple):
    """Where, and at which passing."""

    file: str
    function: str
    line: int  # 0: after the function
    in_main: bool
    passing: int = 1

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}" if self.line else f"after {self.function}"
        return f"{where}{'' if self.in_main else ' in another thread'}, passing {self.passing}"


def _is_ours(code: Any) -> bool:
    file = code.co_filename
    if file in _ALSO or code.co_qualname in _FRAMES:
        return threading.get_ident() == _MAIN
    if code.co_name == "<genexpr>":  # its end may be that of its collection, where nobody hears of an exception
        return False
    return bool(file.startswith(_PACKAGE)) and not file.endswith(_NEVER)


@functools.cache
def _is_frame(file: str, line: int) -> bool:
    """Whether a `with` or `try` begins there, which does nothing by itself: Python lets no signal in, and a fault would.

    The line of a `with` is passed again at its end, before what it holds is let go.
    """
    return linecache.getline(file, line).lstrip().startswith(("with ", "try:"))


@contextlib.contextmanager
def _traced(is_wanted: Callable[[Any], bool], see: Callable[[Point], None]) -> Iterator[None]:
    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno if event == "line" else 0
        if event == "return" or (event == "line" and not _is_frame(code.co_filename, line)):
            see(Point(code.co_filename, code.co_qualname, line, threading.get_ident() == _MAIN))
        return inside

    def outside(frame: FrameType, event: str, argument: Any) -> Any:
        return inside if is_wanted(frame.f_code) else None

    before = sys.gettrace()
    threading.settrace(outside)
    sys.settrace(outside)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


@contextlib.contextmanager
def record(passings: int = 1) -> Iterator[list[Point]]:
    """The points that are passed inside: of each place `passings` at most, spread over all."""
    seen: Counter[Point] = Counter()
    points: list[Point] = []
    with _traced(_is_ours, lambda point: seen.update((point,))):
        yield points
    for point, total in seen.items():
        chosen = {1 + total * (2 * n + 1) // (2 * passings) for n in range(passings)} if total > 1 else {1}
        points += [point._replace(passing=passing) for passing in sorted(chosen)]


@contextlib.contextmanager
def fault_at(point: Point) -> Iterator[None]:
    """Raise Fault there, once."""
    place, left = point._replace(passing=1), point.passing

    def is_wanted(code: Any) -> bool:
        return bool(code.co_qualname == point.function and code.co_filename == point.file)

    def see(here: Point) -> None:
        nonlocal left
        if here == place:
            left -= 1
            if left == 0:
                raise Fault(str(point))

    with _traced(is_wanted, see):
        yield
