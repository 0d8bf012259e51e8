"""A new run from an older one's checkpoint: rows follow their ids, also where the dataset has numbered them again.

A vocabulary numbers its ids by their frequency, so another dataset gives the same value another row. The id lists of both
datasets tell which row became which; a table whose old list is lost is not carried over.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotbed.checkpoint.chain import Entry, find
from hotbed.checkpoint.warm import Carried, warm_start
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.vocabulary import Numbering
from hotbed.errors import DataError, RunError
from hotbed.train.files import write_text
from hotbed.train.step import Learner


def source_of(place: Path, run: Path) -> Entry:
    """The checkpoint to start from; it must not lie in the new run, which begins empty."""
    entry = find(place)
    if run.resolve() in entry.folder.resolve().parents:
        raise RunError(f"{run} cannot be started anew from its own checkpoint; choose another folder with --out.")
    return entry


def start_from(entry: Entry, run: Path, learner: Learner, dataset: Dataset) -> Carried:
    """Carry over what fits, and write down what does not: RUN/warm_start.json."""
    translation, lost = _translation(entry, dataset)
    carried = warm_start(entry.folder, learner.tables, model=learner.model, translation=translation)
    if lost:
        carried.of_tables({"the dataset numbers ids otherwise, and the old numbers are lost": lost})
    tree = {**dataclasses.asdict(carried), "source": str(carried.source)}
    write_text(run / "warm_start.json", json.dumps(tree, indent=1) + "\n")
    return carried


def _translation(entry: Entry, dataset: Dataset) -> tuple[dict[str, Tensor], list[str]]:
    """The new row of every old one, by vocabulary feature; and the features whose old numbers are not to be found."""
    saved = entry.manifest.document.get("progress", {}).get("data", "")
    if saved == dataset.fingerprint:
        return {}, []
    features = [feature.name for feature in dataset.schema.features if feature.mode == "vocabulary"]
    folder = _old_counts(entry, saved)
    translation, lost = {}, []
    for name in features:
        if name not in entry.manifest.tables:
            continue
        old = _ids(folder / f"{name}.parquet") if folder else None
        new = _ids(dataset.path / "counts" / f"{name}.parquet")
        if old is None or new is None:
            translation[name] = torch.tensor([-1])
            lost.append(name)
        else:
            numbering = Numbering()
            numbering.add(new, np.zeros(len(new), dtype=np.bool_))
            found = numbering.find(old).astype(np.int64)
            rows = np.concatenate([[0], np.where(found < 0, -1, found + 1)])  # row 0 is the unknown, here and there
            translation[name] = torch.from_numpy(rows)
    return translation, lost


def _old_counts(entry: Entry, fingerprint: str) -> Path | None:
    """The id lists of the dataset that the checkpoint was trained on: of the run's model, else of the dataset itself."""
    counts = entry.folder.resolve().parent.parent / "model" / "counts"
    if counts.is_dir():
        return counts
    path = (entry.manifest.document.get("config") or {}).get("data", {}).get("path")
    if path:
        try:
            dataset = resolve(path)
        except (DataError, OSError):
            return None
        if dataset.fingerprint == fingerprint:
            return dataset.path / "counts"
    return None


def _ids(path: Path) -> np.ndarray | None:
    try:
        return np.asarray(pq.read_table(path, columns=["id"]).column("id").to_numpy(), dtype=np.int64)
    except (OSError, KeyError, pa.ArrowException):
        return None
