"""A chain of checkpoints in, rows in a sink out: all of them, or none.

What can be known at once is checked at once: manifests, the presence and size of every file, whether the tables fit. Every
file of rows is then read once and held against its checksum before a row of it is used; when one fails, the sink starts
over, so that no table is left half loaded. Files are read ahead by a few threads while rows go into the sink.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.files import checksum, read_tensors
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.row_file import FileMark
from hotbed.checkpoint.row_read import new_room, parts_of, read_whole
from hotbed.checkpoint.types import RowPart, Sink, TableShape
from hotbed.checkpoint.write import GONE, REST
from hotbed.errors import HotbedError, RunError
from hotbed.store.ssd import frozen_items

THREADS = 2
Report = Callable[[int], None]  # told of bytes that were read


def check_sizes(chain: Sequence[Entry]) -> None:
    """A RunError unless every file of every checkpoint is there and as long as it should be."""
    for folder, manifest in chain:
        sizes = {name: mark.bytes for name, mark in manifest.files.items()} | manifest.linked
        for name, size in sizes.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise RunError(f"{folder} is damaged: {name} cannot be read ({error.strerror or error}).") from error
            if found != size:
                raise RunError(f"{folder} is damaged: {name} has {found} bytes, its manifest says {size}.")


def load_rows(
    entry: Entry, sink: Sink, report: Report = lambda _: None, load_rest: Callable[[], None] = lambda: None
) -> None:
    """Put the rows of a checkpoint into tables of the same shape; `load_rest` what belongs to them, before they can be used."""
    chain = chain_of(entry)
    check_sizes(chain)
    refuse_misfits(entry, sink.tables)
    rest = tensors_of(entry, REST)
    with filling(sink):
        for part in replay(chain, sink, report):
            sink.add(part)
        sink.rest(rest)
        load_rest()


@contextmanager
def filling(sink: Sink) -> Iterator[None]:
    """Rows go into the sink, all of them or none: better no rows than some."""
    try:
        sink.begin()
        yield
        sink.end()
    except (HotbedError, OSError):
        sink.begin()
        sink.end()
        raise


def replay(chain: Sequence[Entry], sink: Sink, report: Report) -> Iterator[RowPart]:
    """The rows of every checkpoint, oldest first; frozen folders and forgotten rows go into the sink in their turn."""
    for entry in chain:
        for group, folder in entry.frozen.items():
            sink.adopt(group, folder)
        for table, ids in gone_of(entry):
            sink.gone(table, ids)
        yield from rows_of(entry, report)


def rows_of(entry: Entry, report: Report = lambda _: None) -> Iterator[RowPart]:
    """The rows in the files of one checkpoint; a part is good until the next is asked for."""
    marks = [(entry.folder / name, mark) for name, mark in entry.manifest.files.items() if name.startswith("rows/")]
    largest = max((mark.bytes for _, mark in marks), default=0)
    rooms = [new_room(largest) for _ in range(THREADS + 1)]  # used again: fresh memory costs more than reading
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
        queue: deque[tuple[Path, int, Future[NDArray[np.uint8]]]] = deque()

        def ask(path: Path, mark: FileMark, number: int) -> None:
            queue.append((path, number, pool.submit(read_whole, path, mark, rooms[number])))

        waiting = iter(marks)
        for number, (path, mark) in zip(range(len(rooms)), waiting):
            ask(path, mark, number)
        try:
            while queue:
                path, number, read = queue.popleft()
                content = read.result()
                yield from parts_of(path, content)
                report(len(content))
                following = next(waiting, None)
                if following is not None:
                    ask(*following, number)
        finally:
            pool.shutdown(cancel_futures=True)


def gone_of(entry: Entry) -> Iterator[tuple[str, Tensor]]:
    """(table, ids) forgotten since the parent."""
    mark = entry.manifest.files.get(GONE)
    if mark is not None:
        path = entry.folder / GONE
        for part in parts_of(path, read_whole(path, mark)):
            yield part.table, part.ids


def tensors_of(entry: Entry, stem: str) -> dict[str, Tensor]:
    """The tensors of one small file, checked."""
    name = f"{stem}.safetensors"
    path, mark = entry.folder / name, entry.manifest.files.get(name)
    if mark is None:
        return {}
    try:
        fits = checksum(path) == mark.crc32
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not fits:
        raise RunError(f"{entry.folder} is damaged: the content of {name} does not fit its checksum.")
    return read_tensors(path)


def refuse_misfits(entry: Entry, tables: Mapping[str, TableShape]) -> None:
    """A RunError unless the tables are those that were saved."""
    saved = entry.manifest.tables
    wrong = [f"it has no table {name!r}" for name in tables if name not in saved]
    wrong += [f"its table {name!r} is not wanted" for name in saved if name not in tables]
    for name, shape in tables.items():
        if name in saved and saved[name] != shape:
            pairs = differences(saved[name], shape).items()
            wrong.append(f"table {name!r} has " + ", ".join(f"{what} {old}, not {new}" for what, (old, new) in pairs))
    if wrong:
        raise RunError(
            f"{entry.folder} does not fit this run: {'; '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}. "
            "Build the same tables, or carry over what fits with --warm-start (hotbed.checkpoint.warm_start)."
        )


def differences(one: TableShape, other: TableShape) -> dict[str, tuple[object, object]]:
    """Every field in which two shapes differ."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in TableShape.__dataclass_fields__}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


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
    for folder in entry.frozen.values():
        try:
            for _, records in frozen_items(folder):
                report(records.nbytes)
        except (HotbedError, OSError) as error:
            problems.append(str(error))
    return problems
