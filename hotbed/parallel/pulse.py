"""Signs of life: what every rank is doing, written to the store that all of them share, and read when one does not answer.

A thread of each rank writes its pulse: how many stages of the run it has entered, the name of the last, the number of batches
it has read. Ranks go through the same stages, so one that has entered fewer than others is behind, and one whose pulse stands
still is dead or frozen. A rank that waits longer than the time-out says which and where, and ends; so does one that learns of
an error on another rank and cannot end by itself, because it waits for an answer that will not come.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

GRACE = 5.0  # seconds that the main thread has to end by itself
_MOST_BETWEEN, _LEAST_BETWEEN = 0.5, 0.1  # seconds between two beats
_WATCHED = 4.0  # seconds; a rank that compiles keeps its other threads waiting for long
_FAILURE, _COUNT = "failure", "failures"
EXIT_CODE = 2


class Sign(NamedTuple):
    """One rank's pulse."""

    stages: int  # entered so far
    stage: str
    since: float  # when, by the clock of the rank
    batches: int  # read so far
    now: float  # when this was written


class Failure(NamedTuple):
    """The first error of a run."""

    rank: int
    text: str


class Pulse:
    """Of one rank; `store` is a connection that no one else uses."""

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
        """The next stage begins; `alone`: it asks nothing of other ranks, and may take as long as it takes."""
        self._stages, self._stage, self._since = self._stages + 1, name, time.time()
        self._entered, self._alone = time.monotonic(), alone

    @property
    def stage(self) -> str:
        """Where this rank is."""
        return self._stage

    def end(self) -> None:
        """No more beats."""
        self._ended.set()

    def fail(self, text: str) -> Failure:
        """Tell all ranks of an error; the first one of all is handed back."""
        with self._lock:
            if self._store.add(_COUNT, 1) == 1:
                self._store.set(_FAILURE, json.dumps([self.rank, text]))
            return Failure(*json.loads(self._store.get(_FAILURE)))

    def failure(self, wait: float = 0.0) -> Failure | None:
        """The first error of all ranks, if there is one by then."""
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                if self._store.check([_FAILURE]):
                    return Failure(*json.loads(self._store.get(_FAILURE)))
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def diagnosis(self, seconds: float = 1.25) -> str:
        """Which ranks are gone or behind, and where they were last seen; watches their pulses for so long."""
        before, deadline = self._signs(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._give_sign()  # others may be watching too
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
                said.append(f"rank {rank} gives no sign of life any more, it was last {where}")
            elif (sign.stages, sign.batches) < ahead:
                said.append(f"rank {rank} is behind, {where}, with {sign.batches} batches read of {ahead[1]}")
        return "; ".join(said) or "no rank is behind the others"

    def _signs(self) -> dict[int, Sign]:
        signs = {}
        with self._lock:
            for rank in range(self.size):
                if self._store.check([f"pulse-{rank}"]):
                    signs[rank] = Sign(*json.loads(self._store.get(f"pulse-{rank}")))
        return signs

    def _beat(self) -> None:
        try:
            while not self._ended.wait(self._between):
                self._give_sign()
                if (failure := self.failure()) is not None:
                    self._follow(failure)
                elif not self._alone and time.monotonic() - self._entered > self.timeout:
                    self._time_out()
        except (dist.DistError, RuntimeError):  # whoever keeps the store is gone, and soon so is this rank
            return

    def _give_sign(self) -> None:
        sign = Sign(self._stages, self._stage, self._since, self.batches, time.time())
        with self._lock:
            self._store.set(f"pulse-{self.rank}", json.dumps(sign))

    def _time_out(self) -> None:
        who = self.diagnosis(_WATCHED)
        text = (
            f"no answer for {self.timeout:g} s in the stage {self._stage!r}: {who}. All ranks stop. If that was only slow, "
            "raise parallel.timeout."
        )
        first = self.fail(text)
        leave(f"rank {self.rank}: {text}" if first.rank == self.rank else following(self.rank, first))

    def _follow(self, failure: Failure) -> None:
        """Another rank has failed: end, if the main thread does not."""
        if failure.rank != self.rank and not self._ended.wait(GRACE):
            leave(following(self.rank, failure))


def following(rank: int, failure: Failure) -> str:
    """What a rank says that stops because of another."""
    return f"rank {rank} stops because of rank {failure.rank}: {failure.text.splitlines()[0][:200]}"


def leave(text: str, code: int = EXIT_CODE) -> None:
    """End this process at once, whatever its threads wait for."""
    if text:
        sys.stderr.write(f"error: {text}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
