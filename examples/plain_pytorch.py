"""A training loop of your own in plain PyTorch: rows behind a cache, read ahead, saved after every epoch and resumed.

    python examples/plain_pytorch.py                    # the embedded Adult census log, two epochs, on this machine's CPU
    python examples/plain_pytorch.py --epochs 4         # resumes from the checkpoint of the last epoch
    python examples/plain_pytorch.py --device cuda --compile

hotbed has a part in five lines (marked below); everything else is torch's. --compile compiles the dense model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import hotbed
from hotbed.train.metrics import auc

DIM = 16


class Clicks(nn.Module):
    """An MLP over the vectors of all id features and the dense features."""

    def __init__(self, num_features: int, num_dense: int) -> None:
        super().__init__()
        width = num_features * DIM + num_dense
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([vectors.flatten(1), dense], dim=1))
        return logits.squeeze(1)


@torch.no_grad()
def evaluate(loader: hotbed.data.Loader, tables: hotbed.EmbeddingTables, model: nn.Module) -> float:
    """AUC over a split."""
    labels, logits = [], []
    for batch in hotbed.prefetch(loader.epoch(0), tables):
        labels.append(batch.labels.cpu())
        logits.append(model(tables(batch.ids, batch.bags), batch.dense).cpu())
    return auc(torch.cat(labels).numpy(), torch.cat(logits).numpy())


def main(arguments: list[str] | None = None) -> float:
    """Train, and hand back the test AUC."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="adult", help="embedded dataset, or a directory that `hotbed prepare` wrote")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--cache", type=float, default=0.75, help="share of the rows on the device; Adult is a small log"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoints", type=Path, default=Path("plain-checkpoints"))
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(arguments)

    data = hotbed.data.resolve(given.data)
    train, test = (
        hotbed.data.Loader(data, split, batch_size=given.batch_size, shuffle=split == "train")
        for split in ("train", "test")
    )
    torch.manual_seed(0)
    model: nn.Module = Clicks(len(data.schema.features), len(data.schema.dense)).to(given.device)
    run = torch.compile(model) if given.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # 1. one table for each id feature; a share of the rows on the device, the others in host memory
    features = {
        one.name: hotbed.Table(one.rows, DIM, "mean", hashing=one.mode == "hash") for one in data.schema.features
    }
    tables = hotbed.EmbeddingTables(features, hotbed.optim.Adagrad(lr=0.05), device=given.device, cache=given.cache)

    first = 0
    if given.checkpoints.exists():  # 2. rows, dense weights and both optimizers, as they were
        first = hotbed.checkpoint.load(given.checkpoints, tables, model=model, optimizer=optimizer).extra["epochs"]
    for epoch in range(first, given.epochs):
        for batch in hotbed.prefetch(train.epoch(epoch), tables):  # 3. rows are there when the batch is
            logits = run(tables(batch.ids, batch.bags), batch.dense)  # 4. ids -> vectors [B, F, D]
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()  # the rows are updated here
            optimizer.step()
        saved = {"epochs": epoch + 1}  # 5. what changed since the last checkpoint is written
        hotbed.checkpoint.save(given.checkpoints, tables, model=model, optimizer=optimizer, extra=saved)
        counts = tables.counters()
        cached = f"{counts.hits:,} of {counts.keys:,} rows were in the cache, {counts.evictions:,} made place"
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test AUC {evaluate(test, tables, run):.4f}; {cached}")
    return evaluate(test, tables, run)


if __name__ == "__main__":
    main()
