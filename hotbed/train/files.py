"""Folders on disk, whole or not at all.

A folder is filled beside its final place, gets a manifest with the size and checksum of every file, is flushed to the disk
and then renamed; the old one stays until the new one is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hotbed.checkpoint.files import checksum, flush_to_disk, read_tensors, write_tensors, writing
from hotbed.errors import RunError

__all__ = ["check_folder", "read_tensors", "recover_folder", "write_folder", "write_tensors", "write_text", "writing"]
MANIFEST = "manifest.json"


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: a reader sees the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then put it in the place of the old one."""
    new, old = (folder.with_name(folder.name + suffix) for suffix in (".new", ".old"))
    with writing(folder):
        recover_folder(folder)
        for left in (new, old):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            fill(new)
            files = sorted(path for path in new.rglob("*") if path.is_file())
            marks = {str(path.relative_to(new)): [path.stat().st_size, checksum(path)] for path in files}
            (new / MANIFEST).write_text(json.dumps(marks, indent=1) + "\n")
            for path in [*files, new / MANIFEST, new]:
                flush_to_disk(path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
            raise
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        flush_to_disk(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """After a crash between the two renames of write_folder, the old folder takes its place again."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def check_folder(folder: Path) -> None:
    """A RunError unless every file is there as the manifest says."""
    try:
        marks = json.loads((folder / MANIFEST).read_text())
        for name, (size, sum_) in marks.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise RunError(f"{folder} is damaged: {name} has {found} bytes, its manifest says {size}.")
            if checksum(folder / name) != sum_:
                raise RunError(f"{folder} is damaged: the content of {name} does not fit its checksum.")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
