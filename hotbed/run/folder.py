"""The folder of one run: a new name, a new start, its content, and folders that are written whole or not at all.

config.json  data.json  metrics.jsonl  summary.json  model/  checkpoints/  best/  report.html  tensorboard/

`find_data`: finds the dataset of a run, from any working directory. A run stores the path that it was given, which may be
relative, and in data.json the absolute one. The dataset is searched for relative to the working directory, then at its old
place, then next to the folders that contain the run, so that runs and data can be moved together.

`write_folder`: a folder such as model/ is filled next to its final place, gets a manifest with the size and checksum of every
file, is flushed to the disk and then renamed; the old one stays until the new one is complete. Several files of a folder are
read by their names inside `one_version`: another process may replace the folder in between, and each file would be whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hotbed.checkpoint.files import checksum, read_tensors, write_tensors
from hotbed.data.embedded import is_embedded
from hotbed.errors import HotbedError, RunError
from hotbed.files import path_of
from hotbed.host.atomic import flush_to_disk, make_folder, put_folder, tree_of, write_file, writing
from hotbed.host.atomic import recover_folder as recover

CONTENT = (
    "config.json",
    "data.json",
    "metrics.jsonl",
    "arrivals.jsonl",
    "trackers.json",
    "summary.json",
    "report.html",
    "analysis.json",
    "warm_start.json",
    "forecast.json",
    "misses.json",
    "watched.jsonl",
    "model",
    "checkpoints",
    "checkpoint",
    "best",
    "tensorboard",
)
BEGINNING = "config.json.tmp"  # all that a run leaves if it is killed before it wrote a complete file
_BEFORE_STEPS = {  # written or opened before anything is trained; and the summary of a run that failed then
    "config.json",
    "data.json",
    "forecast.json",
    "misses.json",
    "warm_start.json",
    "metrics.jsonl",
    "watched.jsonl",
    "summary.json",
    "report.html",
    "tensorboard",
}
__all__ = [
    "check_folder",
    "one_version",
    "read_tensors",
    "recover_folder",
    "write_folder",
    "write_tensors",
    "write_text",
]
MANIFEST = "manifest.json"


def default_run(model: str, dataset: str, parent: Path = Path("runs")) -> Path:
    """runs/<model>-<dataset>-<n> with the first n that is free."""
    model = re.sub(r"\W+", "-", model.rpartition(":")[2].removesuffix(".py")).strip("-").lower() or "model"
    name = re.sub(r"[^\w.-]+", "-", Path(dataset).name).strip("-") or "data"
    number = 1
    while (parent / f"{model}-{name}-{number}").exists():
        number += 1
    return parent / f"{model}-{name}-{number}"


def check_free(folder: Path, overwrite: bool = False) -> None:
    """A RunError unless a new run may start here; only a folder that holds a run is ever overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; a run needs a folder. Choose another with --out.")
    if not folder.is_dir() or all(path.name == BEGINNING for path in folder.iterdir()):
        return
    if not (folder / "config.json").is_file():
        raise RunError(f"{folder} is not empty and holds no run. Choose another folder with --out.")
    if not overwrite and not is_unbegun(folder):
        raise RunError(
            f"{folder} already holds a run. --overwrite replaces it, --resume {folder} continues it if it has a "
            "checkpoint, --out DIR puts the new one elsewhere."
        )


def make_run(folder: Path, overwrite: bool = False) -> None:
    """An empty folder for a new run. Of an old run in it only files that runs write are removed, config.json last.

    So a process that is killed meanwhile leaves a folder that still holds a run, which --overwrite accepts.
    """
    check_free(folder, overwrite)
    with writing(folder):
        _remove_content(folder)
        make_folder(folder)


