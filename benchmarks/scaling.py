"""The tables and the plot of docs/scaling.md: `python -m benchmarks.scaling [--svg docs/scaling.svg]`.

In: bytes counted by benchmarks/wire.py, steps timed by benchmarks/cluster (both in benchmarks/results), the formulas of
hotbed/forecast/network.py, step_time.py. Out: Markdown on the terminal, one SVG. Nothing is measured here. What is projected
starts from steps that ranks took: those of the virtual cluster. For GPUs there is no such step, so only the time of their
exchanges is projected, from bytes and assumed speeds.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, log2, log10
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster import model
from benchmarks.cluster.points import WAYS as CLUSTER_WAYS
from benchmarks.wire import ONCE
from benchmarks.workload import KAGGLE_ROWS
from hotbed.forecast.network import Cluster, Exchanges, Group, dense, plain, replicated, sharded, zipf
from hotbed.forecast.step_time import (
    NVLINK,
    DenseSum,
    Fabric,
    StepTime,
    Wire,
    Work,
    network,
    replicated_time,
    sharded_time,
)

RESULTS = Path(__file__).parent / "results"
BATCH, DIM, LOCAL = 16384, 128, 8
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
MACHINES = (2, 4, 8, 16, 32, 64)
MLP = (26 * DIM, 1024, 1024, 1024, 1)
DENSE_WEIGHTS = sum(a * b + b for a, b in pairwise(MLP))
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


class Projection:
    """Exchanges of GPUs on any cluster."""

    def __init__(self) -> None:
        self._features = [zipf(rows, 1.05) for rows in KAGGLE_ROWS]

    def group(self, way: Way) -> Group:
        return Group(self._features, DIM, value_bytes=way.value_bytes)

    def sent(self, way: Way, nodes: int) -> Exchanges:
        return way.send(Cluster(nodes, LOCAL), self.group(way))

    def time(self, way: Way, nodes: int, wire: Wire) -> StepTime:
        """Without any computation."""
        cluster = Cluster(nodes, LOCAL)
        time_of = replicated_time if way is REPLICATED else sharded_time
        merged = DenseSum(dense(cluster, DENSE_WEIGHTS, parts=2 if way.k > 1 else 1), way.k)
        return time_of(cluster, Fabric(NVLINK, wire), Work(0.0, 0.0, inf), self.sent(way, nodes), merged)


class ClusterModel:
    """The model fitted on some points of the virtual cluster."""

    def __init__(self) -> None:
        self.points = model.read_measured()
        self.constants = model.fit([point for point in self.points if point.is_fitted])


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def measured_table() -> str:
    head = ["trace", "order", "mesh", "batch a rank", "dim", "traffic", "lookups", "distinct", "kB sent"]
    head += ["forecast / counted", "plain kB", "of plain", "of pooled"]
    lines = []
    for row in rows_of("wire.csv"):
        nodes, sent = int(row["nodes"]), int(row["in_node"]) + int(row["across"])
        bags = f", bags of {row['bag']}: {row['way']}" if row["bag"] != "1" else ", once a node" * (row["way"] == ONCE)
        cells = [row["trace"] + bags, row["order"], f"{nodes} x {int(row['ranks']) // nodes}"]
        cells += [f"{int(row['batch_per_rank']):,}", row["dim"], row["traffic"], f"{int(row['lookups']):,}"]
        cells += [f"{float(row['distinct']):,.0f}", f"{sent / 1e3:,.0f}", f"{float(row['forecast_over_counted']):.3f}"]
        shares = [f"{float(row[name]):.3f}" for name in ("share_of_plain", "share_of_pooled")]
        lines.append([*cells, f"{int(row['plain']) / 1e3:,.0f}", *shares])
    return table(head, lines)


def network_table(projection: Projection) -> str:
    """Milliseconds of the exchanges of a step."""
    head = ["nodes (GPUs)", "way", "MB in the node", "MB across", *NETWORKS]
    lines = []
    for nodes in NODES:
        for way in WAYS:
            sent = projection.sent(way, nodes).total
            times = [projection.time(way, nodes, wire) for wire in NETWORKS.values()]
            cells = [
                f"{1e3 * one.exchanges:.2f}" if nodes > 1 or not number else "" for number, one in enumerate(times)
            ]
            lines.append(
                [
                    f"{nodes} ({nodes * LOCAL})",
                    way.name,
                    f"{sent.in_node / 1e6:,.0f}",
                    f"{sent.across / 1e6:,.0f}",
                    *cells,
                ]
            )
    return table(head, lines)


def machines_table(found: ClusterModel) -> str:
    """Milliseconds of a step of the virtual cluster's model, one rank on each of many machines with two cores."""
    alone = min(point.alone for point in found.points if point.nodes * point.local == model.CORES)
    ways = {way.name: way for way in CLUSTER_WAYS}
    lines = []
    for nodes in MACHINES:
        cells = []
        for rate in (0.1, 1.0, 10.0):
            steps = []
            for name in ("sharded", "k-step"):
                point = model.Measured(nodes, 1, rate, ways[name], alone, 0.0)
                steps.append(model.predict(point, found.constants, cores=nodes).step)
            cells += [f"{1e3 * steps[0]:.0f}", f"{1e3 * steps[1]:.0f}", f"{steps[0] / steps[1]:.1f}x"]
        lines.append([str(nodes), *cells])
    head = [f"{rate:g} Gbit/s, {what}" for rate in (0.1, 1.0, 10.0) for what in ("k = 1", "k = 16", "ratio")]
    return table(["machines", *head], lines)


