"""Ranks that prepare one dataset together: each takes every W-th file, feature and part, and they meet between the stages.

They communicate only through small files in the shared workspace: no ports, no collectives. What ranks finish before they
are killed is there for the next attempt. Every rank increments a number in its own file each second. If the number stands
still for a minute, the rank counts as lost, and all others stop and name it. A rank that fails leaves its message for the
others. A single process writes none of this.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hotbed.errors import ConfigError, RankError
from hotbed.host.atomic import rewriting

LOST_AFTER = 60.0  # seconds
START_WITHIN = 300.0
_POLL = 0.05


class PrepareRanks:
    """`with PrepareRanks(...) as ranks:` after the workspace exists; rank 0 owns the workspace."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}; a rank lies in 0 .. WORLD_SIZE - 1.")
        self.rank, self.world = rank, world
        self._directory = Path()
        self._nonce = ""
        self._stop = threading.Event()
        self._pulse: threading.Thread | None = None
        self._seen: dict[int, tuple[str, float]] = {}  # rank -> its last number, and when it changed

    @classmethod
    def from_environment(cls) -> PrepareRanks:
        """The rank and world size that torchrun sets."""
        try:
            return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE must be numbers ({error}).") from error

    def takes(self, number: int) -> bool:
        """Whether this rank does task `number`."""
        return number % self.world == self.rank

    def begin(self, workspace: Path) -> None:
        """Wait until all ranks have started."""
        if self.world == 1:
            return
        self._directory = workspace / "ranks"
        self._directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self._call()
        else:
            self._answer()
        self._pulse = threading.Thread(target=self._beat, name="hotbed-ranks", daemon=True)
        self._pulse.start()

    def _call(self) -> None:
        """Rank 0: publish the greetings seen so far until every rank has found its own."""
        self._nonce = secrets.token_hex(4)
        deadline = time.monotonic() + START_WITHIN
        while True:
            words = sorted(path.name for path in self._directory.glob("hello-*"))
            _note(self._directory / "call.json", json.dumps({"attempt": self._nonce, "words": words}))
            absent = [rank for rank in range(1, self.world) if not self._file("here", rank).exists()]
            if not absent:
                return
            self._patience(deadline, absent)

    def _answer(self) -> None:
        word = f"hello-{self.rank}-{secrets.token_hex(8)}"
        (self._directory / word).touch()
        call = self._directory / "call.json"
        deadline = time.monotonic() + START_WITHIN
        while True:
            if call.exists():
                said = json.loads(call.read_text())
                if word in said["words"]:
                    self._nonce = said["attempt"]
                    self._file("here", self.rank).touch()
                    return
            self._patience(deadline, [0])

    def _patience(self, deadline: float, absent: list[int]) -> None:
        if time.monotonic() > deadline:
            raise RankError(
                f"rank {self.rank} of {self.world} waited {START_WITHIN:.0f} s for rank {', '.join(map(str, absent))} in "
                f"{self._directory}. Do all ranks see the same --out?"
            )
        time.sleep(_POLL)

    def meet(self, stage: str) -> None:
        """Wait until every rank has reached this stage; a RankError if one has failed or is lost."""
        if self.world == 1:
            return
        self._file(f"met-{stage}", self.rank).touch()
        while True:
            absent = [rank for rank in range(self.world) if not self._file(f"met-{stage}", rank).exists()]
            if not absent:
                return
            for rank in absent:
                self._check(rank, stage)
            time.sleep(_POLL)

    def leave(self, stage: str) -> None:
        """The last meeting: rank 0 waits for the others, which do not wait."""
        if self.rank == 0:
            self.meet(stage)
        self._end_pulse()
        if self.rank > 0:
            self._file(f"met-{stage}", self.rank).touch()

    def _check(self, rank: int, stage: str) -> None:
        if rank == self.rank:
            return
        failed = self._file("failed", rank)
        if failed.exists():
            raise RankError(f"rank {rank} stopped while {stage}: {failed.read_text()}")
        alive = self._file("alive", rank)
        number = alive.read_text() if alive.exists() else ""
        now = time.monotonic()
        known = self._seen.get(rank)
        if known is None or known[0] != number:
            self._seen[rank] = (number, now)
        elif now - known[1] > LOST_AFTER:
            raise RankError(
                f"rank {rank} has not responded for {LOST_AFTER:.0f} s while {stage}. Run the same command again: finished "
                "work is kept."
            )

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(1.0):
            number += 1
            try:
                _note(self._file("alive", self.rank), str(number))
            except OSError:
                if not self._directory.is_dir():  # rank 0 has finished or failed
                    return  # else a full disk: the next write may succeed

    def _file(self, what: str, rank: int) -> Path:
        return self._directory / f"{self._nonce}-{what}-{rank}"

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._stop.set()
            self._pulse.join()
            self._pulse = None

    def __enter__(self) -> PrepareRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_pulse()
        if error is not None and self._nonce and self._directory.is_dir():
            with suppress(OSError):  # if nothing can be written, the others miss its heartbeat
                _note(self._file("failed", self.rank), str(error) or type(error).__name__)


def _note(path: Path, text: str) -> None:
    """Write a message to other ranks atomically; it need not be durable."""
    with rewriting(path, os.replace, unique=True) as temporary:
        temporary.write_text(text)
