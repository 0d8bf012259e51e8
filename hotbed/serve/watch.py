"""Checks every few seconds for a newer model and loads it while the old one keeps scoring.

For a run, that is its newest complete checkpoint or its model folder, whichever was written last; for a folder of checkpoints
the newest one; for an export the folder itself, once it was replaced. A refused model is tried again when it has changed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.manifest import MANIFEST, read_manifest
from hotbed.checkpoint.write import be_nice
from hotbed.errors import HotbedError
from hotbed.run.export_format import is_export
from hotbed.run.remote_folder import refresh
from hotbed.scorer import Scorer
from hotbed.scorer.checkpoints import source_of
from hotbed.scorer.source import ModelSource, open_model, open_source
from hotbed.serve.metrics import ServerMetrics

_log = logging.getLogger("hotbed.serve")


class ModelOnDisk(NamedTuple):
    """A model on disk."""

    place: Path
    stamp: tuple[int, int]  # time and inode of its manifest: they tell models apart
    entries: Callable[[], list[Entry]] | None  # of a checkpoint
    open: Callable[[], ModelSource]

    @property
    def written(self) -> float:
        """Seconds since 1970."""
        return self.stamp[0] / 1e9


def newest(place: Path) -> ModelOnDisk | None:
    """The model that should be in use; None if the path is a single checkpoint, which cannot have a newer one."""
    found = []
    model = place / "model" if (place / "model").is_dir() else place
    if is_export(place):
        found.append(_found(place, None, lambda: open_source(place)))
    elif (model / "model.json").is_file():
        found.append(_found(model, None, lambda: open_model(model)))
    for root in (place / "checkpoints", place):
        saved = newest_in(root) if root.is_dir() else None
        if saved is not None:

            def entries(folders: tuple[Path, ...] = saved.folders) -> list[Entry]:
                return [Entry(folder, read_manifest(folder)) for folder in folders]

            found.append(_found(saved.folders[0], entries, lambda: source_of(entries())))
            break
    return max((one for one in found if one is not None), key=lambda one: one.stamp, default=None)


def _found(
    place: Path, entries: Callable[[], list[Entry]] | None, opens: Callable[[], ModelSource]
) -> ModelOnDisk | None:
    try:
        state = (place / MANIFEST).stat()
    except OSError:
        return None
    return ModelOnDisk(place, (state.st_mtime_ns, state.st_ino), entries, opens)


class ModelWatch:
    """A thread that checks for newer models and updates the scorer."""

    def __init__(
        self, place: Path, scorer: Scorer, metrics: ServerMetrics, at: ModelOnDisk | None, every: float
    ) -> None:
        self._place, self._scorer, self._metrics, self._every = place, scorer, metrics, every
        self._at = at
        if at is not None:
            metrics.uses(at.written)
        self._refused: ModelOnDisk | None = None
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        if self._every:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> str:
        """Load a newer model: returns "none", the kind of update, or "refused", which is logged and counted."""
        with self._looking:
            try:
                refresh(self._place)
                found = newest(self._place)
            except (HotbedError, OSError) as error:
                return self._refuse(None, str(error))
            if found is None or _same(found, self._at) or _same(found, self._refused):
                return "refused" if found is not None and _same(found, self._refused) else "none"
            try:
                way = self._scorer.update(found.entries()) if found.entries else self._scorer.replace(found.open())
            except (HotbedError, OSError, MemoryError) as error:
                return self._refuse(found, str(error))
            except Exception as error:  # an unexpected error must neither stop the updates nor be hidden
                _log.exception("unexpected error while loading %s", found.place)
                return self._refuse(found, f"{type(error).__name__}: {error}")
            self._at, self._refused = found, None
            self._metrics.updated(way)
            self._metrics.uses(found.written)
            _log.info("%s is in use now (%s)", self._scorer.version, way)
            return way

    def _refuse(self, found: ModelOnDisk | None, error: str) -> str:
        self._refused = found
        self._metrics.not_updated(error)
        _log.warning("a newer model was refused, %s stays in use: %s", self._scorer.version, error)
        return "refused"

    def _run(self) -> None:
        be_nice(min(19, os.nice(0) + 10))
        while not self._stop.wait(self._every):
            self.look()


def _same(one: ModelOnDisk, other: ModelOnDisk | None) -> bool:
    return other is not None and (one.place, one.stamp) == (other.place, other.stamp)
