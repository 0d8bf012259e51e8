"""Rows to watch in; RUN/watched.jsonl out: for every step that used one, how often, and the norm of its gradient.

    hotbed train --watch-rows ad=123,user=7

The gradient of a row is the sum over its lookups of the gradients of the vectors it is part of, as the row optimizer gets it;
l2, clipping and the learning rate come after. Sums are taken on the device from what backward computes anyway and are read
when a line of metrics is written, so no step waits for them: a few small kernels a step for every row that is watched, nothing
where none is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.host.atomic import writing
from hotbed.run.folder import write_text
from hotbed.tables.inputs import Feature
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.telemetry.observer import Observer, Progress, Record
from hotbed.types import Batch

FILE = "watched.jsonl"


class WatchedRow(NamedTuple):
    """One row."""

    table: str
    id: int


class _RowNote(NamedTuple):
    """A note of one row in one step, on the device."""

    row: WatchedRow
    step: int
    lookups: Tensor  # []
    norm: Tensor  # []


def parse_rows(text: str, tables: Mapping[str, Table]) -> list[WatchedRow]:
    """'ad=123,user=7' -> rows; all mistakes at once."""
    found, wrong = [], []
    for part in (one.strip() for one in text.split(",")):
        name, equals, number = part.rpartition("=")
        rows = tables[name].rows if name in tables else None
        if not equals or not number.strip().lstrip("-").isdigit():
            wrong.append(f"{part!r} is not TABLE=ID")
        elif name not in tables:
            wrong.append(f"there is no table {name!r}; the tables are {', '.join(tables)}")
        elif rows is not None and not tables[name].hashing and not 0 <= int(number) < rows:
            wrong.append(f"table {name} has the rows 0 to {rows - 1:,}, not {number}")
        else:
            id_ = int(number) % rows if rows is not None and tables[name].hashing else int(number)
            found.append(WatchedRow(name, id_))
    if wrong:
        raise ConfigError(f"--watch-rows takes TABLE=ID,TABLE=ID: {'; '.join(wrong)}.")
    return found


class RowWatch(Observer):
    """Told of every batch before its backward pass, and, as an Observer, of steps and lines."""

    def __init__(self, run: Path, tables: EmbeddingTables, rows: Sequence[WatchedRow]) -> None:
        self._path = run / FILE
        self._tables = tables
        self._rows = tuple(rows)
        self._open: list[tuple[WatchedRow, Tensor, Tensor]] = []  # of the step under way
        self._noted: list[_RowNote] = []

    def watch(self, batch: Batch, vectors: Tensor) -> None:
        """Look at the gradient of `vectors` [B, F, D] when it comes."""
        vectors.register_hook(lambda grad: self._take(batch, grad.detach()))  # type: ignore[no-untyped-call]

    def begin(self, progress: Progress, total_steps: int) -> None:
        """A run that resumes from a checkpoint forgets what came after it."""
        kept = [line for line in read_lines(self._path) if line["step"] <= progress.step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def step(self, progress: Progress) -> None:
        self._noted += [_RowNote(row, progress.step, lookups, norm) for row, lookups, norm in self._open]
        self._open.clear()

    def record(self, record: Record) -> None:
        self._write()

    def end(self) -> None:
        self._write()

    def _take(self, batch: Batch, grad: Tensor) -> None:
        singles = [one.name for one in self._tables.features if one.name not in batch.bags]
        for row in self._rows:
            found = []
            for place, feature in enumerate(self._tables.features):
                if feature.table == row.table:
                    column = singles.index(feature.name) if feature.name in singles else None
                    found.append(self._of_feature(batch, row, feature, column, grad[:, place]))
            lookups, totals = (torch.stack(parts).sum(0) for parts in zip(*found))
            self._open.append((row, lookups, totals.double().norm()))

    def _of_feature(
        self, batch: Batch, row: WatchedRow, feature: Feature, column: int | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Lookups of a row by one feature that reads its table, and the sum of their gradients."""
        if column is not None:
            used = self._is(row, batch.ids[:, column])
            return used.sum(), (grad * used.unsqueeze(1)).sum(0)
        bag = batch.bags[feature.name]
        lengths = bag.offsets.diff().to(grad.device)
        sample = torch.repeat_interleave(torch.arange(lengths.shape[0], device=grad.device), lengths)
        uses = self._is(row, bag.values.to(grad.device)).to(grad.dtype)
        times = torch.zeros(lengths.shape[0], dtype=grad.dtype, device=grad.device).index_add_(0, sample, uses)
        shares = times / lengths.clamp(min=1) if feature.pooling == "mean" else times
        return times.sum(), (grad * shares.unsqueeze(1)).sum(0)

    def _is(self, row: WatchedRow, ids: Tensor) -> Tensor:
        table = self._tables.tables[row.table]
        return (ids.remainder(table.rows) if table.hashing and table.rows else ids) == row.id

    def _write(self) -> None:
        """One line for each step that used a row."""
        lines = [
            {
                "step": one.step,
                "table": one.row.table,
                "id": one.row.id,
                "lookups": int(one.lookups),
                "gradient_norm": float(one.norm),
            }
            for one in self._noted
            if int(one.lookups)
        ]
        self._noted.clear()
        if lines:
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[Record]:
    """What was watched so far; a line that was cut short ends it."""
    found: list[Record] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                break
    return found
