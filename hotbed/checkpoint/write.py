"""Writes a checkpoint from a snapshot and a state, whole or not at all.

The folder is filled under a temporary name next to its final place, every file is flushed to the disk, then it is renamed.
A few threads write rows, each into files of its own; fsync of one file runs while the next is filled.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hotbed.checkpoint.chain import NEW, Entry, clean, locked, new_name
from hotbed.checkpoint.files import checksum, write_tensors
from hotbed.checkpoint.manifest import MANIFEST, Manifest
from hotbed.checkpoint.row_file import Column, CopyBuffer, FileMark, RowFile, columns_of, split_parts
from hotbed.checkpoint.types import Snapshot
from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, writing
from hotbed.host.background import be_nice
from hotbed.host.threads import run_ahead
from hotbed.types import RowPart

FILE_BYTES = 128 << 20  # of a file of rows, about
REST = "rest"  # the tables' own small tensors
GONE = "gone.parquet"


class State(NamedTuple):
    """What is saved in addition to the rows, as of one step; these tensors no longer change."""

    step: int
    tensors: dict[str, dict[str, Tensor]]  # name of a safetensors file -> its tensors
    document: dict[str, Any]  # plain JSON


class WriteOptions(NamedTuple):
    """How a checkpoint is written."""

    threads: int = 2
    cancelled: Callable[[], bool] = lambda: False
    gentle: Callable[[], bool] = lambda: False  # sleep after every row group for as long as it took


AT_ONCE = WriteOptions()


class _Work(NamedTuple):
    """Shared by the threads that write rows."""

    folder: Path
    parts: Iterator[RowPart]
    lock: threading.Lock
    options: WriteOptions
    failed: threading.Event  # one of the threads has failed


def write_checkpoint(
    root: Path,
    state: State,
    snapshot: Snapshot,
    parent: Entry | None = None,
    options: WriteOptions = AT_ONCE,
) -> Entry:
    """Write a checkpoint; with a parent, an incremental one from a snapshot of touched rows."""
    with locked(root), writing(root):
        clean(root)
        name = new_name(root, state.step)
        new = root / (name + NEW)
        try:
            new.mkdir()
            manifest = _fill(new, state, snapshot, parent, options)
            os.replace(new, root / name)
            flush_to_disk(root)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
            raise
    return Entry(root / name, manifest)


def _fill(new: Path, state: State, snapshot: Snapshot, parent: Entry | None, options: WriteOptions) -> Manifest:
    linked = _link(new, snapshot)
    files, rows = _write_rows(
        _Work(new / "rows", split_parts(snapshot.parts()), threading.Lock(), options, threading.Event())
    )
    gone_mark, gone = _write_gone(new / GONE, snapshot.gone())
    if gone_mark is not None:
        files[GONE] = gone_mark
    for stem, tensors in {**state.tensors, REST: snapshot.rest()}.items():
        path = new / f"{stem}.safetensors"
        write_tensors(path, tensors)
        flush_to_disk(path)
        files[path.name] = FileMark(path.stat().st_size, checksum(path))
    manifest = Manifest(
        kind="full" if parent is None else "incremental",
        step=state.step,
        time=time.time(),
        parent=parent and parent.name,
        parent_crc32=parent and parent.manifest.crc32,
        tables=snapshot.tables,
        rows=dict(rows),
        gone=dict(gone),
        files=files,
        linked=linked,
        document=state.document,
    ).save(new)
    flush_to_disk(new / MANIFEST)
    for folder in [path for path in new.rglob("*") if path.is_dir()]:
        flush_to_disk(folder)
    flush_to_disk(new)
    return manifest


def _link(new: Path, snapshot: Snapshot) -> dict[str, int]:
    """Let every frozen folder link its files; the bytes of each."""
    sizes: dict[str, int] = {}
    for frozen in snapshot.frozen:
        folder = new / "frozen" / frozen.name
        folder.mkdir(parents=True)
        frozen.link_into(folder)
        sizes |= {str(path.relative_to(new)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sizes


def _write_rows(rows: _Work) -> tuple[dict[str, FileMark], Counter[str]]:
    """Write all parts with a few threads; the marks of the files and the number of rows by table."""
    rows.folder.mkdir()
    marks: dict[str, FileMark] = {}
    counts: Counter[str] = Counter()
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else 0
    threads = rows.options.threads

    def write(thread: int) -> tuple[dict[str, FileMark], Counter[str]]:
        return _write_some(rows, thread, niceness)

    for some_marks, some_counts in run_ahead(write, range(threads), threads=threads, ahead=threads, name="checkpoint"):
        marks |= some_marks
        counts += some_counts
    return marks, counts


def _write_some(rows: _Work, thread: int, niceness: int) -> tuple[dict[str, FileMark], Counter[str]]:
    """One thread: take a part, copy it, write it while another thread takes the next."""
    be_nice(niceness)
    marks: dict[str, FileMark] = {}
    counts: Counter[str] = Counter()
    scratch, files = CopyBuffer(), _Files(rows.folder, thread, marks)
    try:
        while True:
            began = time.perf_counter()
            with rows.lock:
                part = next(rows.parts, None)
                if part is not None:
                    part = scratch.copy(part)
            if part is None or rows.failed.is_set():
                break
            if rows.options.cancelled():
                raise RunError("the checkpoint was cancelled")
            files.of(columns_of(part)).add(part)
            counts[part.table] += part.ids.shape[0]
            if rows.options.gentle():
                time.sleep(time.perf_counter() - began)
        files.close()
    except BaseException:
        rows.failed.set()
        files.abandon()
        raise
    return marks, counts


class _Files:
    """The open files of one thread: one for each layout of columns, followed by the next when it is full."""

    def __init__(self, folder: Path, thread: int, marks: dict[str, FileMark]) -> None:
        self._folder, self._thread, self._marks = folder, thread, marks
        self._open: dict[tuple[Column, ...], RowFile] = {}
        self._number = 0

    def of(self, columns: tuple[Column, ...]) -> RowFile:
        file = self._open.get(columns)
        if file is not None and file.position >= FILE_BYTES:
            self._finish(file)
            file = None
        if file is None:
            path = self._folder / f"{self._thread}-{self._number:05}.parquet"
            file = self._open[columns] = RowFile(path, columns)
            self._number += 1
        return file

    def close(self) -> None:
        for file in self._open.values():
            self._finish(file)
        self._open = {}

    def abandon(self) -> None:
        for file in self._open.values():
            file.abandon()

    def _finish(self, file: RowFile) -> None:
        self._marks[f"rows/{file.path.name}"] = file.close()


def _write_gone(path: Path, gone: Iterator[tuple[str, Tensor]]) -> tuple[FileMark | None, Counter[str]]:
    """One file of ids, if there are any."""
    counts: Counter[str] = Counter()
    file: RowFile | None = None
    try:
        for part in split_parts(RowPart(table, ids, {}) for table, ids in gone):
            file = file or RowFile(path, columns_of(part))
            file.add(part)
            counts[part.table] += part.ids.shape[0]
        return (file.close() if file else None), counts
    except BaseException:
        if file is not None:
            file.abandon()
        raise
