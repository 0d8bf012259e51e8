"""A directory that appears atomically: files are written to a hidden directory next to it, which is renamed at the end.

A killed job leaves only `.NAME.partial`. The next job for the same directory clears it, or resumes it if the settings are the
same. A lock prevents two jobs at once.

`publishing`: a dataset for an object store is made in a local folder ($HOTBED_CACHE), then copied, schema.json last. A reader
of the store sees the whole dataset or none: without schema.json there is none. A dataset that is replaced is missing from the
moment its schema.json is removed until the new one arrives. A killed job resumes as for a local dataset.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from hotbed.errors import DISK_FULL, ConfigError, DataError, RemoteError
from hotbed.files import RemotePath
from hotbed.files.copies import publish_folder
from hotbed.files.settings import cache_root
from hotbed.host.atomic import flush_to_disk, flush_tree, make_folder, put_folder, recover_folder
from hotbed.host.memory import in_words

_SUFFIXES = (".arrow", ".parquet")  # of files of rows and counts
SCHEMA = "schema.json"
_OURS = re.compile(r"schema\.json|quarantine\.jsonl|[^/]+/[^/]+\.(arrow|parquet)")


class Workspace:
    """`with Workspace(out) as work:` write under `work.path`, then `work.commit()`.

    With `settings`, a text that determines the files, a job that was killed or interrupted can be resumed. A `resumable` job
    finds the files that were left and decides itself which to keep (`clear`).
    """

    def __init__(self, out: Path, overwrite: bool = False, *, settings: str = "", resumable: bool = False) -> None:
        self._out = Path(out)
        self._overwrite = overwrite
        self._settings = settings
        self._resumable = resumable
        self.keep = False  # whether the work outlives an error
        self.needs = ""  # a sentence about the disk space that the job needs
        self.path = self._out.parent / f".{self._out.name}.partial"
        self._lock: int | None = None  # of the directory, wherever it is
        self._committed = False

    def __enter__(self) -> Workspace:
        try:
            recover(self._out)
            _check_folder(self._out, self._overwrite)
            self._lock = self._take_lock()
            note = self.path / "settings"
            same = bool(self._settings) and note.is_file() and note.read_text() == self._settings
            if not same and not self._resumable:
                self.clear()
                if self._settings:
                    note.write_text(self._settings)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise unwritable(self._out, error) from error
        return self

    def _take_lock(self) -> int:
        """A handle of the directory, locked until it is closed, even after `commit` has moved it."""
        while True:
            make_folder(self.path)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, self.path):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise ConfigError(
                    f"another job is writing {self._out}. Wait for it, or choose another --out."
                ) from None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # another job has moved it meanwhile

    def clear(self) -> None:
        """Delete all files of earlier jobs durably, so that they are never taken for files of this one."""
        for left in self.path.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        flush_to_disk(self.path)

    def commit(self) -> None:
        """Move the directory into place, durably."""
        (self.path / "settings").unlink(missing_ok=True)
        flush_tree(self.path)
        shutil.rmtree(_old(self._out), ignore_errors=True)
        put_folder(self.path, self._out, _old(self._out))
        self._committed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = unwritable(self._out, error, self.path, self.needs) if isinstance(error, OSError) else None
        if self._lock is not None:
            stays = (self._settings and kind is KeyboardInterrupt) or (error is not None and self.keep)
            if not stays and not self._committed:  # after that, the path is another job's
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
        if failed is not None:
            raise failed from error


def _check_folder(out: Path, overwrite: bool) -> None:
    """A ConfigError unless a dataset may be written to a local folder."""
    if not out.name:
        raise ConfigError(f"--out {str(out)!r} is not the name of a new directory.")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file; --out must name a directory.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists already. Choose another --out, or replace it with --overwrite.")
    if not (out / "schema.json").is_file():
        raise ConfigError(f"{out} is not a hotbed dataset; --overwrite replaces only datasets. Choose another --out.")
    strange = sorted(path.name for path in out.iterdir() if not _is_ours(path))
    if strange:
        raise ConfigError(
            f"{out} holds more than a dataset ({', '.join(strange[:5])}), which --overwrite would delete. "
            "Move it away, or choose another --out."
        )


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def recover(out: Path) -> None:
    """After a crash in `commit`, restore the old directory if the new one is not in place."""
    if isinstance(out, RemotePath):  # a store renames nothing
        return
    with suppress(OSError):  # without write permission, use what is there
        recover_folder(out, _old(out))


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def unwritable(out: Path, error: Exception, work: Path | None = None, needs: str = "") -> DataError:
    """The error for a directory that cannot be written; for a full disk with sizes and the way out."""
    code = getattr(error, "errno", None)
    said = f"{str(out)!r} cannot be written: {os.strerror(code) if code else error}."
    if code not in DISK_FULL or work is None:
        return DataError(said)
    written = 0
    for path in work.rglob("*"):
        with suppress(OSError):  # a file that another thread is renaming
            written += path.stat().st_size
    with suppress(OSError):
        free = shutil.disk_usage(work if work.is_dir() else work.parent).free
        said += f" {in_words(written)} had been written when the disk was full; {in_words(free)} are free."
    return DataError(f"{said}{needs} Free some space, or name a folder on another disk with --out.")


def _is_ours(path: Path) -> bool:
    """Whether a path belongs to a dataset: schema, counts, quarantine, or a split, which is a directory of parts."""
    if path.name.startswith("."):
        return path.is_file()  # left there by a file manager or a network drive
    if path.name in ("schema.json", "quarantine.jsonl"):
        return path.is_file()
    return path.is_dir() and all(inside.suffix in _SUFFIXES and inside.is_file() for inside in path.iterdir())


@contextmanager
def publishing(out: Path, *, overwrite: bool, shared: bool) -> Iterator[Path]:
    """Where to write a dataset; for a URI a local folder, which is copied there if all goes well.

    `shared`: several machines write it.
    """
    if not isinstance(out, RemotePath):
        yield out
        return
    check_out(out, overwrite=overwrite, shared=shared)
    digest = hashlib.sha256(str(out).encode()).hexdigest()[:16]
    local = cache_root() / "remote" / "datasets" / digest / (out.name or "dataset")
    make_folder(local.parent)
    shutil.rmtree(
        local, ignore_errors=True
    )  # complete, but its copy was cut short; its settings are not known any more
    yield local
    try:
        publish_folder(local, out, SCHEMA)
    except RemoteError as error:
        raise RemoteError(f"{error} The dataset is complete in {local}; the same command makes it again.") from None
    shutil.rmtree(local.parent, ignore_errors=True)


def check_out(out: Path, *, overwrite: bool, shared: bool) -> None:
    """A ConfigError unless a dataset may be written there; `shared`: by several machines."""
    if not isinstance(out, RemotePath):
        try:
            _check_folder(out, overwrite)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise unwritable(out, error) from error
        return
    if shared:
        raise ConfigError(
            f"{out}: machines of --ray need a folder that all of them see. Give a shared folder with --out."
        )
    start = len(out.key) + 1 if out.key else 0
    names = [path.key[start:] for path, stat in out.entries(recursive=True) if stat is not None]
    names = [name for name in names if name and not name.endswith("/")]
    if SCHEMA in names and not overwrite:
        raise ConfigError(f"{out} exists already. Choose another --out, or replace it with --overwrite.")
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange:
        raise ConfigError(
            f"{out} holds more than a dataset ({', '.join(strange[:5])}), which would be deleted. Choose another --out."
        )
