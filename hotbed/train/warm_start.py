"""A new run from an older one's checkpoint: rows follow their ids, also where the dataset has numbered them again.

A vocabulary numbers its ids by their frequency, so another dataset gives the same value another row. The id lists of both
datasets tell which row became which; a table whose old list is lost is not carried over. Where ids were numbered before and
are now raw, for dynamic tables, the list has their 64-bit ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import entries_of, run_of
from hotbed.checkpoint.warm import WarmStartReport, warm_start_from
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.schema import IdFeature, Schema
from hotbed.data.vocabulary import Numbering
from hotbed.errors import DataError, RunError
from hotbed.files import readable
from hotbed.run.folder import find_data, write_text
from hotbed.train.step import Learner


def source_of(place: Path, run: Path) -> list[Entry]:
    """The checkpoint to start from, of every rank that saved it; it must not lie in the new run, which begins empty."""
    entries = entries_of(place)
    if run.resolve() in entries[0].folder.resolve().parents:
        raise RunError(f"{run} cannot be started again from its own checkpoint; choose another folder with --out.")
    return entries


def start_from(entries: Sequence[Entry], run: Path, learner: Learner, dataset: Dataset) -> WarmStartReport:
    """Carry over what fits, and write down what does not: RUN/warm_start.json."""
    translation, lost = _translation(entries[0], dataset)
    carried = warm_start_from(entries, learner.tables, model=learner.model, translation=translation)
    if lost:
        carried.of_tables({"the dataset numbers ids otherwise, and the old numbers are lost": lost})
    tree = {**dataclasses.asdict(carried), "source": str(carried.source)}
    if learner.world.is_first:
        write_text(run / "warm_start.json", json.dumps(tree, indent=1) + "\n")
    return carried


def _translation(entry: Entry, dataset: Dataset) -> tuple[dict[str, Tensor], list[str]]:
    """The new id of every old one, by table, where they are others; and tables whose old numbers are not to be found."""
    saved = entry.manifest.document.get("progress", {}).get("data", "")
    if saved == dataset.fingerprint:
        return {}, []
    folder = _old_counts(entry, saved)
    modes = {} if folder is None else {name: of_it[0].mode for name, of_it in Schema.load(folder.parent).tables.items()}
    translation, lost = {}, []
    for name, (feature, *_) in dataset.schema.tables.items():
        numbered_before = modes.get(name, feature.mode) == "vocabulary"
        if name not in entry.manifest.tables or not (numbered_before or feature.mode == "vocabulary"):
            continue
        old = _ids(folder / f"{name}.parquet") if folder and numbered_before else None
        new = _new_ids(dataset, feature, old)
        if new is None:
            translation[name] = torch.tensor([-1], device="cpu")
            lost.append(name)
        else:
            translation[name] = torch.from_numpy(new)
    return translation, lost


def _new_ids(dataset: Dataset, feature: IdFeature, old: np.ndarray | None) -> np.ndarray | None:
    """By old row: the new row, or the 64-bit id where ids are no longer numbered; None if unknown."""
    if old is None:
        return None
    if feature.mode != "vocabulary":
        return np.concatenate([[-1], old])  # the unknown of a vocabulary is many ids
    new = _ids(dataset.path / "counts" / f"{feature.table}.parquet")
    if new is None:
        return None
    numbering = Numbering()
    numbering.add(new, np.zeros(len(new), dtype=np.bool_))
    found = numbering.find(old).astype(np.int64)
    return np.concatenate([[0], np.where(found < 0, -1, found + 1)])  # row 0 is the unknown, here and there


def _old_counts(entry: Entry, fingerprint: str) -> Path | None:
    """The id lists of the dataset that the checkpoint was trained on: of the run's model, else of the dataset itself."""
    counts = run_of(entry.folder) / "model" / "counts"
    if counts.is_dir():
        return counts
    path = (entry.manifest.document.get("config") or {}).get("data", {}).get("path")
    if path:
        try:
            dataset = resolve(find_data(path, run_of(entry.folder)))
        except (DataError, OSError):
            return None
        if dataset.fingerprint == fingerprint:
            return dataset.path / "counts"
    return None


def _ids(path: Path) -> np.ndarray | None:
    try:
        return np.asarray(pq.read_table(readable(path), columns=["id"]).column("id").to_numpy(), dtype=np.int64)
    except (OSError, KeyError, pa.ArrowException):
        return None
