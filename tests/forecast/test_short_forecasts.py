"""A tenth of an epoch simulated, and the rest told from counts, against the whole of it."""

from dataclasses import replace

import numpy as np
import pytest

from hotbed.data.dataset import Dataset, hot_rows
from hotbed.data.synthetic.shapes import SHAPES
from hotbed.data.synthetic.write import write_dataset
from hotbed.forecast.replay import LookAhead, Replay
from hotbed.forecast.sampled import SampleOptions, draw_small_epoch, uses_of
from hotbed.forecast.trace import from_dataset, rows_of
from hotbed.forecast.traffic import BatchKnowledge, RunCourse, distinct_rows, hot_of, part_of_rank, simulate_run
from hotbed.ops.shard import Shard

BATCH = 48
LOOKUPS = 1_000_000  # of 3.3 million


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "data"
    write_dataset(path, shape=SHAPES["avazu-like"], train=150_000, valid=100, test=100, days=5)
    return Dataset.open(path)


class Forecasts:
    """Whole and short ones of the same epoch."""

    def __init__(self, dataset, world=1, epochs=1, shuffle=True):
        self.epochs, shard = epochs, Shard(0, world)
        whole = from_dataset(dataset, batch_size=BATCH, shuffle=shuffle, seed=0)
        self.num_batches = whole.trace.num_batches
        self.num_rows = whole.trace.num_rows // world
        wanted = SampleOptions(self.num_batches, min(epochs, 2), not shuffle, LOOKUPS, Shard(0, world))
        short = from_dataset(dataset, batch_size=BATCH, shuffle=shuffle, seed=0, max_batches=self.num_batches // 10)
        distinct = distinct_rows(dataset) // world
        small = draw_small_epoch(dataset, wanted)
        self.whole, self.short = (
            BatchKnowledge(
                Replay(part_of_rank(given.trace, shard)),
                lambda size, g=given: hot_of(g, shard, size),
                distinct,
                lambda: small,
            )
            for given in (whole, short)
        )

    def of(self, share, policy, max_steps=0):
        course = RunCourse(self.num_batches, self.epochs, max_steps, policy, 0.0, LookAhead())
        return [simulate_run(seen, round(share * self.num_rows), course) for seen in (self.whole, self.short)]


@pytest.fixture(scope="module")
def forecasts(dataset):
    return Forecasts(dataset)


@pytest.mark.parametrize("share", [0.005, 0.015, 0.05, 0.2])
@pytest.mark.parametrize("policy", ["oracle", "lfu", "lru", "static"])
def test_a_tenth_of_an_epoch_tells_the_whole_to_a_point(forecasts, share, policy):
    whole, short = forecasts.of(share, policy)
    assert whole.num_simulated == forecasts.num_batches
    assert short.num_simulated == forecasts.num_batches // 10
    assert short.hit_rate == pytest.approx(whole.hit_rate, abs=0.01)
    assert abs(short.hit_rate - whole.hit_rate) <= short.within
    assert short.lookup_hit_rate == pytest.approx(whole.lookup_hit_rate, abs=0.01)
    assert short.created == pytest.approx(whole.created, rel=0.01)
    assert short.written_back == pytest.approx(whole.written_back, rel=0.05)
    assert short.keys == pytest.approx(whole.keys, rel=0.04)
    assert whole.within == 0


@pytest.mark.parametrize("policy", ["oracle", "static"])
def test_several_epochs_of_a_rank(dataset, policy):
    whole, short = Forecasts(dataset, world=2, epochs=3, shuffle=False).of(0.05, policy)
    assert short.num_batches == whole.num_batches
    assert short.hit_rate == pytest.approx(whole.hit_rate, abs=0.01)


def test_a_run_that_ends_within_the_epoch(forecasts):
    whole, short = forecasts.of(0.2, "lru", max_steps=forecasts.num_batches // 2)
    assert short.num_simulated == forecasts.num_batches // 10
    assert short.hit_rate == pytest.approx(whole.hit_rate, abs=0.01)
    assert short.created == pytest.approx(whole.created, rel=0.03)


def test_a_small_epoch_has_its_share_of_every_table(dataset):
    small = draw_small_epoch(dataset, SampleOptions(20_000, 1, True, LOOKUPS))
    uses = [int(one.times.sum()) for one in uses_of(dataset)]
    assert small.share == pytest.approx(LOOKUPS / sum(uses))
    assert small.replay.trace.num_lookups == pytest.approx(LOOKUPS, rel=0.1)
    assert small.keys.shape[0] == pytest.approx(small.share * distinct_rows(dataset), rel=0.01)
    assert (np.diff(small.keys) > 0).all()
    whole = draw_small_epoch(dataset, SampleOptions(20_000, 1, True, 10**9))
    assert whole.share == 1
    assert whole.replay.trace.num_lookups == sum(uses)


@pytest.mark.parametrize("lookups", [1, 20, 300])
def test_a_small_epoch_of_hardly_a_row(dataset, lookups):
    small = draw_small_epoch(dataset, SampleOptions(1000, 2, False, lookups))
    stands = small.run(100, "oracle", LookAhead(1, 20), None, [100, 1000, 2000])
    assert len(stands) == 3
    assert small.replay.trace.num_lookups <= 8 * 2000 * max(small.keys.shape[0], 1)


def test_hot_rows_of_a_rank_are_its_own(dataset):
    given = from_dataset(dataset, batch_size=BATCH, max_batches=2)
    shard = Shard(0, 2)
    found = hot_of(given, shard, 100).keys
    assert set(found) <= set(hot_rows(dataset, 200).keys)
    assert 60 < found.shape[0] <= 100


def test_rows_too_many_to_count_are_there_too(dataset):
    feature, *others = dataset.schema.features
    exact = next(iter(uses_of(dataset)))
    sketched = replace(
        feature, mode="hash", rows=1000, counting="sketch", distinct=10_000, lookups=154_000, unlisted_lookups=4000
    )
    schema = replace(dataset.schema, features=(sketched, *others))
    uses = next(iter(uses_of(replace(dataset, schema=schema))))
    assert exact.other_rows == 0
    assert uses.other_times == 4000
    assert uses.num_rows == pytest.approx(1000, abs=1)  # ten ids for every row
    small = draw_small_epoch(replace(dataset, schema=schema), SampleOptions(100, 1, True, LOOKUPS))
    assert (small.keys >= sum(rows_of(replace(dataset, schema=schema)))).sum() == round(uses.other_rows * small.share)
