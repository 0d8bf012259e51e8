"""Bytes of the modes of ShardedTables, counted: `python -m benchmarks.modes [--data DIR] [--out FILE.csv]`.

Four Gloo ranks train the samples of benchmarks/wire.py sharded, replicated, and with replicas as published: gradients of the
whole union summed by a dense all-reduce, whole records (Adagrad: twice the width) for rows without a replica. Counted is what
a rank sends in the later half of the steps, when replicas have been filled. Nothing is counted unless the first two modes give
the same vectors to the bit, and the third, whose sums have another order, the same to rounding. Next to these are the bytes
that `hotbed.parallel.auto` expects from its counts.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hotbed
from benchmarks.results_file import append_rows
from benchmarks.wire import WORLD, Case, samples_of
from hotbed.optim import Adagrad
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.replicated import RowTally
from hotbed.parallel.sharded import ShardedTables

REAL = [Case("criteo", "time", 256, 40), Case("criteo", "time", 1024, 12), Case("frappe", "time", 1024, 24)]
MADE = [Case("zipf small", "drawn", 512, 24), Case("zipf small", "drawn", 512, 24, nodes=2)]
MODES = ("sharded", "replicated", "all-reduce")
_KEY = 4  # bytes


def expected_bytes(rows: RowTally, row_bytes: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step, sharded and replicated; `rows` were counted over some batches.

    Sharded: rows come from their owners and gradients go to them. Replicated: gradients go there too, rows without a replica
    go to all ranks, and so do the new weights of the union; and the keys and places of the union.
    """
    asked, union, new = (count / max(1, rows.batches) for count in rows[1:])
    exchanged = asked * (WORLD - 1) / WORLD
    gathered = (new + union) * (WORLD - 1)
    settled = (exchanged + union * (WORLD - 1)) * _KEY
    return 2 * exchanged * row_bytes, (exchanged + gathered) * row_bytes + settled


def count_case(case: Case, ids: Any, rows: tuple[int, ...]) -> dict[str, float]:
    """Per step, on this rank."""
    found: dict[str, float] = {}
    counts = RowTally()
    vectors: dict[str, list[torch.Tensor]] = {mode: [] for mode in MODES}
    for mode in MODES:
        mesh = Mesh(nodes=case.nodes, local=WORLD // case.nodes)
        declared = {f"C{i}": hotbed.Table(n, case.dim) for i, n in enumerate(rows)}
        tables: Any = ShardedTables(declared, Adagrad(lr=0.1), mesh=mesh, mode=mode)
        sent, tally = (0, 0), RowTally()
        for step in range(case.steps):
            if step == case.steps // 2:
                sent = mesh.traffic.in_node, mesh.traffic.across
                tally = getattr(tables.fronts[0], "tally", tally)
            mine = torch.from_numpy(np.array(ids[step, mesh.rank * case.batch : (mesh.rank + 1) * case.batch]))
            looked_up = tables(mine)
            vectors[mode].append(looked_up.detach())
            looked_up.square().mean().backward()
        counted = case.steps - case.steps // 2
        if mode == "replicated":
            counts = RowTally(*(now - then for now, then in zip(tables.fronts[0].tally, tally)))
        found[f"{mode}_in_node"] = (mesh.traffic.in_node - sent[0]) / counted
        found[f"{mode}_across"] = (mesh.traffic.across - sent[1]) / counted
    for sharded, replicated, everywhere in zip(*vectors.values()):
        alike = torch.isclose(sharded, everywhere, rtol=1e-3, atol=1e-5).float().mean()
        if not torch.equal(sharded, replicated) or alike < 0.999:  # Adagrad's first step makes 0.1 of any sum but 0
            raise SystemExit(f"{case}: replicas do not train what sharded tables do ({alike:.4f}); nothing is counted")
    expected = expected_bytes(counts, 4 * case.dim)
    asked, union, new = (count / counts.batches for count in counts[1:])
    found |= {"asked": asked, "union": WORLD * union, "new": WORLD * new}
    return found | {f"{mode}_expected": num_bytes for mode, num_bytes in zip(MODES, expected)}


def row_of(case: Case, counted: list[dict[str, float]]) -> dict[str, object]:
    """One line of the CSV file."""
    mean = {name: sum(one[name] for one in counted) / WORLD for name in counted[0]}
    sent = {mode: mean[f"{mode}_in_node"] + mean[f"{mode}_across"] for mode in MODES}
    whole: dict[str, object] = {"benchmark": "modes", "trace": case.trace, "order": case.order, "ranks": WORLD}
    whole |= {"nodes": case.nodes, "batch_per_rank": case.batch, "steps": case.steps, "dim": case.dim}
    whole |= {name: round(value) for name, value in mean.items()}
    return whole | {
        "replicated_over_sharded": round(sent["replicated"] / sent["sharded"], 3),
        "published_over_sharded": round(sent["all-reduce"] / sent["sharded"], 3),
    }


def run_rank(rank: int, folder: str, cases: list[tuple[Case, tuple[int, ...]]]) -> None:
    """One of the processes: all cases one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    numbered = enumerate(cases)
    results = [count_case(case, np.load(f"{folder}/{n}.npy", mmap_mode="r"), rows) for n, (case, rows) in numbered]
    Path(f"{folder}/counted-{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the real logs; left out: Zipf alone")
    parser.add_argument("--out", help="CSV file to append to")
    args = parser.parse_args()
    cases = [*(REAL if args.data else []), *MADE]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        work = []
        for number, case in enumerate(cases):
            samples = samples_of(case, args.data or Path(), Path(folder))
            np.save(f"{folder}/{number}.npy", samples.ids)
            work.append((case, samples.rows))
        torch.multiprocessing.spawn(run_rank, (folder, work), nprocs=WORLD)
        counted = [pickle.loads(Path(f"{folder}/counted-{rank}").read_bytes()) for rank in range(WORLD)]
    rows = [row_of(case, [one[number] for one in counted]) for number, case in enumerate(cases)]
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items() if name != "benchmark"))
    if args.out:
        append_rows(args.out, rows)


if __name__ == "__main__":
    main()
