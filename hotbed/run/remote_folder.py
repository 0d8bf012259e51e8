"""A run, an export or a checkpoint in a store in; which of its folders are whole, and a local copy of them, out.

Its files are of two kinds. A *unit* is a folder with a manifest.json (a checkpoint, the model, best weights, an export): it is
whole when every file that the manifest lists is there with its size, and it is copied whole. The others are the loose files at
the top: config.json, metrics.jsonl and so on. Folders without a manifest are uploads that never ended; nothing reads them.

A unit may be replaced while its files travel. Its writer removes the manifest first and uploads it last (files/copies.py), so
files are of one version if the manifest is the same before and after. Checksums find writers that keep no such order. A copy of
two versions never takes its place: the folder is listed and copied again.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import shutil
import time
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, NamedTuple

from hotbed.checkpoint.chain import is_checkpoint
from hotbed.checkpoint.files import checksum
from hotbed.checkpoint.layouts import is_of_rank
from hotbed.checkpoint.manifest import MANIFEST
from hotbed.errors import RunError
from hotbed.files import RemotePath, path_of
from hotbed.files.block_cache import block_cache
from hotbed.files.copies import fetch_file, fetch_folder
from hotbed.files.store import FileStat, ReplacedError
from hotbed.host.atomic import make_folder, write_file

_INDEX = ".index.json"  # of a copy: which version of each file and unit is here
_CHECKPOINTS = "checkpoints"  # the folder of a run
_SECONDS = 2.0  # stores give times in seconds: one that was written again within the same second looks the same
_TRIES = 5  # to copy a folder that is replaced meanwhile
Wanted = Callable[[str, Collection[str]], bool]  # the name of a unit, and those of all


class _Listed(NamedTuple):
    """What a manifest says."""

    crc32: int  # of the manifest itself
    sizes: dict[str, int]
    sums: dict[str, int]  # crc32; segments of an ssd have checksums of their own in every record
    parent: str | None  # of an incremental checkpoint


class _Reading(NamedTuple):
    """A manifest as it was read."""

    listed: _Listed
    first: float  # when an object of this size and time was first seen here
    last: float  # when it was last read


_manifests: dict[tuple[str, FileStat], _Reading] = {}


class RemoteUnit(NamedTuple):
    """A whole folder in a store."""

    name: str  # relative; empty: the folder itself
    files: dict[str, FileStat]  # relative to the unit
    listed: _Listed
    parent: str | None = None  # of an incremental checkpoint, the unit that it adds to

    @property
    def mark(self) -> list[int]:
        """Tells versions of a unit apart."""
        manifest = self.files[MANIFEST]
        return [manifest.st_size, manifest.st_mtime_ns, self.listed.crc32]

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
    try:
        listed = _read_manifest(remote / MANIFEST, files[MANIFEST])
    except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError):
        return None
    if any(file not in files or files[file].st_size != size for file, size in listed.sizes.items()):
        return None
    sibling = None if listed.parent is None else f"{name.rpartition('/')[0]}/{listed.parent}".lstrip("/")
    kept = {file: stat for file, stat in files.items() if file in listed.sizes or file == MANIFEST}
    return RemoteUnit(name, kept, listed, sibling)


def _read_manifest(manifest: RemotePath, stat: FileStat) -> _Listed:
    """A manifest, read once, and again as long as another one may have the same size and time."""
    key, now = (str(manifest), stat), time.monotonic()
    known = _manifests.get(key)
    if known is None or known.last - known.first < _SECONDS:
        known = _manifests[key] = _Reading(_listed(manifest.read_bytes()), known.first if known else now, now)
    return known.listed


def _listed(content: bytes) -> _Listed:
    tree = json.loads(content)
    body = tree.get("checkpoint")
    marks = {str(name): (int(size), int(sum_)) for name, (size, sum_) in (body["files"] if body else tree).items()}
    sizes, sums = {name: one[0] for name, one in marks.items()}, {name: one[1] for name, one in marks.items()}
    linked = {str(name): int(size) for name, size in body["linked"].items()} if body else {}
    return _Listed(zlib.crc32(content), sizes | linked, sums, body["parent"] if body else None)


def fetch_unit(remote: RemotePath, local: Path, unit: RemoteUnit) -> None:
    """Copy a unit; an error (ReplacedError) if its files are not all of the version that was listed."""

    def check(new: Path) -> None:
        wrong = [name for name, sum_ in unit.listed.sums.items() if checksum(new / name) != sum_]
        try:
            manifests = (new / MANIFEST).read_bytes(), (remote / MANIFEST).read_bytes()
        except FileNotFoundError:  # the first that goes when a folder is replaced
            manifests = b"", b""
        if wrong or any(zlib.crc32(one) != unit.listed.crc32 for one in manifests):
            what = f"{wrong[0]} does not match the checksum in its manifest" if wrong else "its manifest has changed"
            raise ReplacedError(f"{remote} was replaced while it was copied: {what}. Try again when it is complete.")

    make_folder(local.parent)
    try:
        fetch_folder(remote, local, unit.files, check)
    except FileNotFoundError as error:
        raise ReplacedError(f"{remote} was removed or replaced while it was copied ({error}).") from None


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
        for attempt in range(_TRIES):
            try:
                return self._refresh(loose)
            except ReplacedError:
                if attempt == _TRIES - 1:
                    raise
                _manifests.clear()

    def _refresh(self, loose: bool) -> None:
        with (self.folder / ".refresh").open("w") as lock:  # one at a time: an older list would remove newer files
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = content_of(self.remote)
            if not content.loose and not content.units:
                raise RunError(f"there is no {self.remote}; give a run, a checkpoint or an export.")
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
                    self._note(index, f"{name}/", [])  # a process that is killed now has not forgotten what it brought
                    fetch_unit(self.remote / name if name else self.remote, local, unit)
                    self._note(index, f"{name}/", unit.mark)
            for name in [one for one in index if one.endswith("/") and one != "/" and one[:-1] not in content.units]:
                shutil.rmtree(self.path / name[:-1], ignore_errors=True)  # removed in the store
                self._note(index, name, None)

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

    def _note(self, index: dict[str, list[int]], name: str, mark: list[int] | None) -> None:
        """The copy is on the disk when this returns; None: it is no longer here."""
        if mark is None:
            del index[name]
        else:
            index[name] = mark
        write_file(self.folder / _INDEX, json.dumps(index))


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
    root, inside = _run_of(path)
    copy = LocalCopy(root, wanted)
    before = _open.get(str(root))
    _open[str(root)] = copy
    if before is not None:
        before.close()
    return copy.path / inside


def _run_of(path: RemotePath) -> tuple[RemotePath, str]:
    """The run of a checkpoint and the path from there: a checkpoint may need others, and its run says what it belongs to."""
    place = path.parent if is_checkpoint(path.name) else path
    place = place.parent if is_of_rank(place) else place
    if place.name != _CHECKPOINTS or not place.key:  # the name of a bucket is not that of a folder
        return path, ""
    return place.parent, "/".join(path.parts[len(place.parent.parts) :])


def refresh(local: Path) -> None:
    """Bring a copy of a run, an export or a folder of checkpoints up to date; nothing for any other path."""
    for copy in list(_open.values()):
        if local in (copy.path, copy.path / _CHECKPOINTS):
            copy.refresh(loose=False)
