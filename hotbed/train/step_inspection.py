"""Whether a step can be recorded: two steps are run as they are, and all that they compute is looked at.

A step can be replayed if it does the same in Python every time. So it must leave the Python objects it reads as they are, and
both steps must call the same operators with the same numbers, on the device alone. Gradients must end at the vectors and at
the weights of the optimizer, because a recording computes no others.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import TorchDispatchMode

from hotbed.tables.module import EmbeddingTables


class StepInspector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called, those whose results the host waits for, and those that work on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.calls: list[str] = []  # with shapes and numbers
        self.reads: set[str] = set()
        self.elsewhere: set[str] = set()  # with a tensor of another device, or by other processes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        given = list(_flat((args, kwargs or {})))
        self.calls.append(f"{name}({', '.join(map(_described, given))})")
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.reads.add(name)
        tensors = [one for one in (*given, *_flat(out)) if isinstance(one, Tensor)]
        if "c10d" in func.namespace or any(one.device != self._device for one in tensors):
            self.elsewhere.add(name)
        return out

    def why_not(self, who: str) -> str | None:
        """What cannot be replayed of what was called."""
        if self.reads:
            return f"{who} reads numbers back to the host ({', '.join(sorted(self.reads))})"
        if self.elsewhere:
            return f"{who} computes with tensors that are not on {self._device} ({', '.join(sorted(self.elsewhere))})"
        return None


def why_not_same(calls: list[str], before: list[str]) -> str | None:
    """What two steps of one kind called, where it differs."""
    if calls == before:
        return None
    pairs = zip([*calls, "nothing"], [*before, "nothing"])
    now, then = next((one, other) for one, other in pairs if one != other)
    return f"two steps on batches of the same shapes computed different things: {then[:200]}, then {now[:200]}"


def why_not_changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """What a step changed of the Python objects that it may read."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return f"the step changes {', '.join(names[:3])} in Python" if names else None


def random_states() -> dict[str, Any]:
    """States of the generators that Python code may draw from."""
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}


def why_not_gradients(
    loss: Tensor, model: nn.Module, parts: Iterable[Tensor], own: Iterable[Tensor], weights: Iterable[Tensor]
) -> str | None:
    """What a recording would give no gradient to: own are leaves in the place of the vectors."""
    learned = {id(weight) for weight in weights}
    known = learned | {id(one) for one in own}
    for leaf in _leaves_of(loss):
        if id(leaf) not in known:
            name = next(
                (name for name, one in model.named_parameters() if one is leaf), "a tensor outside of the model"
            )
            return f"{name} gets a gradient and is not a weight of the optimizer; add it there, or call requires_grad_(False)"
    if any(id(leaf) in learned for part in parts for leaf in _leaves_of(part)):
        return (
            "weights of the optimizer are used before the step, to make the vectors; use them in the model or the loss"
        )
    return None


def why_not_optimizer(optimizer: Any) -> str | None:
    """Why the step of an optimizer cannot be recorded."""
    if optimizer is None:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks"
    if all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return None
    return f"{type(optimizer).__name__} runs in part on the host; make it with fused=True or capturable=True"


def why_not_hooks(model: nn.Module, loss: Any, weights: Iterable[Tensor]) -> str | None:
    """What would not be called in a replay, or cannot be looked at."""
    if hasattr(loss, "_torchdynamo_orig_callable"):
        return "the loss is compiled by torch.compile"
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingTables):
            return f"the model looks rows up itself ({path or 'model'}); look them up before the step"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return f"the model is reduced over processes ({path or 'model'} is a DistributedDataParallel)"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return f"module {path or 'model'} is compiled by torch.compile"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            return f"module {path or 'model'} has hooks"
    if any(
        getattr(_modules, f"_global_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre")
    ):
        return "there are hooks of all modules"
    hooked = any(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights)
    return "a dense weight has hooks" if hooked else None


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """All that gets a gradient from it."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    todo, seen, found = [tensor.grad_fn], {tensor.grad_fn}, []
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= new
        todo += new
    return found


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    simple = isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, type(None)))
    return repr(value) if simple else type(value).__name__
