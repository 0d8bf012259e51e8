"""A run, an export or a checkpoint in a store in; which of its folders are whole, and a local copy of them, out.

Its files are of two kinds. A *unit* is a folder with a manifest.json (a checkpoint, the model, best weights, an export): it is
whole when every file that the manifest lists is there with its size, and it is copied whole. The others are the loose files at
the top: config.json, metrics.jsonl and so on. Folders without a manifest are uploads that never ended; nothing reads them.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any, NamedTuple

from hotbed.checkpoint.manifest import MANIFEST
from hotbed.errors import RunError
from hotbed.files import RemotePath, path_of
from hotbed.files.block_cache import block_cache
from hotbed.files.copies import fetch_file, fetch_folder
from hotbed.files.store import FileStat
from hotbed.host.atomic import make_folder

_INDEX = ".index.json"  # of a copy: which version of each file and unit is here
_manifests: dict[tuple[str, FileStat], tuple[dict[str, int], str | None]] = {}  # those that were read, by their version
Wanted = Callable[[str, Collection[str]], bool]  # the name of a unit, and those of all


class RemoteUnit(NamedTuple):
    """A whole folder in a store."""

    name: str  # relative; empty: the folder itself
    files: dict[str, FileStat]  # relative to the unit
    parent: str | None = None  # of an incremental checkpoint, the unit that it adds to

    @property
    def mark(self) -> list[int]:
        """Tells versions of a unit apart."""
        manifest = self.files[MANIFEST]
        return [manifest.st_size, manifest.st_mtime_ns]

    @property
    def num_bytes(self) -> int:
        return sum(stat.st_size for stat in self.files.values())


class RemoteContent(NamedTuple):
    """What a folder of a store holds."""

    loose: dict[str, FileStat]
    units: dict[str, RemoteUnit]
    broken: list[str]  # units with a manifest that are not whole


def content_of(remote: RemotePath) -> RemoteContent:
    """List a folder, and read the manifests of its units."""
    start = len(remote.key) + 1 if remote.key else 0
    files = {path.key[start:]: stat for path, stat in remote.entries(recursive=True) if stat is not None}
    files = {name: stat for name, stat in files.items() if name and not name.endswith("/")}
    units: dict[str, RemoteUnit] = {}
    broken = []
    for name in sorted(files):
        folder, _, file = name.rpartition("/")
        if file != MANIFEST or any(folder.startswith(f"{above}/") for above in units if above) or "" in units:
            continue
        inside = {one[len(folder) + 1 if folder else 0 :]: stat for one, stat in files.items() if _is_in(one, folder)}
        unit = _unit(remote / folder if folder else remote, folder, inside)
        if unit is None:
            broken.append(folder)
        else:
            units[folder] = unit
    while orphans := [name for name, unit in units.items() if unit.parent is not None and unit.parent not in units]:
        broken += orphans  # they only hold what changed since a checkpoint that is not whole
        units = {name: unit for name, unit in units.items() if name not in orphans}
    loose = {} if "" in units else {name: stat for name, stat in files.items() if "/" not in name}
    return RemoteContent(loose, units, broken)


def _is_in(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _unit(remote: RemotePath, name: str, files: dict[str, FileStat]) -> RemoteUnit | None:
    """The unit, or None if a file that its manifest lists is not there."""
    mark = str(remote), files[MANIFEST]
    try:
        if mark not in _manifests:
            _manifests[mark] = _listed(json.loads((remote / MANIFEST).read_text()))
        sizes, parent = _manifests[mark]
    except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError):
        return None
    if any(file not in files or files[file].st_size != size for file, size in sizes.items()):
        return None
    beside = None if parent is None else f"{name.rpartition('/')[0]}/{parent}".lstrip("/")
    kept = {file: stat for file, stat in files.items() if file in sizes or file == MANIFEST}
    return RemoteUnit(name, kept, beside)


def _listed(tree: dict[str, Any]) -> tuple[dict[str, int], str | None]:
    """The files of a manifest with their sizes, and the parent of an incremental checkpoint."""
    if "checkpoint" in tree:
        body = tree["checkpoint"]
        sizes = {str(name): int(mark[0]) for name, mark in body["files"].items()}
        return sizes | {str(name): int(size) for name, size in body["linked"].items()}, body["parent"]
    return {str(name): int(mark[0]) for name, mark in tree.items()}, None


class LocalCopy:
    """A local copy of a remote folder, within the budget of the read cache; kept from removal while it is open."""

    def __init__(self, remote: RemotePath, wanted: Wanted) -> None:
        """`wanted` says which units are copied, by their names."""
        self.remote = remote
        digest = hashlib.sha256(str(remote).encode()).hexdigest()[:24]
        self.folder = block_cache().folder.root / "copies" / digest
        self._wanted = wanted
        make_folder(self.folder)
        self._lock: IO[str] | None = (self.folder / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.path = self.folder / (remote.name or "root")
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def refresh(self, *, loose: bool = True) -> None:
        """Bring what is new or has changed in the store; nothing else is read. A server needs no newer loose files."""
        content = content_of(self.remote)
        if not content.loose and not content.units:
            raise RunError(f"there is no {self.remote}; give a run, a checkpoint or an export.")
        with (self.folder / ".refresh").open("w") as lock:  # one process at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self._index()
            for name, stat in content.loose.items() if loose else ():
                mark = [stat.st_size, stat.st_mtime_ns]
                if index.get(name) != mark or not (self.path / name).is_file():
                    self._reserve(stat.st_size)
                    fetch_file(self.remote / name, self.path / name, stat)
                    self._note(index, name, mark)
            for name, unit in _parents_first(content.units):
                local = self.path / name if name else self.path
                if self._wanted(name, content.units) and (
                    index.get(f"{name}/") != unit.mark or not (local / MANIFEST).is_file()
                ):
                    self._reserve(unit.num_bytes)
                    make_folder(local.parent)
                    fetch_folder(self.remote / name if name else self.remote, local, unit.files)
                    self._note(index, f"{name}/", unit.mark)
            for name in [one for one in index if one.endswith("/") and one != "/" and one[:-1] not in content.units]:
                shutil.rmtree(self.path / name[:-1], ignore_errors=True)  # removed in the store
                del index[name]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _reserve(self, size: int) -> None:
        block_cache().folder.reserve(size, what=str(self.remote))

    def _index(self) -> dict[str, list[int]]:
        try:
            found = json.loads((self.folder / _INDEX).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _note(self, index: dict[str, list[int]], name: str, mark: list[int]) -> None:
        index[name] = mark
        (self.folder / _INDEX).write_text(json.dumps(index))


def _parents_first(units: dict[str, RemoteUnit]) -> list[tuple[str, RemoteUnit]]:
    """By name: a checkpoint's parent has a lower step; readers look at the folder meanwhile."""
    return sorted(units.items())


