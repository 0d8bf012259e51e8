"""The run that a forecast is for -> its simulated batches, tables and schedule, each computed once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hotbed.cache import MOST_AHEAD
from hotbed.data.dataset import Dataset
from hotbed.forecast.replay import LookAhead, Replay
from hotbed.forecast.sampled import SampledEpoch, SampleOptions, draw_small_epoch
from hotbed.forecast.trace import TraceSource, from_dataset
from hotbed.forecast.traffic import BatchKnowledge, RunCourse, distinct_rows, hot_of, part_of_rank, part_of_tables
from hotbed.ops.shard import Shard
from hotbed.parallel.world import World
from hotbed.run.config import RunConfig
from hotbed.train.build import Sketch, sketch

MOST_LOOKUPS = 60_000_000  # that are simulated
QUICK_LOOKUPS = 5_000_000  # likewise, when a run is about to start


@dataclass(frozen=True)
class ForecastRequest:
    """A run, and how much may be measured and simulated for it."""

    config: RunConfig
    dataset: Dataset
    world: int = 1
    calibrate: str = "auto"  # auto: if there is none; again; known: never measure; no: no speed at all
    most_lookups: int = MOST_LOOKUPS
    shared: dict[Any, Any] = field(default_factory=dict)  # traces, for several settings of one dataset

    @cached_property
    def sketch(self) -> Sketch:
        return sketch(self.config, self.dataset, World(0, self.world))

    @cached_property
    def _as_read(self) -> Dataset:
        """The dataset; features with dynamic ids have a row for every id, because those are not hashed."""
        schema, tables = self.dataset.schema, self.sketch.tables
        features = [
            replace(one, mode="raw") if one.mode == "hash" and tables[one.table].rows is None else one
            for one in schema.features
        ]
        return replace(self.dataset, schema=replace(schema, features=tuple(features)))

    @cached_property
    def given(self) -> TraceSource:
        """The first batches of the run."""
        data, samples = self.config.data, self.dataset.schema.splits["train"].rows
        lookups = sum(max(one.lookups / max(samples, 1), 1) for one in self.dataset.schema.features)
        most = max(2, int(self.most_lookups / (data.batch_size * max(lookups, 1))))
        if self.config.train.max_steps:  # and what is known ahead of the last
            most = min(most, self.config.train.max_steps + MOST_AHEAD)
        name = (data.batch_size, data.shuffle, self.config.train.seed, most)
        if name not in self.shared:
            given = from_dataset(
                self._as_read, batch_size=data.batch_size, shuffle=data.shuffle, seed=self.config.train.seed,
                max_batches=most,
            )  # fmt: skip
            self.shared[name] = given
        found: TraceSource = self.shared[name]
        return found

    @cached_property
    def replay(self) -> Replay:
        """The part of them that this rank owns."""
        name = ("replay", id(self.given), self.world)
        if name not in self.shared:
            self.shared[name] = Replay(part_of_rank(self.given.trace, Shard(0, self.world)))
        found: Replay = self.shared[name]
        return found

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.dataset.schema.splits["train"].rows // self.config.data.batch_size)

    def thinned(self, features: tuple[int, ...] | None = None) -> SampledEpoch:
        """An epoch with a share of the rows of some features; two epochs if several are trained."""
        train, data = self.config.train, self.config.data
        several = train.epochs > 1 and not 0 < train.max_steps <= self.num_batches
        wanted = SampleOptions(self.num_batches, 1 + several, not data.shuffle, self.most_lookups, self.world, features)
        if wanted not in self.shared:
            self.shared[wanted] = draw_small_epoch(self._as_read, wanted)
        found: SampledEpoch = self.shared[wanted]
        return found

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Numbers of the tables that share a cache; dynamic ids have a cache of their own."""
        kinds: dict[bool, list[int]] = {}
        for number, table in enumerate(self.sketch.tables.values()):
            kinds.setdefault(table.rows is None, []).append(number)
        return [tuple(features) for features in kinds.values()]

    @cached_property
    def seen(self) -> list[BatchKnowledge]:
        """What is known of the batches, for every group."""
        shard = Shard(0, self.world)
        if len(self.groups) == 1:
            num_distinct = distinct_rows(self._as_read) // self.world
            hot = partial(hot_of, self.given, shard)
            return [BatchKnowledge(self.replay, hot, num_distinct, self.thinned)]
        found = []
        for features in self.groups:
            replay = Replay(part_of_tables(self.replay.trace, self.given.ends, features))
            num_distinct = distinct_rows(self._as_read, features) // self.world
            found.append(
                BatchKnowledge(
                    replay, partial(hot_of, self.given, shard), num_distinct, partial(self.thinned, features)
                )
            )
        return found

    @property
    def course(self) -> RunCourse:
        config, train = self.config, self.config.train
        return RunCourse(
            self.num_batches, train.epochs, train.max_steps, config.tables.policy, config.tables.warmup, self.ahead
        )

    @cached_property
    def ahead(self) -> LookAhead:
        """The look-ahead of the cache."""
        tables = self.config.tables
        return LookAhead(tables.window or None, tables.look_ahead or None, self.sketch.budgets.bounds_index)
