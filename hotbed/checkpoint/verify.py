"""Is a checkpoint whole? Every byte is read and every problem named; nothing is loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.read import Report, check_sizes, gone_of, tensors_of
from hotbed.checkpoint.row_read import parts_of, read_whole
from hotbed.errors import HotbedError, RunError
from hotbed.store.ssd import frozen_items


def problems_of(folder: Path, report: Report = lambda _: None) -> list[str]:
    """What is wrong with one checkpoint: its manifest, the chain it stands on, its own files."""
    try:
        entry = Entry(folder, read_manifest(folder))
    except RunError as error:
        return [str(error)]
    problems = []
    for check in (lambda: chain_of(entry), lambda: check_sizes([entry])):
        try:
            check()
        except RunError as error:
            problems.append(str(error))
    return problems + _damaged_files(entry, report) + _damaged_segments(entry, report)


def _damaged_files(entry: Entry, report: Report) -> list[str]:
    problems, rows = [], Counter[str]()
    for name, mark in entry.manifest.files.items():
        path = entry.folder / name
        try:
            if name.startswith("rows/"):
                for part in parts_of(path, read_whole(path, mark)):
                    rows[part.table] += part.ids.shape[0]
            elif path.suffix == ".parquet":
                list(gone_of(entry))
            else:
                tensors_of(entry, path.stem)
        except RunError as error:
            problems.append(str(error))
        report(mark.bytes)
    if not problems and rows != Counter(entry.manifest.rows):
        problems.append(f"{entry.folder} holds {rows.total():,} rows, its manifest says {entry.manifest.num_rows:,}.")
    return problems


def _damaged_segments(entry: Entry, report: Report) -> list[str]:
    """Segments of an ssd carry a checksum in every record."""
    problems = []
    for folder in sorted({Path(name).parts[1] for name in entry.manifest.linked}):
        try:
            for _, records in frozen_items(entry.folder / "frozen" / folder):
                report(records.nbytes)
        except (HotbedError, OSError) as error:
            problems.append(str(error))
    return problems
