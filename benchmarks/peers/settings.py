"""What is compared: two real logs, two models; one set of numbers for all systems.

Sizes lie between the defaults of the three libraries (MLPs of 64-64-64, 256-128 and 128-64; 256 samples a batch is
DeepCTR-Torch's). `target` was fixed from a first run of all systems, a little below the best valid AUC that every one of them
reached. What is not `in_bar` has a larger dense part, which costs all systems the same.

`prepared`: raw logs -> a dataset directory for hotbed and, with the same rows and ids, one .npz per split for the peers. Every
column is an id: integers of Criteo become ids of log-sized buckets, because the three libraries feed numbers to their models in
different ways. Ids are the row numbers of hotbed's vocabularies, 0 where an id is unknown or rare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.peers.job import Job
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    data: str
    model: str
    target: float  # valid AUC to reach
    epochs: int
    evaluations: int  # of each epoch
    dim: int
    batch_size: int
    hidden: tuple[int, ...] = (128, 64)
    batch_norm: bool = False
    dropout: float = 0.0
    in_bar: bool = True  # else shown separately

    def job(self, dataset: Dataset, folder: Path, seed: int, threads: int) -> Job:
        """The job of every system."""
        steps = -(-dataset.schema.splits["train"].rows // self.batch_size)
        return Job(
            model=self.model,
            rows={feature.name: feature.rows for feature in dataset.schema.features},
            dim=self.dim,
            hidden=list(self.hidden),
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            num_cross=2,
            batch_size=self.batch_size,
            lr=1e-3,
            init_std=1e-4,
            epochs=self.epochs,
            eval_every=max(1, steps // self.evaluations),
            seed=seed,
            threads=threads,
            data=str(folder / f"{self.data}-arrays"),
            dataset=str(dataset.path),
        )


_CRITEO = Setting("criteo", "deepfm", 0.769, epochs=2, evaluations=16, dim=8, batch_size=256)
_FRAPPE = Setting("frappe", "deepfm", 0.935, epochs=5, evaluations=5, dim=10, batch_size=4096)
_WIDE = {"hidden": (400, 400, 400), "batch_norm": True, "dropout": 0.2}  # as in the published runs
SETTINGS = {
    "criteo-deepfm": _CRITEO,
    "criteo-dnn": replace(_CRITEO, model="dnn"),
    "frappe-deepfm": _FRAPPE,
    "frappe-dnn": replace(_FRAPPE, model="dnn"),
    "criteo-dcnv2": replace(_CRITEO, model="dcnv2", in_bar=False),
    "frappe-deepfm-wide": replace(_FRAPPE, **_WIDE, epochs=4, target=0.96, in_bar=False),
}


RAW = Path(os.environ.get("HOTBED_DATA", "../shared/data"))
DATASETS = {  # arguments of `hotbed prepare`
    "criteo": [
        *(f"{RAW}/criteo_60k.tsv.xz", "--split", "train=50000,valid=10000"),
        *("--integers", "bucket", "--min-count", "10"),
    ],
    "frappe": [
        *(f"{split}={RAW}/frappe_{split}.csv.xz" for split in ("train", "valid")),
        *("--label", "label", "--ids", "*"),
    ],
}


def prepared(name: str, folder: Path) -> Dataset:
    """The dataset, and its splits as arrays next to it; created if they are missing."""
    directory = folder / name
    if not (directory / "schema.json").exists():
        command = [sys.executable, "-m", "hotbed", "prepare", *DATASETS[name], "--out", str(directory)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dataset = Dataset.open(directory)
    for split in ("train", "valid"):
        if not (folder / f"{name}-arrays" / f"{split}.npz").exists():
            _write_arrays(dataset, split, folder / f"{name}-arrays")
    return dataset


def _write_arrays(dataset: Dataset, split: str, folder: Path) -> None:
    batches = list(Loader(dataset, split, batch_size=65536).epoch(0))
    ids = np.concatenate([batch.ids.numpy() for batch in batches])
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    folder.mkdir(parents=True, exist_ok=True)
    columns = {feature.name: ids[:, i].astype(np.int32) for i, feature in enumerate(dataset.schema.features)}
    np.savez(folder / f"{split}.npz", **columns, label=labels.astype(np.int32))
