"""A disk that may lose power: file operations in, every state out that the disk may be left in.

The model is the weakest that POSIX allows, as in SQLite's and RocksDB's tests: the bytes of a file are on the disk when the
file was synced, its name when the folder that holds the name was synced, and until then any of the operations since may be
there or not, in any order, and a write may be there in part. A rename is there as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SECTOR = 512
_FEW = 5  # pending operations of which all subsets are tried
_SINGLES = 6  # of more, so many of the last ones are dropped or kept each by itself
_DRAWN = 6  # and so many subsets are drawn at random


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever its names."""

    is_folder: bool


@dataclass
class Tree:
    """Folders and files, by node."""

    root: Node
    data: dict[Node, bytes] = field(default_factory=dict)
    names: dict[Node, dict[str, Node]] = field(default_factory=dict)

    def copy(self) -> Tree:
        return Tree(self.root, dict(self.data), {folder: dict(inside) for folder, inside in self.names.items()})

    def make(self, operations: Sequence[Pending]) -> None:
        """Let these operations come through."""
        for operation in operations:
            if isinstance(operation, Write):
                self.data[operation.node] = operation.on(self.data.get(operation.node, b""))
                continue
            for folder, name, node in operation.changes:
                inside = self.names.setdefault(folder, {})
                if node is None:
                    inside.pop(name, None)
                else:
                    inside[name] = node

    def files(self) -> dict[str, bytes | None]:
        """Every path, folders before what is in them; None: a folder."""
        found: dict[str, bytes | None] = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in sorted(self.names.get(folder, {}).items()):
                found[path + name] = None if node.is_folder else self.data.get(node, b"")
                if node.is_folder:
                    walk(node, f"{path}{name}/")

        walk(self.root, "")
        return found


@dataclass(eq=False)
class Write:
    """Bytes of a file: the sectors that changed, and its length then."""

    node: Node
    size: int
    sectors: dict[int, bytes]
    kept: int = 0  # its length before, if it has grown: an append that is torn takes nothing away

    @staticmethod
    def between(node: Node, before: bytes, after: bytes) -> Write:
        places = range(0, len(after), SECTOR)
        changed = {at: after[at : at + SECTOR] for at in places if before[at : at + SECTOR] != after[at : at + SECTOR]}
        return Write(node, len(after), changed, len(before) if len(before) < len(after) else 0)

    def touches(self, node: Node) -> bool:
        return self.node is node

    def on(self, data: bytes) -> bytes:
        """The file's bytes with this write; what was never written reads as zeros."""
        out = bytearray(data[: self.size].ljust(self.size, b"\0"))
        for at, sector in self.sectors.items():
            out[at : at + len(sector)] = sector
        return bytes(out)

    def torn(self) -> list[Write]:
        """Parts of it that may be there: half of it, the length alone, the last sector alone, half a sector."""
        places = sorted(self.sectors)
        if not places:
            return []
        first, last = places[: -(-len(places) // 2)], places[-1]
        half = {at: self.sectors[at] for at in first}
        cut = max(self.kept, first[-1] + len(self.sectors[first[-1]]) // 2)
        short = {at: sector[: cut - at] for at, sector in half.items() if at < cut}
        return [
            Write(self.node, self.size, {}),
            Write(self.node, self.size, half),
            Write(self.node, min(first[-1] + SECTOR, self.size), half),
            Write(self.node, cut, short),
            Write(self.node, self.size, {last: self.sectors[last]}),
        ]


@dataclass(eq=False)
class Rename:
    """Names that change as one: made (a node), gone (None), or one of each."""

    changes: list[tuple[Node, str, Node | None]]  # folder, name, what it names from now on

    def touches(self, node: Node) -> bool:
        return any(folder is node for folder, _, _ in self.changes)


@dataclass(eq=False)
class Sync:
    """All operations on this file or folder so far are on the disk."""

    node: Node


@dataclass(eq=False)
class Mark:
    """The process said something: from here on the disk must give no older state."""

    text: str


Pending = Write | Rename
Operation = Pending | Sync | Mark


@dataclass
class State:
    """One state the disk may be left in."""

    files: dict[str, bytes | None]  # by path; None: a folder
    after: int  # operations that the process had made
    said: tuple[str, ...]  # marks before that

    @cached_property
    def digest(self) -> bytes:
        whole = hashlib.blake2b(digest_size=16)
        for path, data in sorted(self.files.items()):
            whole.update(repr((path, data is None, len(data or b""))).encode())
            whole.update(data or b"")
        return whole.digest()

    def lay_out(self, folder: Path) -> None:
        """Make the state real, in an empty folder."""
        for path, data in self.files.items():  # folders come before what is in them
            if data is None:
                os.mkdir(f"{folder}/{path}")
            else:
                with open(f"{folder}/{path}", "wb", buffering=0) as file:
                    file.write(data)


class Disk:
    """What is on the disk for certain, and what may be."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree.copy()
        self.pending: list[Pending] = []

    def apply(self, operation: Operation) -> None:
        """The process does one more thing."""
        if isinstance(operation, Sync):
            self._tree.make([one for one in self.pending if one.touches(operation.node)])
            self.pending = [one for one in self.pending if not one.touches(operation.node)]
        elif not isinstance(operation, Mark):
            self.pending.append(operation)

    def files(self, kept: Sequence[Pending]) -> dict[str, bytes | None]:
        """The tree, had these of the pending operations come through."""
        tree = self._tree.copy()
        tree.make(kept)
        return tree.files()


def states(start: Tree, operations: Sequence[Operation], seed: int = 0) -> Iterator[State]:
    """Every state after each prefix of the operations, each tree once for each set of marks before it."""
    disk, said, draw = Disk(start), list[str](), random.Random(seed)
    seen: set[tuple[bytes, int]] = set()
    for after, operation in enumerate([None, *operations]):
        if operation is not None:
            disk.apply(operation)
        if isinstance(operation, Mark):
            said.append(operation.text)
        for kept in _choices(disk.pending, draw):
            state = State(disk.files(kept), after, tuple(said))
            key = (state.digest, len(said))
            if key not in seen:
                seen.add(key)
                yield state


def _choices(pending: Sequence[Pending], draw: random.Random) -> Iterator[Sequence[Pending]]:
    """Which of the pending operations came through: all subsets of a few, a choice of those of many."""
    count = len(pending)
    if count <= _FEW:
        for number in range(1 << count):
            yield [one for at, one in enumerate(pending) if number >> at & 1]
    else:
        yield pending
        yield []
        for kind in (Write, Rename):
            yield [one for one in pending if isinstance(one, kind)]
        for at in range(max(1, count - _SINGLES), count):  # shorter ones were tried when they were all there was
            yield pending[:at]
            yield pending[at:]
        others = range(count - _SINGLES) if count > _SINGLES else range(0)
        singles = [*range(max(0, count - _SINGLES), count), *draw.sample(others, min(len(others), 4))]
        names = [one for one in pending if isinstance(one, Rename)]
        for at in singles:
            one = pending[at]
            yield [other for other in pending if other is not one]
            yield [one]
            yield [other for other in names if other is not one] if isinstance(one, Rename) else [*names, one]
        for _ in range(_DRAWN):
            yield [one for one in pending if draw.random() < 0.5]
    for at in range(max(0, count - _SINGLES), count):
        one = pending[at]
        if isinstance(one, Write):
            for torn in one.torn():
                yield [*pending[:at], torn, *pending[at + 1 :]]
