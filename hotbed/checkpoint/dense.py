"""Dense weights and the state of their optimizer as named tensors on the host, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

DENSE, OPTIMIZER = "dense", "dense_optimizer"


def dense_tensors(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """Copies: weights and buffers, and `<parameter number>.<name>` of the optimizer."""
    files: dict[str, dict[str, Tensor]] = {}
    if model is not None:
        files[DENSE] = _copied(model.state_dict())
    if optimizer is not None:
        states = optimizer.state_dict()["state"]
        files[OPTIMIZER] = _copied({f"{n}.{name}": one for n, state in states.items() for name, one in state.items()})
    return files


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load its state; learning rates and other settings stay as they are."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = value.clone()  # the file is mapped into memory and may be removed
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(one, device="cpu").detach().to("cpu", copy=True) for name, one in tensors.items()}


def mean_of(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the dense tensors of several ranks, where they differ; integers are those of the first."""
    found = {}
    for name, first in parts[0].items():
        if not first.is_floating_point() or all(torch.equal(first, part[name]) for part in parts[1:]):
            found[name] = first
        else:
            found[name] = torch.stack([part[name].double() for part in parts]).mean(0).to(first.dtype)
    return found
