"""All ranks of a run, as the code that drives it sees them: a few agreements between processes, each with a name.

`ALONE` is a single process, where every agreement is its own answer; so the code that drives a run is the same in both cases.
Agreements use a Gloo group of their own, on the host, whatever carries the tensors of training. Between them a heartbeat shows
other ranks the progress of this one.

`Heartbeat`: the status of every rank, written to the store that all of them share, and read when a rank does not answer. A
thread of each rank writes how many stages of the run it has entered, the name of the last, and the number of batches it has
read. Ranks go through the same stages, so a rank that has entered fewer than others is behind, and one whose status does not
change is dead or frozen. A rank that waits longer than the timeout reports which and where, and ends. So does a rank that
learns of an error on another one and cannot end by itself, because it waits for an answer that will not come.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hotbed.errors import ExitCode

GRACE = 5.0  # seconds that the main thread has to end by itself
_MOST_BETWEEN, _LEAST_BETWEEN = 0.5, 0.1  # seconds between two beats
_WATCHED = 4.0  # seconds; a rank that compiles blocks its other threads for long
_FAILURE, _COUNT = "failure", "failures"
T = TypeVar("T")


class World:
    """`size` ranks, of which this is `rank`. All of them make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, pulse: Heartbeat | None = None) -> None:
        self.rank, self.size = rank, size
        self._group, self._pulse = group, pulse

    @property
    def is_first(self) -> bool:
        """Whether this rank writes shared files and speaks for all."""
        return self.rank == 0

    def stage(self, name: str, *, alone: bool = False) -> None:
        """Name what all ranks do from here on; `alone`: each by itself, without waiting for another."""
        if self._pulse is not None:
            self._pulse.enter(name, alone=alone)

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, counted for other ranks."""
        for batch in batches:
            if self._pulse is not None:
                self._pulse.batches += 1
            yield batch

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        said = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(said, group=self._group)
        return bool(said)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; plain values."""
        said: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value, group=self._group)
        return said

    def from_first(self, value: T | None) -> T:
        """The value of rank 0."""
        said: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0, group=self._group)
        found: T = said[0]
        return found

    def collect(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The arrays of all ranks, which may differ in length, on rank 0; none elsewhere."""
        if self.size == 1:
            return [array]
        shapes = self.gather(array.shape)
        if self.is_first:
            return [array, *(self._received(rank, shapes[rank], array.dtype) for rank in range(1, self.size))]
        if array.size:
            dist.send(torch.from_numpy(np.ascontiguousarray(array)), 0, group=self._group)
        return []

    def _received(self, rank: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array = np.empty(shape, dtype)
        if array.size:
            dist.recv(torch.from_numpy(array), rank, group=self._group)
        return array


ALONE = World()


class RankStatus(NamedTuple):
    """The status of one rank."""

    stages: int  # entered so far
    stage: str
    since: float  # when, by the clock of the rank
    batches: int  # read so far
    now: float  # when this was written


class Failure(NamedTuple):
    """The first error of a run."""

    rank: int
    text: str


class Heartbeat:
    """The heartbeat of one rank; `store` is a connection of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.batches = 0
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._stages, self._stage, self._since = 0, "starting", time.time()
        self._entered, self._alone = time.monotonic(), True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._between = min(_MOST_BETWEEN, max(_LEAST_BETWEEN, timeout / 20))
        self._thread = threading.Thread(target=self._beat, name="hotbed-pulse", daemon=True)
        self._thread.start()

    def enter(self, name: str, *, alone: bool = False) -> None:
        """The next stage begins; `alone`: it needs no other rank and has no time limit."""
        self._stages, self._stage, self._since = self._stages + 1, name, time.time()
        self._entered, self._alone = time.monotonic(), alone

    @property
    def stage(self) -> str:
        """Where this rank is."""
        return self._stage

    def end(self) -> None:
        """No more beats. Waits for one in progress: Python aborts the process if it ends while a thread is inside the store."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE)

    def fail(self, text: str) -> Failure:
        """Report an error to all ranks; returns the first error of the run."""
        with self._lock:
            if self._store.add(_COUNT, 1) == 1:
                self._store.set(_FAILURE, json.dumps([self.rank, text]))
            return Failure(*json.loads(self._store.get(_FAILURE)))

    def failure(self, wait: float = 0.0) -> Failure | None:
        """The first error of all ranks, if there is one within `wait` seconds."""
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                if self._store.check([_FAILURE]):
                    return Failure(*json.loads(self._store.get(_FAILURE)))
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def diagnosis(self, seconds: float = 1.25) -> str:
        """Which ranks are gone or behind, and where they were last seen; watches them for `seconds`."""
        before, deadline = self._signs(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._give_sign()  # others may be watching this one
            time.sleep(self._between)
        signs = self._signs()
        ahead = max(((sign.stages, sign.batches) for sign in signs.values()), default=(0, 0))
        said = []
        for rank in range(self.size):
            sign = signs.get(rank)
            if sign is None:
                said.append(f"rank {rank} has never given a sign of life")
                continue
            where = f"in the stage {sign.stage!r} for {sign.now - sign.since:.0f} s"
            if rank != self.rank and sign == before.get(rank):
                said.append(f"rank {rank} no longer gives a sign of life: it was last {where}")
            elif (sign.stages, sign.batches) < ahead:
                said.append(f"rank {rank} is behind, {where}, with {sign.batches} batches read of {ahead[1]}")
        return "; ".join(said) or "no rank is behind the others"

    def _signs(self) -> dict[int, RankStatus]:
        signs = {}
        with self._lock:
            for rank in range(self.size):
                if self._store.check([f"pulse-{rank}"]):
                    signs[rank] = RankStatus(*json.loads(self._store.get(f"pulse-{rank}")))
        return signs

    def _beat(self) -> None:
        try:
            while not self._ended.wait(self._between):
                self._give_sign()
                if (failure := self.failure()) is not None:
                    self._follow(failure)
                elif not self._alone and time.monotonic() - self._entered > self.timeout:
                    self._time_out()
        except (dist.DistError, RuntimeError):  # the process that keeps the store is gone, and this rank will end soon
            return

    def _give_sign(self) -> None:
        sign = RankStatus(self._stages, self._stage, self._since, self.batches, time.time())
        with self._lock:
            self._store.set(f"pulse-{self.rank}", json.dumps(sign))

    def _time_out(self) -> None:
        who = self.diagnosis(_WATCHED)
        text = (
            f"no answer for {self.timeout:g} s in the stage {self._stage!r}: {who}. All ranks stop. If it was only slow, "
            "raise parallel.timeout."
        )
        first = self.fail(text)
        leave(f"rank {self.rank}: {text}" if first.rank == self.rank else following(self.rank, first))

    def _follow(self, failure: Failure) -> None:
        """Another rank has failed: end, if the main thread does not."""
        if failure.rank != self.rank and not self._ended.wait(GRACE):
            leave(following(self.rank, failure))


def following(rank: int, failure: Failure) -> str:
    """The message of a rank that stops because of another."""
    return f"rank {rank} stops because of rank {failure.rank}: {failure.text.splitlines()[0][:200]}"


def leave(text: str, code: int = ExitCode.FAILURE) -> None:
    """End this process immediately, whatever its threads wait for."""
    if text:
        sys.stderr.write(f"error: {text}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
