"""The dense part of a training step as one CUDA graph: model, loss, gradients, and the optimizer of the dense weights.

    step = hotbed.compile_step(model, optimizer)
    for batch in hotbed.prefetch(loader, tables):
        loss = step(tables(batch.ids), batch.dense, batch.labels)

Launched one by one these take Python 2 to 4 ms, longer than the GPU works on them. The first steps of a kind run as they are;
then they are recorded, and replayed from then on: the same kernels on the same numbers, so the same bits. The kind of a step
(step_kind.py) is all that its Python code reads, as far as that can be followed. Where it changes, the step runs as it is, and
is recorded anew when the new kind has come a few times. Learning rates of fused optimizers may change with every step; on CUDA
they are rounded to float32, recorded or not.

What cannot be replayed is not recorded (step_inspection.py), and `why_not` says what it is. Some things cannot be seen, and
happen when a step is recorded but not when it is replayed: Python code that reads the time or a file, writes a log, or takes a
number from an object of another library. A number that changes must be an input of the step: a tensor on the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.errors import HotbedError
from hotbed.train.step_inspection import (
    StepInspector,
    random_states,
    why_not_changed,
    why_not_gradients,
    why_not_hooks,
    why_not_optimizer,
    why_not_same,
)
from hotbed.train.step_kind import NotRecordableError, PythonState, has_live_rate, shape_of, tensors_of, torch_settings
from hotbed.train.step_recording import Loss, Recording, Vectors, backward, outputs_of, rounded

_log = logging.getLogger("hotbed.train")
_WHERE = "cuda"  # steps are recorded
_OFTEN = 4  # steps of a kind that run as they are; the last two of them are looked at
_MOST = 4  # recordings that are kept
_IDLE = 64  # steps after which a recording that was not replayed may go
_KINDS = 256  # kinds that are counted


def binary_loss(model: nn.Module, vectors: Vectors, *inputs: Any) -> tuple[Tensor, Tensor]:
    """(mean log loss, logits) of model(vectors, *inputs but the last), which are the labels."""
    *others, labels = inputs
    logits = model(vectors, *others)
    return F.binary_cross_entropy_with_logits(logits, labels), logits


def compile_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, loss: Loss = binary_loss) -> CompiledStep:
    """A function step(vectors, *inputs) that trains the model and, through the vectors, the rows, and gives the loss.

    Inputs are tensors on the device, numbers, strings or None. Gradients of the dense weights are those of the last step, in
    memory that the next step overwrites. One thread at a time may call it.

    Arguments:
        model: its dense weights, on the device of the tables.
        optimizer: of the dense weights, `fused=True` or `capturable=True`; None where there are none.
        loss: is called with (model, vectors, *inputs) and gives the loss, or a tuple that starts with it. A weight of a term
            that is annealed must be an input of the step, as a tensor on the device. As a Python number it makes every step a
            kind of its own, which is never recorded; hidden in an object of another library, its change is not seen at all.
    """
    return CompiledStep(model, optimizer, loss)


class _Count(NamedTuple):
    """The count of a kind that is not recorded."""

    steps: int
    calls: list[str]  # operators, of the step that was looked at


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
        self.say: Callable[[str], None] = _log.warning  # called once
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._seen: dict[Any, _Count] = {}  # the kind that came first is first
        self._recorded: dict[Any, Recording] = {}  # the one used longest ago first
        self._python: PythonState | None = None
        self._num_steps = 0
        self._running = threading.Lock()

    def __reduce__(self) -> Any:
        """A copy has no recordings: they hold for the memory of these weights."""
        return CompiledStep, (self._model, self._optimizer, self._loss), {"why_not": self.why_not}

    @property
    def num_recorded(self) -> int:
        """Recordings that are kept."""
        return len(self._recorded)

    def __call__(self, vectors: Vectors, *inputs: Any) -> Tensor:
        return self.run(vectors, *inputs)[0]

    def run(self, vectors: Vectors, *inputs: Any) -> tuple[Tensor, ...]:
        """One step; all that the loss function gave, detached."""
        if not self._running.acquire(blocking=False):
            raise HotbedError("a compiled step was called while it runs, by another thread or by its own loss function")
        try:
            parts = tensors_of(vectors)
            if self.why_not is not None or not parts or parts[0].device.type != _WHERE:
                return self._as_it_is(vectors, inputs)
            self._num_steps += 1
            try:
                kind = self._kind_of(vectors, inputs)
            except NotRecordableError as error:
                self._refuse(str(error))
                return self._as_it_is(vectors, inputs)
            found = self._recorded.pop(kind, None)
            if found is None:
                return self._count(kind, vectors, inputs)
            self._recorded[kind] = found
            found.last_used = self._num_steps
            return found.replay(self._groups, parts, inputs)
        finally:
            self._running.release()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for group in self._groups for weight in group["params"]]

    def _kind_of(self, vectors: Vectors, inputs: tuple[Any, ...]) -> Any:
        """Everything that a recording depends on."""
        parts = tensors_of(vectors)
        device = parts[0].device
        names = tuple(vectors) if isinstance(vectors, Mapping) else None
        shapes = [shape_of(0, part, device) for part in parts]
        shapes += [shape_of(place, one, device) for place, one in enumerate(inputs, 1)]
        if self._python is None:
            self._python = PythonState(model=self._model, optimizer=self._optimizer, loss=self._loss)
        return names, tuple(shapes), torch_settings(), self._python.key()

    def _count(self, kind: Any, vectors: Vectors, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """A step of a kind that is not recorded: as it is, unless it has come often enough."""
        steps, calls = self._seen.get(kind, (0, []))
        if steps < _OFTEN:
            if steps < _OFTEN - 2:
                outputs = self._as_it_is(vectors, inputs)
            else:
                outputs, calls = self._inspected(vectors, inputs, calls)
            self._seen[kind] = _Count(steps + 1, calls)
            self._forget_kinds()
            return outputs
        oldest = next(iter(self._recorded), None)
        if len(self._recorded) >= _MOST and oldest is not None:
            if self._recorded[oldest].last_used > self._num_steps - _IDLE:
                return self._as_it_is(vectors, inputs)
            del self._recorded[oldest]
        found = self._record(kind, vectors, inputs)
        if found is None:
            return self._as_it_is(vectors, inputs)
        del self._seen[kind]
        self._recorded[kind] = found
        found.last_used = self._num_steps
        return found.replay(self._groups, tensors_of(vectors), inputs)

    def _forget_kinds(self) -> None:
        if len(self._seen) <= _KINDS:
            return
        if self._recorded:
            del self._seen[next(iter(self._seen))]
        else:
            self._refuse(
                f"{_KINDS} kinds of steps have come, none of them often: shapes or numbers among the inputs, attributes of the "
                "model or settings of the optimizer are different in almost every step"
            )

    def _as_it_is(self, vectors: Vectors, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        self._forget_gradients()
        outputs = outputs_of(self._loss(self._model, vectors, *inputs))
        outputs[0].backward()  # type: ignore[no-untyped-call]
        self._move(outputs[0].device)
        return tuple(output.detach() for output in outputs)

    def _forget_gradients(self) -> None:
        torch.clear_autocast_cache()  # of weights as they were, where autocast is entered around several steps
        for weight in self._weights:
            weight.grad = None

    def _move(self, device: torch.device) -> None:
        """The dense weights, against their gradients."""
        if self._optimizer is None:
            return
        live = [group for group in self._groups if device.type == _WHERE and has_live_rate(group)]
        rates = [group["lr"] for group in live]
        try:
            for group in live:
                group["lr"] = rounded(group["lr"])
            self._optimizer.step()
        finally:
            for group, rate in zip(live, rates):
                group["lr"] = rate

    def _inspected(
        self, vectors: Vectors, inputs: tuple[Any, ...], calls: list[str]
    ) -> tuple[tuple[Tensor, ...], list[str]]:
        """A step as it is, and whether it can be recorded: with what it called, and what the one before did, if any."""
        parts, weights = tensors_of(vectors), self._weights
        self._refuse(why_not_optimizer(self._optimizer) or why_not_hooks(self._model, self._loss, weights))
        if self.why_not is not None:
            return self._as_it_is(vectors, inputs), []
        python = PythonState(model=self._model, optimizer=self._optimizer, loss=self._loss)
        before = {**python.facts(), **random_states()}
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in parts]
        copies = [leaf.clone() for leaf in leaves]  # the model may change them in place
        own = dict(zip(vectors, copies)) if isinstance(vectors, Mapping) else copies[0]
        versions = [one._version for one in inputs if isinstance(one, Tensor)]
        model, optimizer = StepInspector(parts[0].device), StepInspector(parts[0].device)
        self._forget_gradients()
        with model:
            outputs = outputs_of(self._loss(self._model, own, *inputs))
            reason = why_not_gradients(outputs[0], self._model, parts, leaves, weights)
            outputs[0].backward()  # type: ignore[no-untyped-call]
        backward(parts, [leaf.grad for leaf in leaves])
        with optimizer:
            self._move(parts[0].device)
        if versions != [one._version for one in inputs if isinstance(one, Tensor)]:
            reason = reason or "the model or the loss changes an input in place"
        self._refuse(
            reason
            or model.why_not("the model or the loss")
            or optimizer.why_not("the optimizer")
            or why_not_changed(before, {**python.facts(), **random_states()})
            or (why_not_same(model.calls, calls) if calls else None)
        )
        return tuple(output.detach() for output in outputs), model.calls

    def _record(self, kind: Any, vectors: Vectors, inputs: tuple[Any, ...]) -> Recording | None:
        try:
            with torch.cuda.device(tensors_of(vectors)[0].device):
                pool = next((one.pool for one in self._recorded.values()), None)  # of a recording that lives
                found = Recording(self._model, self._optimizer, self._loss, self._weights, vectors, inputs, pool)
        except Exception as error:  # the model's code may raise anything
            text = (str(error).strip().splitlines() or [""])[0][:200]
            self._refuse(f"recording it failed ({type(error).__name__}: {text})")
            return None
        finally:
            self._forget_gradients()
        if self._kind_of(vectors, inputs) != kind:
            self._refuse("the model, the loss or the optimizer changes Python objects when it is recorded")
            return None
        return found

    def _refuse(self, reason: str | None) -> None:
        if reason is None:
            return
        self.why_not = reason
        self._recorded.clear()
        self._seen.clear()
        self._python = None
        self.say(f"the dense part of a step is launched kernel by kernel and not replayed as one CUDA graph: {reason}")
