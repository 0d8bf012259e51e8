"""Gradients of several batches that move the rows together: tables.accumulate(), then tables.step().

A batch is looked up without learning, and its vectors are leaves of the graph that collect their gradient. `step` is one
training step on all of them, one after the other: the same lookups, sums and updates as those of one larger batch, to the bit,
whatever holds the rows. The price is that every batch is looked up twice, and that its ids are copied: a loader may fill the
same tensors again before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.tables.autograd import SCALED_RANKS
from hotbed.tables.inputs import BatchInputs, Feature
from hotbed.tables.torch_hooks import ScaledBackward, scaled_pass
from hotbed.types import Jagged


class AccumulatingTables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    features: list[Feature]
    num_updates: int

    @property
    def device(self) -> torch.device:
        """Where the rows are looked up."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have a part in every batch."""

    @property
    def learns(self) -> bool:
        """Whether backward moves rows."""


LookUp = Callable[[Tensor, dict[str, Jagged]], Tensor | dict[str, Tensor]]  # a batch of ids and bags -> its vectors


@dataclass
class Part:
    """One batch that waits."""

    number: int  # in the order of the calls
    given: BatchInputs
    leaves: dict[str, Tensor]  # by feature; the block of all of them under ""
    scaled: ScaledBackward | None = None  # what is known of a loss that was scaled

    def unscale(self, by: object) -> bool:
        """Take the factor of a GradScaler out of the gradients, unless it did so itself; False where they overflowed."""
        scaled, self.scaled = self.scaled, None
        if scaled is None or scaled.has_unscaled(by):
            return True
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                leaf.grad = scaled.unscaled(leaf.grad)
                if leaf.grad is None:
                    return False
        return True

    def forget(self) -> None:
        """Drop the gradients: one that comes through this graph later begins anew."""
        for leaf in self.leaves.values():
            leaf.grad = None


