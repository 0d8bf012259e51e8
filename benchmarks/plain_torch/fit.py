"""The training loop of the twin: batches in, a trained twin and what it cost out. Plain on purpose."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.plain_torch.twin import PlainTwin
from hotbed.train.metrics import Metrics, measure
from hotbed.types import Batch

Batches = Callable[[int], Iterable[Batch]]  # of one epoch


@dataclass(frozen=True)
class Settings:
    """How the twin is trained; names and meanings are those of hotbed's run files."""

    epochs: int = 1
    optimizer: str = "adam"
    lr: float = 1e-3
    dense_lr: float = 1e-3
    l2: float = 0.0  # on whole tables
    plateau_factor: float = 1.0
    patience: int = 0


class Fit(NamedTuple):
    """What a training run cost and saw."""

    epochs: int
    samples: int
    seconds: float  # in training steps and reading alone, evaluations excluded
    valid_auc: list[float]  # after each epoch; empty without a valid split


def fit(twin: PlainTwin, train: Batches, valid: Batches | None, settings: Settings) -> Fit:
    """Train; with a valid split, keep the weights of its best AUC, lower the rate when it stalls, stop early."""
    if settings.l2 and twin.sparse:
        raise ValueError("l2 on whole tables needs gradients of whole tables: sparse must be False")
    optimizers = twin.optimizers(settings.optimizer, lr=settings.lr, dense_lr=settings.dense_lr)
    best_state, best_auc, stalled = None, -1.0, 0
    seconds, samples, valid_auc = 0.0, 0, []
    for epoch in range(settings.epochs):
        start = time.perf_counter()
        samples += _train_epoch(twin, train(epoch), optimizers, settings.l2)
        seconds += time.perf_counter() - start
        if valid is None:
            continue
        valid_auc.append(evaluate(twin, valid(0)).auc)
        if valid_auc[-1] > best_auc:
            best_auc, stalled = valid_auc[-1], 0
            best_state = copy.deepcopy(twin.state_dict())
            continue
        stalled += 1
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= settings.plateau_factor
        if stalled == settings.patience:
            break
    if best_state is not None:
        twin.load_state_dict(best_state)
    return Fit(epoch + 1, samples, seconds, valid_auc)


def _train_epoch(twin: PlainTwin, batches: Iterable[Batch], optimizers: list[torch.optim.Optimizer], l2: float) -> int:
    twin.train()
    samples = 0
    for batch in batches:
        loss = F.binary_cross_entropy_with_logits(twin(batch.ids, batch.dense), batch.labels)
        if l2:
            loss = loss + twin.l2_loss(l2)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        samples += batch.size
    return samples


@torch.no_grad()
def evaluate(twin: PlainTwin, batches: Iterable[Batch]) -> Metrics:
    """AUC, log loss and the rest over all batches."""
    twin.eval()
    labels, logits = [], []
    for batch in batches:
        labels.append(batch.labels.cpu().numpy())
        logits.append(twin(batch.ids, batch.dense).cpu().numpy())
    return measure(np.concatenate(labels), np.concatenate(logits))
