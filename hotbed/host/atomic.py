"""Files and folders that are there whole or not at all, also after a power loss.

A rename is one step, but neither the bytes of a new file nor any name is on the disk before it was flushed: the bytes with the
file, the name with the folder that holds it. Hence one order everywhere: content, flush, rename, flush of the folder, and only
then the removal of what was there before. tests/power replays every state that a power loss may leave.

    place           a flushed file takes its name; after a power loss the name is the old file's or the new one's
    put             the same, and the name is on the disk when it returns
    rewriting       a file next to it, written by the caller, that takes the name or is removed
    put_folder      a flushed folder takes the place of another one
    recover_folder  the old one again, where two renames were needed for that and a crash came between
    remove_folder   a folder goes in one step
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotbed.errors import RunError

_AT_CWD, _EXCHANGE = -100, 2
_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux has it


def flush_to_disk(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; some file systems have no folders to flush."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tree_of(folder: Path) -> Iterator[Path]:
    """All that must be flushed for a folder to be whole: files, folders, and last the folder itself."""
    for at, _, files in os.walk(folder, topdown=False):
        yield from (Path(at, name) for name in sorted(files))
        yield Path(at)


def flush_tree(folder: Path) -> None:
    """Bring a folder with all that is in it to the disk."""
    for path in tree_of(folder):
        flush_to_disk(path)


def make_folder(path: Path) -> None:
    """A folder and those above it, if they are not there, on the disk."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush_to_disk(path.parent)


def place(temporary: Path, path: Path) -> None:
    """Give a file that was written next to it this name: from then on it is there with all its bytes, or not yet."""
    flush_to_disk(temporary)
    os.replace(temporary, path)


def put(temporary: Path, path: Path) -> None:
    """`place`, and the name is on the disk when this returns."""
    place(temporary, path)
    flush_to_disk(path.parent)


def write_file(path: Path, content: str | bytes) -> None:
    """A small file in one step: a reader sees the old content or the new, whatever happens."""
    with rewriting(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def rewriting(path: Path, finish: Callable[[Path, Path], None] = put, *, unique: bool = False) -> Iterator[Path]:
    """Where to write a file before it takes its name, as `finish` does; nothing is left of it after an error.

    `unique` where several processes may write the same file at once. Otherwise the next writer takes the place of what one that
    was killed has left.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp" if unique else f"{path.name}.tmp")
    try:
        yield temporary
        finish(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def put_folder(new: Path, folder: Path, old: Path) -> None:
    """Let `new`, whose tree was flushed, take the place of a folder, which is removed.

    Where the file system cannot exchange two names, there is a moment in which the folder is called `old`.
    """
    if folder.exists() and exchange(new, folder):
        old = new
    else:
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path, old: Path) -> None:
    """After a crash between the two renames of put_folder, the old folder takes its place again."""
    if not folder.exists() and old.exists():
        os.replace(old, folder)


def exchange(one: Path, other: Path) -> bool:
    """Two folders swap their names in one step; False where the system cannot, and nothing has changed."""
    if _renameat2 is None:
        return False
    return bool(_renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0)


def remove_folder(folder: Path, doomed: Path) -> None:
    """Remove a folder under another name, so that it goes in one step."""
    os.replace(folder, doomed)
    flush_to_disk(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. Free some space or choose another folder with --out."
        ) from error
