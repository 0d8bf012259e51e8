"""Tables inside a Lightning module: rows behind a cache, prefetched, saved next to Lightning's own checkpoint.

    pip install lightning
    python examples/lightning_module.py
    python examples/lightning_module.py --epochs 4                      # resumes from the checkpoint
    python examples/lightning_module.py --out other --accumulate 4      # steps after every fourth batch

Lightning drives the dense weights; the rows are updated in `backward` and are not parameters. Three things to know:
- the tables are kept out of the module's `state_dict`, which would copy every row into Lightning's file; `TablesCallback` saves
  them next to it, incrementally, loads the step that fits, and moves rows where Lightning accumulates batches or scales losses;
- `Fed` puts hotbed.prefetch between the loader and Lightning. It has a length, so Lightning does not fetch a batch too early;
- `transfer_batch_to_device` hands batches on as they are: prefetch has moved them to the device, and tables recognise a
  prepared batch by object identity.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import hotbed
from hotbed.interop.lightning import TablesCallback

DIM = 16


class Fed:
    """The batches of a split with their rows in place; in the order of the trainer's epoch, where one is given."""

    def __init__(
        self, loader: hotbed.data.Loader, tables: hotbed.EmbeddingTables, trainer: lightning.Trainer | None = None
    ) -> None:
        self.loader, self.tables, self.trainer = loader, tables, trainer

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[hotbed.Batch]:
        epoch = self.trainer.current_epoch if self.trainer else 0
        return hotbed.prefetch(self.loader.epoch(epoch), self.tables)


class ClickModule(lightning.LightningModule):
    """An MLP over the vectors of all id features and the dense features."""

    def __init__(self, tables: hotbed.EmbeddingTables, num_dense: int) -> None:
        super().__init__()
        self._tables = [tables]  # in a list: no submodule, so not in the state_dict
        width = len(tables.features) * DIM + num_dense
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: hotbed.Batch) -> Tensor:
        vectors = self._tables[0](batch.ids, batch.bags)
        logits: Tensor = self.layers(torch.cat([vectors.flatten(1), batch.dense], dim=1))
        return logits.squeeze(1)

    def training_step(self, batch: hotbed.Batch, number: int) -> Tensor:
        return self._loss(batch, "train_loss")

    def validation_step(self, batch: hotbed.Batch, number: int) -> None:
        self._loss(batch, "valid_loss")  # gradients are off, so rows stay as they are

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def _loss(self, batch: hotbed.Batch, name: str) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch.labels)
        self.log(name, loss, batch_size=batch.size)
        return loss


def main(arguments: list[str] | None = None) -> float:
    """Train, from the last checkpoint where there is one; the last valid loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="adult", help="embedded dataset, or a directory that `hotbed prepare` wrote")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("lightning-run"))
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--cache", type=float, default=0.75, help="share of the rows on the device; Adult is a small log"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="batches that move rows and dense weights together")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    data = hotbed.data.resolve(given.data)
    torch.manual_seed(0)
    features = {
        one.name: hotbed.Table(one.rows, DIM, "mean", hashing=one.mode == "hash") for one in data.schema.features
    }
    tables = hotbed.EmbeddingTables(features, hotbed.optim.Adagrad(lr=0.05), device=given.device, cache=given.cache)
    module = ClickModule(tables, len(data.schema.dense))
    trainer = lightning.Trainer(
        max_epochs=given.epochs,
        accumulate_grad_batches=given.accumulate,
        callbacks=[TablesCallback(tables, given.out / "rows")],
        accelerator="gpu" if given.device.startswith("cuda") else "cpu",
        devices=1,
        default_root_dir=given.out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = given.batch_size
    train = Fed(hotbed.data.Loader(data, "train", batch_size=size, shuffle=True), tables, trainer)
    valid = Fed(hotbed.data.Loader(data, "valid", batch_size=size), tables)
    last = given.out / "last.ckpt"
    trainer.fit(module, train, valid, ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last)
    loss = float(trainer.callback_metrics["valid_loss"])
    print(f"{given.epochs} epochs, {tables.num_updates} updates: valid loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
