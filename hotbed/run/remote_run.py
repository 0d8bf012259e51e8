"""A run whose folder is in a store: it trains in a local folder, and a background thread copies that away.

    with working_copy("s3://bucket/runs/a", resume=False) as folder: ...train in folder...

Every few seconds, and once more at the end, the thread uploads what is new: loose files, then best weights, checkpoints and the
model, oldest first, each with its manifest last (files/copies.py). What the run removed is removed in the store afterwards,
manifest first. So the store always has a whole checkpoint once the first one has arrived, and the log is never shorter than
what a checkpoint refers to. A store that does not answer delays the copies, not the training. What has not arrived by the end
is an error, and `hotbed train --resume URI` on the same machine sends the rest.

To resume, the local folder is used if it has the newest checkpoint; else all that the store has is brought. Ranks of one
machine share the local folder. Once everything has arrived, the local folder is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.manifest import MANIFEST
from hotbed.errors import ConfigError, RemoteError, RunError
from hotbed.files import RemotePath, hide, path_of
from hotbed.files.copies import fetch_file, publish_folder, remove_remote
from hotbed.files.settings import cache_root
from hotbed.host.atomic import make_folder
from hotbed.run.folder import CONTENT, is_training, is_unbegun
from hotbed.run.remote_folder import RemoteContent, content_of, fetch_unit

EVERY = 5.0  # seconds between two looks at the local folder
_log = logging.getLogger("hotbed.run")
_UNFINISHED = (".new", ".gone", ".old")  # folders that are being written or removed
_LOG_FILE = "metrics.jsonl"
_LAST = ("summary.json", "report.html")  # say that a run has ended, or how


@contextmanager
def working_copy(
    place: Path | None, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False
) -> Iterator[Path | None]:
    """The local folder of a run; a local run is its own. A `dry_run` changes nothing in the store, and nothing here."""
    remote = None if place is None else path_of(place)
    if not isinstance(remote, RemotePath):
        yield remote
        return
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(world))) != world:
        raise ConfigError(
            f"{remote}: ranks on several machines need a run folder that all of them see. Give a shared folder with --out."
        )
    folder = working_folder(remote)
    make_folder(folder.parent)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank at a time: the first brings the files
        was_here = folder.is_dir()
        if resume:
            bring_run(remote, folder)
        elif rank == 0:
            _check_free(remote, folder, overwrite)
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
    if dry_run and rank == 0:
        try:
            yield folder
        finally:
            if not was_here:
                shutil.rmtree(folder.parent, ignore_errors=True)
        return
    if rank > 0:
        yield folder
        return
    copier = RunCopier(folder, remote, fresh=not resume)
    copier.start()
    try:
        yield folder
    except KeyboardInterrupt:  # the second signal: what has not arrived stays in the local folder
        copier.stop()
        raise
    except BaseException:
        copier.finish(quietly=True)
        raise
    copier.finish()


def how_to_continue(place: Path) -> tuple[bool, bool]:
    """(resume, overwrite) for a job that is repeated: what never came to a checkpoint or a model is started over."""
    remote = path_of(place)
    if isinstance(remote, RemotePath):
        content, root = content_of(remote), working_folder(remote) / "checkpoints"
        names = {name.partition("/")[0] for name in (*content.loose, *content.units)}
        resumes = newest_in(root) is not None or _newest_step(content) >= 0
    else:
        names = {path.name for path in remote.iterdir()} if remote.is_dir() else set()
        resumes = newest_in(remote / "checkpoints") is not None
    return resumes, not resumes and "config.json" in names and not names & {"model", "checkpoint"}


def working_folder(remote: RemotePath) -> Path:
    """Where a run of a store trains on this machine."""
    digest = hashlib.sha256(str(remote).encode()).hexdigest()[:16]
    return cache_root() / "remote" / "runs" / digest / (remote.name or "run")


def bring_run(remote: RemotePath, folder: Path) -> None:
    """Let the local folder have the newest checkpoint of the run, wherever it is."""
    content = content_of(remote)
    here = newest_in(folder / "checkpoints") if (folder / "config.json").is_file() else None
    there = _newest_step(content)
    if here is not None and here.step >= there:
        _refuse_other_run(remote, folder, content)
        return
    if "config.json" not in content.loose:
        raise RunError(f"{remote} is not a run: it has no config.json. Start one with --out {remote}.")
    _refuse_training(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for name, stat in content.loose.items():
        fetch_file(remote / name, folder / name, stat)
    for name, unit in sorted(content.units.items()):
        fetch_unit(remote / name, folder / name, unit)


def _refuse_other_run(remote: RemotePath, folder: Path, content: RemoteContent) -> None:
    """A RunError if the store holds another run than the local folder: one that was started there from elsewhere since.

    Runs are told apart by the checkpoints that both have, else by the first lines of their logs, which have times in them.
    """
    both = [name for name in content.units if name.startswith("checkpoints/") and (folder / name / MANIFEST).is_file()]
    if both:
        is_same = (folder / both[-1] / MANIFEST).read_bytes() == (remote / both[-1] / MANIFEST).read_bytes()
    else:
        logs = [_first_line(place / _LOG_FILE) for place in (folder, remote)]
        is_same = logs[0] == logs[1] or "" in logs
    if not is_same:
        raise RunError(
            f"{remote} holds another run than {folder}, where a run was trained on this machine and not copied to the "
            f"end. To resume the one in the store, remove {folder}; to keep the local one, move it elsewhere first."
        )


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except FileNotFoundError:
        return ""


def _newest_step(content: RemoteContent) -> int:
    """The step of the newest checkpoint that is whole in the store, of any rank; -1 if there is none."""
    names = [Path(name).name for name in content.units if name.startswith("checkpoints/")]
    return max((int(name.partition(".")[0]) for name in names), default=-1)


def _check_free(remote: RemotePath, folder: Path, overwrite: bool) -> None:
    """A RunError unless a new run may start at this URI, and nothing is lost here that never arrived there."""
    if not overwrite and (remote / "config.json").is_file():
        raise RunError(
            f"{remote} already holds a run. --overwrite replaces it, --resume {remote} continues it if it has a "
            "checkpoint, --out URI puts the new one elsewhere."
        )
    found = [path.name for path in remote.iterdir() if path != remote]
    strange = [name for name in found if name not in CONTENT]
    if strange and "config.json" not in found:
        raise RunError(f"{remote} holds {strange[0]}, which is not of a run. Choose another place with --out.")
    _refuse_training(folder)
    if not overwrite and (folder / "config.json").is_file() and not is_unbegun(folder):
        raise RunError(
            f"a run of {remote} was trained on this machine and has not arrived there: it is in {folder}. --resume {remote} "
            "continues it and copies it there, --overwrite starts again."
        )


def _refuse_training(folder: Path) -> None:
    if is_training(folder):
        raise RunError(f"another process is training in {folder}. Wait for it, or choose another place with --out.")


class RunCopier:
    """The thread that copies a run folder to a store."""

    def __init__(self, folder: Path, remote: RemotePath, *, fresh: bool) -> None:
        self._folder, self._remote = folder, remote
        self._fresh = fresh  # the store may still hold an older run, which goes with the first copy
        self._marks: dict[str, list[int]] = {}  # what has arrived: size and time of a loose file, or of a manifest
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotbed-run-copy", daemon=True)
        self._failed = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no further copy; nothing waits for the one in progress."""
        self._stop.set()

    def finish(self, quietly: bool = False) -> None:
        """Copy what is left, then remove the local folder; `quietly`: another error ends the run, and keeps the folder."""
        self.stop()
        self._thread.join()
        if not (self._folder / "config.json").is_file():
            return  # it never began
        try:
            self.copy(last=True)
        except (RemoteError, OSError) as error:
            if quietly:
                _log.warning("%s", hide(f"not all of the run was copied to {self._remote}: {error}"))
                return
            raise RemoteError(
                f"{hide(str(error))} The run itself is whole in {self._folder}; `hotbed train --resume {self._remote}` on this "
                "machine copies the rest."
            ) from None
        if not quietly:
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            try:
                self.copy()
                self._failed = ""
            except (RemoteError, OSError) as error:
                if not self._failed:  # once for each time the store is away
                    _log.warning("%s", hide(f"{self._remote} is not up to date, training continues: {error}"))
                self._failed = str(error)

    def copy(self, last: bool = False) -> None:
        """Let the store have what the folder has now."""
        if not (self._folder / "config.json").is_file():
            return
        if self._fresh:
            self._remove_older_run()
            self._fresh = False
        units = local_units(self._folder)  # first: the log that is copied next is as long as these checkpoints need
        loose = sorted(path.name for path in self._folder.iterdir() if path.is_file() and path.suffix != ".tmp")
        for name in [one for one in loose if one not in _LAST]:
            self._copy_loose(name)
        for name in units:
            self._copy_unit(name)
        if last:
            for name in [one for one in loose if one in _LAST]:
                self._copy_loose(name)
        for name in [one for one in self._marks if one.endswith("/") and one[:-1] not in units]:
            remove_remote(self._remote / name[:-1], MANIFEST)
            del self._marks[name]

    def _remove_older_run(self) -> None:
        """What an overwritten run left in the store, manifests first; config.json last, so that it stays a run until then.

        What runs do not write, such as an export below it, stays there, as it does in a local folder.
        """
        content, start = content_of(self._remote), len(self._remote.key) + 1 if self._remote.key else 0
        for name in sorted((one for one in content.units if one.partition("/")[0] in CONTENT), reverse=True):
            remove_remote(self._remote / name, MANIFEST)
        left = [path for path, stat in self._remote.entries(recursive=True) if stat is not None]
        left = [path for path in left if path.key[start:].partition("/")[0] in CONTENT]
        for path in sorted(left, key=lambda one: one.name == "config.json"):
            path.unlink(missing_ok=True)

    def _copy_loose(self, name: str) -> None:
        path = self._folder / name
        try:
            found = path.stat()
            mark = [found.st_size, found.st_mtime_ns]
            if self._marks.get(name) == mark:
                return
            content = path.read_bytes()
        except FileNotFoundError:
            return  # removed or replaced meanwhile: the next look sees it
        (self._remote / name).put(content)
        self._marks[name] = mark

    def _copy_unit(self, name: str) -> None:
        folder = self._folder / name
        try:
            found = (folder / MANIFEST).stat()
            mark = [found.st_size, found.st_mtime_ns]
            if self._marks.get(f"{name}/") == mark or self._has_arrived(name, folder):
                self._marks[f"{name}/"] = mark
                return
            publish_folder(folder, self._remote / name, MANIFEST)
            self._marks[f"{name}/"] = mark
        except FileNotFoundError:
            self._marks[f"{name}/"] = []  # it was removed meanwhile, and goes from the store with the next look
        except RemoteError:
            if folder.is_dir():
                raise
            self._marks[f"{name}/"] = []

    def _has_arrived(self, name: str, folder: Path) -> bool:
        """Whether the store has this very unit, from before this process."""
        manifest = self._remote / name / MANIFEST
        return manifest.is_file() and manifest.read_bytes() == (folder / MANIFEST).read_bytes()


def local_units(folder: Path) -> list[str]:
    """The folders of a run that have a manifest, best weights first, then checkpoints by step, then the model."""
    found = [path for pattern in ("best/*", "checkpoints/*", "checkpoints/rank-*/*") for path in folder.glob(pattern)]
    units = [
        path for path in [*found, folder / "model"] if (path / MANIFEST).is_file() and path.suffix not in _UNFINISHED
    ]
    order = {"best": 0, "checkpoints": 1, "model": 2}
    names = [str(path.relative_to(folder)) for path in units]
    return sorted(names, key=lambda name: (order[name.partition("/")[0]], Path(name).name, name))