def _remove_content(folder: Path) -> None:
    for name in reversed(CONTENT):
        if name == CONTENT[0] and folder.is_dir():
            flush_to_disk(folder)  # so that it is the last to be removed after a power loss, too
        for path in (folder / f"{name}{ending}" for ending in ("", ".new", ".old", ".tmp")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def is_unbegun(folder: Path) -> bool:
    """Whether a run was started here and ended before it left a line, a checkpoint or a model: nothing is lost with it."""
    try:
        sizes = {path.name.removesuffix(".tmp"): path.stat().st_size for path in folder.iterdir()}
        if (
            not {"config.json", "data.json"} <= sizes.keys() <= _BEFORE_STEPS
        ):  # config.json alone may belong to the user
            return False
        if sizes.get("metrics.jsonl", 0) or sizes.get("watched.jsonl", 0):
            return False
        return "summary.json" not in sizes or read_json(folder / "summary.json").get("steps") == 0
    except (OSError, RunError):
        return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder. It is created if needed, and removed if no step is made."""
    with writing(folder):
        made = not folder.exists()
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is training in {folder}. Wait for it, or choose another folder with --out."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                if is_unbegun(folder):
                    _remove_content(folder)
                folder.rmdir()
        os.close(handle)


def is_training(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return not (folder / "summary.json").exists()
    finally:
        os.close(handle)
    return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path.parent} is not a run: {path.name} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it must hold a mapping.")
    return found


def find_data(named: str, run: Path) -> str:
    """A name or path that opens the dataset `named` by a run; `named` itself where nothing else is found."""
    if is_embedded(named) or path_of(named).exists():
        return named
    places = [path_of(noted)] if (noted := _noted(run)) else []
    places += [parent / named for parent in run.resolve().parents]
    return next((str(one) for one in places if (one / "schema.json").is_file()), named)


def find_data_or_say(named: str, run: Path) -> str:
    """The same, or a RunError that mentions --data."""
    found = find_data(named, run)
    if not is_embedded(found) and not path_of(found).exists():
        raise RunError(
            f"{run} was trained on {named}, which is no longer there. Give the new place of the dataset: --data DATASET."
        )
    return found


def _noted(run: Path) -> str:
    """The place of the dataset when the run started."""
    try:
        return str(read_json(run / "data.json").get("path") or "")
    except RunError:
        return ""


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: a reader sees the old text or the new."""
    with writing(path):
        write_file(path, text)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then replace the old one by it."""
    new, old = folder.with_name(folder.name + ".new"), _old(folder)
    with writing(folder):
        recover_folder(folder)
        for left in (new, old):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        try:
            make_folder(new)
            fill(new)
            files = sorted(path for path in new.rglob("*") if path.is_file())
            marks = {str(path.relative_to(new)): [path.stat().st_size, checksum(path)] for path in files}
            (new / MANIFEST).write_text(json.dumps(marks, indent=1) + "\n")
            for path in tree_of(new):
                flush_to_disk(path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
            raise
        put_folder(new, folder, old)


def recover_folder(folder: Path) -> None:
    """After a crash in write_folder, restore the old folder if the new one is missing."""
    recover(folder, _old(folder))


@contextmanager
def one_version(place: Path) -> Iterator[Callable[[], None]]:
    """A RunError if a folder, or the model of a run, was replaced while it was read inside; the result checks it earlier."""
    before = _manifests(place)

    def check(error: Exception | None = None) -> None:
        if _manifests(place) != before:
            raise RunError(
                f"{place} was replaced while it was read: its files are of two versions. Repeat the command."
            ) from error

    try:
        yield check
    except (HotbedError, OSError) as error:
        check(error)
        raise
    check()


def _manifests(place: Path) -> list[bytes]:
    recover_folder(place / "model")
    paths = [place / MANIFEST, place / "model" / MANIFEST]
    return [path.read_bytes() if path.is_file() else b"" for path in paths]


def _old(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def check_folder(folder: Path, content_of: Callable[[str], bool] = lambda name: True) -> None:
    """A RunError unless every file exists with the size of the manifest, and those of `content_of` with its checksum."""
    try:
        marks = json.loads((folder / MANIFEST).read_text())
        for name, (size, sum_) in marks.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise RunError(f"{folder} is damaged: {name} has {found} bytes, its manifest says {size}.")
            if content_of(name) and checksum(folder / name) != sum_:
                raise RunError(f"{folder} is damaged: the content of {name} does not match its checksum.")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
