"""What a process is doing, recorded in a file that outlives it.

The file is mapped into memory: a count for each stage that is open, a flag for each that was ever entered, and the number of
changes to the disk so far. A killed process leaves it as it was at that moment.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

STAGES = {  # stage -> where the functions are looked up that are it
    "reading the dataset": ("hotbed.cli.train_run:open_dataset",),
    "building tables": ("hotbed.train.build:build",),
    "clearing the folder": ("hotbed.run.folder:make_run",),
    "resuming": ("hotbed.train.loop:Training.resume",),
    "adopting segments": ("hotbed.store.ssd.store:adopt",),
    "training": ("hotbed.train.loop:Training.train",),
    "evaluating": ("hotbed.train.loop:Training.evaluate_split",),
    "writing best weights": ("hotbed.train.loop:Training._save_best",),
    "writing a checkpoint": ("hotbed.checkpoint.saver:write_checkpoint",),
    "removing checkpoints": ("hotbed.checkpoint.saver:remove", "hotbed.checkpoint.chain:remove"),
    "compacting": ("hotbed.store.ssd.compaction:Compaction.rewrite",),
    "writing the model": ("hotbed.train.run:save_model",),
    "writing the report": ("hotbed.report:write_report",),
}
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "open")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_COUNT = struct.Struct("<I")
_SIZE = 2 * len(STAGES) + _COUNT.size


def no_marks(path: Path) -> None:
    """An empty file of marks."""
    path.write_bytes(bytes(_SIZE))


def open_stages(path: Path) -> list[str]:
    """The stages that were open when the process ended."""
    marks = path.read_bytes()
    found = [stage for number, stage in enumerate(STAGES) if marks[number]]
    if found:
        return found
    return ["after the end" if "training" in seen_stages(path) else "starting up"]


def seen_stages(path: Path) -> set[str]:
    """The stages that the process has entered."""
    marks = path.read_bytes()
    return {stage for number, stage in enumerate(STAGES) if marks[len(STAGES) + number]}


def num_changes(path: Path) -> int:
    """How often the process has changed the disk."""
    return int(_COUNT.unpack_from(path.read_bytes(), 2 * len(STAGES))[0])


def watch(path: Path, root: Path, fatal_change: int) -> None:
    """From here on this process marks what it does, and dies right before this change (0: never) below `root`."""
    with path.open("r+b") as file:
        marks = mmap.mmap(file.fileno(), _SIZE)
    for number, places in enumerate(STAGES.values()):
        for place in places:
            module, _, name = place.partition(":")
            owner: Any = import_module(module)
            *outer, attribute = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, attribute, _marked(getattr(owner, attribute), marks, number))
    sys.addaudithook(_Changes(marks, str(root), fatal_change))


def _marked(function: Callable[..., Any], marks: mmap.mmap, number: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        marks[len(STAGES) + number] = 1
        marks[number] += 1
        try:
            return function(*args, **named)
        finally:
            marks[number] -= 1

    return call


class _Changes:
    """Counts renames, links, removals and files opened for writing, before they happen."""

    def __init__(self, marks: mmap.mmap, root: str, fatal: int) -> None:
        self._marks, self._root, self._fatal, self._count = marks, root, fatal, 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _CHANGES or not self._is_change(event, args):
            return
        self._count += 1
        _COUNT.pack_into(self._marks, 2 * len(STAGES), self._count)
        if self._count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_change(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open" and not args[2] & _WRITES:
            return False
        if not isinstance(args[0], str | os.PathLike):
            return event == "os.truncate"
        path = os.fspath(args[0])
        return path.startswith(self._root) or not os.path.isabs(
            path
        )  # removing a tree names its files without their folder
