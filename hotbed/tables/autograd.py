"""Where backward enters the tables: a lookup is a node of the graph, and its gradient updates the rows.

Forward: the lookups of one group in, vectors out, as one block or cut into features. Backward: the gradient of the vectors in;
the row optimizer runs at once, and no gradient of the rows goes any further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed.errors import ConfigError, HotbedError
from hotbed.ops.blocks import Scratch
from hotbed.ops.lookups import Lookups
from hotbed.ops.records import Layout
from hotbed.tables.group.group import UpdateStep
from hotbed.tables.outputs import FeatureSplit
from hotbed.tables.torch_hooks import backward_in_caller, current_pass, eager, scaled_pass
from hotbed.tables.transaction import Changes
from hotbed.telemetry.clock import UPDATE, StepClock

SCALED_RANKS = (
    "a GradScaler scales the loss, and rows spread over ranks cannot skip a step together when it overflows; train without it: "
    "torch.autocast with dtype=torch.bfloat16 needs none"
)


class Front(Protocol):
    """What answers the lookups of one group: the group itself, or a front that asks other ranks."""

    layout: Layout

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """The lookups with the slots their rows are in; what has to move rows for it calls `claim` first."""

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] they read."""

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """One step of the row optimizer: part of a change."""


class Partners(Protocol):
    """Other processes that update their rows in the same step."""

    def agree(self, fronts: Sequence[Front], lookups: Lookups, factor: float, number: int) -> None:
        """All update these groups now, with the same factor on the rate and the same number, or none does."""

    def refuse(self, error: BaseException) -> None:
        """Instead of what all do next: this process has failed, and nothing has changed in any of them."""


class UpdatableTables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    num_updates: int
    lr_factor: float
    clock: StepClock
    changes: Changes
    independent: bool
    scratch: Scratch

    @property
    def exchange(self) -> Partners:
        """Who takes part in every step."""

    @property
    def device(self) -> torch.device:
        """Where the rows are looked up."""

    @property
    def fronts(self) -> list[Front]:
        """What answers lookups, by group."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have a part in every batch."""

    def placed(self, group: Front, lookups: Lookups, learns: bool) -> Lookups:
        """Lookups whose rows are in their slots."""


class Step:
    """One forward call. Its groups are updated together or not at all, under one number."""

    def __init__(self, tables: UpdatableTables) -> None:
        self.tables = tables
        self._taken: tuple[float, int] | None = None
        # by backward pass, those that wait for its end, with their gradients
        self._calls: dict[int, list[tuple[Call, Tensor]]] = {}
        self._overflowed = False  # in one group at least: then all stay
        self._around = current_pass()  # a checkpointed model is called again inside a backward pass

    @property
    def scratch(self) -> Scratch | None:
        """Memory for a gradient, where its update is over before the next one comes: not on a GPU, nor with several groups."""
        tables = self.tables
        at_once = len(tables.fronts) == 1 and not tables.is_shared and tables.device.type == "cpu"
        return tables.scratch if at_once else None

    def unscaled(self, grad: Tensor) -> Tensor | None:
        """The gradient without the factor of a GradScaler; None where it has overflowed, and rows must stay."""
        scaled = scaled_pass(self._around)
        if scaled is None:
            return grad
        if self.tables.is_shared:
            raise HotbedError(SCALED_RANKS)
        unscaled = scaled.unscaled(grad)
        self._overflowed |= unscaled is None
        return unscaled

    def taken(self) -> tuple[float, int]:
        """(factor on learning rates, number) of this call's update, which counts from now on: part of a change."""
        if self._taken is None:
            tables = self.tables
            number = tables.num_updates
            self._taken = tables.lr_factor, number
            tables.__dict__["num_updates"] = number + 1  # nn.Module takes 10 us to set an attribute
        return self._taken

    def update(self, call: Call, grad: Tensor) -> None:
        """Update one group: now, or with the others once all gradients are there. A backward that fails updates none."""
        tables = self.tables
        if not (tables.independent or tables.is_shared):
            _refuse_ranks()
        if len(tables.fronts) == 1:
            self._move([(call, grad)])
            return
        number = current_pass()
        calls = self._calls.setdefault(number, [])  # an earlier pass that failed left its own, which are never updated
        if not calls:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._update_all(self._calls.pop(number)))
        calls.append((call, grad))

    def _update_all(self, calls: list[tuple[Call, Tensor]]) -> None:
        tables = self.tables
        if self._overflowed:
            return
        with tables.changes.lock:
            before = tables.clock.enter(UPDATE)
            self._move(calls)
            tables.clock.enter(before)

    def _move(self, calls: list[tuple[Call, Tensor]]) -> None:
        """Update the rows of these groups: all of them, on all ranks, or none."""
        tables = self.tables
        try:
            for _ in calls[:2]:  # bringing in the rows of one group may move those of the others, but once
                for call, _ in calls:
                    call.lookups = tables.placed(call.group, call.lookups, call.learns)
            tables.changes.check()
        except BaseException as error:
            tables.exchange.refuse(error)
            raise
        with tables.changes.changing("an update of rows"):
            due = self._taken or (tables.lr_factor, tables.num_updates)
            tables.exchange.agree([call.group for call, _ in calls], calls[0][0].lookups, *due)
            for call, grad in calls:
                call.group.update(call.lookups, call.tables, grad, self)


