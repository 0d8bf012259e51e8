"""The unfinished work of one `prepare` in its workspace: what it is work for, and what of it still holds.

    .OUT.partial/job.json     settings, files with their sizes and times, columns
    .OUT.partial/work/        reels (parse.py), features (merge.py)
    .OUT.partial/counts, ...  finished parts of the dataset

The same settings over the same files go on where the last job stopped. A file that was replaced is read again, and everything
that follows from it. Other settings, files or columns begin anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.data.formats.chunk import REEL_BYTES
from hotbed.data.prepare.arrays import write_whole
from hotbed.data.prepare.inputs import Mark, Source
from hotbed.data.prepare.layout import Layout
from hotbed.data.prepare.parse import ReelFacts
from hotbed.data.prepare.piece import PIECE_IDS
from hotbed.data.workspace import Workspace
from hotbed.host.atomic import flush_to_disk

GENERATION = 1  # raise it when temporary files or the rows of a dataset change


def describe_job(settings: dict[str, Any], sources: Sequence[Source], layout: Layout) -> dict[str, Any]:
    """All that the output follows from, as JSON."""
    return {
        "settings": settings,
        "files": [[source.split, str(source.path.absolute())] for source in sources],
        "columns": {
            "label": layout.label,
            "dense": [asdict(one) for one in layout.dense],
            "features": [asdict(one) for one in layout.features],
        },
        "versions": [GENERATION, REEL_BYTES, PIECE_IDS, pa.__version__],
    }


def take_over(work: Workspace, job: dict[str, Any], sources: Sequence[Source], marks: Sequence[Mark]) -> str:
    """Keep what still holds of earlier work and delete the rest; what to tell the user, if anything."""
    path = work.path / "job.json"
    said = ""
    left = _load(path)
    if left is not None and _differences(left, job) == [] and all(source.data is None for source in sources):
        said = _take_over(work, left, marks)
    else:
        if left is not None:
            what = ", ".join(_differences(left, job)) or "tables"
            said = f"the unfinished work in {work.path} was for other {what}: it is deleted and begun anew"
        work.clear(but=("ranks",))
    (work.path / "work").mkdir(exist_ok=True)
    work.keep = work.keep or any((work.path / "work").glob("file-*.json"))  # it outlived one end, so it outlives errors
    (work.path / "counts").mkdir(exist_ok=True)
    for folder in (work.path / "work", work.path):
        flush_to_disk(folder)  # what was deleted must not come back beside the new note
    write_whole(path, json.dumps({**job, "marks": marks}))
    return said


def _load(path: Path) -> dict[str, Any] | None:
    try:
        left: dict[str, Any] = json.loads(path.read_text())
        return left if isinstance(left, dict) else None
    except (OSError, ValueError):
        return None


def _differences(left: dict[str, Any], job: dict[str, Any]) -> list[str]:
    now = json.loads(json.dumps(job))
    return [name for name in now if left.get(name) != now[name]]


def _take_over(work: Workspace, left: dict[str, Any], marks: Sequence[Mark]) -> str:
    directory = work.path / "work"
    changed = [number for number, mark in enumerate(marks) if list(mark) != left["marks"][number]]
    for number in changed:
        for path in directory.glob(f"file-{number:05d}.*"):
            path.unlink()
    if changed:
        _forget_results(work)
    for path in work.path.rglob("*.tmp"):
        path.unlink(missing_ok=True)
    reels = list(directory.glob("*.json"))
    if not reels:
        return ""
    again = f"; {len(changed)} files have changed since and are read again" if changed else ""
    return f"going on with the unfinished work in {work.path}{again}"


def _forget_results(work: Workspace) -> None:
    """Delete what follows from all files, and reels whose pieces were used up."""
    directory = work.path / "work"
    for path in work.path.iterdir():
        if path.is_dir() and path.name not in ("work", "ranks"):
            shutil.rmtree(path)
    for path in directory.glob("feature-*"):
        path.unlink()
    for path in directory.glob("file-*.json"):
        facts = ReelFacts.load(path)
        if not all(facts.piece_path(directory, number).is_file() for number in range(len(facts.pieces))):
            path.unlink()


def load_reels(directory: Path) -> list[ReelFacts]:
    """All reels that are done, in order."""
    return [ReelFacts.load(path) for path in sorted(directory.glob("file-*.json"))]