def cluster_table(found: ClusterModel) -> str:
    """Measured milliseconds of a step on the virtual cluster, and predicted ones."""
    shapes = list(dict.fromkeys((point.nodes, point.local) for point in found.points))
    names = [way.name for way in CLUSTER_WAYS]
    lines = []
    for nodes, local in shapes:
        for rate in sorted({point.gigabits for point in found.points if (point.nodes, point.local) == (nodes, local)}):
            by_name = {p.way.name: p for p in found.points if (p.nodes, p.local, p.gigabits) == (nodes, local, rate)}
            cells = []
            for name in names:
                point = by_name.get(name)
                if point is None:
                    cells.append("")
                    continue
                guess = 1e3 * model.predict(point, found.constants).step
                mark = "" if point.is_fitted else "*"
                cells.append(f"{1e3 * point.seconds:.0f} ({guess:.0f}{mark})")
            lines.append([f"{nodes} x {local}", f"{rate:g}" if rate else "one node", *cells])
    return table(["nodes x ranks", "Gbit/s", *names], lines)


def once_a_node(projection: Projection) -> float:
    """Distinct keys of a node over those that its ranks ask for one by one."""
    group = projection.group(SHARDED)
    return group.distinct(LOCAL * BATCH) / (LOCAL * group.distinct(BATCH))


def draw(projection: Projection, found: ClusterModel) -> str:
    """Two panels: predicted over measured steps of the virtual cluster, and the exchanges of GPUs."""
    exchanges = [
        ([projection.time(way, nodes, wire).exchanges * 1e3 for nodes in NODES], color, dashes)
        for wire, color in zip(NETWORKS.values(), COLORS)
        for way, dashes in ((SHARDED, ""), (PLAIN, "4 3"))
    ]
    right = _panel(
        "GPUs: ms of exchanges, sharded and plain (dashed)", exchanges, (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
    )
    width, height = 2 * (WIDTH + GAP), HEIGHT + 50
    style = "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.mark{stroke:#ddd}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for number, panel in enumerate((_scatter(found), right)):
        parts.append(f'<g transform="translate({GAP - 26 + number * (WIDTH + GAP)} 14)">{panel}</g>')
    for number, (name, color) in enumerate(zip(NETWORKS, COLORS)):
        x, y = GAP - 26 + number * 170, HEIGHT + 40
        parts.append(
            f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{color}"/><text x="{x + 14}" y="{y}">{name}</text>'
        )
    return "".join([*parts, "</svg>\n"])


def _scatter(found: ClusterModel) -> str:
    """Every point of the virtual cluster; a point on the diagonal is predicted exactly."""
    low, high = log10(10), log10(1000)

    def across(ms: float) -> float:
        return 12 + (WIDTH - 24) * (log10(ms) - low) / (high - low)

    def at(ms: float) -> float:
        return 14 + (HEIGHT - 40) * (high - log10(ms)) / (high - low)

    title = "virtual cluster: ms predicted over measured, fitted (grey) and held out"
    parts = [f'<text x="0" y="2" class="title">{title}</text>']
    for mark in (10, 20, 50, 100, 200, 500, 1000):
        parts.append(f'<path d="M0 {at(mark):.1f}H{WIDTH}" class="mark"/>')
        parts.append(f'<text x="-5" y="{at(mark) + 4:.1f}" text-anchor="end">{mark}</text>')
        parts.append(f'<text x="{across(mark):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{mark}</text>')
    for factor in (1 - model.NEAR, 1.0, 1 + model.NEAR):
        ends = [(across(ms), at(ms * factor)) for ms in (12.5, 800)]
        dashed = "" if factor == 1 else ' stroke-dasharray="3 3"'
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#999"{dashed}/>')
    for point in found.points:
        x, y = across(1e3 * point.seconds), at(1e3 * model.predict(point, found.constants).step)
        color = "#aaa" if point.is_fitted else COLORS[0]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')
    return "".join(parts)


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
    projection, found = Projection(), ClusterModel()
    print(f"dense weights: {DENSE_WEIGHTS:,}; distinct keys: {projection.group(SHARDED).distinct(BATCH):,.0f}")
    print(f"a node asking once for all its ranks: {once_a_node(projection):.2f} of the rows across")
    tables = [measured_table(), cluster_table(found), model.page(found.points, found.constants)]
    for part in (*tables, machines_table(found), network_table(projection)):
        print(f"\n{part}")
    if args.svg:
        args.svg.write_text(draw(projection, found))


if __name__ == "__main__":
    main()
