"""Where the checkpoints of a run are: of one process, or of W ranks, each with a chain of its own.

    checkpoints/000000001000                  of one process
    checkpoints/rank-0-of-2/000000001000      of two ranks: each has the rows that it owns
    checkpoints/rank-1-of-2/000000001000

A checkpoint of ranks is complete when all of them have one of that name. A run resumes from the newest complete one, with any
number of ranks.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.chain import Entry, find, folders_in, remove, unneeded
from hotbed.checkpoint.manifest import read_manifest
from hotbed.errors import RunError

_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


class SavedCheckpoint(NamedTuple):
    """One complete checkpoint."""

    step: int
    folders: tuple[Path, ...]  # of every rank that wrote it

    @property
    def world(self) -> int:
        return len(self.folders)


def root_of(checkpoints: Path, rank: int, world: int) -> Path:
    """Where a rank writes."""
    return checkpoints if world == 1 else checkpoints / f"rank-{rank}-of-{world}"


def worlds_in(checkpoints: Path) -> list[int]:
    """The numbers of ranks that have written here."""
    try:
        names = [match for path in checkpoints.iterdir() if (match := _RANK.fullmatch(path.name))]
    except OSError:
        names = []
    return sorted({int(match[2]) for match in names} | ({1} if folders_in(checkpoints) else set()))


def is_of_rank(root: Path) -> bool:
    """Whether a folder of checkpoints is that of one rank."""
    return _RANK.fullmatch(root.name) is not None


def shard_of(entry: Entry) -> list[int] | None:
    """[rank, ranks] of the rows of a checkpoint; None if it is not known, as in those saved by older versions."""
    match = _RANK.fullmatch(entry.folder.resolve().parent.name)
    return [int(match[1]), int(match[2])] if match else entry.manifest.document.get("shard")


def step_of(folder: Path) -> int:
    return int(folder.name.partition(".")[0])


def steps_of(checkpoints: Path, world: int) -> dict[int, SavedCheckpoint]:
    """The complete checkpoints of `world` ranks, oldest first; of a step that was saved twice, the last that all have."""
    first, *others = (folders_in(root_of(checkpoints, rank, world)) for rank in range(world))
    by_rank = [{folder.name: folder for folder in folders} for folders in others]
    common = [folder for folder in first if all(folder.name in folders for folders in by_rank)]
    return {
        step_of(one): SavedCheckpoint(step_of(one), (one, *(folders[one.name] for folders in by_rank)))
        for one in common
    }


def newest_in(checkpoints: Path) -> SavedCheckpoint | None:
    """The checkpoint that a run resumes from; of two at the same step the one written last."""
    found = [list(steps.values())[-1] for world in worlds_in(checkpoints) if (steps := steps_of(checkpoints, world))]
    return max(found, key=lambda saved: (saved.step, _time_of(saved.folders[0])), default=None)


def entries_of(place: Path) -> list[Entry]:
    """A checkpoint, of every rank that wrote it: by its own folder, or the newest one of a run."""
    for root in (place / "checkpoints", place):
        if (saved := newest_in(root)) is not None and saved.world > 1:
            return [Entry(folder, read_manifest(folder)) for folder in saved.folders]
    entry = find(place)
    if shard_of(entry) not in (None, [0, 1]):
        way = (
            f" Give {run_of(entry.folder)}, which has those of all."
            if is_of_rank(entry.folder.resolve().parent)
            else ""
        )
        raise RunError(f"{place} holds the rows of one rank alone.{way}")
    return [entry]


def run_of(folder: Path) -> Path:
    """The run of a checkpoint."""
    root = folder.resolve().parent
    return root.parent.parent if is_of_rank(root) else root.parent


def unneeded_before(root: Path, step: int) -> list[Path]:
    """The checkpoints of one rank that those of this step and later ones do not need."""
    return unneeded(root, sum(step_of(folder) >= step for folder in folders_in(root)))


def ranks_in(checkpoints: Path) -> list[Path]:
    """The folders of ranks, in the order of the ranks."""
    worlds = [world for world in worlds_in(checkpoints) if world > 1]
    roots = [root_of(checkpoints, rank, world) for world in worlds for rank in range(world)]
    return [root for root in roots if root.is_dir()]


def remove_others(checkpoints: Path, world: int) -> None:
    """Remove the checkpoints of other numbers of ranks, once the newest complete one is of this number."""
    newest = newest_in(checkpoints)
    if newest is None or newest.world != world:
        return
    for other in worlds_in(checkpoints):
        if other == world:
            continue
        for rank in reversed(range(other)):
            root = root_of(checkpoints, rank, other)
            with suppress(RunError):  # one that cannot be removed does no harm
                remove(folders_in(root))
                if root != checkpoints:
                    shutil.rmtree(root, ignore_errors=True)


def _time_of(folder: Path) -> float:
    try:
        return read_manifest(folder).time
    except RunError:
        return 0.0
