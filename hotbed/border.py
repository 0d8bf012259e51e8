"""The border to autograd: a look-up is a node of its graph, and when its gradient comes the rows are updated.

Forward: the look-ups of one group in, vectors out. Backward: the gradient of the vectors in; the row optimizer runs at once,
and no gradient of the rows goes any further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed.clock import UPDATE, StepClock
from hotbed.errors import HotbedError
from hotbed.ops.lookups import Lookups
from hotbed.ops.records import Layout
from hotbed.optim.schedules import Schedule
from hotbed.torch_hooks import current_pass, eager, scaled_pass


class Front(Protocol):
    """What answers the look-ups of one group: the group itself, or whoever asks other ranks."""

    layout: Layout

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] they read."""

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, lr: float, number: int) -> None:
        """One step of the row optimizer."""


class Updated(Protocol):
    """EmbeddingTables, as far as this needs them."""

    num_updates: int
    lr_factor: float
    schedule: Schedule
    clock: StepClock

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have a part in every batch."""

    def placed(self, group: Front, lookups: Lookups, learns: bool) -> Lookups:
        """Look-ups whose rows are in their slots."""


class Step:
    """One forward call. Its groups share one number, given when the first of them is updated."""

    def __init__(self, tables: Updated) -> None:
        self.tables = tables
        self.number = 0  # of the update, once it has a learning rate
        self._lr: float | None = None
        self._around = current_pass()  # a checkpointed model is called again inside a backward pass

    def unscaled(self, grad: Tensor) -> Tensor | None:
        """The gradient without the factor of a GradScaler; None where it has overflowed, and rows must stay."""
        scaled = scaled_pass(current_pass(), self._around)
        if scaled is None:
            return grad
        if self.tables.is_shared:
            raise HotbedError(
                "a GradScaler scales the loss, and rows spread over ranks cannot skip a step together when it overflows; "
                "train without it: torch.autocast with dtype=torch.bfloat16 needs none"
            )
        return scaled.unscaled(grad)

    def lr(self) -> float:
        """The learning rate of this call's update."""
        if self._lr is None:
            tables = self.tables
            self.number = tables.num_updates
            self._lr = tables.schedule.at(tables.num_updates) * tables.lr_factor
            tables.__dict__["num_updates"] += 1  # nn.Module takes 10 us to set an attribute
        return self._lr


@dataclass
class Call:
    """What backward has to remember of one group in one forward call."""

    group: Front
    lookups: Lookups
    tables: tuple[str, ...]
    step: Step
    learns: bool  # in eval mode rows stay, and only the weights of a bag get a gradient
    done: bool = False


class LookUp(torch.autograd.Function):
    """Vectors of one group; backward runs the row optimizer."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, scale: Tensor | None, call: Call) -> Tensor:
        call.lookups = call.lookups._replace(scale=None if scale is None else scale.detach())
        ctx.call = call
        return call.group.lookup(call.lookups)

    @staticmethod
    @once_differentiable
    @eager
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        call: Call = ctx.call
        if call.done:
            raise HotbedError(
                "backward ran twice through one look-up, which would update the rows twice; "
                "call the tables again instead of keeping the graph"
            )
        call.done = True
        clock = call.step.tables.clock
        before = clock.enter(UPDATE)
        call.lookups = call.step.tables.placed(call.group, call.lookups, call.learns)  # they may have been moved
        grad_scale = None
        if ctx.needs_input_grad[1]:
            out_rows = call.lookups.out_row_of_lookup()
            grad_LD = grad if out_rows is None else grad[out_rows]
            grad_scale = (grad_LD * call.group.rows_of(call.lookups)).sum(1)
        taken = call.step.unscaled(grad) if call.learns else None
        if taken is not None:
            call.group.update(call.lookups, call.tables, taken, call.step.lr(), call.step.number)
        clock.enter(before)
        return None, grad_scale, None
