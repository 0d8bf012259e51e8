"""Bytes on the wire of ShardedTables, counted: `python -m benchmarks.wire [--data DIR] [--only TEXT] [--out FILE.csv]`.

Four Gloo ranks with one thread each look up and train the same samples, real logs and Zipf 1.05; counted is what the ranks
hand to each other, keys, rows, gradients and the numbers that say how much comes, in the mean over steps and ranks. Bags go
by rows, in parts that their owners pool, and as ShardedTables chooses (`way`); "once a node" is once_per_node. Beside it:

    forecast      what hotbed/forecast/network.py expects from id frequencies alone
    plain         an all-to-all of every lookup: 8 bytes of id to the owner of the row, the row back, its gradient there.
                  Counted over the same lookups and owners. TorchRec's EmbeddingCollection sends this (its `use_index_dedup`
                  is off unless asked for).
    pooled        one owner per table: 8 bytes of every id there, one vector per sample and feature back, one gradient there.
                  TorchRec's EmbeddingBagCollection sends this with table-wise sharding. With one id per feature it is `plain`.

Neither peer is charged for lengths, permutes or padding. Rows travel in the same type on both sides. Bytes do not depend on the
speed of a machine. Before anything is counted, four ranks must train small tables to the bits of one process.
Exits with 1 if more than half of `plain` is sent, or a forecast for shuffled samples is off by more than 3 %.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import hotbed
from benchmarks.results_file import append_rows
from benchmarks.traces import prepared
from benchmarks.workload import KAGGLE_ROWS, batches
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.forecast.network import Cluster, Frequencies, Group, read_frequencies, sharded, zipf
from hotbed.ops.shard import Shard
from hotbed.optim import SGD
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.sharded import ShardedTables
from hotbed.tables.sizing.placement import PLACEMENTS

WORLD, SEED, ZIPF = 4, 0, 1.05
HALF, NEAR = 0.5, 0.03
WAYS = {"never": "rows", "always": "parts", "auto": "chosen"}
ONCE = "once a node"
WHOLE = 1 << 20  # samples shuffled together: more than any of these logs has


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    trace: str
    order: str  # shuffled, blocks (as training shuffles: a part of the log at a time), time, drawn
    batch: int  # samples of one rank
    steps: int
    dim: int = 16
    nodes: int = 1
    traffic: str = "fp32"
    bag: int = 1  # ids of one sample and feature
    pooled: str = "auto"  # of ShardedTables
    once: bool = False  # once_per_node of ShardedTables
    placement: str = "row"  # likewise

    @property
    def way(self) -> str:
        """How rows or bags travel."""
        return ONCE if self.once else WAYS[self.pooled] if self.bag > 1 else "rows"

    def __str__(self) -> str:
        what = f"{self.trace} {self.order} batch={self.batch} dim={self.dim} nodes={self.nodes} {self.traffic}"
        what += f" {ONCE}" if self.once else ""
        what = what if self.placement == "row" else f"{what} {self.placement}"
        return what if self.bag == 1 else f"{what} bag={self.bag} {WAYS[self.pooled]}"


REAL = [
    Case(trace, order, batch, steps)
    for trace, batch, steps in (
        *(("criteo", 1024, 12), ("criteo", 4096, 3), ("frappe", 1024, 12), ("frappe", 4096, 6)),
        *(("avazu", 512, 4), ("gowalla", 4096, 6)),
    )
    for order in ("shuffled", "time")
] + [
    Case("gowalla", "blocks", 4096, 6),
    Case("criteo", "shuffled", 1024, 4, nodes=2),
    Case("criteo", "shuffled", 1024, 4, nodes=2, once=True),
    Case("criteo", "shuffled", 1024, 4, traffic="bf16"),
]
MADE = [
    Case("zipf", "drawn", 4096, 3),
    Case("zipf", "drawn", 16384, 2),
    Case("zipf", "drawn", 4096, 2, nodes=2),
    Case("zipf", "drawn", 4096, 2, nodes=2, once=True),
    Case("zipf small", "drawn", 2048, 2, dim=128),
    *(Case("zipf bags", "drawn", 1024, 2, dim=32, bag=20, pooled=pooled) for pooled in WAYS),
    *(Case("zipf bags", "drawn", 256, 2, dim=32, bag=100, pooled=pooled) for pooled in WAYS),
    Case("zipf bags", "drawn", 256, 2, dim=32, bag=100, nodes=2),
    *(Case("zipf small", "drawn", 2048, 2, dim=16, placement=place) for place in PLACEMENTS),
    *(
        Case("zipf bags", "drawn", batch, 2, dim=32, bag=bag, placement=place)
        for batch, bag in ((1024, 20), (256, 100))
        for place in PLACEMENTS[1:]
    ),
]


@dataclass(frozen=True)
class Samples:
    """The ids of a case, and the sizes of its tables."""

    ids: NDArray[np.int64]  # [steps, W * B, F * bag]
    rows: tuple[int, ...]
    frequencies: list[Frequencies]


def samples_of(case: Case, data: Path, work: Path) -> Samples:
    """Read or drawn; logs are prepared in `work`, once."""
    if case.order == "drawn":
        rows = KAGGLE_ROWS if case.trace == "zipf" else tuple(max(3, n // 50) for n in KAGGLE_ROWS)
        draws = batches(rows, WORLD * case.batch * case.bag, case.steps, seed=SEED)
        ids = torch.stack(draws).view(case.steps, WORLD * case.batch, case.bag, len(rows))
        ids = ids.transpose(2, 3).reshape(case.steps, WORLD * case.batch, -1)
        return Samples(ids.numpy(), rows, [zipf(n, ZIPF)._replace(per_sample=case.bag) for n in rows])
    done = (work / case.trace / "schema.json").exists()
    dataset = Dataset.open(work / case.trace) if done else prepared(case.trace, data, work)
    options: dict[str, Any] = {"shuffle": case.order != "time", "seed": SEED}
    if case.order == "shuffled":
        options["shuffle_rows"] = WHOLE
    loader = Loader(dataset, "train", batch_size=WORLD * case.batch, **options)
    read = [batch.ids.numpy() for batch in loader.epoch(0)][: case.steps]
    rows = tuple(feature.rows for feature in dataset.schema.features)
    return Samples(np.stack(read), rows, read_frequencies(dataset))


def row_of(case: Case, samples: Samples, counted: list[dict[str, float]]) -> dict[str, object]:
    """One line of the CSV file, from what the ranks have counted per step."""
    mean = {name: sum(one[name] for one in counted) / WORLD for name in counted[0]}
    sent = mean["in_node"] + mean["across"]
    value = 4 if case.traffic == "fp32" else 2
    placed = [one._replace(placement=case.placement) for one in samples.frequencies]
    group = Group(placed, case.dim, value_bytes=value)
    cluster, way = Cluster(case.nodes, WORLD // case.nodes), cast(Any, case.pooled)
    forecast = sharded(cluster, [group], case.batch, pooled=way, once_per_node=case.once).total
    bags = case.batch * len(samples.rows)
    vectors = 2 * case.dim * value
    plain = mean["remote_lookups"] * (8 + vectors)
    pooled = (8 * bags * case.bag + vectors * bags) * (WORLD - 1) / WORLD
    return {
        "benchmark": "wire",
        "trace": case.trace,
        "order": case.order,
        "ranks": WORLD,
        "nodes": case.nodes,
        "batch_per_rank": case.batch,
        "bag": case.bag,
        "steps": case.steps,
        "dim": case.dim,
        "traffic": case.traffic,
        "way": case.way,
        "placement": case.placement,
        "lookups": bags * case.bag,
        "distinct": round(mean["distinct"], 1),
        "forecast_distinct": round(group.distinct(case.batch), 1),
        "in_node": round(mean["in_node"]),
        "across": round(mean["across"]),
        "largest_over_mean": round(max(one["in_node"] + one["across"] for one in counted) / sent, 4),
        "forecast_in_node": round(forecast.in_node),
        "forecast_across": round(forecast.across),
        "forecast_over_counted": round(forecast.total / sent, 4),
        "plain": round(plain),
        "pooled": round(pooled),
        "share_of_plain": round(sent / plain, 4),
        "share_of_pooled": round(sent / pooled, 4),
    }


def misses_bar(row: dict[str, Any]) -> bool:
    """Whether a bar that holds for the row is not met."""
    off = row["order"] in ("shuffled", "drawn") and abs(row["forecast_over_counted"] - 1) > NEAR
    return off or (row["nodes"] == 1 and row["share_of_plain"] > HALF)


def count_case(case: Case, ids: NDArray[np.int64], rows: tuple[int, ...]) -> dict[str, float]:
    """Per step, on this rank."""
    mesh = Mesh(nodes=case.nodes, local=WORLD // case.nodes)
    tables = _tables(rows, case.dim, mesh, case.traffic, case.pooled, case.once, case.placement)
    shard, base = Shard(mesh.rank, WORLD), np.cumsum([0, *rows[:-1]])
    found = {"in_node": 0.0, "across": 0.0, "distinct": 0.0, "remote_lookups": 0.0}
    for step in range(case.steps):
        mine = torch.from_numpy(np.array(ids[step, mesh.rank * case.batch : (mesh.rank + 1) * case.batch]))
        before = replace(mesh.traffic)
        _train(tables, mine, case.bag)
        keys = (mine.view(case.batch, len(rows), case.bag) + torch.from_numpy(base)[:, None]).flatten()
        found["in_node"] += mesh.traffic.in_node - before.in_node
        found["across"] += mesh.traffic.across - before.across
        found["distinct"] += keys.unique().numel()
        found["remote_lookups"] += int((shard.owner_of(keys) != mesh.rank).sum())
    return {name: value / case.steps for name, value in found.items()}


def check_ranks() -> None:
    """Four ranks give the rows of one process, to the bit, whichever way bags go."""
    rows, rank, share = (1000, 77, 3), dist.get_rank(), 64
    ids = torch.stack(batches(rows, share * WORLD, 3, seed=5))
    bags = ids.view(3, -1, 8, len(rows)).transpose(2, 3).reshape(3, -1, 8 * len(rows))
    ways = [
        *((way, False, "row") for way in WAYS),
        ("never", True, "row"),
        *(("auto", False, one) for one in ("table", "column")),
    ]
    for pooled, once, placement in ways:
        mesh = Mesh(2, WORLD // 2) if once else Mesh(1, WORLD)
        tables = _tables(rows, 8, mesh, "fp32", pooled, once, placement)
        declared = {f"C{i}": hotbed.Table(n, 8) for i, n in enumerate(rows)}
        alone = hotbed.EmbeddingTables(declared, SGD(lr=0.5), independent=True)
        for given, bag in ((ids, 1), (bags, 8)):
            for step in given:
                _train(tables, step[rank * len(step) // WORLD : (rank + 1) * len(step) // WORLD], bag)
                _train(alone, step, bag)
        mine, theirs = tables(ids[0, share * rank : share * (rank + 1)]), alone(ids[0])
        if not torch.equal(mine, theirs[share * rank : share * (rank + 1)]):
            raise SystemExit(
                f"four ranks do not train what one does, with pooled={pooled!r}, placement={placement!r}; nothing is counted"
            )


def _tables(
    rows: tuple[int, ...], dim: int, mesh: Mesh, traffic: Any, pooled: Any, once: bool, placement: Any
) -> ShardedTables:
    declared = {f"C{i}": hotbed.Table(n, dim, placement=placement) for i, n in enumerate(rows)}
    options: dict[str, Any] = {"traffic": traffic, "pooled": pooled, "once_per_node": once}
    return ShardedTables(declared, SGD(lr=0.5), mesh=mesh, gradients="sum", **options)


def _train(tables: hotbed.EmbeddingTables, ids: torch.Tensor, bag: int) -> None:
    """Look up and update; gradients of one, whose sums are exact."""
    if bag == 1:
        vectors = tables(ids)
    else:
        offsets = torch.arange(0, ids.shape[0] * bag + 1, bag)
        columns = ids.view(ids.shape[0], -1, bag).unbind(1)
        vectors = tables({f"C{i}": hotbed.Jagged(one.reshape(-1), offsets) for i, one in enumerate(columns)})
    vectors.backward(torch.ones_like(vectors))


def run_rank(rank: int, folder: str, cases: list[tuple[Case, tuple[int, ...]]]) -> None:
    """One of the processes: all cases one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    check_ranks()
    results = []
    for number, (case, rows) in enumerate(cases):
        results.append(count_case(case, np.load(f"{folder}/{number}.npy", mmap_mode="r"), rows))
        if rank == 0:
            print(f"counted {case}", flush=True)
    Path(f"{folder}/counted-{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(cases: list[Case], data: Path) -> Iterator[dict[str, object]]:
    """The rows of all cases."""
    with tempfile.TemporaryDirectory() as folder:
        given = []
        for number, case in enumerate(cases):
            samples = samples_of(case, data, Path(folder))
            np.save(f"{folder}/{number}.npy", samples.ids)
            given.append(without_ids(samples))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        work = [(case, samples.rows) for case, samples in zip(cases, given)]
        torch.multiprocessing.spawn(run_rank, (folder, work), nprocs=WORLD)
        counted = [pickle.loads(Path(f"{folder}/counted-{rank}").read_bytes()) for rank in range(WORLD)]
        for number, (case, samples) in enumerate(zip(cases, given)):
            yield row_of(case, samples, [one[number] for one in counted])


def without_ids(samples: Samples) -> Samples:
    """Without the ids, which are on disk."""
    return replace(samples, ids=np.zeros((0, 0, 0), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the real logs; left out: Zipf alone")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--out", help="CSV file to append to")
    args = parser.parse_args()
    cases = [case for case in [*(REAL if args.data else []), *MADE] if args.only in str(case)]
    rows = list(measure(cases, args.data or Path()))
    for row in rows:
        note = "  <- over the bar" if misses_bar(row) else ""
        print(" ".join(f"{name}={value}" for name, value in row.items() if name != "benchmark") + note)
    if args.out:
        append_rows(args.out, rows)
    raise SystemExit(1 if any(misses_bar(row) for row in rows) else 0)


if __name__ == "__main__":
    main()
