"""Checks every few seconds for a newer model and loads it while the old one keeps scoring.

For a run, that is its newest complete checkpoint or its model folder, whichever was written after more steps, and the model if
both were; for a folder of checkpoints the newest one; for an export the folder itself, once it was replaced. Times of files
do not count: those of a copy from a store say when it was copied. A refused model is tried again when it has changed, and
when a client asks for a reload: a disk may have been full.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.manifest import MANIFEST, read_manifest
from hotbed.errors import HotbedError
from hotbed.host.background import be_nice, paced
from hotbed.run.export_format import is_export
from hotbed.run.remote_folder import refresh
from hotbed.scorer import Scorer
from hotbed.scorer.checkpoints import source_of
from hotbed.scorer.source import ModelSource, open_model, open_source
from hotbed.serve.metrics import ServerMetrics

_SHARE = 0.25  # of a core, for loading a newer model while requests come
_BUSY_SECONDS = 1.0  # after a request
_ASKED_SECONDS = 0.2  # between checks whether a client has asked another worker for a reload
_log = logging.getLogger("hotbed.serve")


class ModelOnDisk(NamedTuple):
    """A model on disk."""

    place: Path
    stamp: tuple[int, int]  # time and inode of its manifest: they tell models apart
    steps: int | None  # of training when it was written; None: hotbed 0.1 did not write them down
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
        found.append(_found(place, None, None, lambda: open_source(place)))
    elif (model / "model.json").is_file():
        found.append(_found(model, _steps_of(model), None, lambda: open_model(model)))
    for root in (place / "checkpoints", place):
        saved = newest_in(root) if root.is_dir() else None
        if saved is not None:

            def entries(folders: tuple[Path, ...] = saved.folders) -> list[Entry]:
                return [Entry(folder, read_manifest(folder)) for folder in folders]

            found.append(_found(saved.folders[0], saved.step, entries, lambda: source_of(entries())))
            break
    whole = [one for one in found if one is not None]  # the model first
    steps = [one.steps for one in whole if one.steps is not None]
    if len(steps) == len(whole):
        return whole[steps.index(max(steps))] if whole else None
    return max(whole, key=lambda one: one.stamp)


def _steps_of(model: Path) -> int | None:
    try:
        found = json.loads((model / "model.json").read_text()).get("steps")
    except (OSError, ValueError, AttributeError):
        return None  # opening it says what is wrong
    return found if isinstance(found, int) else None


def _found(
    place: Path, steps: int | None, entries: Callable[[], list[Entry]] | None, opens: Callable[[], ModelSource]
) -> ModelOnDisk | None:
    try:
        state = (place / MANIFEST).stat()
    except OSError:
        return None
    return ModelOnDisk(place, (state.st_mtime_ns, state.st_ino), steps, entries, opens)


class ModelWatch:
    """A thread that checks for newer models and updates the scorer."""

    def __init__(
        self, place: Path, scorer: Scorer, metrics: ServerMetrics, at: ModelOnDisk | None, every: float
    ) -> None:
        self._place, self._scorer, self._metrics, self._every = place, scorer, metrics, every
        self._at = at
        self._board = metrics.board
        metrics.uses(scorer, at.written if at is not None else 0.0)
        self._refused: ModelOnDisk | None = None
        self._looking = threading.Lock()
        self._batches, self._busy_until = 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        if self._every or self._has_others:
            self._thread.start()

    @property
    def _has_others(self) -> bool:
        return len(self._board.parts) > 1

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> str:
        """Load a newer model: returns "none", the kind of update, or "refused", which is logged and counted."""
        with self._looking:
            reloads, own = self._board.reloads, self._metrics.own
            if own.reloads_done < reloads:
                self._refused = None
            way = self._look()
            own.refused, own.reloads_done = int(way == "refused"), reloads
            return way

    def look_everywhere(self, give_up: Callable[[], bool]) -> str:
        """Like `look`, in all workers; returns when all have looked. "refused" if one of them refused the model."""
        reloads, parts = self._metrics.ask_reload(), self._board.parts
        way = self.look()
        while any(part.reloads_done < reloads for part in parts) and not give_up():
            time.sleep(_ASKED_SECONDS / 4)
        return "refused" if any(part.refused for part in parts) else way

    def catch_up(self) -> None:
        """In the place of a worker that died: load what it had loaded since the start."""
        if self._every or self._board.reloads:
            self.look()

    def _look(self) -> str:
        try:
            refresh(self._place)
            found = newest(self._place)
        except (HotbedError, OSError) as error:
            return self._refuse(None, str(error))
        if found is not None and _same(found, self._refused):
            return "refused"
        if found is None or _same(found, self._at):
            self._refused = None
            self._metrics.up_to_date()
            return "none"
        try:
            with self._board.turn(self._stop.wait):
                if self._stop.is_set():
                    return "none"
                with paced(_SHARE, self._rest):
                    way = self._scorer.update(found.entries()) if found.entries else self._scorer.replace(found.open())
        except (HotbedError, OSError, MemoryError) as error:
            return self._refuse(found, str(error))
        except Exception as error:  # an unexpected error must neither stop the updates nor be hidden
            _log.exception("unexpected error while loading %s", found.place)
            return self._refuse(found, f"{type(error).__name__}: {error}")
        self._at, self._refused = found, None
        self._metrics.updated(way)
        self._metrics.uses(self._scorer, found.written)
        _log.info("%s is in use now (%s)", self._scorer.version, way)
        return way

    def _rest(self, seconds: float) -> None:
        """Leave the core to requests for a while; a server without any loads a newer model at full speed."""
        batches, now = self._metrics.own.batches, time.monotonic()
        if batches != self._batches:
            self._batches, self._busy_until = batches, now + _BUSY_SECONDS
        if now < self._busy_until:
            self._stop.wait(seconds)

    def _refuse(self, found: ModelOnDisk | None, error: str) -> str:
        self._refused = found
        self._metrics.not_updated(error)
        _log.warning("a newer model was refused, %s stays in use: %s", self._scorer.version, error)
        return "refused"

    def _run(self) -> None:
        be_nice(min(19, os.nice(0) + 10))
        wait, waited = min(self._every or math.inf, _ASKED_SECONDS) if self._has_others else self._every, 0.0
        while not self._stop.wait(wait):
            waited += wait
            if self._metrics.own.reloads_done < self._board.reloads or 0 < self._every <= waited:
                self.look()
                waited = 0.0


def _same(one: ModelOnDisk, other: ModelOnDisk | None) -> bool:
    return other is not None and (one.place, one.stamp) == (other.place, other.stamp)
