"""What one process trains, and what it returns. Imported by peers' Pythons: standard library and numpy alone.

A process gets a folder with `job.json` and the prepared splits; it leaves `done.json` and, for every evaluation, the scores
of the valid split. The clock runs from the opening of the data on, through reading and training steps, and stands still
while the valid split is scored: scoring is not compared.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Job:
    """One model on one dataset; the same for all systems."""

    model: str  # dnn, deepfm or dcnv2
    rows: dict[str, int]  # of the table of each feature
    dim: int
    hidden: list[int]
    batch_norm: bool
    dropout: float
    num_cross: int  # layers of dcnv2
    batch_size: int
    lr: float  # of Adam, rows and dense weights alike
    init_std: float  # of rows
    epochs: int
    eval_every: int  # steps
    seed: int
    threads: int
    data: str  # folder with train.npz and valid.npz, one array per feature and `label`
    dataset: str  # the same rows as a dataset directory of hotbed

    @classmethod
    def load(cls, folder: Path) -> Job:
        return cls(**json.loads((folder / "job.json").read_text()))

    def save(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(asdict(self), indent=1))

    def columns(self, split: str) -> dict[str, Array]:
        """The features of a split, int32, and `label`."""
        with np.load(Path(self.data) / f"{split}.npz") as arrays:
            return {name: arrays[name] for name in (*self.rows, "label")}


class Clock:
    """Seconds of training, and what had been learned by then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points: list[dict[str, float]] = []
        self._seconds = 0.0
        self._since: float | None = None
        self.started = 0.0  # time of day at which the clock first ran

    def go(self) -> None:
        self.started = self.started or time.time()
        self._since = time.perf_counter()

    def stop(self) -> None:
        assert self._since is not None, "the clock is not running"
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def point(self, step: int, scores: Array) -> None:
        """The clock stands: keep what the valid split got."""
        np.save(self.folder / f"scores_{step}.npy", np.asarray(scores, dtype=np.float64).reshape(-1))
        self.points.append({"step": step, "seconds": self._seconds})

    def done(self, versions: dict[str, str]) -> None:
        done = {"points": self.points, "started": self.started, "versions": versions}
        (self.folder / "done.json").write_text(json.dumps(done, indent=1))
