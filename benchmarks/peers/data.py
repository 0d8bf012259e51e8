"""Raw logs in; a dataset directory for hotbed and, with the same rows and ids, one .npz a split for the peers out.

Every column is an id: integers of Criteo become ids of log-sized buckets, for the three libraries feed numbers to their
models in different ways. Ids are the row numbers of hotbed's vocabularies, 0 where an id is unknown or rare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader

RAW = Path(os.environ.get("HOTBED_DATA", "../shared/data"))
DATASETS = {  # what `hotbed prepare` is told
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
    """The dataset, and its splits as arrays beside it; made when they are not there."""
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
