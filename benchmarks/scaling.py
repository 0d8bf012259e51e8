"""The tables and the plot of docs/scaling.md: `python -m benchmarks.scaling [--svg docs/scaling.svg]`.

In: bytes counted by benchmarks/wire.py, steps timed on one H200 (both in benchmarks/results), the formulas of
hotbed/forecast/network.py, step_time.py. Out: Markdown on the terminal, one SVG. Nothing is measured here, and nothing in the
second and third table has been: they are projections.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2, log10
from pathlib import Path
from typing import NamedTuple

from benchmarks.workload import KAGGLE_ROWS
from hotbed.forecast.network import Cluster, Exchanges, Group, dense, plain, replicated, sharded, zipf
from hotbed.forecast.step_time import NVLINK, Fabric, StepTime, Wire, Work, network, replicated_time, sharded_time

RESULTS = Path(__file__).parent / "results"
BATCH, DIM, LOCAL = 16384, 128, 8
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
MLP = (26 * DIM, 1024, 1024, 1024, 1)
DENSE_WEIGHTS = sum(a * b + b for a, b in pairwise(MLP))
DEAL = 0.18e-3  # seconds: torch.unique of 426 thousand ids on an H200
NEW = 0.3  # rows of a global batch without a replica: as a cache of 1.5 % misses on one H200
NETWORKS = {
    "400 Gb/s a GPU": network(400),
    "200 Gb/s a GPU": network(200),
    "400 Gb/s a node": network(400, ranks=LOCAL),
    "200 Gb/s a node": network(200, ranks=LOCAL),
}
COLORS = ("#2463a8", "#c2571a", "#2f8052", "#8a4fa3")
WIDTH, HEIGHT, GAP = 330, 240, 66  # of a panel, and between panels


class Way(NamedTuple):
    """How rows and dense weights travel."""

    name: str
    send: Callable[[Cluster, Group], Exchanges]
    value_bytes: int = 4
    k: int = 1


WAYS = (
    Way("every lookup (plain)", lambda cluster, group: plain(cluster, [group], BATCH)),
    Way("sharded", lambda cluster, group: sharded(cluster, [group], BATCH)),
    Way("sharded, bf16 rows", lambda cluster, group: sharded(cluster, [group], BATCH), 2),
    Way("sharded, bf16 rows, dense k = 16", lambda cluster, group: sharded(cluster, [group], BATCH), 2, 16),
    Way("replicated", lambda cluster, group: replicated(cluster, [group], BATCH, new=NEW)),
)
PLAIN, SHARDED, _, NARROW_K, REPLICATED = WAYS


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def read_work() -> Work:
    """What one H200 takes for a training step of this size: the median over the hosts on file."""
    wanted = {"benchmark": "training_step", "system": "hotbed-cached", "optimizer": "rowwise_adagrad"}
    wanted |= {"dim": str(DIM), "batch": str(BATCH)}
    rows = [row for row in rows_of("h200_bars.csv") if all(row[name] == value for name, value in wanted.items())]
    compute, copy = (statistics.median(float(row[name]) for row in rows) for name in ("ms_p50", "copy_gb_per_s"))
    return Work(compute * 1e-3, DEAL, copy * 1e9)


class Projection:
    """Steps on any cluster."""

    def __init__(self) -> None:
        self.work = read_work()
        self._features = [zipf(rows, 1.05) for rows in KAGGLE_ROWS]

    def group(self, way: Way) -> Group:
        return Group(self._features, DIM, value_bytes=way.value_bytes)

    def sent(self, way: Way, nodes: int) -> Exchanges:
        return way.send(Cluster(nodes, LOCAL), self.group(way))

    def time(self, way: Way, nodes: int, wire: Wire) -> StepTime:
        cluster = Cluster(nodes, LOCAL)
        time_of = replicated_time if way is REPLICATED else sharded_time
        merged = dense(cluster, DENSE_WEIGHTS, way.k)
        work = self.work._replace(deal=0.0) if way is PLAIN else self.work
        return time_of(cluster, Fabric(NVLINK, wire), work, self.sent(way, nodes), merged)

    def efficiency(self, way: Way, nodes: int, wire: Wire) -> float:
        """Samples per second over those of as many GPUs that need not talk."""
        return self.work.compute / self.time(way, nodes, wire).step


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def measured_table() -> str:
    head = ["trace", "order", "mesh", "batch a rank", "dim", "traffic", "lookups", "distinct", "kB sent"]
    head += ["forecast / counted", "plain kB", "of plain", "of pooled"]
    lines = []
    for row in rows_of("wire.csv"):
        nodes, sent = int(row["nodes"]), int(row["in_node"]) + int(row["across"])
        bags = f", bags of {row['bag']}: {row['way']}" if row["bag"] != "1" else ""
        cells = [row["trace"] + bags, row["order"], f"{nodes} x {int(row['ranks']) // nodes}"]
        cells += [f"{int(row['batch_per_rank']):,}", row["dim"], row["traffic"], f"{int(row['lookups']):,}"]
        cells += [f"{float(row['distinct']):,.0f}", f"{sent / 1e3:,.0f}", f"{float(row['forecast_over_counted']):.3f}"]
        shares = [f"{float(row[name]):.3f}" for name in ("share_of_plain", "share_of_pooled")]
        lines.append([*cells, f"{int(row['plain']) / 1e3:,.0f}", *shares])
    return table(head, lines)


def node_table(projection: Projection) -> str:
    """One node of GPUs on NVLink."""
    lines = []
    for way in WAYS:
        found = projection.time(way, 1, NETWORKS["400 Gb/s a GPU"])
        sent = projection.sent(way, 1).total.in_node / 1e6
        rate = LOCAL * BATCH / found.step / 1e6
        cells = [f"{sent:,.0f}", f"{found.step * 1e3:.2f}", f"{found.floor * 1e3:.2f}", f"{rate:.1f}"]
        lines.append([way.name, *cells, f"{100 * projection.efficiency(way, 1, NVLINK):.0f} %"])
    return table(["way", "MB a GPU sends", "step ms", "floor ms", "million samples/s", "of perfect"], lines)


def network_table(projection: Projection) -> str:
    """Milliseconds of a step; the floor in brackets."""
    head = ["nodes (GPUs)", "way", "MB across a GPU", *NETWORKS]
    lines = []
    for nodes in NODES[1:]:
        for way in (PLAIN, SHARDED, NARROW_K, REPLICATED):
            across = projection.sent(way, nodes).total.across / 1e6
            times = [projection.time(way, nodes, wire) for wire in NETWORKS.values()]
            cells = [f"{one.step * 1e3:.1f} ({one.floor * 1e3:.1f})" for one in times]
            lines.append([f"{nodes} ({nodes * LOCAL})", way.name, f"{across:,.0f}", *cells])
    return table(head, lines)


def once_a_node(projection: Projection) -> float:
    """Distinct keys of a node over those that its ranks ask for one by one."""
    group = projection.group(SHARDED)
    return group.distinct(LOCAL * BATCH) / (LOCAL * group.distinct(BATCH))


def draw(projection: Projection) -> str:
    """Two panels: steps, and what of perfect scaling is left."""
    steps = [
        ([projection.time(way, nodes, wire).step * 1e3 for nodes in NODES], color, dashes)
        for wire, color in zip(NETWORKS.values(), COLORS)
        for way, dashes in ((SHARDED, ""), (PLAIN, "4 3"))
    ]
    shares = [
        ([100 * projection.efficiency(way, nodes, wire) for nodes in NODES], color, dashes)
        for wire, color in zip(NETWORKS.values(), COLORS)
        for way, dashes in ((SHARDED, ""), (NARROW_K, "1 3"))
    ]
    left = _panel("ms per step: sharded, plain (dashed)", steps, (2, 5, 10, 20, 50, 100, 200))
    right = _panel("% of perfect: sharded, with bf16 rows and k = 16 (dotted)", shares, (0, 20, 40, 60, 80, 100))
    width, height = 2 * (WIDTH + GAP), HEIGHT + 50
    style = "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.mark{stroke:#ddd}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for number, panel in enumerate((left, right)):
        parts.append(f'<g transform="translate({GAP - 26 + number * (WIDTH + GAP)} 14)">{panel}</g>')
    for number, (name, color) in enumerate(zip(NETWORKS, COLORS)):
        x, y = GAP - 26 + number * 170, HEIGHT + 40
        parts.append(
            f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{color}"/><text x="{x + 14}" y="{y}">{name}</text>'
        )
    return "".join([*parts, "</svg>\n"])


def _panel(title: str, lines: Sequence[tuple[list[float], str, str]], marks: Sequence[float]) -> str:
    """Nodes by powers of two; values by powers of ten unless the marks begin at zero."""
    scale = log10 if marks[0] > 0 else float
    low, high = scale(marks[0]), scale(marks[-1])

    def at(value: float) -> float:
        return 14 + (HEIGHT - 40) * (high - scale(value)) / (high - low)

    def across(nodes: int) -> float:
        return 12 + (WIDTH - 24) * log2(nodes) / log2(NODES[-1])

    parts = [f'<text x="0" y="2" class="title">{title}</text>']
    parts += [
        f'<text x="{across(n):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{n}{" nodes" if n == 128 else ""}</text>'
        for n in NODES
    ]
    for mark in marks:
        parts.append(f'<path d="M0 {at(mark):.1f}H{WIDTH}" class="mark"/>')
        parts.append(f'<text x="-5" y="{at(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for values, color, dashes in lines:
        points = " ".join(f"{across(n):.1f},{at(value):.1f}" for n, value in zip(NODES, values))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dashed}/>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="where the plot goes")
    args = parser.parse_args()
    projection = Projection()
    work = projection.work
    print(f"one GPU: {work.compute * 1e3:.2f} ms a step, copies {work.copy_speed / 1e12:.2f} TB/s")
    print(f"dense weights: {DENSE_WEIGHTS:,}; distinct keys: {projection.group(SHARDED).distinct(BATCH):,.0f}")
    print(f"a node asking once for all its ranks: {once_a_node(projection):.2f} of the rows across")
    for part in (measured_table(), node_table(projection), network_table(projection)):
        print(f"\n{part}")
    if args.svg:
        args.svg.write_text(draw(projection))


if __name__ == "__main__":
    main()
