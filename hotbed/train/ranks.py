"""What the ranks of a run agree on while they train: when to stop, what an interval and an evaluation have seen.

Every rank has its part of the samples. What is told of all of them (a line of metrics.jsonl, the metrics of a split) is worked
out on rank 0 from what the others send, and is the same on every rank: what comes next depends on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hotbed.parallel.world import World
from hotbed.train.interval import Interval, IntervalSummary

_BETWEEN = 8  # questions of which one goes to all ranks


class AgreedStop:
    """A wish to stop that one rank had and all grant, between the same two steps.

    All ranks ask equally often; one question in eight is answered by all of them, the others by the last such answer.
    """

    def __init__(self, asked: Callable[[], bool], world: World) -> None:
        self._asked, self._world = asked, world
        self._count, self._stops = 0, False

    def __call__(self) -> bool:
        if self._world.size == 1:
            return self._asked()
        if not self._stops and self._count % _BETWEEN == 0:
            self._stops = self._world.any(self._asked())
        self._count += 1
        return self._stops


def first_bad(interval: Interval, world: World) -> int | None:
    """The offset of the first step whose loss is no finite number on some rank."""
    found = [offset for offset in world.gather(interval.first_bad()) if offset is not None]
    return min(found, default=None)


def summary_of(interval: Interval, world: World) -> IntervalSummary:
    """Over the samples of all ranks."""
    if world.size == 1:
        return interval.summary()
    whole = joined(interval, world)
    return world.from_first(whole.summary() if world.is_first else None)


def joined(interval: Interval, world: World) -> Interval:
    """The steps of all ranks as those of one, on rank 0."""
    state = interval.state()
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world.size)]
    for name, tensor in state.items():
        for part, array in zip(parts, world.collect(tensor.numpy())):
            part[name] = torch.from_numpy(array)
    return join_states(parts) if world.is_first else Interval()


def join_states(parts: list[dict[str, torch.Tensor]]) -> Interval:
    """What ranks have seen, step by step; a rank without samples has no part in the mean."""
    if not parts[0]:
        return Interval()
    sizes = np.stack([part["interval.sizes"].numpy() for part in parts])  # [W, steps]
    losses = np.stack([part["interval.losses"].double().numpy() for part in parts])
    logits = [torch.split(part["interval.logits"], row.tolist()) for part, row in zip(parts, sizes)]
    labels = [torch.split(part["interval.labels"], row.tolist()) for part, row in zip(parts, sizes)]
    means = (losses * sizes).sum(0) / sizes.sum(0)
    whole = Interval()
    for step, mean in enumerate(means):
        whole.add(
            torch.tensor(mean, dtype=torch.float32, device="cpu"),
            torch.cat([one[step] for one in logits]),
            torch.cat([one[step] for one in labels]),
        )
    return whole
