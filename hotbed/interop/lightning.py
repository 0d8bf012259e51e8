"""Tables under Lightning's trainer: rows step, are saved and are loaded with the dense weights.

    from hotbed.interop.lightning import TablesCallback

    trainer = lightning.Trainer(accumulate_grad_batches=4, callbacks=[TablesCallback(tables, "rows")])

The tables stay outside the module (in a list, say): its state_dict would hold a copy of every row. Each checkpoint of the
trainer names one of the rows, which costs what was touched since the one before. Importing this file needs Lightning.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import hotbed.checkpoint
from hotbed.checkpoint.saver import Policy
from hotbed.errors import ConfigError, RunError
from hotbed.tables.module import EmbeddingTables

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("hotbed.interop.lightning needs Lightning: pip install lightning") from error

_KEY = "hotbed_rows"  # in Lightning's checkpoint: the name of the folder with the rows


class TablesCallback(Callback):  # type: ignore[misc]  # Lightning is not there when types are checked
    """Steps, saves and loads the rows of tables with the trainer's dense weights.

    With `accumulate_grad_batches`, rows collect gradients (`tables.accumulate()`) and move where the optimizer steps. Precision
    16-mixed works in both cases: where its scaler finds an overflow, rows and dense weights stay. Every checkpoint of the
    trainer comes with one in `folder` (with several ranks, in `folder/rank-N`); `keep` is how many of them stay, None all.
    """

    def __init__(self, tables: EmbeddingTables, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be 1 or more, or None for all, not {keep}")
        self.tables = tables
        self.folder = Path(folder)
        self._policy = Policy(keep=keep or sys.maxsize)
        self._accumulates = False  # because this callback asked for it
        self._is_loaded = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._is_loaded = False
        if any(part is self.tables for part in pl_module.modules()):
            raise ConfigError(
                f"the tables are a part of {type(pl_module).__name__}, whose state_dict would hold a copy of every row: keep "
                "them outside, as self._tables = [tables], and call self._tables[0](ids)"
            )
        if trainer.world_size > 1 and not self.tables.is_shared:
            raise ConfigError(
                f"the trainer has {trainer.world_size} ranks, and every one of them would train rows of its own: use "
                "hotbed.ShardedTables"
            )
        if stage == "fit" and trainer.accumulate_grad_batches > 1 and self.tables.accumulation is None:
            self.tables.accumulate()
            self._accumulates = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._accumulates:
            self.tables.zero_grad()  # batches since the last step: the trainer forgets their dense gradients, too
            self.tables.accumulate(False)
            self._accumulates = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if (
            self.tables.accumulation is not None
        ):  # gradients of a step that never came must not be in the next fit's first
            self.tables.zero_grad()
        self.teardown(trainer, pl_module, "fit")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self.tables.accumulation is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None:
            self.tables.step()
        else:
            scaler.step(self.tables)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = hotbed.checkpoint.save(self._folder_of(trainer), self.tables, policy=self._policy)
        checkpoint[_KEY] = saved.name

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if _KEY in checkpoint:
            hotbed.checkpoint.load(self._folder_of(trainer) / checkpoint[_KEY], self.tables)
            self._is_loaded = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._require_rows(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._require_rows(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._require_rows(trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._require_rows(trainer)

    def _require_rows(self, trainer: Any) -> None:
        """A RunError where dense weights came from a checkpoint and the rows did not."""
        if trainer.ckpt_path and not self._is_loaded:
            raise RunError(
                f"{trainer.ckpt_path} brought dense weights without the rows that they were trained with. A checkpoint has "
                "rows if the callback was there when it was saved, and save_weights_only was False."
            )

    def _folder_of(self, trainer: Any) -> Path:
        return self.folder / f"rank-{trainer.global_rank}" if trainer.world_size > 1 else self.folder
