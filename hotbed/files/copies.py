"""Whole folders between the local disk and a store: files side by side, the manifest last.

A store has no rename, so the file that makes a folder count (a manifest, schema.json) is uploaded after all others have
arrived, and removed before any other is replaced. Whoever reads it sees a whole folder or none. Downloads are written beside,
flushed and renamed, as everything local is. A few files travel at a time, each through a buffer of one piece.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hotbed.errors import RemoteError
from hotbed.files.block_cache import is_unused
from hotbed.files.path import RemotePath
from hotbed.files.settings import cache_root
from hotbed.files.store import FileStat
from hotbed.host.atomic import flush_tree, make_folder, put_folder, rewriting
from hotbed.host.threads import run_all

AT_ONCE = 4  # files that travel side by side
_PIECE = 8 << 20


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A local folder for what is uploaded when it is complete; those that killed processes left are removed first."""
    root = cache_root() / "remote" / kind
    make_folder(root)
    with (root / ".lock").open("w") as all_:
        fcntl.flock(all_, fcntl.LOCK_EX)
        for left in [one for one in root.iterdir() if one.is_dir() and is_unused(one)]:
            shutil.rmtree(left, ignore_errors=True)
        folder = root / secrets.token_hex(8)
        folder.mkdir()
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def publish_folder(local: Path, remote: RemotePath, last: str) -> None:
    """Let a folder of the store hold these files; `last` makes it count. Other objects in it are removed."""
    names = sorted(str(path.relative_to(local)) for path in local.rglob("*") if path.is_file())
    if last not in names:
        raise RemoteError(f"{local} has no {last}, so it cannot be copied to {remote}.")
    old = [path for path, stat in remote.entries(recursive=True) if stat is not None]
    if remote / last in old:
        (remote / last).unlink(missing_ok=True)
    run_all(
        lambda name: (remote / name).put(local / name),
        [name for name in names if name != last],
        threads=AT_ONCE,
        name="hotbed-copy",
    )
    new = {remote / name for name in names}
    run_all(
        lambda path: path.unlink(missing_ok=True),
        [path for path in old if path not in new],
        threads=AT_ONCE,
        name="hotbed-copy",
    )
    (remote / last).put(local / last)


def remove_remote(remote: RemotePath, first: str) -> None:
    """Remove a folder of the store, beginning with the file that makes it count."""
    (remote / first).unlink(missing_ok=True)
    found = [path for path, stat in remote.entries(recursive=True) if stat is not None]
    run_all(lambda path: path.unlink(missing_ok=True), found, threads=AT_ONCE, name="hotbed-copy")


def fetch_folder(remote: RemotePath, local: Path, files: Mapping[str, FileStat], check: Callable[[Path], None]) -> None:
    """Bring these files of a remote folder to a local one, which appears whole or not at all, in place of an older one.

    `check` sees the new files before they take their place, and raises if they are not of one version: someone may have
    replaced the folder in the store while its files travelled.
    """
    new, old = local.with_name(local.name + ".new"), local.with_name(local.name + ".old")
    for left in (new, old):  # by a killed process
        shutil.rmtree(left, ignore_errors=True)
    try:
        for folder in sorted({(new / name).parent for name in files}):
            make_folder(folder)
        run_all(
            lambda name: fetch_file(remote / name, new / name, files[name]),
            list(files),
            threads=AT_ONCE,
            name="hotbed-copy",
        )
        check(new)
        flush_tree(new)
        put_folder(new, local, old)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def fetch_file(remote: RemotePath, local: Path, stat: FileStat) -> None:
    """Bring one object to a local file, in one step."""
    make_folder(local.parent)
    with rewriting(local) as temporary, temporary.open("wb") as file:
        for begin in range(0, stat.st_size, _PIECE):
            file.write(remote.store.read(remote.key, begin, min(begin + _PIECE, stat.st_size), stat.st_size))
