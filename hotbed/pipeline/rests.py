"""Iterators that were left early: what was read of them ahead is kept, and comes first when they are read again.

An entry lives as long as anybody else knows the iterator. Most can be known weakly; of others references are counted.
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
    """Of an iterator that was left early: what was read of it and not trained, and what comes then."""

    batches: deque[Any]
    error: BaseException | None
    drew: bool  # the last read


def is_stream(loader: object) -> bool:
    """Whether a loader has one pass only, and a second loop over it goes on where the first was left.

    Some loaders are their own iterators and begin anew in `__iter__`; that of a stream only returns itself.
    """
    if not isinstance(loader, Iterator):
        return False
    method = type(loader).__iter__
    code = getattr(method, "__code__", None)
    return code is None or code.co_code == Iterator.__iter__.__code__.co_code


def keep(stream: Any, rest: Leftover) -> int:
    """For the next reader of the stream, as long as anybody else knows the stream; where it is kept."""
    name = id(stream)
    if rest.error is not None:
        traceback.clear_frames(rest.error.__traceback__)  # they know the stream
    if rest.batches or rest.error is not None:
        try:
            _rests[name] = weakref.ref(stream, lambda _: _rests.pop(name, None)), None, rest
        except TypeError:  # many of Python's own iterators
            _rests[name] = None, stream, rest
    return name


def kept(stream: Any) -> Leftover:
    """What the reader before left of the stream."""
    for name in [*_rests]:
        _forget_orphan(name)
    entry = _rests.pop(id(stream), None)
    return Leftover(deque(), None, False) if entry is None else entry[2]


def _forget_orphan(name: int) -> None:
    entry = _rests.get(name)
    if entry is not None and entry[0] is None and sys.getrefcount(entry[1]) <= _ORPHAN:
        _rests.pop(name, None)


def say_kept(name: int) -> None:
    """Once: somebody may ask a stream for what is kept."""
    _forget_orphan(name)
    entry = _rests.get(name)
    if entry is not None and not _said:
        _said.append(True)
        _LOG.warning(
            "an iterator was left early, and %d batches are read ahead: they come first in the next prefetch over the same "
            "iterator; whoever asks the iterator itself does not get them (said once)",
            len(entry[2].batches),
        )


_ORPHAN = 2  # references: the entry's, and the question's
_LOG = logging.getLogger("hotbed.pipeline")
_said: list[bool] = []
_rests: dict[int, tuple[Any, Any, Leftover]] = {}  # by id of the stream: a weak reference, or the stream itself
