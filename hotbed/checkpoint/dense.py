"""Dense weights and the state of their optimizer as named tensors on the host, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DENSE, OPTIMIZER = "dense", "dense_optimizer"


def dense_tensors(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """Copies as of now: weights and buffers, and `<parameter number>.<name>` of the optimizer."""
    files: dict[str, dict[str, Tensor]] = {}
    if model is not None:
        files[DENSE] = _copied(model.state_dict())
    if optimizer is not None:
        states = optimizer.state_dict()["state"]
        files[OPTIMIZER] = _copied({f"{n}.{name}": one for n, state in states.items() for name, one in state.items()})
    return files


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Learning rates and the like stay as they are."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = value.clone()  # the file is mapped into memory and may go away
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(one).detach().to("cpu", copy=True) for name, one in tensors.items()}
