"""The gate: a system trains small tables and must reach what float64 arithmetic reaches, or it is not timed.

It runs the loop that is timed later, over tables small enough to follow row by row and a cache small enough to evict.
Vectors are compared at every step, the change of all rows at the end, both as |out - ref| / |ref|. hotbed's caches must
besides equal hotbed without a cache to the bit.

Two rules of Adam are in use: the bias correction counts the updates of a row (hotbed), or those of the whole table
(FBGEMM, torch). Each system is held to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hotbed.bench.systems import EXACT_TWIN, KINDS, System
from hotbed.bench.workload import EPS, LR, Setting, Workload, make_workload

_ROWS = (3, 50, 3_000, 400)
_BATCH, _STEPS = 256, 12
_CACHE, _ZIPF = 0.16, 0.5  # 552 slots, where a batch needs 480 rows and all batches together 2,000: rows must come back
_VECTORS_OFF, _ROWS_OFF = 1e-4, 1e-3  # float32 lands an order of magnitude below either
_BETA1, _BETA2 = 0.9, 0.999


def check(name: str, setting: Setting) -> str | None:
    """What is wrong with a system's results; None if nothing is."""
    small = replace(setting, rows=_ROWS, batch=_BATCH, cache=_CACHE, dense=0, window=None, look_ahead=None)
    workload = make_workload(_ROWS, _BATCH, _STEPS, setting.device, zipf=_ZIPF, seed=7)
    wrong, weights = _train(KINDS[name].make(small), small, workload)
    if wrong is None and name in EXACT_TWIN:
        twin = EXACT_TWIN[name]
        _, others = _train(KINDS[twin].make(small), small, workload)
        if not all(map(torch.equal, weights, others)):
            return f"its rows are not those of {twin} to the bit"
    return wrong


def _train(system: System, setting: Setting, workload: Workload) -> tuple[str | None, list[Tensor]]:
    """Train a system beside the reference."""
    first = [weight.double() for weight in system.weights()]
    reference = Reference(first, system.rule)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for step, out in enumerate(system.vectors(workload)):
        expected = reference.look_up(workload.matrices[step].cpu())
        worst = max(worst, distance(out.detach().view(expected.shape).cpu().double(), expected))
        grad = _gradient(expected.shape, generator)
        reference.update(grad.double())
        out.backward(grad.view(out.shape).to(out.device))  # type: ignore[no-untyped-call]
    weights = system.weights()
    moved = torch.cat([after.double() - before for after, before in zip(weights, first)])
    expected = torch.cat([after - before for after, before in zip(reference.weights, first)])
    rows_off = distance(moved, expected)
    if not worst <= _VECTORS_OFF:
        return f"its vectors are {worst:.1e} off the float64 reference (limit {_VECTORS_OFF:.0e})", weights
    if not rows_off <= _ROWS_OFF:
        return f"its updates are {rows_off:.1e} off the float64 reference (limit {_ROWS_OFF:.0e})", weights
    return None, weights


def _gradient(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Numbers of 0.005 to 0.105, of one sign for all samples at a place: sums that cancel would show rounding, not mistakes."""
    signs = torch.randint(0, 2, shape[1:], generator=generator) * 2 - 1
    return (torch.rand(shape, generator=generator) + 0.05) * 0.1 * signs


def distance(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference|; not a number is infinitely far."""
    off = float((out - reference).norm() / reference.norm())
    return float("inf") if math.isnan(off) else off


class Reference:
    """Embedding tables in float64, one row optimizer, nothing clever."""

    def __init__(self, first: list[Tensor], rule: str) -> None:
        self.weights = [weight.clone() for weight in first]
        self._states = [[torch.zeros_like(weight) for _ in range(3)] for weight in first]  # two moments, row steps
        self._rule = RULES[rule]
        self._ids = torch.empty(0)
        self._step = 0

    def look_up(self, ids_BF: Tensor) -> Tensor:
        """[B, F, D]."""
        self._ids = ids_BF
        return torch.stack([weight[ids] for weight, ids in zip(self.weights, ids_BF.t())], dim=1)

    def update(self, grad_BFD: Tensor) -> None:
        self._step += 1
        for i, (weight, state) in enumerate(zip(self.weights, self._states)):
            rows, where = torch.unique(self._ids[:, i], return_inverse=True)
            grad = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.float64)
            grad.index_add_(0, where, grad_BFD[:, i])
            parts = [column[rows] for column in state]
            parts[2] += 1
            weight[rows] -= self._rule(grad, parts, self._step)
            for column, part in zip(state, parts):
                column[rows] = part


def _sgd(grad: Tensor, state: list[Tensor], step: int) -> Tensor:
    return LR * grad


def _adagrad(grad: Tensor, state: list[Tensor], step: int) -> Tensor:
    state[0] += grad * grad
    return LR * grad / (state[0].sqrt() + EPS)


def _rowwise_adagrad(grad: Tensor, state: list[Tensor], step: int) -> Tensor:
    state[0] += (grad * grad).mean(1, keepdim=True)
    return LR * grad / (state[0].sqrt() + EPS)


def _adam(grad: Tensor, state: list[Tensor], step: int) -> Tensor:
    return _adam_change(grad, state, state[2])


def _adam_by_table(grad: Tensor, state: list[Tensor], step: int) -> Tensor:
    return _adam_change(grad, state, torch.full_like(state[2], step))


def _adam_change(grad: Tensor, state: list[Tensor], steps: Tensor) -> Tensor:
    state[0] = _BETA1 * state[0] + (1 - _BETA1) * grad
    state[1] = _BETA2 * state[1] + (1 - _BETA2) * grad * grad
    mean, variance = state[0] / (1 - _BETA1**steps), state[1] / (1 - _BETA2**steps)
    return LR * mean / (variance.sqrt() + EPS)


RULES: dict[str, Callable[[Tensor, list[Tensor], int], Tensor]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "adam_by_table": _adam_by_table,
}
