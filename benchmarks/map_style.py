"""torch DataLoaders over map-style datasets of a Parquet file, at their best: for `benchmarks.reader`.

A map-style dataset answers by row number, so a file must be unpacked once into something that can: matrices on disk, as
numpy.memmap (worker processes share them through the file cache). That unpacking is not charged to the row-wise dataset. It
is charged to the batch-wise one, which does nothing else with the file: after it, an epoch is a copy from memory to memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, RandomSampler

Row = tuple[np.float32, np.ndarray, np.ndarray]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FILES = ("labels.npy", "dense.npy", "ids.npy")


def unpack(tables: Sequence[pa.Table], names: tuple[str, list[str], list[str]], folder: Path) -> None:
    """Labels [R], dense [R, N] and ids [R, F] of the tables, as files."""
    label, dense, ids = names
    rows = sum(table.num_rows for table in tables)
    shapes = ((rows,), (rows, len(dense)), (rows, len(ids)))
    kinds = (np.float32, np.float32, np.int64)
    out = [
        np.lib.format.open_memmap(folder / file, mode="w+", dtype=kind, shape=shape)
        for file, kind, shape in zip(FILES, kinds, shapes)
    ]
    start = 0
    for table in tables:
        end = start + table.num_rows
        out[0][start:end] = table[label].to_numpy()
        for matrix, columns in zip(out[1:], (dense, ids)):
            for number, name in enumerate(columns):
                matrix[start:end, number] = table[name].to_numpy()
        start = end


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One row for one number."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder, self._rows = folder, rows
        self._matrices: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_matrices": []}  # a worker opens the files itself

    @property
    def matrices(self) -> list[np.ndarray]:
        if not self._matrices:
            self._matrices = [np.asarray(np.load(self._folder / file, mmap_mode="r")) for file in FILES]
        return self._matrices

    def __getitem__(self, row: int) -> Row:
        labels, dense, ids = self.matrices
        return labels[row], dense[row], ids[row]


class Batches(Rows):
    """All rows of a batch at once."""

    def __getitems__(self, rows: list[int]) -> Tensors:
        picked = np.asarray(rows)
        labels, dense, ids = (torch.from_numpy(matrix[picked]) for matrix in self.matrices)
        return labels, dense, ids


def stack(rows: Sequence[Row]) -> Tensors:
    """Faster than torch's default_collate, which makes a tensor of every value first."""
    labels, dense, ids = zip(*rows)
    return torch.from_numpy(np.array(labels)), torch.from_numpy(np.stack(dense)), torch.from_numpy(np.stack(ids))


def as_it_is(batch: Tensors) -> Tensors:
    """For rows that come as a batch."""
    return batch


def data_loader(dataset: Rows, batch_size: int, workers: int) -> DataLoader[Any]:
    """Shuffled; worker processes stay from one epoch to the next."""
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    collate = as_it_is if isinstance(dataset, Batches) else stack
    sampler = RandomSampler(dataset)
    return DataLoader(
        dataset, batch_size, sampler=sampler, collate_fn=collate, num_workers=workers, drop_last=True, **options
    )


def workers_that_fit(wanted: int, batch_bytes: int) -> int:
    """Worker processes hand batches over in shared memory, which some machines have little of."""
    if not Path("/dev/shm").is_dir():
        return wanted
    found = os.statvfs("/dev/shm")
    return min(wanted, int(found.f_bavail * found.f_frsize // (4 * batch_bytes)))
