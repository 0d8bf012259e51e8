"""The simulator counts what training counts, to the row."""

import json

import numpy as np
import pytest
import torch

import hotbed
from hotbed import EmbeddingTables, Table
from hotbed.cache import BYTES_PER_SLOT, POLICIES, CacheCounts
from hotbed.data.dataset import Dataset, HotRows, hot_rows, num_warm
from hotbed.errors import BudgetError, ConfigError
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import LookAhead, Replay, simulate
from hotbed.forecast.trace import read_trace, trace_of
from hotbed.ops.records import layout_of
from hotbed.tables.sizing.budget import staged_row_bytes
from hotbed.train.run import run
from tests.pairs import pairs
from tests.train.conftest import ready_for
from tests.train.small import write_dataset

ROWS = (400, 90, 7)
BATCH = 12
MOVED = {"bytes_in": 0, "bytes_out": 0, "stall_seconds": 0.0}  # what a simulation does not know


AHEAD = [
    {},
    {"window": 1},
    {"window": 4},
    {"window": 2, "look_ahead": 5},
    {"window": 8, "look_ahead": 3},
    {"look_ahead": 1},
    {"look_ahead": 50},  # two batches share a bit
]


def random_ids(num_batches, seed=0):
    """Skewed ids [B, F], and a drift: rows that are hot at first are cold in the end."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(num_batches):
        columns = [((torch.rand(BATCH, generator=generator) ** 4 * rows).long() + number // 3) % rows for rows in ROWS]
        batches.append(torch.stack(columns, dim=1))
    return batches


def trace_from(batches):
    base = np.cumsum([0, *ROWS[:-1]])
    return trace_of([(batch.numpy() + base).ravel() for batch in batches], sum(ROWS))


def train(batches, share, policy, ahead, device="cpu", hot=None):
    """Counters after training; `ahead` are the arguments of prefetch, None for the plain loop."""
    tables = EmbeddingTables(
        {f"t{f}": Table(rows=rows, dim=3) for f, rows in enumerate(ROWS)}, cache=share, policy=policy, device=device
    )
    if hot is not None:
        tables.groups[0].warm(*map(torch.from_numpy, hot))
    for ids in batches if ahead is None else hotbed.prefetch(batches, tables, **ahead):
        tables(ids).square().sum().backward()
    return tables.counters()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("share", [0.07, 0.2, 0.5, 1.0])
def test_the_plain_loop(policy, share):
    batches = random_ids(60)
    counts = simulate(trace_from(batches), max(1, round(share * sum(ROWS))), policy, look_ahead=0)
    assert counts == train(batches, share, policy, None)._replace(**MOVED)
    assert counts.batches == counts.windows == 60


@pytest.mark.parametrize(("policy", "share", "ahead"), pairs(sorted(POLICIES), [0.07, 0.2, 0.5], AHEAD))
def test_with_prefetch(policy, share, ahead):
    batches = random_ids(70, seed=1)
    counts = simulate(trace_from(batches), round(share * sum(ROWS)), policy, **ahead)
    assert counts == train(batches, share, policy, ahead)._replace(**MOVED)
    assert counts.misses > counts.created or share == 0.5


@pytest.mark.parametrize("policy", ["oracle", "lru"])
@pytest.mark.parametrize("given", [{}, {"window": 2, "look_ahead": 40}, {"look_ahead": 3}])
def test_with_a_budget_in_bytes(policy, given):
    """Its index holds fewer batches ahead."""
    batches, num_slots = random_ids(70, seed=1), 60
    tables = {f"t{f}": Table(rows=rows, dim=3) for f, rows in enumerate(ROWS)}
    record = layout_of(3, hotbed.optim.Adagrad()).width * 4
    cached = EmbeddingTables(tables, policy=policy, hbm=num_slots * (record + BYTES_PER_SLOT))
    assert cached.groups[0].num_slots == num_slots
    for ids in hotbed.prefetch(batches, cached, **given):
        cached(ids).square().sum().backward()
    ahead = LookAhead(given.get("window"), given.get("look_ahead"), bounded=True)
    counts = Replay(trace_from(batches)).run(num_slots, policy, ahead).counts
    assert counts == cached.counters()._replace(**MOVED)
    unbounded = simulate(trace_from(batches), num_slots, policy, **given)
    assert (counts != unbounded) == (policy == "oracle" and given != {"look_ahead": 3})


@pytest.mark.parametrize("staged", [30, 38, 1000])
def test_with_a_budget_for_rows_on_their_way(tmp_path, staged):
    """It cuts windows."""
    batches = random_ids(40, seed=2)
    tables = {f"t{f}": Table(rows=rows, dim=3) for f, rows in enumerate(ROWS)}
    record = layout_of(3, hotbed.optim.Adagrad()).width * 4
    staging = staged * staged_row_bytes(record, "cpu")
    trained = EmbeddingTables(tables, cache=0.2, memory="1MiB", ssd=f"{tmp_path}:64MiB", staging=staging)
    for ids in hotbed.prefetch(batches, trained):
        trained(ids).square().sum().backward()
    replay, num_slots = Replay(trace_from(batches)), trained.groups[0].num_slots
    found = [replay.run(num_slots, "oracle", LookAhead(staged=most)).counts for most in (staged, None)]
    assert found[0] == trained.counters()._replace(**MOVED)
    assert (found[0].windows > found[1].windows) == (staged < 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("share", [0.07, 0.2, 0.5])
@pytest.mark.parametrize("ahead", [{}, {"window": 3}, {"window": 2, "look_ahead": 7}, {"look_ahead": 50}])
def test_with_prefetch_on_cuda(policy, share, ahead):
    """The index there is another program; its decisions are not."""
    batches = random_ids(90, seed=4)
    counts = simulate(trace_from(batches), round(share * sum(ROWS)), policy, **ahead)
    assert counts == train(batches, share, policy, ahead, "cuda")._replace(**MOVED)


@pytest.mark.parametrize("ahead", [(0, 0), (3, 8)], ids=["automatic", "three of eight"])
@pytest.mark.parametrize(("policy", "warmup"), [("oracle", 0), ("static", 0), ("lfu", 0.8), ("lru", 1)])
def test_a_whole_run(tmp_path, ahead, policy, warmup):
    dataset = Dataset.open(write_dataset(tmp_path / "clicks"))
    sets = ["data.batch_size=16", "train.epochs=1", "train.eval_every=0", "train.log_every=10", "tables.cache=0.7"]
    sets += [
        f"tables.policy={policy}",
        f"tables.warmup={warmup}",
        f"tables.window={ahead[0]}",
        f"tables.look_ahead={ahead[1]}",
    ]
    built = ready_for(dataset)(tmp_path / "run", *sets)
    run(built.training, built.subject)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["cache"] for line in lines if "cache" in line]  # figures of a batch, interval by interval
    trace = read_trace(dataset, batch_size=16, shuffle=True)
    given = {"window": ahead[0], "look_ahead": ahead[1]} if ahead[0] else {}
    num_slots = round(0.7 * trace.num_rows)
    warm = num_warm(num_slots, policy, warmup)
    hot = hot_rows(dataset, warm) if warm else None
    counts = simulate(trace, num_slots, policy, hot=hot, **given)
    if hot is not None:  # the lines of a run begin after the hot rows have come in
        size = hot.keys.size
        counts = counts.minus(CacheCounts(keys=size, misses=size, created=size))
    for name in ("keys", "misses", "created", "evictions", "written_back"):
        assert round(sum(one[name] * one["batches"] for one in trained)) == getattr(counts, name), name
    assert counts.misses > counts.created


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_fewer_batches_than_are_known_ahead(num_batches):
    batches = random_ids(num_batches)
    assert simulate(trace_from(batches), 60) == train(batches, 60 / sum(ROWS), "oracle", {})._replace(**MOVED)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("window", [None, 1, 3])
def test_no_policy_beats_the_optimum(policy, window):
    trace = trace_from(random_ids(80, seed=2))
    for num_slots in (trace.most_keys, 60, 120, sum(ROWS)):
        assert simulate(trace, num_slots, policy, window=window).misses >= optimum(trace, num_slots)
    assert simulate(trace, sum(ROWS), policy, window=window).misses == trace.distinct().shape[0]


def test_a_trace_that_is_known_to_its_end_is_served_as_well_as_can_be():
    trace = trace_from(random_ids(25, seed=3))
    for num_slots in (trace.most_keys, 45, 80):
        assert simulate(trace, num_slots, window=1).misses == optimum(trace, num_slots)


def test_hot_rows_are_brought_in_first_and_kept():
    batches = [torch.tensor([[number % 3, number % 3, 0]]) for number in range(30)]
    trace = trace_from(batches)
    hot = HotRows(np.array([0, 1, 2]), np.array([9, 9, 9]))
    counts = simulate(trace, 7, "static", hot=hot, window=1)
    without = simulate(trace, 4, "lru", window=1)
    assert counts.misses == 3 + 4  # the hot ones, then the others once
    assert without.misses == 1 + 2 * 30
    assert counts.batches == 1 + 30


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("ahead", [None, {}, {"window": 3}])
def test_hot_rows_in_training(ahead, policy):
    """Their first uses are known as those of any row: the oracle keeps the ones that are soon wanted."""
    batches = random_ids(50, seed=5)
    trace = trace_from(batches)
    draw = np.random.default_rng(0)
    hot = HotRows(np.sort(draw.choice(trace.distinct(), 95, replace=False)), draw.integers(1, 40, 95))
    given = {"look_ahead": 0} if ahead is None else ahead
    counts = simulate(trace, round(0.2 * sum(ROWS)), policy, hot=hot, **given)
    assert counts == train(batches, 0.2, policy, ahead, hot=hot)._replace(**MOVED)
    if policy == "static":  # some hot rows left again before they were ever trained
        assert counts.created > trace.distinct().size


def test_progress_and_mistakes():
    trace = trace_from(random_ids(9))
    seen = []
    simulate(trace, 100, window=2, progress=seen.append)
    assert seen == [2, 4, 6, 8, 9]
    assert simulate(trace_from([]), 1) == CacheCounts()
    with pytest.raises(BudgetError, match="rows at once, but the cache has 5 slots"):
        simulate(trace, 5)
    with pytest.raises(ConfigError, match="no cache policy 'best'"):
        simulate(trace, 100, "best")
    with pytest.raises(ConfigError, match="look_ahead is 999"):
        simulate(trace, 100, look_ahead=999)
    with pytest.raises(ConfigError, match="window is 0"):
        simulate(trace, 100, window=0)


@pytest.mark.parametrize("policy", ["oracle", "lru"])
@pytest.mark.parametrize("share", [0.07, 0.2, 0.5])
def test_the_index_grows_as_in_training(policy, share):
    batches = random_ids(150, seed=6)
    tables = EmbeddingTables(
        {f"t{f}": Table(rows=rows, dim=3) for f, rows in enumerate(ROWS)}, cache=share, policy=policy
    )
    for ids in hotbed.prefetch(batches, tables):
        tables(ids).square().sum().backward()
    (group,) = tables.groups
    found = Replay(trace_from(batches)).run(round(share * sum(ROWS)), policy, with_cells=True)
    assert found.num_cells == group.residency.cache.parts()[0].key.shape[0]


def test_figures_of_the_first_batches_of_a_longer_run():
    trace = trace_from(random_ids(90, seed=7))
    whole = Replay(trace).run(100, "oracle", LookAhead(1, None))
    part = Replay(trace).run(100, "oracle", LookAhead(1, None), stop=40)
    assert part.counts.batches == 40
    assert part.counts.misses == whole.misses[:40].sum()
