"""Training on a log that is followed: hours of test-then-train, checkpoints by the minute, waiting; and its setup.

A checkpoint is due every few minutes of work, and when all that has arrived is trained, so that a server of the run has it.
Both depend on the clock, and neither changes a bit of what is learned. The place in the log, the open hours and the time of the
newest event are state of training: a checkpoint holds them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hotbed.data.dataset import Dataset
from hotbed.data.follow.folder import FolderSource
from hotbed.data.follow.kafka import KafkaSource, Topic
from hotbed.data.follow.loader import FollowLoader
from hotbed.data.follow.source import FILE, Journal, Source
from hotbed.data.prepare.quarantine import MaxBad
from hotbed.data.raw_reader import RawReader
from hotbed.data.times import TimeColumn
from hotbed.errors import ConfigError
from hotbed.files import path_of
from hotbed.files.settings import cache_root
from hotbed.ids import IdCounts
from hotbed.parallel.world import World
from hotbed.run.config import FollowConfig, RunConfig
from hotbed.telemetry.observer import Record
from hotbed.train.hours import Hours
from hotbed.train.step import Learner

_BREATH = 0.2  # seconds between two questions whether to stop
_CAUGHT_UP = 10.0  # seconds between two checkpoints of a run that has nothing left to train, at least

_NONE = -1  # the step of no checkpoint


class CountingTables(Protocol):
    """Tables, as far as this file needs them."""

    def id_counts(self) -> dict[str, IdCounts]:
        """Counts of every table with dynamic ids."""

    def set_id_clock(self, clock: Callable[[int], float]) -> None:
        """Let ids expire by this time instead of the machine's."""


class FollowPace(NamedTuple):
    """How often, in seconds."""

    checkpoint: float = 600.0
    poll: float = 1.0
    idle: float = 0.0  # end after so long without an arrival; 0: never


