"""Gradient sum per row and row update in plain torch; runs on every device, with sums in the order of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups
from hotbed.ops.precision.reference import random_bits, round_stochastic
from hotbed.ops.records import Layout
from hotbed.ops.update.settings import UpdateSettings

_MATH = {"sqrt": torch.sqrt, "exp2": torch.exp2, "where": torch.where, "absolute": torch.abs}


def sum_gradients(grad: Tensor, lookups: Lookups, settings: UpdateSettings) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [U] ascending, their summed gradients [U, D], how often each occurs [U])."""
    order = torch.argsort(lookups.slots, stable=True)  # equal rows keep the order of the batch
    order = order[lookups.slots[order] >= 0]
    slots, counts = torch.unique_consecutive(lookups.slots[order], return_counts=True)
    if settings.whole_table:
        slots = torch.cat([torch.arange(t.base, t.base + t.rows, device=grad.device) for t in settings.tables])
        counts = torch.bincount(lookups.slots[order], minlength=int(slots[-1]) + 1 if slots.numel() else 0)[slots]
    out_rows = lookups.out_row_of_lookup()
    grad_LD = grad.index_select(0, order if out_rows is None else out_rows[order])
    if lookups.scale is not None:
        grad_LD = grad_LD * lookups.scale[order].unsqueeze(1)
    if slots.numel() == 0:
        return slots, grad.new_zeros(0, grad.shape[1]), counts
    if grad_LD.shape[0] == 0:
        return slots, grad.new_zeros(slots.shape[0], grad.shape[1]), counts
    return slots, torch.segment_reduce(grad_LD, "sum", lengths=counts, initial=0), counts


def update(records: Tensor, layout: Layout, grad: Tensor, lookups: Lookups, settings: UpdateSettings) -> None:
    """Apply the row optimizer in place to every row with a gradient (or every row, for whole_table)."""
    slots, g, counts = sum_gradients(grad, lookups, settings)
    if slots.numel() == 0:
        return
    part = records.index_select(0, slots)
    w = layout.weights(part).to(part.dtype)
    if settings.scale_by_count:
        g = g / counts.clamp(min=1).unsqueeze(1)
    if settings.clip_norm > 0:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True, dtype=torch.float64)
        g = torch.where(norm > settings.clip_norm, g * (settings.clip_norm / norm).to(g.dtype), g)
    if settings.l2:
        g = g + settings.l2 * w
    if settings.weight_decay:
        w = w * (1 - settings.lr * settings.weight_decay)
    row, element = settings.rule.bind(_MATH)
    mean_square = (g.double() ** 2).mean(dim=1, keepdim=True)
    lr = torch.tensor(settings.lr, dtype=torch.float64, device=g.device)
    h = tuple(torch.tensor(c, dtype=torch.float64, device=g.device) for c in settings.constants)
    has_row_state = bool(layout.row_states)
    r = part[:, layout.columns(layout.row_states[0])].double() if has_row_state else torch.zeros_like(mean_square)
    r, c0, c1 = row(r, mean_square, lr, h)
    states = [part[:, layout.columns(name)] for name in layout.element_states]
    a, b = [*states, g.new_zeros(1), g.new_zeros(1)][:2]
    c0, c1 = (torch.as_tensor(c, device=g.device).to(g.dtype) for c in (c0, c1))
    w, *new = element(w, g, a, b, c0, c1, tuple(c.to(g.dtype) for c in h))
    if layout.precision != "fp32":
        random = random_bits(_keys_of(slots, lookups), settings.salt, layout.dim)
        w = round_stochastic(w, random, layout.numbers(part).dtype)
    layout.weights(part).copy_(w)
    for state, value in zip(states, new):
        state.copy_(value)
    if has_row_state:
        part[:, layout.columns(layout.row_states[0])] = r.to(g.dtype)
    records.index_copy_(0, slots, part)


def _keys_of(slots: Tensor, lookups: Lookups) -> Tensor:
    """The keys [U] of the rows in `slots` [U]."""
    if lookups.keys is None:
        return slots
    order = torch.argsort(lookups.slots)
    return lookups.keys[order][torch.searchsorted(lookups.slots[order], slots)].long()
