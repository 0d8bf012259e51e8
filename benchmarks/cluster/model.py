"""The model of docs/scaling.md against the virtual cluster: `python -m benchmarks.cluster.model`.

Fits the constants of hotbed/forecast/step_time.py on some rows of benchmarks/results/cluster.csv and predicts the others. Bytes
are those that hotbed/forecast/network.py expects. The only measured input of a prediction is the time of a step that the same
number of ranks take alone, on the same machine at the same time. Five constants are fitted:

    work       seconds of a step over those alone
    overhead   core seconds that a rank's step takes besides: requests, packing, the optimizer of many ranks
    reached    payload over the rate of a link
    byte       core seconds of a byte through a socket; all ranks share the cores
    start      core seconds of a collective on one rank

Fitted are all ways on the shapes of `FITTED`; held out are all ways on the others. Constants are found by least squares of
relative errors, none below zero.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster.__main__ import RESULTS, read_rows
from benchmarks.cluster.points import BATCH, DENSE_WEIGHTS, DIM, ROWS, WAYS, K, Way
from hotbed.forecast.network import Cluster, Exchanges, Group, SentBytes, dense, replicated, sharded, zipf
from hotbed.forecast.step_time import DenseSum, Fabric, StepTime, Wire, Work, replicated_time, sharded_time

FITTED = ("1x2", "2x1", "2x2", "1x8", "2x4")  # nodes x ranks of a node
_ROUNDS = 20  # of the fit
_SCALE = np.array([1.0, 1e-3, 1.0, 1e-9, 1e-4])  # of the constants
CORES = 2
DELAY = K // 4  # of KStepAdam
NEW = 0.1  # rows of a global batch without a replica: the samples repeat, most of them have one
NEAR = 0.2  # the bar
_FEATURES = [zipf(rows, 1.05) for rows in ROWS]


class Constants(NamedTuple):
    """Of this machine; a step without merges is linear in them."""

    work: float
    overhead: float  # core seconds
    per_rate: float  # 1 / reached
    byte: float  # core seconds
    start: float  # core seconds

    @property
    def reached(self) -> float:
        return 1 / self.per_rate if self.per_rate else float("inf")


class Measured(NamedTuple):
    """A row of the file."""

    nodes: int
    local: int
    gigabits: float
    way: Way
    alone: float  # seconds
    seconds: float

    @property
    def shape(self) -> str:
        return f"{self.nodes}x{self.local}"

    @property
    def is_fitted(self) -> bool:
        return self.shape in FITTED


def read_measured(path: Path = RESULTS) -> list[Measured]:
    """Rows with more than one rank."""
    ways = {way.name: way for way in WAYS}
    found = [
        Measured(
            *(int(row["nodes"]), int(row["local"]), float(row["gbit"]), ways[row["way"]]),
            *(float(row["alone_ms"]) / 1e3, float(row["ms_p50"]) / 1e3),
        )
        for row in read_rows(path)
    ]
    alone: dict[tuple[str, float], list[float]] = {}
    for one in found:  # ways of a shape and rate are measured within a minute: one figure for all of them
        alone.setdefault((one.shape, one.gigabits), []).append(one.alone)
    several = [one for one in found if one.nodes * one.local > 1]
    return [one._replace(alone=statistics.median(alone[one.shape, one.gigabits])) for one in several]


def exchanges_of(cluster: Cluster, way: Way) -> Exchanges:
    """Bytes of rows, keys and gradients that a rank sends."""
    group = Group(_FEATURES, DIM, value_bytes=4 if way.traffic == "fp32" else 2)
    if way.mode == "replicated":
        return replicated(cluster, [group], BATCH, new=NEW)
    if not way.two_hops:  # one all-to-all over all ranks: the part of other nodes crosses at once
        flat = sharded(Cluster(cluster.size, 1), [group], BATCH)
        far = (cluster.size - cluster.local) / (cluster.size - 1)
        return Exchanges(*(SentBytes(one.across * (1 - far), one.across * far) for one in flat))
    return sharded(cluster, [group], BATCH)


def dense_of(cluster: Cluster, way: Way) -> DenseSum:
    """Gradients at every step, or weights and second moments every k."""
    if way.k > 1:
        return DenseSum(dense(cluster, DENSE_WEIGHTS, parts=2), way.k, DELAY)
    if not way.two_hops:  # a ring over all ranks leaves every node once
        ring = dense(Cluster(cluster.size, 1), DENSE_WEIGHTS).across
        return DenseSum(SentBytes(ring * (1 - 1 / cluster.local), ring / cluster.local))
    return DenseSum(dense(cluster, DENSE_WEIGHTS))


def predict(point: Measured, constants: Constants, cores: float = CORES) -> StepTime:
    """A step of the point by the formulas; `cores` serve all ranks together."""
    cluster, way = Cluster(point.nodes, point.local), point.way
    crowd = max(1.0, cluster.size / cores)  # how much longer work of all ranks takes than that of one
    start = constants.start * crowd
    socket = constants.byte * crowd
    link = 0.0
    if point.gigabits:
        link = point.local * constants.per_rate / (point.gigabits * 1e9 / 8)
    fabric = Fabric(Wire(1 / max(socket, 1e-18), start, 0.0), Wire(1 / max(socket + link, 1e-18), start, 0.0))
    work = Work(constants.work * point.alone + constants.overhead * crowd, 0.0, np.inf)
    if way.across_only:  # gradients are summed in the node at every step
        node = dense(Cluster(1, point.local), DENSE_WEIGHTS).in_node
        work = work._replace(compute=work.compute + 2 * start + node * socket)
    time_of = replicated_time if way.mode == "replicated" else sharded_time
    return time_of(cluster, fabric, work, exchanges_of(cluster, way), dense_of(cluster, way), ahead=False)


def fit(points: Sequence[Measured]) -> Constants:
    """Least squares of relative errors.

    A step is linear in the constants as long as the same merges are hidden, so each round solves a linear problem around the
    constants of the last one.
    """
    seconds = np.array([point.seconds for point in points])
    constants = _SCALE
    for _ in range(_ROUNDS):
        steps = _steps(points, constants)
        slopes = np.array(
            [(_steps(points, constants + move) - steps) / move.max() for move in np.diag(1e-3 * _SCALE)]
        ).T
        target = (seconds - steps + slopes @ constants) / seconds
        found = _non_negative(slopes / seconds[:, None], target)
        if np.allclose(found, constants, rtol=1e-9, atol=0):
            break
        constants = found
    return Constants(*map(float, constants))


def _steps(points: Sequence[Measured], constants: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([predict(point, Constants(*constants)).step for point in points])


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares over the columns whose weights stay positive."""
    active = list(range(matrix.shape[1]))
    while active:
        scale = np.abs(matrix[:, active]).max(0)
        weights = np.linalg.lstsq(matrix[:, active] / scale, target, rcond=None)[0] / scale
        if (weights >= 0).all():
            break
        active.pop(int(np.argmin(weights * scale)))
    found = np.zeros(matrix.shape[1])
    found[active] = weights
    return found


