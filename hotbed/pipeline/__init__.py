"""Stages and streams: batches in, batches whose rows are in place out."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import torch

from hotbed.cache import MOST_AHEAD
from hotbed.errors import ConfigError, HotbedError
from hotbed.pipeline.batches import take_over
from hotbed.pipeline.feed import Feed
from hotbed.pipeline.reader import Reader
from hotbed.tables.module import EmbeddingTables
from hotbed.telemetry.clock import READER, StepClock

__all__ = ["prefetch"]

_MOST_WINDOW = 30

BatchT = TypeVar("BatchT")


def prefetch(
    loader: Iterable[BatchT],
    tables: EmbeddingTables,
    *,
    ids: Callable[[BatchT], Any] | None = None,
    window: int | None = None,
    look_ahead: int | None = None,
) -> Generator[BatchT, None, None]:
    """The batches of `loader`, on the tables' device, each with its rows in the cache when it is handed out.

        for batch in hotbed.prefetch(loader, tables):
            loss(model(tables(batch.ids)), batch.labels).backward()

    Results are those of the plain loop to the bit; only the waiting differs. Call the tables with the very objects of the
    batch (`batch.ids`, not a copy): that is how a prepared batch is known; a mapping of features is known by its tensors.
    Other calls work too, and wait for their rows.
    A batch must stay as it was yielded: a loader that fills one tensor again and again cannot be read ahead, and is refused.

    A loader that draws from torch's global generator is read ahead up to its next draw, which waits for the batches before to
    be trained; give it a generator of its own. An error of the loader comes after the batches read before it. Of an iterator
    (a generator, say) that is left early, batches read ahead are kept and come first in the next prefetch over it, which ends
    a loop of this thread over it that is still open; asking the iterator itself misses them.

    Args:
        loader: yields hotbed Batches, tensors of ids, tuples that start with ids, or mappings (with "ids", or of the features);
            with `ids=`, anything. It is read in a background thread, `look_ahead` batches ahead of training. Dataclasses and
            objects with a method `to(device)` are moved to the device like those; other objects stay where they are.
        tables: with a cache; without one, batches are moved to the device ahead and that is all.
        ids: where the ids of a batch are, `lambda batch: batch.items`: what the tables will be called with, or (ids, bags). It
            is called in the background thread, too, and returns tensors that the batch holds.
        window: batches planned and fetched together, at most; by default as many as the cache holds well.
        look_ahead: batches whose ids are read in advance, up to 233; by default as many as the policy can make use of.
    """
    if not isinstance(tables, EmbeddingTables):
        raise ConfigError(f"prefetch(loader, tables) needs hotbed.EmbeddingTables, not {type(tables).__name__}")
    if ids is not None and not callable(ids):
        raise ConfigError(f"ids must be a function that finds the ids in a batch, not {type(ids).__name__}")
    for name, value, most in (("window", window, _MOST_WINDOW), ("look_ahead", look_ahead, MOST_AHEAD)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
            raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
    if not tables.caches:
        return _moved(Reader(loader, tables.device), tables.device, tables.clock)
    return _batches(Feed(loader, tables, window, look_ahead, ids))


def _moved(reader: Reader, device: torch.device, clock: StepClock) -> Generator[BatchT, None, None]:
    """Without a cache: batches on the device."""
    process = os.getpid()
    try:
        _begin(reader)
        reader.start()
        while found := _waited(reader, clock):
            batch, point, _ = found
            reader.contents.check(batch)
            reader.contents.forget(batch)
            take_over(batch, device, point)
            yield batch
            _refuse_ended(reader, process)
            del found, batch
    finally:
        _close(reader, process)


def _waited(reader: Reader, clock: StepClock) -> tuple[Any, Any, Any] | None:
    """The next batch, or None at the end."""
    clock.count_ready(reader.num_ready)
    before = clock.enter(READER)
    found = reader.get(wait=True, wanted=True)
    clock.enter(before)
    return found


def _batches(feed: Feed) -> Generator[BatchT, None, None]:
    process = os.getpid()
    try:
        _begin(feed)
        feed.start()
        while found := feed.next():
            feed.offered = ()
            yield found[0]
            _refuse_ended(feed, process)
    finally:
        _close(feed, process)


def _begin(source: Feed | Reader) -> None:
    """A loop begins. One over the same iterator that this thread left open ends, as by `break`: its batches come first here."""
    owner = threading.current_thread(), os.getpid()
    for other, (theirs, _) in list(_open.items()):
        if theirs == owner and other.stream is not None and other.stream is source.stream:
            _open[other] = owner, True  # first: after an interrupt the next loop closes it again
            other.close()
    _open[source] = owner, False


def _refuse_ended(source: Feed | Reader, process: int) -> None:
    if process != os.getpid():
        raise HotbedError(
            "this prefetched loop belongs to the process that this one was forked from, with its threads; begin a loop here"
        )
    if _open[source][1]:
        raise HotbedError(
            "a later prefetch over the same iterator has ended this one, and got the batches that were read ahead; use the "
            "later one"
        )


def _close(source: Feed | Reader, process: int) -> None:
    """Where `process` began it. In a fork of that, and when Python ends, its threads do not run: waiting would never end."""
    _open.pop(source, None)
    if not sys.is_finalizing() and process == os.getpid():
        source.close()


def _abandon() -> None:
    """The process ends, and loops were left open: threads that run on while Python is taken down would crash it."""
    for source in list(_open):
        source.abandon()


# loops: the thread and process that began each; whether a later one took its iterator over
_open: weakref.WeakKeyDictionary[Feed | Reader, tuple[tuple[threading.Thread, int], bool]] = weakref.WeakKeyDictionary()
atexit.register(_abandon)
