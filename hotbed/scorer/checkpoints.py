"""A checkpoint in, a ModelSource out: rows in parts, from all ranks and tiers, as of the moment it was saved.

`weights_of`: a checkpoint in, its weights out, one row group at a time, without optimizer state.

checkpoint/read.py reads whole files in parallel, because a resuming run needs all of them soon. Here a server keeps scoring
within its memory budget: a file is read once for its checksum, in pieces, and then group by group, ids and weights only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.files import DENSE, checksum, mean_of
from hotbed.checkpoint.layouts import entries_of, run_of
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import TYPES, check_sizes, gone_of, refuse_slices, tensors_of
from hotbed.checkpoint.row_file import COLUMNS_KEY, TABLES_KEY
from hotbed.data.embedded import resolve
from hotbed.data.schema import Schema
from hotbed.errors import DataError, RunError
from hotbed.ops.shard import Shard
from hotbed.run.config_check import read_tree
from hotbed.run.folder import find_data
from hotbed.run.model_card import card_of
from hotbed.scorer.source import ModelSource, TableSource, columns_mark, read_marks
from hotbed.tables.snapshot.snapshot import thawed
from hotbed.types import RowPart

RANK_BITS = 40  # of the number of a row; above them is its rank
_WANTED = {"id": "id", "vector": "weight", "row": "row", "shared": "shared"}  # the last two of dynamic ids


def open_checkpoint(place: Path) -> ModelSource:
    """One checkpoint, or the newest of a run or of a folder of checkpoints."""
    return source_of(entries_of(place))


def source_of(entries: Sequence[Entry]) -> ModelSource:
    """A checkpoint by its entries, one of each rank that wrote it."""
    chains = [chain_of(one) for one in entries]
    for chain in chains:
        check_sizes(chain)
    refuse_slices(entries, "scoring")
    first = entries[0]
    tree = first.manifest.document.get("config")
    if not tree:
        raise RunError(
            f"{first.folder} does not say which model it belongs to: only checkpoints of `hotbed train` can be scored. "
            "Load it into your own model with hotbed.checkpoint.load."
        )
    config = read_tree(tree)
    columns, mark = _columns(first, config.data.path)
    card = card_of(config, Schema.load(columns))
    shapes = first.manifest.tables
    if list(shapes) != list(card["tables"]):
        raise RunError(f"{first.folder} has the tables {', '.join(shapes)}, and {columns} has others.")
    tables = {
        name: TableSource(
            name,
            dim=shapes[name].dim,
            pooling=one["pooling"],
            hashing=one["hashing"],
            rows=one["rows"],
            init=config.tables.init,
            seed=shapes[name].seed,
            precision=shapes[name].precision,
            group=shapes[name].group_name,
        )
        for name, one in card["tables"].items()
    }
    return ModelSource(
        first.folder,
        f"step-{first.manifest.step}-{first.manifest.crc32:08x}",
        card["model"],
        tables,
        mean_of([tensors_of(one, DENSE) for one in entries]),
        columns,
        mark,
        partial(_parts, chains),
        tuple(tuple(chain) for chain in chains),
        is_current=lambda: _columns(first, config.data.path) == (columns, mark),
        reopen=lambda: source_of(entries),
    )


def _columns(entry: Entry, data: str) -> tuple[Path, str]:
    """The folder with schema.json and counts/, and the mark of its content: that of the run's model, else the dataset."""
    model = run_of(entry.folder) / "model"
    if (model / "schema.json").is_file() and (manifest := read_marks(model)):
        return model, columns_mark(model, manifest)
    try:
        dataset = resolve(find_data(data, run_of(entry.folder)))
    except (DataError, OSError) as error:
        raise RunError(
            f"{entry.folder} was trained on {data}, which says what its columns and ids mean and cannot be opened: {error}"
        ) from error
    saved = entry.manifest.document.get("progress", {}).get("data", "")
    if saved != dataset.fingerprint:
        raise RunError(
            f"{entry.folder} was trained on {data}, which has changed since: its ids are numbered differently now."
        )
    return dataset.path, dataset.fingerprint


def _parts(chains: Sequence[Sequence[Entry]]) -> Iterator[RowPart]:
    """Rows with their last owners; the `row` of a dynamic id says the rank, too."""
    for rank, chain in enumerate(chains):
        for part in parts_of(chain, Shard(rank, len(chains)), partial(weights_of, all_owners=True), numbered=True):
            if "row" in part.columns:
                part.columns["row"] = part.columns["row"] + (rank << RANK_BITS)
            yield part


def parts_of(
    chain: Sequence[Entry], shard: Shard, read: Callable[[Entry], Iterable[RowPart]], *, numbered: bool = False
) -> Iterator[RowPart]:
    """Every row that a rank ever trained, some more than once: the last one counts. A part without columns: the row is gone.

    `numbered`: rows of dynamic ids in files of an ssd come with their number, as all others do.
    """
    owners = Owners(chain)
    for entry in chain:
        yield from owners.thaw(entry, shard, thawed, numbered=numbered)
        yield from (RowPart(table, ids, {}) for table, ids in gone_of(entry))
        for part in read(entry):
            if "row" not in part.columns:  # of a preset table: no copy
                yield part
                continue
            kept = owners.owned(part)
            yield RowPart(part.table, part.ids[kept], {name: one[kept] for name, one in part.columns.items()})


def weights_of(entry: Entry, *, all_owners: bool = False) -> Iterator[RowPart]:
    """The rows in the files of one checkpoint; the checksum of a file is verified before its first row is used.

    `all_owners`: of rows in the files of an ssd, their numbers and ids.
    """
    for name, mark in entry.manifest.files.items():
        if not name.startswith("rows/"):
            continue
        path = entry.folder / name
        try:
            if path.stat().st_size != mark.bytes or checksum(path) != mark.crc32:
                raise RunError(f"{path} is damaged: its content does not match its checksum.")
            yield from (part for part in _groups(path) if all_owners or "weight" in part.columns)
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, IndexError) as error:
            raise RunError(f"{path} holds no rows of hotbed ({type(error).__name__}: {error}).") from error


def _groups(path: Path) -> Iterator[RowPart]:
    footer: Any = pq.read_metadata(path)
    tables = json.loads(footer.metadata[TABLES_KEY])
    columns = list(enumerate(json.loads(footer.metadata[COLUMNS_KEY]), 1))  # the first column says the table
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number, table in enumerate(tables):
            group = footer.row_group(number)
            found = {
                _WANTED[name]: _column(handle, group.column(place), group.num_rows, width, TYPES[dtype])
                for place, (name, width, dtype) in columns
                if name in _WANTED
            }
            ids = found.pop("id")
            yield RowPart(table, ids, found)
    finally:
        os.close(handle)


def _column(handle: int, chunk: Any, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Read the values of a column chunk: the last bytes of its page."""
    size = count * max(width, 1) * dtype.itemsize
    flat = torch.empty(size, dtype=torch.uint8, device="cpu")
    start, done = chunk.data_page_offset + chunk.total_compressed_size - size, 0
    while done < size:
        got = os.preadv(handle, [flat.numpy().data[done:]], start + done)
        if not got:
            raise ValueError(f"it ends after {start + done} bytes")
        done += got
    numbers = flat.view(dtype)
    return numbers.view(count, width) if width else numbers