class Follower:
    """The log of a run, and the state of following it."""

    def __init__(
        self,
        loader: FollowLoader,
        tables: CountingTables,
        pace: FollowPace,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.loader = loader
        self.is_idle = False  # nothing came for as long as the run may wait
        features = loader.dataset.schema.features
        self.hours = Hours([one.name for one in features], [one.name for one in features if one.mode == "vocabulary"])
        self._tables, self._pace, self._clock, self._sleep = tables, pace, clock, sleep
        self._saved_at, self._saved_step = clock(), 0
        self._until_next = self._soon = min(_CAUGHT_UP, pace.checkpoint)
        tables.set_id_clock(loader.second_of)

    def begin(self, step: int) -> None:
        """Training starts, or resumes, at this step."""
        self._saved_at, self._saved_step = self._clock(), step

    def trained(self, logits: Tensor, labels: Tensor) -> list[Record]:
        """The oldest batch ahead was trained; records of hours that are over."""
        facts = self.loader.trained()
        if not self.hours.add(facts, logits, labels):
            return []
        return self.hours.close(facts.after.watermark, self._tables.id_counts())

    def last_hours(self) -> list[Record]:
        """Records of the hours that are still open when a run ends."""
        return self.hours.close(self.loader.next.watermark, self._tables.id_counts(), at_end=True)

    def is_due(self) -> bool:
        """Whether the next checkpoint is, while there is work."""
        return self._clock() - self._saved_at >= self._pace.checkpoint

    def saved(self, step: int) -> None:
        """A checkpoint of this step was taken."""
        self._saved_at, self._saved_step, self._until_next = self._clock(), step, self._soon

    def skipped(self) -> None:
        """The checkpoint that was due was not taken, because the last one is still being written."""
        self._saved_at = self._clock()

    def failed(self) -> None:
        """The disk refused a checkpoint: what is trained is not saved, and the next attempt is not made soon."""
        self._saved_at, self._saved_step, self._until_next = self._clock(), _NONE, self._pace.checkpoint

    def wait(
        self, step: int, stop: Callable[[], bool], save: Callable[[], None], poll: Callable[[], None] = lambda: None
    ) -> None:
        """Until there is something to train, someone asks to stop, or nothing came for too long.

        Meanwhile a checkpoint is taken if there is none of what is trained. `poll` reports on the one that is being written.
        """
        since = self._clock()
        while not stop() and not self.loader.look():
            poll()
            now = self._clock()
            if step != self._saved_step and now - self._saved_at >= self._until_next:
                save()
            elif self._pace.idle and now - since >= self._pace.idle:
                self.is_idle = True
                return
            else:
                self._rest(stop)

    def _rest(self, stop: Callable[[], bool]) -> None:
        left = self._pace.poll
        while left > 0 and not stop():
            self._sleep(min(left, _BREATH))
            left -= _BREATH

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a checkpoint: a document, and tensors."""
        document, tensors = self.hours.state()
        return {"place": self.loader.state(), "hours": document}, tensors

    def load_state(self, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """As `state` gave it."""
        self.loader.load_state(document["place"])
        self.hours.load_state(document["hours"], tensors)

    def close(self) -> None:
        self.loader.source.close()


def hour_lines(records: Iterable[Record], position: Record) -> list[Record]:
    """Lines of metrics.jsonl."""
    return [{"kind": "hour", **position, **record} for record in records]


def follow_problems(config: RunConfig, dataset: Dataset, world: World) -> list[str]:
    """Settings that cannot be combined with follow.source."""
    follow, problems = config.follow, []
    if not follow.source:
        return []
    if world.size > 1:
        problems.append(f"follow.source: one process follows a log, not {world.size} ranks; start it without torchrun")
    if config.train.schedule == "cosine":
        problems.append(
            "train.schedule: must be constant, warmup or decay with follow.source, not 'cosine': it has no end"
        )
    if not dataset.schema.raw_format:
        problems.append(
            f"follow.source: {config.data.path} does not say how raw rows are read; `hotbed prepare` makes a dataset that does"
        )
    for path, check in (
        ("follow.time", lambda: time_column(follow, dataset)),
        ("follow.max_bad", lambda: _limit(follow)),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(f"{path}: {error}")
    return problems


def time_column(follow: FollowConfig, dataset: Dataset) -> TimeColumn | None:
    """The time column of the log: as given, else as the dataset was prepared, else none."""
    if follow.time:
        return TimeColumn.parse(follow.time)
    noted = dataset.schema.notes.get("time")
    return TimeColumn(str(noted["column"]), str(noted["unit"])) if isinstance(noted, dict) else None


def follow_loader(config: RunConfig, dataset: Dataset, run: Path) -> FollowLoader:
    """The batches of a followed log; the list of what was taken is in the run folder."""
    follow = config.follow
    reader = RawReader(dataset.path, [], max_bad=follow.max_bad, time=time_column(follow, dataset), needs_labels=True)
    return FollowLoader(dataset, open_source(follow, run), Journal(run / FILE), reader, config.data.batch_size)


def open_source(follow: FollowConfig, run: Path) -> Source:
    """What follow.source names, for one run."""
    skip = [follow.skip, *(name.strip() for name in follow.skip.split(","))]  # the name of one may have commas
    if follow.source.startswith("kafka://"):
        return KafkaSource(Topic.parse(follow.source), settle=follow.settle_seconds, skip=skip)
    return FolderSource(
        path_of(follow.source),
        settle=follow.settle_seconds,
        train_late=follow.late == "train",
        skip=skip,
        scratch=cache_root() / "remote" / "followed" / hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16],
    )


def make_follower(follow: FollowConfig, loader: FollowLoader, learner: Learner) -> Follower:
    """Set the clock of dynamic ids, too: they expire by event time."""
    pace = FollowPace(60 * follow.checkpoint_minutes, follow.poll_seconds, follow.idle_seconds)
    return Follower(loader, learner.tables, pace)


def _limit(follow: FollowConfig) -> MaxBad:
    return MaxBad.parse(follow.max_bad)
