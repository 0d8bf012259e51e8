"""Wall time per step on virtual nodes: `python -m benchmarks.cluster [--out FILE.csv]`.

    python -m benchmarks.cluster                                  # all points, some ten minutes
    python -m benchmarks.cluster --shapes 2x2 --rates 1           # 4 ranks in 2 nodes
    python -m benchmarks.cluster --bars                           # the bars of k-step training, from the rows on file

Nodes are network namespaces of this machine, joined by a bridge, with a rate on every link (benchmarks/cluster/nodes.py).
torchrun runs across them. Every rank trains the same model on its own 64 samples: 26 tables of dim 16, an MLP of 0.6 million
weights. Measured is the median over blocks of steps, from barrier to barrier, so the slowest rank counts. Ranks share the
cores of the machine: with more ranks than cores a step takes longer whatever the network is, and the model of
docs/scaling.md says so. The losses of sharded and replicated rows must be the same to the bit at every rate, or nothing is
written.

Needs Linux and root. Points that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cluster.nodes import VirtualCluster, missing, stop_on_signals
from benchmarks.cluster.points import RATES, SHAPES, K, Point, points_of
from benchmarks.results_file import append_rows

RESULTS = Path(__file__).parent.parent / "results" / "cluster.csv"
PORT = 29533
BARS = {"0.1": 3.0, "1": 1.5}  # Gbit/s: how much faster a step is with k = 16, at least
_POLL = 0.1  # seconds


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measure(points: list[Point], blocks: int, steps: int, limit: float) -> Iterator[dict[str, object]]:
    """The rows of points that share a mesh; `limit` is the seconds that all of them may take."""
    nodes, local = points[0].nodes, points[0].local
    with tempfile.TemporaryDirectory() as folder, VirtualCluster(nodes) as cluster:
        out, job = Path(folder, "rows.jsonl"), Path(folder, "job.json")
        given = {"points": points, "out": str(out), "switch": cluster.switch, "nodes": cluster.nodes}
        job.write_text(json.dumps({**given, "blocks": blocks, "steps": steps}))
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        processes = []
        for node in range(nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)]
            command += ["--nproc-per-node", str(local), "--master-addr", cluster.addresses[0], "--master-port"]
            command += [str(PORT), "-m", "benchmarks.cluster.rank", str(job)]
            with open(f"{folder}/log-{node}", "w") as log:
                processes.append(cluster.start(node, command, env, log))
        _wait(processes, folder, limit)
        yield from map(json.loads, out.read_text().splitlines())


def _wait(processes: list[subprocess.Popen[bytes]], folder: str, limit: float) -> None:
    """Until all have ended, or one has failed, or the time is over."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        failed = [node for node, process in enumerate(processes) if process.returncode]
        if failed or time.monotonic() > end:
            break
        time.sleep(_POLL)
    failed = [node for node, process in enumerate(processes) if process.returncode]
    running = [node for node, process in enumerate(processes) if process.returncode is None]
    if failed or running:
        node = (failed or running)[0]
        what = "failed" if failed else f"did not end within {limit:.0f} s (--limit)"
        raise SystemExit(f"node {node} {what}:\n{Path(folder, f'log-{node}').read_text()[-3000:]}")


def check_bars(rows: list[dict[str, str]]) -> int:
    """Print how much faster k-step training is over links; the number of bars that are missed."""
    missed = 0
    found = {(row["nodes"], row["local"], row["gbit"], row["way"]): float(row["ms_p50"]) for row in rows}
    for (nodes, local, gbit, way), fast in found.items():
        if way != "k-step" or gbit == "0":
            continue
        slow, bar = found[nodes, local, gbit, "sharded"], BARS.get(gbit, 0.0)
        note = f", bar {bar:g}x: {'met' if slow / fast >= bar else 'MISSED'}" if bar else ""
        missed += bool(bar and slow / fast < bar)
        print(f"{nodes} x {local} at {gbit} Gbit/s: k=1 {slow:.1f} ms, k={K} {fast:.1f} ms, {slow / fast:.2f}x{note}")
    return missed


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ",".join(f"{nodes}x{local}" for nodes, local in SHAPES)
    parser.add_argument("--shapes", default=shapes, help="nodes x ranks of a node (%(default)s)")
    parser.add_argument(
        "--rates", default=",".join(f"{rate:g}" for rate in RATES), help="Gbit/s of a link (%(default)s)"
    )
    parser.add_argument("--ways", default="", help="only ways with these names; left out: all")
    parser.add_argument("--blocks", type=int, default=5, help="timed blocks of a point (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block; k-step: rounded up to k (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the points of a shape may take")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file to append to (%(default)s)")
    parser.add_argument("--bars", action="store_true", help="measure nothing, compare k-step training with its bars")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.bars:
        raise SystemExit(1 if check_bars(read_rows(args.out)) else 0)
    reason = missing()
    if reason is not None:
        raise SystemExit(f"no virtual cluster here: {reason}")
    stop_on_signals()
    done = {tuple(row[name] for name in ("nodes", "local", "gbit", "way")) for row in read_rows(args.out)}
    rates = tuple(float(rate) for rate in args.rates.split(","))
    for shape in args.shapes.split(","):
        nodes, local = (int(part) for part in shape.split("x"))
        wanted = [way for way in args.ways.split(",") if way]
        points = [point for point in points_of(nodes, local, rates) if not wanted or point.way.name in wanted]
        points = [point for point in points if point.key not in done]
        if not points:
            continue
        rows = list(measure(points, args.blocks, args.steps, args.limit))
        append_rows(str(args.out), rows)
        for row in rows:
            print(" ".join(f"{name}={value}" for name, value in row.items() if name != "benchmark"), flush=True)


if __name__ == "__main__":
    main()
