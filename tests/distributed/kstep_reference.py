"""k-step training of a few weights in NumPy, all ranks in one loop, written from the formulas of docs/kstep.md.

The loss of rank r at step t is a parabola: its gradient is a(r, t) (x - b(r, t)), so that ranks pull apart between merges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SHAPES = [(3, 2), (5,), (1, 4)]  # the last parameter is a group of its own
SIZES = [int(np.prod(shape)) for shape in SHAPES]
NUM_WEIGHTS = sum(SIZES)
GROUPS = [(slice(0, 11), 0.02, (0.9, 0.999)), (slice(11, 15), 0.05, (0.8, 0.99))]  # place, lr, betas
EPS = 1e-8


@dataclass(frozen=True)
class Case:
    """One training, and how it is merged."""

    rule: str = "params"
    k: int = 4
    delay: int = 0  # 0: no overlap
    steps: int = 13
    inner: str = "adam"
    weight_decay: float = 0.0
    momentum: float = 0.0
    merges: tuple[int, ...] = ()  # after these steps merge() is called
    all_moments: bool = False  # by those
    weights: tuple[tuple[float, ...], ...] = ()  # [rank][step]; 1 where nothing is said
    nodes: int = 1
    across_only: bool = False
    scale_lr: bool = False

    def weight(self, rank: int, step: int) -> float:
        return self.weights[rank][step - 1] if self.weights else 1.0


@dataclass
class Rank:
    """What one rank holds."""

    x: np.ndarray
    m: np.ndarray = field(default_factory=lambda: np.zeros(NUM_WEIGHTS))
    v: np.ndarray = field(default_factory=lambda: np.zeros(NUM_WEIGHTS))
    weight: float = 0.0  # since the last merge
    updates: int = 0  # since it was sent
    sent: tuple[np.ndarray, ...] = ()  # x, m, v

    def held(self) -> tuple[np.ndarray, ...]:
        return self.x.copy(), self.m.copy(), self.v.copy()


def first_weights() -> np.ndarray:
    return np.random.default_rng(7).normal(size=NUM_WEIGHTS)


def gradient(rank: int, step: int, x: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng([rank, step])
    return rng.uniform(0.5, 1.5, NUM_WEIGHTS) * (x - rng.normal(size=NUM_WEIGHTS))


class Training:
    """All ranks of one case, step by step."""

    def __init__(self, case: Case, world: int) -> None:
        self.case = case
        self.ranks = [Rank(first_weights()) for _ in range(world)]
        self.shared, self.shared_at = np.zeros(NUM_WEIGHTS), 0
        self.since = 0
        self.mean: tuple[np.ndarray, ...] | None = None  # on its way
        self.sent_at = 0

    def run(self) -> list[Rank]:
        case = self.case
        for step in range(1, case.steps + 1):
            self.move(step)
            self.since += 1
            if self.mean is not None and step == self.sent_at + min(case.delay, self.interval(self.sent_at)):
                self.use()
            if case.k > 1 and self.since == self.interval(step - self.since):
                waits = not case.delay or (case.rule == "frozen_v" and not self.shared_at)
                self.merge(step, case.rule == "moments") if waits else self.send(step)
            if case.k > 1 and step in case.merges:
                in_flight = self.mean is not None
                if in_flight:
                    self.use()
                if self.since or in_flight or case.all_moments:
                    self.merge(step, case.all_moments or case.rule == "moments")
        return self.ranks

    def interval(self, merged_at: int) -> int:
        return min(self.case.k, max(8, merged_at)) if self.case.rule == "frozen_v" else self.case.k

    def move(self, step: int) -> None:
        case, world = self.case, len(self.ranks)
        gradients = [gradient(r, step, rank.x) for r, rank in enumerate(self.ranks)]
        weights = [case.weight(r, step) for r in range(world)]
        together = world if case.k == 1 else world // case.nodes if case.across_only else 1
        for first in range(0, world, together) if together > 1 else ():
            node = slice(first, first + together)
            total = max(sum(weights[node]), 1e-300)  # no gradient where nobody has samples
            mean = sum(weight * g for weight, g in zip(weights[node], gradients[node])) / total
            gradients[node] = [mean] * together
        squares = [g**2 for g in gradients]
        if case.rule == "frozen_v" and not self.shared_at and world > 1 and case.k > 1:
            together, total = world, max(sum(weights), 1e-300)
            squares = [sum(weight * g**2 for weight, g in zip(weights, gradients)) / total] * world
            gradients = [sum(weight * g for weight, g in zip(weights, gradients)) / total] * world
        for rank, g, square, weight in zip(self.ranks, gradients, squares, weights):
            rank.weight += weight
            if weight or together > 1:
                rank.updates += 1
                for place, lr, betas in GROUPS:
                    self.move_group(rank, (g[place], square[place]), (place, lr, betas), step)

    def move_group(self, rank: Rank, gradient: tuple, group: tuple, step: int) -> None:
        g, square = gradient
        place, lr, (beta1, beta2) = group
        case, x = self.case, rank.x[place]
        if case.inner == "adamw":
            x = (1 - lr * case.weight_decay) * x
        else:
            square = square + (g + case.weight_decay * x) ** 2 - g**2
            g = g + case.weight_decay * x
        rank.x = rank.x.copy()
        if case.inner == "sgd":
            rank.m[place] = case.momentum * rank.m[place] + g
            rank.x[place] = x - lr * rank.m[place]
            return
        rank.m[place] = beta1 * rank.m[place] + (1 - beta1) * g
        rank.v[place] = beta2 * rank.v[place] + (1 - beta2) * square
        second, most = rank.v[place] / (1 - beta2**step), np.inf
        if self.shared_at:
            shared = self.shared[place] / (1 - beta2**self.shared_at)
            second = shared if case.rule == "frozen_v" else np.maximum(second, shared)
            if case.rule == "frozen_v":
                most = (1 - beta1) / np.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
        if case.scale_lr and case.k > 1:
            lr = lr * np.sqrt(case.nodes if case.across_only else len(self.ranks))
        move = rank.m[place] / (1 - beta1**step) / (np.sqrt(second) + EPS)
        rank.x[place] = x - lr * np.clip(move, -most, most)

    def average(self) -> tuple[np.ndarray, ...]:
        """Of x, m and v, by what each rank did since the last merge."""
        weights = [rank.weight if self.since else 1.0 for rank in self.ranks]
        self.since = 0
        for rank in self.ranks:
            rank.weight = 0.0
        held = [rank.held() for rank in self.ranks]
        if not any(weights):  # nobody moved: x is equal, and v says nothing new
            return held[0][0], held[0][1], None if self.case.rule == "frozen_v" else np.zeros(NUM_WEIGHTS)
        return tuple(np.average([one[i] for one in held], axis=0, weights=weights) for i in range(3))

    def merge(self, step: int, moments: bool) -> None:
        x, m, v = self.average()
        for rank in self.ranks:
            rank.x = x
            if moments:
                rank.m, rank.v = m.copy(), v.copy()
        self.share(v, step)

    def send(self, step: int) -> None:
        self.mean, self.sent_at = self.average(), step
        for rank in self.ranks:
            rank.sent, rank.updates = rank.held(), 0

    def use(self) -> None:
        assert self.mean is not None
        x, m, v = self.mean
        for rank in self.ranks:
            rank.x = rank.x + x - rank.sent[0]
            for place, _, (beta1, beta2) in GROUPS if self.case.rule == "moments" else ():
                decay = self.case.momentum if self.case.inner == "sgd" else beta1
                rank.m[place] += decay**rank.updates * (m - rank.sent[1])[place]
                rank.v[place] += beta2**rank.updates * (v - rank.sent[2])[place]
        self.share(v, self.sent_at)
        self.mean = None

    def share(self, v: np.ndarray, step: int) -> None:
        if self.case.rule in ("shared_v", "frozen_v") and v is not None:
            largest = np.maximum(self.shared, v) if self.case.rule == "shared_v" else v
            self.shared, self.shared_at = largest, step


def train(case: Case, world: int) -> list[Rank]:
    """All ranks after the last step."""
    return Training(case, world).run()
