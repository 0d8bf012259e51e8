"""The dense part of a training step as one CUDA graph: model, loss, gradients, and the optimizer of the dense weights.

    step = hotbed.compile_step(model, optimizer)
    for batch in hotbed.prefetch(loader, tables):
        loss = step(tables(batch.ids), batch.dense, batch.labels)

Launched one by one these take Python 2 to 4 ms, longer than the GPU works on them. The first steps of a kind of batch run as
they are; then they are recorded, and replayed from then on: the same kernels on the same numbers, so the same bits. A recording
holds for the shapes of its inputs, the modes of the model's modules, the settings of the optimizer and the memory of weights
and states; where one of these is another, the step runs as it is, and is recorded anew when that has come a few times. Learning
rates may change with every step.

What cannot be replayed is not recorded, and `why_not` says what it is: a model that reads numbers back to the host, calls
hooks, draws random numbers in Python or counts in attributes of its own; an optimizer that is neither fused nor capturable.
What else a model's Python code does happens when a step is recorded and not again: time, files, global variables.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hotbed.errors import ShapeError
from hotbed.ops.recording import recording
from hotbed.tables.module import EmbeddingTables

_log = logging.getLogger("hotbed.train")
_OFTEN = 4  # steps of a kind that run as they are; the last of them is looked at
_MOST = 4  # recordings that are kept
_SIMPLE = (bool, int, float, str, tuple, type(None))

Loss = Callable[..., Tensor | tuple[Tensor, ...]]
Vectors = Tensor | Mapping[str, Tensor]


def binary_loss(model: nn.Module, vectors: Vectors, *inputs: Any) -> tuple[Tensor, Tensor]:
    """(mean log loss, logits) of model(vectors, *inputs but the last), which are the labels."""
    *others, labels = inputs
    logits = model(vectors, *others)
    return F.binary_cross_entropy_with_logits(logits, labels), logits


def compile_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loss: Loss = binary_loss
) -> Callable[..., Tensor]:
    """A function step(vectors, *inputs) that trains the model and, through the vectors, the rows, and gives the loss.

    Arguments:
        model: its dense weights, on the device of the tables.
        optimizer: of the dense weights, `fused=True` or `capturable=True`; None where there are none.
        loss: is called with (model, vectors, *inputs) and gives the loss, or a tuple that starts with it.
    """
    return CompiledStep(model, optimizer, loss)


class CompiledStep:
    """Runs steps as they are, until they are recorded; on a CPU always."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss = binary_loss,
        *,
        records: bool = True,
    ) -> None:
        self.why_not = None if records else "it was switched off"  # why nothing is recorded any more
        self.say: Callable[[str], None] = _log.warning  # told of it, once
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._weights = (
            [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]
        )
        self._seen: dict[Any, int] = {}
        self._recorded: dict[Any, _Recording] = {}  # the one used longest ago first
        self._pool: Any = None

    @property
    def num_recorded(self) -> int:
        """Recordings that are kept."""
        return len(self._recorded)

    def __call__(self, vectors: Vectors, *inputs: Any) -> Tensor:
        return self.run(vectors, *inputs)[0]

    def run(self, vectors: Vectors, *inputs: Any) -> tuple[Tensor, ...]:
        """One step; all that the loss function gave, detached."""
        parts = list(vectors.values()) if isinstance(vectors, Mapping) else [vectors]
        if self.why_not is not None or not parts or parts[0].device.type != "cuda":
            return self._as_it_is(vectors, inputs)
        kind = self._kind_of(vectors, parts, inputs)
        found = self._recorded.pop(kind, None)
        if found is None:
            seen = self._seen[kind] = self._seen.get(kind, 0) + 1
            if seen < _OFTEN:
                return self._as_it_is(vectors, inputs)
            if seen == _OFTEN:
                return self._looked_at(vectors, inputs)
            found = self._record(vectors, inputs)
            if found is None:
                return self._as_it_is(vectors, inputs)
            while len(self._recorded) >= _MOST:
                del self._recorded[next(iter(self._recorded))]
        self._recorded[kind] = found
        return found.replay(parts, inputs)

    def _as_it_is(self, vectors: Vectors, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        for weight in self._weights:
            weight.grad = None
        outputs = _outputs(self._loss(self._model, vectors, *inputs))
        outputs[0].backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            rates = [group["lr"] for group in self._optimizer.param_groups]
            try:
                for group in self._optimizer.param_groups:
                    group["lr"] = _rounded(group["lr"]) if group.get("fused") else group["lr"]
                self._optimizer.step()
            finally:
                for group, rate in zip(self._optimizer.param_groups, rates):
                    group["lr"] = rate
        return tuple(output.detach() for output in outputs)

    def _looked_at(self, vectors: Vectors, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """A step as it is, and whether it can be recorded."""
        before, reads = _facts_of(self._model), _Reads()
        with reads:
            outputs = self._as_it_is(vectors, inputs)
        changed = [
            name for name, value in _facts_of(self._model).items() if name not in before or before[name] != value
        ]
        reason = _why_not_optimizer(self._optimizer) or _why_not_hooks(self._model, self._weights)
        if reason is None and reads.found:
            reason = f"the model or the loss reads numbers back to the host ({', '.join(sorted(reads.found))})"
        if reason is None and changed:
            reason = f"the model changes {', '.join(changed[:3])} in Python from step to step"
        self._refuse(reason)
        return outputs

    def _record(self, vectors: Vectors, inputs: tuple[Any, ...]) -> _Recording | None:
        try:
            found = _Recording(self._model, self._optimizer, self._loss, self._weights, vectors, inputs, self._pool)
        except Exception as error:  # the model's code may raise anything
            self._refuse(f"recording it failed ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})")
            return None
        self._pool = found.pool
        return found

    def _refuse(self, reason: str | None) -> None:
        if reason is None:
            return
        self.why_not = reason
        self._recorded.clear()
        self.say(f"the dense part of a step is launched kernel by kernel and not replayed as one CUDA graph: {reason}")

    def _kind_of(self, vectors: Vectors, parts: list[Tensor], inputs: tuple[Any, ...]) -> Any:
        """All that a recording holds for."""
        names = tuple(vectors) if isinstance(vectors, Mapping) else ()
        shapes = tuple(_shape_of(each) for each in (*parts, *inputs))
        modes = tuple(module.training for module in self._model.modules())
        memory = [
            weight.data_ptr() if weight.requires_grad else -weight.data_ptr() for weight in self._model.parameters()
        ]
        memory += [buffer.data_ptr() for buffer in self._model.buffers()]
        settings: list[Any] = [torch.are_deterministic_algorithms_enabled()]
        if torch.is_autocast_enabled("cuda"):
            settings.append(torch.get_autocast_dtype("cuda"))
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                fused = group.get("fused")
                settings += [
                    value for name, value in group.items() if name != "params" and not (fused and name == "lr")
                ]
            for state in self._optimizer.state.values():
                memory += [value.data_ptr() for value in state.values() if isinstance(value, Tensor)]
        return names, shapes, modes, tuple(memory), tuple(settings)


class _Recording:
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
        own = {name: _twin(part) for name, part in vectors.items()} if isinstance(vectors, Mapping) else _twin(vectors)
        self._parts: list[Tensor] = list(own.values()) if isinstance(own, dict) else [own]
        self._inputs = [torch.empty_like(one) if isinstance(one, Tensor) else one for one in inputs]
        self._weights = weights
        self._groups = groups = [] if optimizer is None else optimizer.param_groups
        before = [dict(group) for group in groups]
        device = self._parts[0].device
        self._filled: list[Any] = [_rounded(group["lr"]) if group.get("fused") else None for group in groups]
        self._rates = [None if rate is None else torch.tensor(rate, device=device) for rate in self._filled]
        learned = [one for one in (*self._parts, *weights) if one.requires_grad]
        copy_all(self._parts, _tensors(vectors))
        copy_all(self._inputs, inputs)
        try:
            torch.clear_autocast_cache()
            for group, rate in zip(groups, self._rates):
                group.update({} if rate is None else {"lr": rate})
                group.update({"capturable": True} if "capturable" in group else {})
            with recording(pool) as self._graph:
                self._outputs = _outputs(loss(model, own, *self._inputs))
                grads = torch.autograd.grad(self._outputs[0], learned, allow_unused=True)
                by_weight = dict(zip(map(id, learned), grads))
                self._grads = [by_weight.get(id(part)) for part in self._parts]
                self._weight_grads = [by_weight.get(id(weight)) for weight in weights]
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

    def replay(self, parts: list[Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        copy_all(self._parts, parts)
        copy_all(self._inputs, inputs)
        for place, (rate, group) in enumerate(zip(self._rates, self._groups)):
            if rate is not None and _rounded(group["lr"]) != self._filled[place]:
                self._filled[place] = _rounded(group["lr"])
                rate.fill_(self._filled[place])
        self._graph.replay()
        self._give_gradients()
        roots = [(part, grad) for part, grad in zip(parts, self._grads) if grad is not None]
        if roots:
            torch.autograd.backward([part for part, _ in roots], [grad for _, grad in roots])
        return tuple(output.clone() for output in self._outputs)

    def _give_gradients(self) -> None:
        """Where another step, or somebody else, has put others in their place."""
        if any(weight.grad is not grad for weight, grad in zip(self._weights, self._weight_grads)):
            for weight, grad in zip(self._weights, self._weight_grads):
                weight.grad = grad


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators whose results the host must wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        leaves = isinstance(out, Tensor) and out.device.type == "cpu" and any(_on_cuda(one) for one in args)
        if waits or leaves:
            self.found.add(func.name().removeprefix("aten::"))
        return out


def copy_all(targets: Iterable[Any], sources: Iterable[Any]) -> None:
    """Every tensor into its twin; all else is equal in both."""
    pairs = [(to, of.detach()) for to, of in zip(targets, sources, strict=True) if isinstance(to, Tensor)]
    with torch.no_grad():
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)


def _twin(part: Tensor) -> Tensor:
    return torch.empty_like(part, requires_grad=part.requires_grad)


def _tensors(vectors: Vectors) -> list[Tensor]:
    return list(vectors.values()) if isinstance(vectors, Mapping) else [vectors]


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    if not outputs or outputs[0].ndim:
        shape = list(outputs[0].shape) if outputs else "nothing"
        raise ShapeError(
            f"the loss function of compile_step gave {shape}; it must give one number, or a tuple that starts with it"
        )
    return outputs


def _on_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _shape_of(value: Any) -> Any:
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


def _rounded(rate: Any) -> Any:
    """As a float32, which is what a recording reads it as."""
    return float(np.float32(rate)) if isinstance(rate, (float, int)) else rate


def _facts_of(model: nn.Module) -> dict[str, Any]:
    """What a step may change in Python: attributes of modules, and the generators of random numbers."""
    facts: dict[str, Any] = {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, _SIMPLE) and name != "training":
                facts[f"{path}.{name}".lstrip(".")] = value
    return facts


def _why_not_optimizer(optimizer: torch.optim.Optimizer | None) -> str | None:
    if optimizer is None:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks"
    if all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return None
    return f"{type(optimizer).__name__} counts its steps on the host; make it with fused=True or capturable=True"


def _why_not_hooks(model: nn.Module, weights: list[nn.Parameter]) -> str | None:
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingTables):
            return f"the model looks rows up itself ({path or 'model'}); look them up before the step"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            return f"module {path or 'model'} has hooks"
    hooked = any(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights)
    return "a dense weight has hooks" if hooked else None
