"""The gate: a system trains small tables and must reach what float64 arithmetic reaches, or it is not timed.

It runs the loop that is timed later, over tables small enough to compare row by row and a cache small enough to evict.
Vectors are compared at every step, the change of all rows at the end, both as |out - ref| / |ref|. In addition hotbed's caches
must equal hotbed without a cache to the bit.

Two rules of Adam are in use: the bias correction counts the updates of a row (hotbed), or those of the whole table
(FBGEMM, torch). Each system is held to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.bench.setting import EPS, LR, Setting, in_ranks
from hotbed.bench.systems import EXACT_TWIN, OURS, System, Vectors, open_system
from hotbed.bench.workload import FlatIds, Workload, make_workload, offsets_of, part_of, values_of

_ROWS = (3, 50, 3_000, 400)
_BATCH, _STEPS = 256, 12
_CACHE, _ZIPF = 0.16, 0.5  # 552 slots, where a batch needs 480 rows and all batches together 2,000: rows must come back
_VECTORS_OFF, _ROWS_OFF = 1e-4, 1e-3  # float32 lands an order of magnitude below either
_BETA1, _BETA2 = 0.9, 0.999


def check(name: str, setting: Setting) -> str | None:
    """What is wrong with the results of a system; None if nothing is."""
    small = replace(
        setting, rows=_ROWS, batch=_BATCH, cache=_CACHE, zipf=_ZIPF, dense=0, window=None, look_ahead=None, cold=False
    )
    if small.ids in ("bags", "varying"):
        small = replace(small, batch=_BATCH // 2)  # reads as many rows
    if small.ranks and name in OURS:
        return next((wrong for wrong in in_ranks(check_rank, small, name) if wrong is not None), None)
    workload = make_workload(small, _STEPS, seed=7)
    with open_system(name, small) as system:
        wrong, weights = _train(system, workload)
    if wrong is None and name in EXACT_TWIN and small.ids != "dynamic":  # dynamic ids have no form without a cache
        twin = EXACT_TWIN[name]
        with open_system(twin, small) as other:
            _, others = _train(other, workload)
        if not all(map(torch.equal, weights, others)):
            return f"its rows differ from those of {twin}"
    return wrong


def check_rank(setting: Setting, name: str) -> str | None:
    """As `check`, in one of several ranks: its own vectors, and the rows of all."""
    rank = dist.get_rank()
    samples = slice(*part_of(setting.batch, rank, setting.ranks))
    workload = make_workload(setting, _STEPS, seed=7)
    with open_system(name, setting) as system:
        return _train(system, workload, workload.part(rank, setting.ranks), samples)[0]


def _train(
    system: System, workload: Workload, part: Workload | None = None, samples: slice = slice(None)
) -> tuple[str | None, list[Tensor]]:
    """Train a system on a workload, or on its part of it, and the reference on the whole."""
    first = [weight.double() for weight in system.weights()]
    reference = Reference(first, system.rule)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for step, out in enumerate(system.vectors(workload if part is None else part)):
        expected = reference.look_up(workload.flat[step], workload.batch)
        worst = max(worst, distance(_block(out).detach().cpu().double(), expected[samples].flatten(1)))
        grad = _gradient(expected.shape, generator)
        reference.update(grad.double())
        block = _block(out)
        block.backward(grad[samples].reshape(block.shape).to(block.device))  # type: ignore[no-untyped-call]
    weights = system.weights()
    moved = torch.cat([after.double() - before for after, before in zip(weights, first)])
    expected = torch.cat([after - before for after, before in zip(reference.weights, first)])
    rows_off = distance(moved, expected)
    if not worst <= _VECTORS_OFF:
        return f"its vectors are {worst:.1e} off the float64 reference (limit {_VECTORS_OFF:.0e})", weights
    if not rows_off <= _ROWS_OFF:
        return f"its updates are {rows_off:.1e} off the float64 reference (limit {_ROWS_OFF:.0e})", weights
    return None, weights


def _block(out: Vectors) -> Tensor:
    """[B, F * D], whatever form the vectors have."""
    return torch.cat(list(out.values()), dim=1) if isinstance(out, dict) else out.flatten(1)


def _gradient(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Numbers of 0.005 to 0.105, of one sign for all samples at a place: sums that cancel would show rounding only."""
    signs = torch.randint(0, 2, shape[1:], generator=generator) * 2 - 1
    return (torch.rand(shape, generator=generator) + 0.05) * 0.1 * signs


def distance(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference|; infinite if it is not a number."""
    off = float((out - reference).norm() / reference.norm())
    return float("inf") if math.isnan(off) else off


class Reference:
    """Embedding tables in float64, one row optimizer, nothing clever."""

    def __init__(self, first: list[Tensor], rule: str) -> None:
        self.weights = [weight.clone() for weight in first]
        self._states = [[torch.zeros_like(weight) for _ in range(3)] for weight in first]  # two moments, row steps
        self._rule = RULES[rule]
        self._rows: list[Tensor] = []  # of the last lookup, table by table
        self._samples: list[Tensor] = []
        self._step = 0

    def look_up(self, ids: FlatIds, batch: int) -> Tensor:
        """[B, F, D]."""
        offsets = [offsets_of(ids, f, batch).cpu() for f in range(len(self.weights))]
        self._rows = [values_of(ids, f).cpu() for f in range(len(self.weights))]
        self._samples = [torch.arange(batch).repeat_interleave(each.diff()) for each in offsets]
        out = torch.zeros(batch, len(self.weights), self.weights[0].shape[1], dtype=torch.float64)
        for f, (weight, rows, samples) in enumerate(zip(self.weights, self._rows, self._samples)):
            out[:, f].index_add_(0, samples, weight[rows])
        return out

    def update(self, grad_BFD: Tensor) -> None:
        self._step += 1
        for f, (weight, state) in enumerate(zip(self.weights, self._states)):
            rows, where = torch.unique(self._rows[f], return_inverse=True)
            grad = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.float64)
            grad.index_add_(0, where, grad_BFD[self._samples[f], f])
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
