"""Iterators that were left early: what was read of them ahead is kept, and comes first when they are read again.

An entry lives as long as something else references the iterator. Most can be known weakly; of others references are counted.
"""

from __future__ import annotations

import logging
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple


class Leftover(NamedTuple):
    """What is left of an iterator that was left early: batches read and not trained, and what comes after them."""

    batches: deque[Any]
    error: BaseException | None
    drew: bool  # the last read


def is_stream(loader: object) -> bool:
    """Whether a loader has one pass only, and a second loop over it continues where the first stopped.

    Some loaders are their own iterators and begin anew in `__iter__`; that of a stream only returns itself.
    """
    if not isinstance(loader, Iterator):
        return False
    method = type(loader).__iter__
    code = getattr(method, "__code__", None)
    return code is None or code.co_code == Iterator.__iter__.__code__.co_code


def keep_leftover(stream: Any, leftover: Leftover) -> int:
    """For the next reader of the stream, as long as something else references the stream; its name."""
    name = id(stream)
    if leftover.error is not None:
        traceback.clear_frames(leftover.error.__traceback__)  # they know the stream
    if leftover.batches or leftover.error is not None:
        try:
            _leftovers[name] = weakref.ref(stream, lambda _: _leftovers.pop(name, None)), None, leftover
        except TypeError:  # many of Python's own iterators
            _leftovers[name] = None, stream, leftover
    return name


def take_leftover(stream: Any) -> Leftover:
    """What the reader before left of the stream."""
    for name in [*_leftovers]:
        _forget_orphan(name)
    entry = _leftovers.pop(id(stream), None)
    return Leftover(deque(), None, False) if entry is None else entry[2]


def _forget_orphan(name: int) -> None:
    entry = _leftovers.get(name)
    if entry is not None and entry[0] is None and sys.getrefcount(entry[1]) <= _ORPHAN:
        _leftovers.pop(name, None)


def warn_of_leftover(name: int) -> None:
    """Once: the stream itself no longer yields what is kept."""
    _forget_orphan(name)
    entry = _leftovers.get(name)
    if entry is not None and not _said:
        _said.append(True)
        _LOG.warning(
            "an iterator was left early, and %d batches are read ahead: they come first in the next prefetch over the same "
            "iterator; reading the iterator itself does not return them (logged once)",
            len(entry[2].batches),
        )


_ORPHAN = 2  # references: the entry's, and the question's
_LOG = logging.getLogger("hotbed.pipeline")
_said: list[bool] = []
_leftovers: dict[int, tuple[Any, Any, Leftover]] = {}  # by id of the stream: a weak reference, or the stream itself