def everything(name: str, units: Collection[str]) -> bool:
    """All but best weights that are not the model's."""
    return not name.startswith("best/")


def for_scoring(name: str, units: Collection[str]) -> bool:
    """The model if there is one, else checkpoints."""
    return everything(name, units) and ("model" not in units or name == "model")


def nothing(name: str, units: Collection[str]) -> bool:
    """Only the loose files, which are all that a report needs."""
    return False


_open: dict[str, LocalCopy] = {}


@atexit.register
def _close_all() -> None:
    while _open:
        _open.popitem()[1].close()


def local_copy(place: str | Path, wanted: Wanted = everything) -> Path:
    """A local path itself; of a URI the local copy, brought up to date, and kept until the process ends."""
    path = path_of(place)
    if not isinstance(path, RemotePath):
        return path
    root, inside = path, []
    if "checkpoints" in path.parts:  # one checkpoint may need others, and its run says what it belongs to
        while root.name != "checkpoints":
            inside.append(root.name)
            root = root.parent
        inside.append(root.name)
        root = root.parent
    copy = LocalCopy(root, wanted)
    before = _open.get(str(root))
    _open[str(root)] = copy
    if before is not None:
        before.close()
    return copy.path.joinpath(*reversed(inside))


def refresh(local: Path) -> None:
    """Bring a copy up to date; nothing for a local path."""
    for copy in list(_open.values()):
        if copy.path == local:
            copy.refresh(loose=False)
