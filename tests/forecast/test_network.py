"""Bytes on the wire: the forecast beside what ranks count, and beside plain counting."""

import csv
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from hotbed import Jagged, Table, optim
from hotbed.bench.setting import KAGGLE_ROWS, scaled_rows
from hotbed.bench.workload import zipf_ids
from hotbed.errors import ConfigError
from hotbed.forecast.network import (
    Cluster,
    Exchanges,
    Frequencies,
    Group,
    SentBytes,
    all_gather,
    counted,
    dense,
    plain,
    read_frequencies,
    replicated,
    sharded,
    together,
    zipf,
)
from hotbed.ops.shard import Shard
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.forecast.test_frequency import make

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "wire.csv"
ROWS, BATCH, STEPS, BAG = (5000, 300, 4), 512, 3, 3
WAYS = ("never", "always", "auto")


def test_distinct_of_a_small_epoch_is_the_mean_over_all_batches():
    log = [0, 0, 0, 1, 1, 2, 3]  # every batch of 3 out of 7 lookups
    sizes = [len(set(batch)) for batch in combinations(log, 3)]
    assert counted(np.array([3, 2, 1, 1])).distinct(3) == pytest.approx(np.mean(sizes), rel=1e-9)


def test_distinct_of_drawn_ids():
    one = Frequencies(np.array([0.5, 0.25]), np.array([1.0, 2.0]))
    assert one.distinct(3) == pytest.approx(1 - 0.5**3 + 2 * (1 - 0.75**3))
    assert one._replace(per_sample=2.0).distinct(3) == one.distinct(6)


@pytest.mark.parametrize(
    "frequencies", [counted(np.array([5, 0, 1, 94])), zipf(1, 1.05), zipf(3, 1.05), zipf(9999, 1.05)]
)
def test_ends(frequencies):
    number = frequencies.numbers.sum()
    assert float((frequencies.shares * frequencies.numbers).sum()) == pytest.approx(1.0)
    assert frequencies.distinct(0) == 0.0
    assert frequencies.distinct(1) == pytest.approx(1.0)
    assert frequencies.distinct(1e9) == pytest.approx(number)


@pytest.mark.parametrize("rows", [1, 2, 3, 4095, 4097, 1_000_000])
def test_zipf_is_what_the_benchmarks_draw(rows):
    generator = torch.Generator().manual_seed(rows)
    sizes = [zipf_ids(rows, 8192, 1.05, generator).unique().numel() for _ in range(8)]
    assert zipf(rows, 1.05).distinct(8192) == pytest.approx(np.mean(sizes), rel=0.01)


def test_the_yardstick_has_the_distinct_keys_that_the_gpu_counted():
    """78.5 thousand a step, as in benchmarks/results."""
    assert Group([zipf(n, 1.05) for n in KAGGLE_ROWS], 128).distinct(16384) == pytest.approx(78_500, rel=0.002)


@pytest.mark.parametrize(("rows", "bag", "world"), [(5000, 1, 4), (5000, 3, 2), (900, 12, 8), (3, 20, 4), (10, 100, 4)])
def test_parts_of_bags(rows, bag, world):
    generator = torch.Generator().manual_seed(rows)
    ids = zipf_ids(rows, 4000 * bag, 1.05, generator)
    bases = [world * rows * block for block in range(50)]  # owners of 50 tables
    owners = [Shard(0, world).owner_of(ids + base).view(-1, bag) for base in bases]
    counted = np.mean([float((one == rank).any(1).float().mean()) for one in owners for rank in range(world)]) * world
    assert zipf(rows, 1.05)._replace(per_sample=bag).parts(world) == pytest.approx(counted, rel=0.03)


def test_features_are_asked_for_in_the_way_that_moves_fewer_bytes():
    long, short = zipf(100_000, 1.05)._replace(per_sample=100.0), zipf(50, 1.05)._replace(per_sample=100.0)
    rows, parts, both = ([Group([one], 16).demand(4, 64, way) for one in (long, short)] for way in WAYS)
    assert both == [parts[0], rows[1]]
    assert (parts[0].keys, parts[0].vectors) == (6400, pytest.approx(64 * 4, rel=0.01))
    assert Group([zipf(100_000, 1.05)], 16).demand(4, 64, "always").keys < 64  # one id a sample: no bags


