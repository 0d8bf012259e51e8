"""`follow.*` of a config in, the loader of a followed log and its Follower out; what contradicts following is said at once."""

from __future__ import annotations

from pathlib import Path

from hotbed.data.dataset import Dataset
from hotbed.data.follow.folder import FolderSource
from hotbed.data.follow.journal import FILE, Journal
from hotbed.data.follow.kafka import KafkaSource, Topic
from hotbed.data.follow.loader import FollowLoader
from hotbed.data.follow.source import Source
from hotbed.data.prepare.quarantine import MaxBad
from hotbed.data.raw_reader import RawReader
from hotbed.data.times import TimeColumn
from hotbed.errors import ConfigError
from hotbed.parallel.world import World
from hotbed.run.config import FollowConfig, RunConfig
from hotbed.train.follow import Follower, FollowPace
from hotbed.train.step import Learner


def follow_problems(config: RunConfig, dataset: Dataset, world: World) -> list[str]:
    """What cannot be together with follow.source."""
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
    """Of the rows of the log: as given, else as the dataset was prepared, else none."""
    if follow.time:
        return TimeColumn.parse(follow.time)
    noted = dataset.schema.notes.get("time")
    return TimeColumn(str(noted["column"]), str(noted["unit"])) if isinstance(noted, dict) else None


def follow_loader(config: RunConfig, dataset: Dataset, run: Path) -> FollowLoader:
    """The batches of a followed log; the list of what was taken is in the run folder."""
    follow = config.follow
    reader = RawReader(dataset.path, [], max_bad=follow.max_bad, time=time_column(follow, dataset), needs_labels=True)
    return FollowLoader(dataset, open_source(follow), Journal(run / FILE), reader, config.data.batch_size)


def open_source(follow: FollowConfig) -> Source:
    """What follow.source names."""
    if follow.source.startswith("kafka://"):
        return KafkaSource(Topic.parse(follow.source), settle=follow.settle_seconds)
    skip = [name.strip() for name in follow.skip.split(",") if name.strip()]
    return FolderSource(Path(follow.source), settle=follow.settle_seconds, train_late=follow.late == "train", skip=skip)


def make_follower(follow: FollowConfig, loader: FollowLoader, learner: Learner) -> Follower:
    """Set the clock of dynamic ids, too: they expire by event time."""
    pace = FollowPace(60 * follow.checkpoint_minutes, follow.poll_seconds, follow.idle_seconds)
    return Follower(loader, learner.tables, pace)


def _limit(follow: FollowConfig) -> MaxBad:
    return MaxBad.parse(follow.max_bad)