class _Seen(torch.autograd.Function):
    """What the user sees of a leaf: the same numbers, which may be changed in place; torch refuses that of leaves and views."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Accumulation:
    """The batches since the last step whose gradients have come."""

    def __init__(self) -> None:
        self._count = 0
        self.parts: dict[int, Part] = {}
        self.is_over = False  # by accumulate(False)

    def collect(self, given: BatchInputs, out: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """The vectors of a batch, as leaves; the batch waits from its first gradient on."""
        if any(bag.weights is not None and bag.weights.requires_grad for bag in given.bags.values()):
            raise HotbedError(
                "weights of bags that learn cannot be accumulated: their gradient needs the rows as they are in backward; "
                "detach the weights, or leave accumulate() for batches that have them"
            )
        named = out if isinstance(out, dict) else {"": out}
        leaves = {name: one.detach().requires_grad_() for name, one in named.items()}
        self._count += 1
        part = Part(self._count, _copy_of(given), leaves)
        for leaf in leaves.values():
            hook: Any = leaf.register_post_accumulate_grad_hook
            hook(lambda _: self._arrive(part))
        seen = {name: _Seen.apply(leaf) for name, leaf in leaves.items()}  # type: ignore[no-untyped-call]
        return seen if isinstance(out, dict) else seen[""]

    def _arrive(self, part: Part) -> None:
        if self.is_over:
            raise HotbedError(
                "a gradient came for a batch that was looked up before accumulate(False), and no step() will move its rows; "
                "call backward before accumulate(False), or call the tables again after it"
            )
        self.parts[part.number] = part
        part.scaled = part.scaled or scaled_pass(-1)

    @property
    def leaves(self) -> list[Tensor]:
        """All vectors that have a gradient."""
        return [leaf for part in self.in_order() for leaf in part.leaves.values() if leaf.grad is not None]

    def step(self, tables: AccumulatingTables, look_up: LookUp) -> bool:
        """Move rows by the gradients of the batches that wait; whether there were any and none overflowed."""
        if not self.parts and not tables.is_shared:
            return False
        if not tables.learns:
            raise HotbedError(
                "gradients are pending, and tables.eval() or requires_grad_(False) keeps rows as they are: call "
                "tables.train() or tables.requires_grad_(True) before tables.step(), or drop the gradients with "
                "tables.zero_grad()"
            )
        if tables.is_shared and any(part.scaled is not None for part in self.parts.values()):
            raise HotbedError(SCALED_RANKS)
        parts, before, is_done = self.take(), tables.num_updates, False
        try:
            is_moved = _step_on(parts, tables, look_up)
            is_done = True
        finally:
            if is_done or tables.num_updates > before:
                for part in parts:
                    part.forget()
            else:  # refused, and no row has moved
                self.give_back(parts)
        return is_moved

    def forget(self) -> None:
        """Drop all gradients."""
        for part in self.take():
            part.forget()

    def give_back(self, parts: Sequence[Part]) -> None:
        """Let batches wait again that a step was refused for."""
        self.parts |= {part.number: part for part in parts}

    def take(self) -> list[Part]:
        """Take the pending batches, in the order of their calls; none is pending afterwards."""
        taken = self.in_order()
        self.parts.clear()
        return taken

    def in_order(self) -> list[Part]:
        """The batches that wait, in the order of their calls."""
        return [self.parts[number] for number in sorted(self.parts)]


@torch.inference_mode(False)  # where nothing has a gradient
def _step_on(parts: Sequence[Part], tables: AccumulatingTables, look_up: LookUp) -> bool:
    """One training step on all these batches, unless one overflowed. Hooks do not see it: they have seen each of them."""
    unscaled = [part.unscale(tables) for part in parts]  # of all, so that the scaler knows
    if not all(unscaled):
        return False
    names = [feature.name for feature in tables.features]
    nothing = partial(torch.empty, 0, len(names), dtype=torch.int64, device=tables.device)
    with torch.enable_grad():
        out = look_up(*joined(parts, names, nothing))
    moving = [pair for pair in gradients(parts, out) if pair[0].requires_grad]  # frozen tables have none
    if moving:
        vectors, grads = zip(*moving)
        torch.autograd.backward(vectors, grads)
    return bool(parts)


def _copy_of(given: BatchInputs) -> BatchInputs:
    """The same ids in memory of their own."""
    bags = {
        name: Jagged(*(part if part is None else part.clone() for part in bag))  # type: ignore[arg-type]
        for name, bag in given.bags.items()
    }
    return given._replace(matrix=given.matrix.clone(), bags=bags)


def joined(
    parts: Sequence[Part], names: Sequence[str], empty: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Jagged]]:
    """(matrix, bags) of all batches one after the other; a feature that is a bag in one of them is a bag in all."""
    single = [name for name in names if all(name in part.given.columns for part in parts)]
    if not parts:
        return empty(), {}
    columns = [part.given.matrix[:, [part.given.columns[name] for name in single]] for part in parts]
    bags = {name: _joined_bags([bag_of(part.given, name) for part in parts]) for name in names if name not in single}
    return torch.cat(columns), bags


def gradients(parts: Sequence[Part], out: Tensor | dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(vectors, gradient) of the joined batch, as it was looked up."""
    named: Mapping[str, Tensor] = out if isinstance(out, dict) else {"": out}
    pairs = []
    for name, vectors in named.items():
        found = [part.leaves[name] for part in parts]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in found]
        pairs.append(
            (vectors, torch.cat([_like(grad, vectors) for grad in grads]) if grads else torch.zeros_like(vectors))
        )
    return pairs


def _like(grad: Tensor, vectors: Tensor) -> Tensor:
    """Sequences [B, T, D] as vectors one after the other, if the joined batch has them that way."""
    return grad.reshape(-1, grad.shape[-1]) if vectors.ndim == 2 and grad.ndim == 3 else grad


def bag_of(given: BatchInputs, name: str) -> Jagged:
    """The ids of one feature; single ids are bags of one."""
    if name in given.bags:
        return given.bags[name]
    values = given.matrix[:, given.columns[name]]
    return Jagged(values.contiguous(), torch.arange(len(values) + 1, device=values.device))


def _joined_bags(bags: Sequence[Jagged]) -> Jagged:
    starts = torch.tensor([0, *(len(bag.values) for bag in bags)], device="cpu").cumsum(0).tolist()
    offsets = [bag.offsets[:-1] + start for bag, start in zip(bags, starts)]
    last = bags[-1].offsets[-1:] + starts[-2]
    weights: Any = None
    if any(bag.weights is not None for bag in bags):
        weights = torch.cat(
            [torch.ones_like(b.values, dtype=torch.float32) if b.weights is None else b.weights for b in bags]
        )
    return Jagged(torch.cat([bag.values for bag in bags]), torch.cat([*offsets, last]), weights)
