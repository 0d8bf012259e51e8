"""The points of the virtual cluster: how many ranks in how many nodes, the rate of their links, and how they train."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.workload import KAGGLE_ROWS

BATCH, DIM = 64, 16  # samples of a rank, weights of a row
ROWS = tuple(max(3, rows // 50) for rows in KAGGLE_ROWS)
MLP = (len(ROWS) * DIM, 512, 512, 256, 1)
DENSE_WEIGHTS = sum(a * b + b for a, b in pairwise(MLP))
K = 16
RATES = (0.1, 1.0, 10.0)  # Gbit/s
SHAPES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2))  # nodes, ranks of a node


class Way(NamedTuple):
    """How rows and dense weights travel."""

    name: str
    mode: Any = "sharded"
    traffic: Any = "fp32"
    k: int = 1
    two_hops: bool = True  # False: the mesh does not know which ranks share a node
    across_only: bool = False

    def fits(self, nodes: int, local: int) -> bool:
        """Whether it differs from the others on such a mesh."""
        if not self.two_hops or self.across_only:
            return nodes > 1 and local > 1
        return nodes * local > 1 or self.name == "sharded"


WAYS = (
    Way("sharded"),
    Way("16 bits", traffic="bf16"),
    Way("replicated", mode="replicated"),
    Way("k-step", k=K),
    Way("k-step 16 bits", traffic="bf16", k=K),
    Way("one hop", two_hops=False),
    Way("k-step across", k=K, across_only=True),
)


class Point(NamedTuple):
    """One row of the file."""

    nodes: int
    local: int
    gigabits: float  # of a link; 0 in a single node, which has none
    way: Way

    @property
    def ranks(self) -> int:
        return self.nodes * self.local

    @property
    def key(self) -> tuple[str, ...]:
        return str(self.nodes), str(self.local), f"{self.gigabits:g}", self.way.name


def points_of(nodes: int, local: int, rates: tuple[float, ...] = RATES) -> list[Point]:
    """All that differ on a mesh."""
    found = [way for way in WAYS if way.fits(nodes, local)]
    return [Point(nodes, local, rate, way) for rate in (rates if nodes > 1 else (0.0,)) for way in found]
