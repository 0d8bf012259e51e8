"""One batch in, one update of rows and dense weights out.

The rows are updated inside backward, by the optimizer fused into the tables; the dense weights by torch.optim after it.
Nothing here waits for the device.

The loss of several tasks is log loss or squared error per task, weighted by task and by sample:
loss = sum over tasks of weight_t * mean over samples of weight_b * loss_t(logit, label). The mean divides by the number of
samples, not by the sum of their weights, so a batch divided among ranks has the same loss.

A positive that counts w times multiplies the odds that are learned by w. log(w) is added to the logits in the loss alone, so
its logits, which are returned, are those of the log as it is: p = q / (q + (1 - q) w) of the weighted probability q.

A log of which a share s of the negatives was kept has its odds multiplied by 1 / s. -log(s) is added to the logits of the label
in the loss alone, so the model learns the logits of the whole log. Negatives are sampled by the label only, so further tasks
learn the sampled log. The loss adds it in training and in eval mode, since a batch of one sample is trained in eval mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.data.schema import Task
from hotbed.models import block_of
from hotbed.optim import KStepAdam
from hotbed.parallel.world import ALONE, World
from hotbed.pipeline import prefetch
from hotbed.tables.module import EmbeddingTables
from hotbed.telemetry.clock import DENSE, LOOK_UP, MODEL, OTHER
from hotbed.train.compiled_step import CompiledStep, binary_loss
from hotbed.train.step_recording import Loss, Vectors
from hotbed.types import Batch


class StepResult(NamedTuple):
    """The result of one training step, still on the device."""

    loss: Tensor  # [], the mean over the samples of this rank
    logits: Tensor  # [B]


@dataclass(frozen=True)
class Learner:
    """All that learns: rows, dense weights, and the optimizer of the latter (absent when there are none)."""

    tables: EmbeddingTables
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    dense_lr: float
    device: torch.device
    window: int | None = None  # batches planned together; None is automatic
    look_ahead: int | None = None  # batches whose ids are known before they are planned
    hot: tuple[Tensor, Tensor] | None = None  # int64: keys, ascending, and uses of the rows that a cache starts with
    world: World = ALONE  # the ranks that learn together
    watch: Callable[[Batch, Tensor], None] | None = None  # called with a batch and its vectors before the backward pass
    compiled: CompiledStep | None = None  # of the dense part, where it may be recorded
    loss: Loss = binary_loss  # as `compiled` has it
    sampled_shift: float = (
        0.0  # what the loss adds to the logits of the label, because train has a share of its negatives
    )

    def warm(self) -> None:
        """Bring the rows in that the cache starts with; loading rows forgets them."""
        if self.hot is not None:
            self.tables.warm(*self.hot)

    def ahead(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The batches on the device, their rows brought in ahead of need; close it before closing `batches`."""
        yield from prefetch(_Pass(batches), self.tables, window=self.window, look_ahead=self.look_ahead)

    def step(self, batch: Batch, global_size: int | None = None) -> StepResult:
        """Look up, score, and move rows and dense weights against the gradient of the mean loss.

        `global_size`: samples of all ranks together, of which this batch is a part, maybe an empty one.
        """
        # Batch norm knows no variance of a single sample: such a last batch is scored as in evaluation, and still learned.
        clock = self.tables.clock
        clock.step()
        self._set_mode(batch.size > 1)
        clock.enter(LOOK_UP)
        found = self.tables(batch.ids, batch.bags or None)
        clock.enter(MODEL)
        vectors, lengths = block_of(found, self.sequences, batch.bags)
        inputs = (batch.dense,) if lengths is None else (batch.dense, lengths)
        if global_size is not None:  # rows get the sum over ranks of their gradients
            share = batch.size / global_size
            vectors.register_hook(lambda grad: grad * share)  # type: ignore[no-untyped-call]
        if self.watch is not None:
            self.watch(batch, vectors)
        labels = _labels_of(batch)
        if self.compiled is not None and batch.size:
            loss, logits = self.compiled.run(vectors, *inputs, *labels)
            clock.enter(OTHER)
            return StepResult(loss, first_task(logits))
        if batch.size:
            loss, logits = self.loss(self.model, vectors, *inputs, *labels)
        else:  # other ranks wait for the gradients of no rows
            logits = batch.labels
            loss = vectors.sum()
        if self.optimizer is not None:
            _forget_gradients(self.optimizer)
        loss.backward()  # type: ignore[no-untyped-call]
        clock.enter(DENSE)
        if isinstance(self.optimizer, KStepAdam):
            self.optimizer.step(weight=batch.size)
        elif self.optimizer is not None:
            self.optimizer.step()
        clock.enter(OTHER)
        return StepResult(loss.detach(), first_task(logits.detach()))

    def merge(self) -> None:
        """Let all ranks have the same dense weights and running statistics, where they differ."""
        if isinstance(self.optimizer, KStepAdam):
            self.optimizer.merge()

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Logits [B], or [B, T] of a model of several tasks, with nothing learned."""
        self._set_mode(False)
        vectors, lengths = block_of(self.tables(batch.ids, batch.bags or None), self.sequences, batch.bags)
        return self.model(vectors, batch.dense, *([] if lengths is None else [lengths])) if batch.size else batch.labels

    @property
    def sequences(self) -> dict[str, int]:
        """The features whose vectors the model reads one by one, and their greatest length."""
        return getattr(self.model, "sequences", {})

    def _set_mode(self, training: bool) -> None:
        if self.model.training != training:  # torch takes 10 us for every layer, also where nothing changes
            self.model.train(training)

    def set_rate(self, factor: float) -> None:
        """Multiply the configured learning rates of rows and dense weights by `factor` for the steps that follow."""
        if self.tables.lr_factor != factor:
            self.tables.lr_factor = factor
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.dense_lr * factor


def _labels_of(batch: Batch) -> tuple[Tensor, ...]:
    """What the loss takes: labels [B], or [B, T] of all tasks, then weights [B] where samples have some."""
    labels = batch.labels
    if batch.targets is not None:
        labels = torch.cat([labels.unsqueeze(1), batch.targets], dim=1)
    return (labels,) if batch.weights is None else (labels, batch.weights)


class _Pass:
    """Batches of which nobody reads the rest when a loop over them is left: nothing that was read ahead is kept."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def _forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """What zero_grad does, without its 40 us of hooks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@contextmanager
