"""Every file operation below a folder, as a process makes them, whoever makes them: Python, pyarrow or compiled code.

Calls that give names, take names away or sync are seen as they come. Whatever else happened since the last of them is found
by looking: files that are new, and bytes that are other than they were. So a file that C++ has written counts, and so does
one that is mapped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotbed.host import atomic
from tests.power.disk import Mark, Node, Operation, Rename, Sync, Tree, Write

_NAMING = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink")
_WRITING = ("write", "pwrite", "ftruncate", "truncate", "sendfile", "copy_file_range")
_SYNCING = ("fsync", "fdatasync")
_YOUNG = 1e8  # nanoseconds: a file this young may have changed without another time
Place = tuple[Node, str]  # a folder, and a name in it


class Recorder:
    """`with Recorder(folder) as recorder:` its operations below the folder, in order; what is there before is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self._patch = pytest.MonkeyPatch()
        self._now = Tree(Node(True))
        self._node_of: dict[int, Node] = {}  # by inode
        self._seen: dict[Node, tuple[int, int]] = {}  # length and time
        self._look()
        self.start = self._now.copy()
        self.operations.clear()

    def __enter__(self) -> Recorder:
        for name in _NAMING + _WRITING:
            self._patch.setattr(os, name, self._watched(getattr(os, name)))
        self._patch.setattr(atomic, "exchange", self._watched(atomic.exchange))
        for name in _SYNCING:
            self._patch.setattr(os, name, self._sync)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self._look()

    def mark(self, text: str) -> None:
        """What the process promises from here on."""
        with self._lock:
            self._look()
            self.operations.append(Mark(text))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._look()
                try:
                    return real(*arguments, **named)
                finally:
                    self._look(as_one=real.__name__ in ("rename", "replace", "exchange"))

        return call

    def _sync(self, file: Any) -> None:
        """The disk itself is left alone: a sync costs milliseconds, and its order is all that matters here."""
        handle = file if isinstance(file, int) else file.fileno()
        with self._lock:
            self._look()
            node = self._node_of.get(os.fstat(handle).st_ino)
            if node is not None:
                self.operations.append(Sync(node))

    def _look(self, as_one: bool = False) -> None:
        """Note what has changed since the last look; `as_one`: names that changed did so in one step."""
        found: dict[Place, Node] = {}
        with self._lock:
            writes = self._walk(self._now.root, self.folder, found)
            before = {
                (folder, name): node for folder, inside in self._now.names.items() for name, node in inside.items()
            }
            made = [(*place, node) for place, node in found.items() if before.get(place) is not node]
            gone = [(*place, None) for place in before if place not in found]
            changes = [*made, *gone]
            renames = [Rename(changes)] if as_one and changes else [Rename([one]) for one in changes]
            self._now.make([*renames, *writes])
            self.operations += [*renames, *writes]
            named = {id(node) for node in found.values()}
            self._node_of = {inode: node for inode, node in self._node_of.items() if id(node) in named}
            self._node_of[self.folder.stat().st_ino] = self._now.root

    def _walk(self, folder: Node, path: Path, found: dict[Place, Node]) -> list[Write]:
        writes: list[Write] = []
        for entry in sorted(_entries(path), key=lambda one: one.inode()):
            try:
                about = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
                node = self._node_of.get(about.st_ino)
                if node is None or node.is_folder != is_folder:
                    node = self._node_of[about.st_ino] = Node(is_folder)
                known = node in self._seen
                if not is_folder and (
                    self._seen.get(node) != (about.st_size, about.st_mtime_ns)
                    or time.time_ns() - about.st_mtime_ns < _YOUNG
                ):
                    before, after = self._now.data.get(node, b""), Path(entry.path).read_bytes()
                    if before != after or (not known and after):
                        writes.append(Write.between(node, before, after))
                    self._seen[node] = (about.st_size, about.st_mtime_ns)
            except FileNotFoundError:  # another thread has taken it away meanwhile
                continue
            found[folder, entry.name] = node
            if is_folder:
                writes += self._walk(node, Path(entry.path), found)
        return writes


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