def _refuse_ranks() -> None:
    """Raise where this process is one of several ranks: each would move rows of its own, unnoticed."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"these tables are about to train on rank {dist.get_rank()} of {dist.get_world_size()}, and their rows would drift "
            "away from those of other ranks: DistributedDataParallel keeps parameters alike, and rows are not parameters. Use "
            "hotbed.ShardedTables with the same arguments (docs/distributed.md); or, if this rank trains a model of its own, "
            "say so: EmbeddingTables(..., independent=True). Rows that stay as they are need neither: "
            "tables.requires_grad_(False)"
        )


@dataclass
class Call:
    """What backward has to remember of one group in one forward call."""

    group: Front
    lookups: Lookups
    tables: tuple[str, ...]
    step: Step
    learns: bool  # in eval mode rows stay, and only the weights of a bag get a gradient
    cut: FeatureSplit | None = None  # into features; None: vectors are one block
    done: bool = False


class LookupFunction(torch.autograd.Function):
    """Vectors of one group, one block or a tuple of features; backward runs the row optimizer."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, scale: Tensor | None, call: Call) -> Tensor | tuple[Tensor, ...]:
        call.lookups = call.lookups.with_scale(None if scale is None else scale.detach())
        ctx.call = call
        block = call.group.lookup(call.lookups)
        if block.is_cuda:
            backward_in_caller()
        if call.cut is None:
            return block
        ctx.set_materialize_grads(False)
        # tensors of their own that share memory: torch refuses changes in place of views made here, and these do not overlap
        return tuple(part.data for part in call.cut.split(block))

    @staticmethod
    @once_differentiable
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None, None]:
        call: Call = ctx.call
        if all(grad is None for grad in grads):  # nothing of the loss came through here
            return None, None, None
        if call.done:
            raise HotbedError(
                "backward ran twice through one lookup, which would update the rows twice; "
                "call the tables again instead of keeping the graph"
            )
        call.done = True
        tables, grad_scale = call.step.tables, None
        with tables.changes.lock:
            before = tables.clock.enter(UPDATE)
            grad = grads[0] if call.cut is None else call.cut.join(grads, call.step.scratch)
            assert grad is not None, "a block has a gradient, or its backward is not run"
            if ctx.needs_input_grad[1]:
                call.lookups = tables.placed(call.group, call.lookups, call.learns)  # they may have been moved
                out_rows = call.lookups.out_row_of_lookup()
                grad_LD = grad if out_rows is None else grad[out_rows]
                grad_scale = (grad_LD * call.group.rows_of(call.lookups)).sum(1)
            taken = call.step.unscaled(grad) if call.learns else None
            if taken is not None:
                call.step.update(call, taken)
            tables.clock.enter(before)
        return None, grad_scale, None
