"""Folders on disk, whole or not at all.

A folder is filled next to its final place, gets a manifest with the size and checksum of every file, is flushed to the disk
and then renamed; the old one stays until the new one is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from hotbed.checkpoint.files import checksum, read_tensors, write_tensors
from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, make_folder, put_folder, tree_of, write_file, writing
from hotbed.host.atomic import recover_folder as recover

__all__ = ["check_folder", "read_tensors", "recover_folder", "write_folder", "write_tensors", "write_text"]
MANIFEST = "manifest.json"


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
                raise RunError(f"{folder} is damaged: the content of {name} does not fit its checksum.")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