def repeatable() -> Iterator[None]:
    """Only kernels that give the same bits on every run; torch's filling of fresh memory, a debugging aid, stays off."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to run in this mode without it
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def task_loss(
    kinds: Sequence[str] = ("binary",),
    weights: Sequence[float] = (),
    *,
    weighted: bool = False,
    positives: Sequence[float] = (),
    kept: float = 1.0,
) -> Loss:
    """A loss for `compile_step`: called with (model, vectors, *inputs, labels), and sample weights last if `weighted`.

    `labels` is [B], or [B, T] for T tasks of these `kinds`. A model that returns one logit per sample learns the first task.
    `positives`: by task, how many times a sample with the label 1 counts. `kept`: the share of the negatives of the first task
    that are in the log.
    """
    kinds, factors = tuple(kinds), tuple(weights) or (1.0,) * len(kinds)
    times = tuple(positives) or (1.0,) * len(kinds)
    shifts = (sampled_shift(kept), *(0.0 for _ in kinds[1:]))

    def loss(model: nn.Module, vectors: Vectors, *inputs: Any) -> tuple[Tensor, Tensor]:
        *others, labels = inputs[:-1] if weighted else inputs
        logits: Tensor = model(vectors, *others)
        of_sample = inputs[-1] if weighted else None
        if logits.dim() == 1:
            first = labels if labels.dim() == 1 else labels[:, 0]
            return _one(_moved(logits, shifts[0]), first, kinds[0], of_sample, times[0]), logits
        found = [
            factor * _one(_moved(logits[:, number], shift), labels[:, number], kind, of_sample, positive)
            for number, (kind, factor, positive, shift) in enumerate(zip(kinds, factors, times, shifts))
        ]
        return torch.stack(found).sum(), logits

    return loss


def sampled_shift(kept: float) -> float:
    """How much the log odds of a positive gain if a share `kept` of the negatives is kept."""
    return -math.log(kept) if kept != 1 else 0.0


def positive_weights(given: float | Mapping[str, Any], labels: Sequence[Task]) -> dict[str, float]:
    """By label, how many times a positive counts; a number is that of the first label."""
    named = given if isinstance(given, Mapping) else {labels[0].name: given}
    return {task.name: named.get(task.name, 1.0) for task in labels}


def positive_problems(given: float | Mapping[str, Any], labels: Sequence[Task], data: str) -> list[str]:
    """What is wrong with the setting train.positive_weight."""
    kind_of, problems = {task.name: task.kind for task in labels}, []
    for name, weight in (given if isinstance(given, Mapping) else {labels[0].name: given}).items():
        if name not in kind_of:
            problems.append(f"{data} has no label {name!r}; there are {', '.join(kind_of)}")
        elif kind_of[name] != "binary":
            problems.append(f"{name} is a number to predict and has no positives")
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            problems.append(f"the weight of {name} must be a number above 0, not {weight!r}")
    return [f"train.positive_weight: {one}" for one in problems]


def _moved(logits: Tensor, shift: float) -> Tensor:
    return logits + shift if shift else logits


def _one(logits: Tensor, labels: Tensor, kind: str, weights: Tensor | None, positive: float) -> Tensor:
    """The mean loss of one task."""
    if positive != 1:
        counted = 1 + (positive - 1) * labels
        weights = counted if weights is None else counted * weights
        logits = logits + math.log(positive)
    one = F.binary_cross_entropy_with_logits if kind == "binary" else F.mse_loss
    return one(logits, labels) if weights is None else (one(logits, labels, reduction="none") * weights).mean()


def first_task(logits: Tensor) -> Tensor:
    """Logits [B] of the label, of a model that returns [B] or [B, T]."""
    return logits if logits.dim() == 1 else logits[:, 0]
