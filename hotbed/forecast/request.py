"""The run that a forecast is for -> its simulated batches, tables and schedule, each computed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from hotbed.cache import MOST_AHEAD
from hotbed.data.dataset import Dataset
from hotbed.forecast.links import ASSUMED, Links
from hotbed.forecast.network import Frequencies, read_frequencies
from hotbed.forecast.replay import LookAhead, Replay
from hotbed.forecast.sampled import SampledEpoch, SampleOptions, draw_small_epoch
from hotbed.forecast.trace import TraceSource, from_dataset, rows_of
from hotbed.forecast.traffic import BatchKnowledge, RunCourse, distinct_rows, hot_of, part_of_rank, part_of_tables
from hotbed.ops.shard import SPREAD, WHOLE, Shard
from hotbed.parallel.world import World
from hotbed.run.config import RunConfig
from hotbed.tables.sizing.placement import largest_rank
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
    links: Links = ASSUMED  # between ranks

    @cached_property
    def sketch(self) -> Sketch:
        return sketch(self.config, self.dataset, World(0, self.world))

    @cached_property
    def _places(self) -> tuple[int, list[int]]:
        """(the rank with most bytes, the owner of every table); of rows by column it has a part of each, which are its own."""
        tables = self.sketch.tables
        rank, owners = largest_rank(tables, self.sketch.optimizer, self.sketch.precision, self.world)
        return rank, [
            rank if table.placement == "column" else owners.get(name, SPREAD) for name, table in tables.items()
        ]

    def _shard(self, rows: Iterable[int]) -> Shard:
        """What that rank has of tables with these numbers of rows."""
        if self.world == 1:
            return WHOLE
        rank, owners = self._places
        return Shard(rank, self.world).of_tables(tuple(zip(rows, owners)))

    @cached_property
    def shard(self) -> Shard:
        """The shard of the rank with the most bytes, over the keys of the simulated batches."""
        ends = [0, *self.given.ends]
        return self._shard(end - start for start, end in pairwise(ends))

    def _distinct(self, tables: tuple[int, ...]) -> int:
        """Rows of some tables that the train split uses and the rank has."""
        rank, owners = self._places
        spread = distinct_rows(self._as_read, tuple(n for n in tables if owners[n] == SPREAD)) // self.world
        return spread + distinct_rows(self._as_read, tuple(n for n in tables if owners[n] == rank))

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
        name = ("replay", id(self.given), self.shard)
        if name not in self.shared:
            self.shared[name] = Replay(part_of_rank(self.given.trace, self.shard))
        found: Replay = self.shared[name]
        return found

    @property
    def frequencies(self) -> list[Frequencies]:
        """How often the ids of each table occur."""
        if "frequencies" not in self.shared:
            self.shared["frequencies"] = read_frequencies(self.dataset)
        found: list[Frequencies] = self.shared["frequencies"]
        return found

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.dataset.schema.splits["train"].rows // self.config.data.batch_size)

    def thinned(self, features: tuple[int, ...] | None = None) -> SampledEpoch:
        """An epoch with a share of the rows of some features; two epochs if several are trained."""
        train, data = self.config.train, self.config.data
        several = train.epochs > 1 and not 0 < train.max_steps <= self.num_batches
        shard = self._shard(rows_of(self._as_read))
        wanted = SampleOptions(self.num_batches, 1 + several, not data.shuffle, self.most_lookups, shard, features)
        if wanted not in self.shared:
            self.shared[wanted] = draw_small_epoch(self._as_read, wanted)
        found: SampledEpoch = self.shared[wanted]
        return found

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Numbers of the tables that share a cache; dynamic ids have a cache of their own, and so have columns of rows."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for number, table in enumerate(self.sketch.tables.values()):
            kinds.setdefault((table.rows is None, table.placement == "column"), []).append(number)
        return [tuple(features) for features in kinds.values()]

    @cached_property
    def seen(self) -> list[BatchKnowledge]:
        """What is known of the batches, for every group."""
        if len(self.groups) == 1:
            num_distinct = self._distinct(self.groups[0])
            hot = partial(hot_of, self.given, self.shard)
            return [BatchKnowledge(self.replay, hot, num_distinct, self.thinned)]
        found = []
        for features in self.groups:
            replay = Replay(part_of_tables(self.replay.trace, self.given.ends, features))
            hot = partial(hot_of, self.given, self.shard)
            found.append(BatchKnowledge(replay, hot, self._distinct(features), partial(self.thinned, features)))
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
