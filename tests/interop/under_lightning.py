"""A small module, its trainer and the same loop by hand. Importing this needs Lightning."""

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn

import hotbed
from hotbed.errors import ConfigError
from hotbed.interop.lightning import TablesCallback

__all__ = ["MixedPrecision"]

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
BATCHES = torch.utils.data.DataLoader(
    [torch.randint(0, 60, (8, 2), generator=torch.Generator().manual_seed(seed)) for seed in range(6)], batch_size=None
)


def new_tables(**options):
    tables = {name: hotbed.Table(60, 4) for name in "ab"}
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), **({"cache": 0.4} | options))


class Clicks(LightningModule):
    def __init__(self, tables, overflow_at=()):
        super().__init__()
        torch.manual_seed(0)
        self._tables, self._overflow_at = [tables], overflow_at
        self.dense = nn.Linear(8, 1)

    def loss(self, ids):
        return self.dense(self._tables[0](ids).flatten(1)).float().square().mean()

    def training_step(self, ids, number):
        return self.loss(ids) * (float("inf") if number in self._overflow_at else 1.0)

    def validation_step(self, ids, number):
        self.log("loss", self.loss(ids), batch_size=len(ids))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.dense.parameters(), lr=0.1)


class BreaksOff(Callback):
    """An error amid an accumulated step."""

    def __init__(self, at):
        self.at, self.num_waiting = at, 0

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == self.at:
            self.num_waiting = len(module._tables[0].accumulation.parts)
            raise ValueError("broken off")


def fit(tables, folder, *, overflow_at=(), ckpt_path=None, **options):
    module = Clicks(tables, overflow_at)
    trainer = Trainer(accelerator="cpu", callbacks=[TablesCallback(tables, folder)], **QUIET, **options)
    trainer.fit(module, BATCHES, ckpt_path=ckpt_path)
    return trainer, module


def by_hand(tables, epochs=1, every=1, left_out=()):
    module = Clicks(tables)
    optimizer = module.configure_optimizers()
    if every > 1:
        tables.accumulate()
    for _ in range(epochs):
        for number, ids in enumerate(BATCHES):
            if number not in left_out:
                (module.loss(ids) / every).backward()
            if number % every == every - 1 and number not in left_out:
                if every > 1:
                    tables.step()
                optimizer.step()
                optimizer.zero_grad()
    return module


def assert_same(tables, module, other_tables, other_module):
    for name in "ab":
        assert torch.equal(tables.weight(name), other_tables.weight(name))
    assert torch.equal(module.dense.weight, other_module.dense.weight)


def under_ddp(folder):
    rank = dist.get_rank()
    tables = hotbed.ShardedTables({name: hotbed.Table(60, 4) for name in "ab"}, hotbed.optim.SGD(lr=0.1), cache=0.9)
    module, refused = Clicks(tables), Clicks(new_tables())
    batches = torch.utils.data.DataLoader([ids.chunk(2)[rank] for ids in BATCHES], batch_size=None)
    options = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 3, "use_distributed_sampler": False}
    for one in (refused, module):
        callback = TablesCallback(one._tables[0], folder)
        options |= {"callbacks": [callback], "plugins": [TorchElasticEnvironment()]}
        trainer = Trainer(accelerator="cpu", max_epochs=1, **QUIET, **options)
        if one is refused:
            with pytest.raises(ConfigError, match=r"2 ranks.*ShardedTables"):
                trainer.fit(one, batches)
        else:
            trainer.fit(one, batches)
    trainer.save_checkpoint(folder / "last.ckpt")
    ids = torch.arange(60).view(-1, 1).expand(60, 2)
    vectors = torch.cat([tables(some).detach() for some in ids.split(10)])
    return vectors, module.dense.weight.detach()
