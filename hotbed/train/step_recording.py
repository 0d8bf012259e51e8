"""One recording of a step: a CUDA graph, with the memory that it reads from and writes to.

Inputs are copied into memory of the recording, and what comes out is copied from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.errors import HotbedError, ShapeError
from hotbed.ops.recording import recording
from hotbed.train.step_kind import has_live_rate, tensors_of

Loss = Callable[..., Tensor | tuple[Tensor, ...]]
Vectors = Tensor | Mapping[str, Tensor]


class Recording:
    """A graph, with the memory that it reads from and writes to."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss,
        weights: list[nn.Parameter],
        vectors: Vectors,
        inputs: tuple[Any, ...],
        pool: Any,
    ) -> None:
        self.last_used = 0
        given = tensors_of(vectors)
        twins = twins_of([*given, *(one for one in inputs if isinstance(one, Tensor))])
        self._parts, others = twins[: len(given)], iter(twins[len(given) :])
        self._inputs = [next(others) if isinstance(one, Tensor) else one for one in inputs]
        own = dict(zip(vectors, self._parts)) if isinstance(vectors, Mapping) else self._parts[0]
        self._weights = weights
        groups = [] if optimizer is None else optimizer.param_groups
        before = [dict(group) for group in groups]
        device = self._parts[0].device
        self._filled = [rounded(group["lr"]) if has_live_rate(group) else None for group in groups]
        self._rates = [
            None if rate is None else torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._filled
        ]
        learned = [one for one in (*self._parts, *weights) if one.requires_grad]
        copy_all((*self._parts, *self._inputs), (*given, *inputs))
        try:
            torch.clear_autocast_cache()
            for group, rate in zip(groups, self._rates):
                group.update({} if rate is None else {"lr": rate})
                group.update({"capturable": True} if "capturable" in group else {})
            with recording(pool) as self._graph:
                self._outputs = outputs_of(loss(model, own, *self._inputs))
                grads = torch.autograd.grad(self._outputs[0], learned, allow_unused=True)
                by_weight = dict(zip(map(id, learned), grads))
                self._grads = [by_weight.get(id(part)) for part in self._parts]
                self._weight_grads = [_laid_out(by_weight.get(id(weight)), weight) for weight in weights]
                for weight, grad in zip(weights, self._weight_grads):
                    weight.grad = grad
                if optimizer is not None:
                    optimizer.step()
        finally:
            torch.clear_autocast_cache()
            for group, old in zip(groups, before):
                group.update({name: old[name] for name in ("lr", "capturable") if name in old})
        self._outputs = tuple(output.detach() for output in self._outputs)
        self.pool = self._graph.pool()

    def replay(self, groups: list[dict[str, Any]], parts: list[Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        copy_all((*self._parts, *self._inputs), (*parts, *inputs))
        for place, (rate, group) in enumerate(zip(self._rates, groups, strict=True)):
            if rate is not None and (new := rounded(group["lr"])) != self._filled[place]:
                self._filled[place] = new
                rate.fill_(new)
        self._graph.replay()
        self._give_gradients()
        # hooks of users may keep a gradient, and the next replay writes into ours
        grads = [None if g is None else g.clone() if part._backward_hooks else g for part, g in zip(parts, self._grads)]
        backward(parts, grads)
        return tuple(output.clone() for output in self._outputs)

    def _give_gradients(self) -> None:
        """Where another step, or other code, has put others in their place."""
        if any(weight.grad is not grad for weight, grad in zip(self._weights, self._weight_grads)):
            for weight, grad in zip(self._weights, self._weight_grads):
                weight.grad = grad


def copy_all(targets: Iterable[Any], sources: Iterable[Any]) -> None:
    """Every tensor into its twin; all else is equal in both."""
    pairs = [(to, of.detach()) for to, of in zip(targets, sources, strict=True) if isinstance(to, Tensor)]
    with torch.no_grad():  # there are vectors in any case
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)


def backward(parts: list[Tensor], grads: list[Tensor | None]) -> None:
    """From the vectors to the rows."""
    roots = [(part, grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
    if roots:  # what torch.autograd.backward does, without looking at shapes that are known to be right
        torch.autograd.Variable._execution_engine.run_backward(
            tuple([part for part, _ in roots]), tuple([grad for _, grad in roots]), False, False, (), True, True
        )


def twins_of(tensors: list[Tensor]) -> list[Tensor]:
    """Memory of its own for each, of the same shape and strides; those that lie between each other do so in it too.

    Strides choose kernels, and features of one lookup are columns of one block: apart, each would take as much as the block.
    """
    order = sorted(range(len(tensors)), key=lambda i: (_storage(tensors[i]), tensors[i].storage_offset()))
    clusters: list[list[int]] = []
    for i in order:
        last = [tensors[k] for k in clusters[-1]] if clusters else []
        same = bool(last) and (_storage(last[0]), last[0].dtype) == (_storage(tensors[i]), tensors[i].dtype)
        if same and tensors[i].storage_offset() < max(map(_end, last)):
            clusters[-1].append(i)
        else:
            clusters.append([i])
    found: dict[int, Tensor] = {}
    for cluster in clusters:
        members = [tensors[i] for i in cluster]
        start, stop = members[0].storage_offset(), max(map(_end, members))
        taken = torch.zeros(stop - start, dtype=torch.int32, device=members[0].device)
        for one in members:
            taken.as_strided(one.size(), one.stride(), one.storage_offset() - start).add_(1)
        is_apart = len(members) == 1 or int(taken.max()) == 1
        block = torch.empty(stop - start, dtype=members[0].dtype, device=members[0].device)
        for i, one in zip(cluster, members):
            place = block if is_apart else torch.empty_like(block)
            twin = place.as_strided(one.size(), one.stride(), one.storage_offset() - start).detach()
            found[i] = twin.requires_grad_(one.requires_grad)
    return [found[i] for i in range(len(tensors))]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _end(tensor: Tensor) -> int:
    """Behind the last number, in numbers from the start of the storage."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return int(tensor.storage_offset()) + int(span)


def _laid_out(grad: Tensor | None, weight: Tensor) -> Tensor | None:
    """A gradient in memory like its weight, as backward() leaves it."""
    if grad is None or grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, requires_grad=False).copy_(grad)


def outputs_of(found: Any) -> tuple[Tensor, ...]:
    """What a loss function gave, checked."""
    outputs = (found,) if isinstance(found, Tensor) else tuple(found) if isinstance(found, (tuple, list)) else ()
    others = [type(one).__name__ for one in outputs if not isinstance(one, Tensor)]
    if not outputs or others or outputs[0].ndim:
        given = f"a {others[0]}" if others else list(outputs[0].shape) if outputs else f"a {type(found).__name__}"
        raise ShapeError(
            f"the loss function of compile_step gave {given}; it must give one number, or a tuple of tensors with it first"
        )
    if outputs[0]._backward_hooks:
        raise HotbedError(
            "the loss that compile_step was given has hooks, as a GradScaler sets them: its optimizer would use scaled "
            "gradients. Use bfloat16, which needs no scaler, or write out backward() and scaler.step()"
        )
    return outputs


def rounded(rate: float) -> float:
    """As a float32, which is what a recording reads it as."""
    return float(np.float32(rate))
