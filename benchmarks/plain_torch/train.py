"""Train the twin of a hotbed model on a dataset directory: `python -m benchmarks.plain_torch.train DATASET --model deepfm`.

It reads the batches hotbed's loader yields, in the same order for the same seed, and prints one JSON object: settings,
metrics of the test split, samples per second. Bags are not supported.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.plain_torch.twin import PlainTwin
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.loader.loader import Loader
from hotbed.train.metrics import Metrics, measure
from hotbed.types import Batch

EVAL_BATCH = 16384


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    dataset = resolve(arguments.dataset)
    schema = dataset.schema
    if any(feature.multi for feature in schema.features):
        raise SystemExit("the plain twin reads single-valued features only; this dataset has bags")
    twin = PlainTwin(
        arguments.model,
        [feature.rows for feature in schema.features],
        arguments.dim,
        len(schema.dense),
        arguments.options,
        sparse=arguments.sparse,
        init_std=arguments.init_std,
    ).to(arguments.device)
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    read = Reader(dataset, arguments.batch_size, arguments.seed, arguments.device)
    done = fit(twin, read.train, read.split("valid"), settings)
    test = evaluate(twin, (read.split("test") or read.split("valid") or read.train)(0))
    print(
        json.dumps(
            {
                **vars(arguments),
                "parameters": sum(parameter.numel() for parameter in twin.parameters()),
                "test": test._asdict(),
                "fit": done._asdict(),
                "samples_per_s": done.samples / done.seconds,
            }
        )
    )


class Reader:
    """Batches of a dataset, ids brought into their tables."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, device: str) -> None:
        self.dataset = dataset
        self.device = device
        self.rows = torch.tensor([feature.rows for feature in dataset.schema.features])
        self.hashed = any(feature.mode == "hash" for feature in dataset.schema.features)
        self.loader = Loader(dataset, "train", batch_size=batch_size, shuffle=True, seed=seed)

    def train(self, epoch: int) -> Iterator[Batch]:
        return self._prepared(self.loader.epoch(epoch))

    def split(self, name: str) -> Batches | None:
        """All batches of a split, in order; None when the dataset has no such split."""
        if name not in self.dataset.schema.splits:
            return None
        loader = Loader(self.dataset, name, batch_size=EVAL_BATCH)
        return lambda epoch: self._prepared(loader.epoch(epoch))

    def _prepared(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            ids = torch.remainder(batch.ids, self.rows) if self.hashed else batch.ids
            yield replace(batch, ids=ids).to(self.device)


def parse() -> argparse.Namespace:
    defaults = asdict(Settings())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="dataset directory, or criteo-like, criteo-like:ROWS, adult")
    parser.add_argument("--model", default="deepfm", help="a name of `hotbed models` (%(default)s)")
    parser.add_argument("--dim", type=int, default=16, help="of the vectors (%(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, e.g. '{\"hidden\": [400, 400]}'")
    parser.add_argument("--sparse", action="store_true", help="gradients of touched rows only")
    parser.add_argument("--init-std", type=float, default=0.01, help="deviation of first rows (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4096, help="samples a step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="%(default)s")
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
