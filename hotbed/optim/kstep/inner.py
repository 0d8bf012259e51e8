"""One local step of Adam, AdamW or SGD over a stretch of flat weights, in place, with torch.optim's order of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Stretch(NamedTuple):
    """The weights of one run, and all that moves them; tensors of one length."""

    x: Tensor
    g: Tensor  # gradient
    m: Tensor  # first moment; empty where the rule has none
    v: Tensor  # second moment; likewise
    floor: Tensor | None = None  # of the second moment with its bias taken out: what all ranks share
    scale: float = 1.0  # of Adam's step, not of its decay


Inner = Callable[[Stretch, dict[str, Any], int], None]


def adam_(stretch: Stretch, group: dict[str, Any], step: int) -> None:
    """`step` counts from 1; weight decay is added to the gradient."""
    g = stretch.g
    if group["weight_decay"]:
        g = g.add(stretch.x, alpha=group["weight_decay"])
    _adam_(stretch._replace(g=g), group, step)


def adamw_(stretch: Stretch, group: dict[str, Any], step: int) -> None:
    """Weight decay shrinks the weights beside the step."""
    stretch.x.mul_(1 - group["lr"] * group["weight_decay"])
    _adam_(stretch, group, step)


def sgd_(stretch: Stretch, group: dict[str, Any], step: int) -> None:
    """Plain, or with a momentum that starts as the first gradient."""
    g = stretch.g
    if group["weight_decay"]:
        g = g.add(stretch.x, alpha=group["weight_decay"])
    if group["momentum"]:
        g = stretch.m.mul_(group["momentum"]).add_(g)
    stretch.x.add_(g, alpha=-group["lr"])


def _adam_(stretch: Stretch, group: dict[str, Any], step: int) -> None:
    x, g, m, v, floor, scale = stretch
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    correction = 1 - beta2**step
    if floor is None:
        root = v.sqrt().div_(correction**0.5)
    else:
        root = torch.maximum(v / correction, floor).sqrt_()
    x.addcdiv_(m, root.add_(group["eps"]), value=-scale * group["lr"] / (1 - beta1**step))


INNER: dict[str, Inner] = {"adam": adam_, "adamw": adamw_, "sgd": sgd_}
