"""Policies: which rows stay. Each scores slots; none moves data, none knows a device, all run in training and in simulation.

A policy is told of every use (`used`) and asked for a score per slot (`scores`, higher stays). Scores are compared among
slots that no batch in flight needs; a free slot goes first, whatever its score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hotbed.cache.policies.lfu import LFU
from hotbed.cache.policies.lru import LRU
from hotbed.errors import ConfigError

__all__ = ["LFU", "LRU", "POLICIES", "Policy", "make_policy"]


class Policy(Protocol):
    """What the cache asks of a policy."""

    def used(self, slots: Tensor, counts: Tensor, is_new: Tensor) -> None:
        """A window uses `slots`, `counts` times each; `is_new` slots hold a row that just came in."""

    def scores(self) -> Tensor:
        """[S]: the lowest are evicted first."""


POLICIES: dict[str, Callable[[int, torch.device], Policy]] = {"lru": LRU, "lfu": LFU}


def make_policy(name: str, num_slots: int, device: torch.device) -> Policy:
    """A policy by name."""
    if name not in POLICIES:
        raise ConfigError(f"no cache policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](num_slots, device)
