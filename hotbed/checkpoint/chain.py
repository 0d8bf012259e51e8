"""A folder of checkpoints: which exist, what each one needs, and which may be removed.

    checkpoints/000000001000     named by its step; a second one of the same step is 000000001000.1
    checkpoints/000000002000
    checkpoints/000000003000.new     being written, or its writer was killed; readers ignore it

An incremental checkpoint names its parent. Loading reads the chain down to a full one. Retention keeps the newest checkpoints
and everything they need.

Marks of touched rows are relative to the last checkpoint that was written from these tables, or loaded into them. It is
forgotten (`store.history.begin_history`) before anything changes the meaning of the marks, and remembered when that is done:
after an interruption in between the next checkpoint is a full one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, make_folder, remove_folder, writing
from hotbed.store.history import HISTORY_LOCK, history_of

NEW, DOOMED = ".new", ".gone"
LONGEST_WAIT = 60.0  # seconds for another writer, such as `hotbed checkpoint prune`
_NAME = re.compile(r"(\d{12,})(?:\.(\d+))?")


class Entry(NamedTuple):
    """One checkpoint on disk."""

    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def frozen(self) -> dict[str, Path]:
        """The folders of ssd segments, by the group whose rows are in them."""
        groups = sorted({Path(name).parts[1] for name in self.manifest.linked})
        return {group: self.folder / "frozen" / group for group in groups}


def is_checkpoint(name: str) -> bool:
    """Whether a complete checkpoint has such a name."""
    return _NAME.fullmatch(name) is not None


def folders_in(root: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first, unread."""
    try:
        found = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{root} cannot be read: {error.strerror or error}.") from error
    return [path for _, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))]


def new_name(root: Path, step: int) -> str:
    """The name of the next checkpoint of a step: above all existing ones, also if the first were removed."""
    names = [match for path in folders_in(root) if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step]
    serial = max((int(match[2] or 0) + 1 for match in names), default=0)
    return f"{step:012}.{serial}" if serial else f"{step:012}"


def find(place: Path) -> Entry:
    """A checkpoint by its own folder, or the newest one of a folder of checkpoints or of a run."""
    if (place / MANIFEST).is_file() and is_checkpoint(place.resolve().name):
        return Entry(place, read_manifest(place))
    for root in (place / "checkpoints", place):
        folders = folders_in(root)
        if folders:
            return Entry(folders[-1], read_manifest(folders[-1]))
    if not place.exists():
        raise RunError(f"there is no {place}; give a run, a folder of checkpoints or one checkpoint.")
    raise RunError(
        f"{place} holds no checkpoint. A run writes them with --checkpoint-every N, when it is stopped, and when it ends."
    )


def chain_of(entry: Entry) -> list[Entry]:
    """The checkpoints that loading this one reads: a full one and all that add to it, oldest first."""
    chain = [entry]
    while chain[-1].manifest.kind == "incremental":
        child = chain[-1]
        parent = child.folder.parent / (child.manifest.parent or "")
        if not parent.is_dir() or parent in [one.folder for one in chain]:
            raise RunError(
                f"{child.folder} only holds what changed since {child.manifest.parent}, which is not there. Bring "
                f"{parent} back, or resume from an older checkpoint by moving the later ones away."
            )
        older = Entry(parent, read_manifest(parent))
        if older.manifest.crc32 != child.manifest.parent_crc32:
            raise RunError(f"{parent} is not the checkpoint that {child.folder} adds to; it comes from elsewhere.")
        chain.append(older)
    return chain[::-1]


def unneeded(root: Path, keep: int, written: Path | None = None) -> list[Path]:
    """The folders that may be removed: neither among the newest `keep`, nor just `written`, nor needed by one of those."""
    folders = folders_in(root)
    place = {path.name: number for number, path in enumerate(folders)}
    needed: set[int] = set()
    kept = range(max(0, len(folders) - max(keep, 1)), len(folders))
    for newest in (*kept, *([place[written.name]] if written is not None and written.name in place else [])):
        number: int | None = newest
        while number is not None and number not in needed:
            needed.add(number)
            number = _parent(folders, place, number)
    return [path for number, path in enumerate(folders) if number not in needed]


def remove(folders: list[Path]) -> None:
    """Remove checkpoints, each in one step, children before parents."""
    for folder in reversed(folders):
        doomed = folder.with_name(folder.name + DOOMED)
        with writing(folder):
            remove_folder(folder, doomed)


def clean(root: Path) -> None:
    """Remove leftovers of killed writers; only with the lock held."""
    left = [path for path in root.iterdir() if path.suffix in (NEW, DOOMED) and _NAME.fullmatch(path.stem)]
    if left:
        flush_to_disk(root)  # a folder that was just renamed must not come back with half of its files
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """One writer at a time in a folder of checkpoints, which is created if needed. Waits for another writer."""
    with writing(root):
        make_folder(root)
        lock = _Lock(root)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while not lock.taken():
            if time.monotonic() >= deadline:
                raise RunError(f"another process has been writing in {root} for {LONGEST_WAIT:.0f} s. Wait for it.")
            time.sleep(0.05)
        yield
    finally:
        lock.close()


class _Lock:
    """The lock of a folder; released when this object is freed at the latest, wherever an interrupt came."""

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._handle)

    def taken(self) -> bool:
        """True once the lock is held, or where the file system has no locks."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _parent(folders: list[Path], place: dict[str, int], number: int) -> int | None:
    """The place of the parent; if the manifest cannot be read, to be safe, the checkpoint before it."""
    try:
        manifest = read_manifest(folders[number])
    except RunError:
        return number - 1 if number else None
    return place.get(manifest.parent or "") if manifest.kind == "incremental" else None


class _LastSave(NamedTuple):
    """The checkpoint that marks of touched rows are relative to."""

    entry: Entry
    history: object  # of the tables, then


_LAST: weakref.WeakKeyDictionary[Any, _LastSave] = weakref.WeakKeyDictionary()


def remember(tables: Any, entry: Entry) -> None:
    """From here on, rows are marked as touched since this checkpoint."""
    with HISTORY_LOCK:
        _LAST[tables] = _LastSave(Entry(entry.folder.resolve(), entry.manifest), history_of(tables))


def advance(tables: Any, entry: Entry, history: object, commit: Callable[[], None]) -> None:
    """A checkpoint of a history is on disk: marks are relative to it, unless rows were replaced while it was written."""
    with HISTORY_LOCK:
        if history_of(tables) is history:
            _LAST.pop(tables, None)
            commit()
            remember(tables, entry)


def last_of(tables: Any, root: Path) -> Entry | None:
    """The checkpoint that marks are relative to, if it is in `root` and unchanged."""
    with HISTORY_LOCK:
        since = _LAST.get(tables)
        last = since.entry if since is not None and since.history is history_of(tables) else None
    if last is None or last.folder.parent != root.resolve():
        return None
    try:
        found = read_manifest(last.folder)
    except RunError:
        return None
    return Entry(root / last.name, found) if found.crc32 == last.manifest.crc32 else None
