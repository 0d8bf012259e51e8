"""Dense weights as one flat tensor, with parameters as views of it.

After building, every parameter is a view of `values`, and so is every buffer (running statistics), at its end. An operation on
all weights, such as an optimizer step or a merge between ranks, is then one pass over one tensor. The price: a parameter must
not get other memory afterwards (call `model.to(device)` before), which `check` verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ConfigError


class ParameterRun(NamedTuple):
    """Neighbours in the flat tensor that a step moves together."""

    group: dict[str, Any]  # their param group: lr and other settings
    place: slice


class FlatWeights:
    """All parameters of `groups`, then all of `buffers`, in one tensor."""

    def __init__(self, groups: Sequence[dict[str, Any]], buffers: Sequence[Tensor]) -> None:
        self.parameters: list[Tensor] = [one for group in groups for one in group["params"]]
        tensors = [*self.parameters, *buffers]
        _check_alike(tensors)
        sizes = [one.numel() for one in tensors]
        self.num_weights = sum(sizes[: len(self.parameters)])
        self.values = torch.cat([one.detach().reshape(-1) for one in tensors])
        ends = torch.tensor(sizes, device="cpu").cumsum(0).tolist()
        self._places = [slice(end - size, end) for end, size in zip(ends, sizes)]
        starts = [place.start for place in self._places] + [self.num_weights]
        counts = torch.tensor([0, *(len(group["params"]) for group in groups)], device="cpu").cumsum(0).tolist()
        self.groups = [
            ParameterRun(group, slice(starts[a], starts[b])) for group, a, b in zip(groups, counts, counts[1:])
        ]
        self._groups = [group for group in groups for _ in group["params"]]
        for one, view in zip(tensors, self.views(self.values, tensors)):
            one.data = view
        self._tensors = tensors
        self._addresses = [one.data_ptr() for one in tensors]

    def views(self, flat: Tensor, of: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The part of each parameter in another flat tensor of the same order, in the parameter's shape."""
        return [flat[place].view(one.shape) for one, place in zip(of or self.parameters, self._places)]

    def check(self) -> None:
        """Raise if a parameter or buffer is no longer a view of the flat tensor."""
        for number, (one, address) in enumerate(zip(self._tensors, self._addresses)):
            if one.data_ptr() != address:
                raise ConfigError(
                    f"parameter or buffer {number} of shape {tuple(one.shape)} got other memory after the optimizer was "
                    "built, so its steps would be lost; move or convert the model first, then build the optimizer"
                )

    def collect_gradients(self, into: Tensor) -> None:
        """All gradients in order; zero where there is none."""
        gradients, views = [], []
        for one, view in zip(self.parameters, self.views(into)):
            if one.grad is None:
                view.zero_()
            elif one.grad.layout != torch.strided:
                raise ConfigError(
                    f"a gradient of shape {tuple(one.shape)} is sparse; k-step merging is for dense weights: keep tables out "
                    "of this optimizer"
                )
            else:
                gradients.append(one.grad)
                views.append(view)
        if views:
            torch._foreach_copy_(views, gradients)

    def runs(self, *, with_gradient: bool) -> list[ParameterRun]:
        """The runs that a step moves: parameters that have a gradient, or all that could have one."""
        runs: list[ParameterRun] = []
        for one, group, place in zip(self.parameters, self._groups, self._places):
            if (one.grad is None) if with_gradient else not one.requires_grad:
                continue
            last = runs[-1] if runs else None
            if last is not None and last.group is group and last.place.stop == place.start:
                runs[-1] = ParameterRun(group, slice(last.place.start, place.stop))
            else:
                runs.append(ParameterRun(group, place))
        return runs


def _check_alike(tensors: Sequence[Tensor]) -> None:
    kinds = {(one.dtype, one.device) for one in tensors}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(
            f"all parameters and buffers lie in one flat tensor and need one type and device; given: {found}"
        )
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"k-step merging adds weights of all ranks in float32 or float64; given: {dtype}")
    if len({id(one) for one in tensors}) != len(tensors):
        raise ConfigError("a parameter or buffer was given twice")