def test_zipf_without_a_formula():
    with pytest.raises(ConfigError, match="other than 1"):
        zipf(10, 1.0)


def test_counts_of_a_dataset(tmp_path):
    from hotbed.data.schema import IdFeature, Split

    counts = {"a": [(777, 50), (-3, 7)], "b": [(21, 9), (3, 8), (-9, 6)]}
    dataset = make(tmp_path / "d", [IdFeature("a", 4), IdFeature("b", 10, mode="hash", multi=True)], counts)
    splits = {"train": Split(("some",), (60,))}
    single, bags = read_frequencies(replace(dataset, schema=replace(dataset.schema, splits=splits)))
    assert (single.total, single.per_sample) == (60, 1.0)  # three ids left out of the vocabulary share row 0
    assert sorted(np.repeat(single.shares, single.numbers.astype(int)) * 60) == pytest.approx([3, 7, 50])
    assert (bags.total, bags.per_sample) == (23, 23 / 60)
    assert sorted(bags.shares * 23) == pytest.approx([8, 15])  # two ids share a bucket


def draw(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = {f"t{i}": zipf_ids(n, BATCH, 1.05, generator) for i, n in enumerate(ROWS)}
    offsets = torch.arange(0, BAG * BATCH + 1, BAG)
    return {**ids, "bags": Jagged(zipf_ids(ROWS[0], BAG * BATCH, 1.05, generator), offsets)}


def count_sent(nodes, traffic, pooled="auto"):
    """(in node, across) per step of this rank."""
    mesh = Mesh(nodes=nodes, local=4 // nodes)
    declared = {f"t{i}": Table(n, 8) for i, n in enumerate(ROWS)} | {"bags": Table(ROWS[0], 32)}
    tables = ShardedTables(declared, optim.SGD(lr=0.1), mesh=mesh, traffic=traffic, output="dict", pooled=pooled)
    before = replace(mesh.traffic)
    for step in range(STEPS):
        sum(vectors.sum() for vectors in tables(draw(step, mesh.rank)).values()).backward()
    return (mesh.traffic.in_node - before.in_node) / STEPS, (mesh.traffic.across - before.across) / STEPS


@pytest.mark.parametrize(
    ("nodes", "traffic", "pooled"),
    [(1, "fp32", "auto"), (2, "bf16", "auto"), (4, "fp32", "never"), (2, "fp32", "always")],
)
def test_ranks_send_what_was_forecast(nodes, traffic, pooled):
    value = 4 if traffic == "fp32" else 2
    groups = [
        Group([zipf(n, 1.05) for n in ROWS], 8, value_bytes=value),
        Group([zipf(ROWS[0], 1.05)._replace(per_sample=BAG)], 32, value_bytes=value),
    ]
    forecast = sharded(Cluster(nodes, 4 // nodes), groups, BATCH, pooled=pooled).total
    in_node, across = np.mean(run_ranks(count_sent, 4, nodes, traffic, pooled, nodes=nodes), axis=0)
    assert forecast.in_node == pytest.approx(in_node, rel=0.02)
    assert forecast.across == pytest.approx(across, rel=0.02)


def count_sum(nodes, size):
    mesh = Mesh(nodes=nodes, local=4 // nodes)
    mesh.sum_(torch.ones(size))
    return mesh.traffic.in_node, mesh.traffic.across


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_mesh_sums_with_the_bytes_that_were_forecast(nodes):
    sent = np.mean(run_ranks(count_sum, 4, nodes, 1000, nodes=nodes), axis=0)
    assert tuple(dense(Cluster(nodes, 4 // nodes), 1000)) == pytest.approx(tuple(sent))
    assert tuple(dense(Cluster(nodes, 4 // nodes), 1000, k=16, parts=3)) == pytest.approx(tuple(3 / 16 * sent))


def test_gathering_brings_everything_once():
    """Each of 6 ranks gets the bytes of the 5 others, so all send 30 times those of one."""
    assert all_gather(Cluster(3, 2), 10.0).total == 50.0
    assert all_gather(Cluster(3, 2), 10.0).across == 20.0  # to the peers of two other nodes


def test_replicated_sends_the_rows_of_the_global_batch_to_everyone():
    group = Group([counted(np.array([1000, 1000, 1000, 1000]))], 16)  # any batch has all four: an owner has one
    sent = replicated(Cluster(1, 4), [group], 100, new=0.5)
    assert sent.rows.in_node == pytest.approx(0.5 * 3 * 64)
    assert sent.gradients.in_node == pytest.approx(3 * 64 + 3 * 64)
    numbers = 3 * 24 + 3 * 8
    assert sent.settling.in_node == pytest.approx(3 * (4 + 4) + 3 * 4 + numbers)
    assert together(*sent) == sent.total


def test_one_rank_sends_nothing():
    group = Group([zipf(100, 1.05)], 16)
    alone = Cluster(1, 1)
    for sent in (sharded(alone, [group], 10), replicated(alone, [group], 10), plain(alone, [group], 10)):
        assert sent == Exchanges(SentBytes(), SentBytes(), SentBytes())
    assert dense(alone, 100) == SentBytes()


def test_plain_counts_every_lookup_and_pooled_every_bag():
    group = Group([zipf(100, 1.05)._replace(per_sample=5.0)], 16)
    assert plain(Cluster(1, 4), [group], 8).total.total == pytest.approx(8 * 5 * (8 + 2 * 64) * 3 / 4)
    assert plain(Cluster(1, 4), [group], 8, pooled=True).total.total == pytest.approx((8 * 5 * 8 + 8 * 2 * 64) * 3 / 4)


def measured():
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def test_counts_on_file_stay_under_half_of_plain():
    """On click logs and Zipf 1.05; Gowalla's pairs of user and item hardly repeat within a batch (docs/scaling.md)."""
    clicks = [
        row for row in measured() if row["trace"] in ("criteo", "frappe", "avazu", "zipf") and row["nodes"] == "1"
    ]
    assert {row["trace"] for row in clicks} == {"criteo", "frappe", "avazu", "zipf"}
    over = [row for row in clicks if (int(row["in_node"]) + int(row["across"])) > 0.5 * int(row["plain"])]
    assert over == []


def test_counts_on_file_match_the_forecast_of_today():
    made = [row for row in measured() if row["trace"] == "zipf"]
    assert made
    for row in made:
        nodes, ranks = int(row["nodes"]), int(row["ranks"])
        group = Group([zipf(n, 1.05) for n in KAGGLE_ROWS], int(row["dim"]))
        once = row["way"] == "once a node"
        sent = sharded(Cluster(nodes, ranks // nodes), [group], int(row["batch_per_rank"]), once_per_node=once).total
        assert sent.in_node == pytest.approx(int(row["in_node"]), rel=0.01)
        assert sent.across == pytest.approx(int(row["across"]), rel=0.01)


@pytest.mark.parametrize("bag", ["20", "100"])
def test_bags_on_file_go_the_cheaper_way(bag):
    rows = [row for row in measured() if row["bag"] == bag and row["nodes"] == "1"]
    sent = {row["way"]: int(row["in_node"]) for row in rows}
    assert sent["chosen"] < 0.75 * min(sent["rows"], sent["parts"])


@pytest.mark.parametrize("order", ["shuffled", "drawn"])
def test_forecasts_on_file_are_near(order):
    rows = [row for row in measured() if row["order"] == order]
    assert rows
    assert all(abs(float(row["forecast_over_counted"]) - 1) < 0.03 for row in rows)


def test_smaller_tables_have_fewer_distinct_keys():
    large, small = ([zipf(n, 1.05) for n in rows] for rows in (KAGGLE_ROWS, scaled_rows(0.01)))
    assert Group(small, 8).distinct(16384) < Group(large, 8).distinct(16384)