def error_of(point: Measured, constants: Constants) -> float:
    """The predicted step over the measured one, less 1."""
    return predict(point, constants).step / point.seconds - 1


def page(points: Sequence[Measured], constants: Constants) -> str:
    """Errors by shape and way, fitted ones and held-out ones apart."""
    lines = ["| points | number | median error | largest | within 20 % |", "|---|---|---|---|---|"]
    held = [point for point in points if not point.is_fitted]
    groups = {
        "fitted": [point for point in points if point.is_fitted],
        "held out": held,
        "held out, k = 1": [point for point in held if point.way.k == 1],
        "held out, k-step": [point for point in held if point.way.k > 1],
    }
    for rate in (0.0, 0.1, 1.0, 10.0):
        name = "one node" if rate == 0 else f"{rate:g} Gbit/s"
        groups[f"held out, {name}"] = [point for point in held if point.gigabits == rate]
    for name, some in groups.items():
        errors = [abs(error_of(point, constants)) for point in some]
        cells = [name, str(len(some)), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
        cells.append(f"{sum(error <= NEAR for error in errors)} of {len(errors)}")
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return "\n".join(lines)


def describe(constants: Constants) -> str:
    """The constants in words."""
    return (
        f"a step takes {constants.work:.2f} of its time alone plus {1e3 * constants.overhead:.1f} core ms; links carry "
        f"{constants.reached:.2f} of their rate; a byte costs {1e9 * constants.byte:.2f} core ns, a collective "
        f"{1e6 * constants.start:.0f} core us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="the file of benchmarks.cluster (%(default)s)")
    parser.add_argument("--all", action="store_true", help="every point, not only the table")
    args = parser.parse_args()
    points = read_measured(args.rows)
    constants = fit([point for point in points if point.is_fitted])
    print(describe(constants), "\n")
    for point in points if args.all else ():
        found = predict(point, constants).step
        print(
            f"{point.shape} {point.gigabits:g} Gbit/s {point.way.name}: alone {1e3 * point.alone:.1f}, "
            f"measured {1e3 * point.seconds:.1f}, predicted {1e3 * found:.1f} ms, {error_of(point, constants):+.0%}"
            f"{' (fitted)' if point.is_fitted else ''}"
        )
    print(page(points, constants))
    held = [point for point in points if not point.is_fitted]
    raise SystemExit(1 if any(abs(error_of(point, constants)) > NEAR for point in held) else 0)


if __name__ == "__main__":
    main()
