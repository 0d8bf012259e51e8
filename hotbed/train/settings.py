"""What a run trains on, for how long, and what its learning rates do."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader, RankHistory
from hotbed.optim import Schedule
from hotbed.types import Batch


class TrainLoader(Protocol):
    """The batches that a run trains on: a split of a dataset, or a log that is followed."""

    batch_size: int
    num_rows: int  # 0: not known

    @property
    def dataset(self) -> Dataset:
        """Which gives columns, vocabularies and held-out splits."""

    @property
    def described(self) -> str:
        """For the first line of a run."""

    def __len__(self) -> int:
        """Batches in an epoch; 0: there is no end."""

    def size_of(self, batch: int) -> int:
        """Samples of a batch, of all ranks together."""

    def epoch(self, epoch: int, start_batch: int = 0, history: RankHistory = ()) -> Generator[Batch, None, None]:
        """The batches of an epoch from one on; of a log, those that are there."""


class Loaders(NamedTuple):
    """The splits of one run; `held_out` has valid and test where the dataset does."""

    train: TrainLoader
    held_out: dict[str, Loader]


class StepIntervals(NamedTuple):
    """How long and how often, in steps; 0 is off (eval_every 0: after each epoch)."""

    epochs: int
    max_steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    full_every: int = 8  # checkpoints of which one holds all rows
    keep: int = 2  # checkpoints that stay, with all they need


class LearningCourse(NamedTuple):
    """What the learning rates do, and when to give up."""

    schedule: Schedule  # of the factor on both learning rates
    plateau_factor: float
    patience: int
    keep_best: bool
    recalibrate: bool = False
