"""RUN/checkpoints: everything that a run needs to continue as if it had never stopped, bit for bit.

Beside rows and dense weights (hotbed/checkpoint), a run saves where it stands: its Progress and the random generators in the
manifest, the open interval of metrics.jsonl as tensors; a follower its place in the log and its open hours. Every rank of a
run saves its own; rank 0 has their common position.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotbed.checkpoint import State, load_entry
from hotbed.checkpoint.chain import Entry, folders_in
from hotbed.checkpoint.files import dense_tensors
from hotbed.checkpoint.layouts import SavedCheckpoint, newest_in, root_of, worlds_in
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.read import tensors_of
from hotbed.errors import RunError
from hotbed.parallel.world import World
from hotbed.run.folder import check_folder, write_folder
from hotbed.tables.snapshot.snapshot import shapes_of
from hotbed.telemetry.observer import Best, Progress
from hotbed.train.follow import Follower
from hotbed.train.interval import Interval
from hotbed.train.model_folder import load_weights, save_weights, send_weights
from hotbed.train.ranks import join_states, load_all
from hotbed.train.step import Learner

INTERVAL, FOLLOW = "interval", "follow"
OLD = "checkpoint"  # the folder of format version 1, which wrote one checkpoint per run


def checkpoint_root(run: Path) -> Path:
    return run / "checkpoints"


def has_checkpoint(run: Path) -> bool:
    """Whether there is one, even of a format that is no longer read: such a run is refused, not started over."""
    return newest_in(checkpoint_root(run)) is not None or (run / OLD).is_dir()


def state_of(
    run: Path, learner: Learner, progress: Progress, interval: Interval, follower: Follower | None = None
) -> State:
    """What is saved in addition to the rows, copied."""
    saved = dataclasses.asdict(progress)
    saved["dealt"] = saved.pop("rank_history")  # the name it has in checkpoints
    document: dict[str, Any] = {
        "config": _config_of(run),
        "progress": saved,
        "generators": _generators(learner.device),
    }
    files = {**dense_tensors(learner.model, learner.optimizer), INTERVAL: interval.state()}
    if follower is not None:
        document[FOLLOW], files[FOLLOW] = follower.state()
    return State(progress.step, files, document)


def load_checkpoint(
    run: Path, learner: Learner, say: Callable[[str], None] = lambda _: None, follower: Follower | None = None
) -> tuple[Progress, Interval, SavedCheckpoint]:
    """Put the learner and the random generators where the run's newest checkpoint left them."""
    world = learner.world
    newest: SavedCheckpoint | None = newest_in(checkpoint_root(run)) if world.is_first else None
    found: SavedCheckpoint | None = world.from_first((newest,))[0]
    world.stage("loading a checkpoint", alone=True)
    if found is None:
        raise RunError(_why_none(run))
    if found.world == world.size:
        document, interval = _load_own(found, learner, world, say)
    else:
        document, interval = _load_others(found, learner, world, say)
    try:
        saved = dict(document["progress"])
        best, history = saved.pop("best"), [(first, ranks) for first, ranks in saved.pop("dealt", [])]
        progress = Progress(**saved, best=best and Best(**best), rank_history=history)
        _set_generators(document["generators"], learner.device)
        if follower is not None:
            follower.load_state(document[FOLLOW], tensors_of(_entry(found.folders[0]), FOLLOW))
        if found.world != world.size:
            _reseed(world.rank)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"the checkpoint of {run} does not fit this run ({type(error).__name__}: {error}).") from error
    progress.continue_on(world.size)
    return progress, interval, found


def best_steps(run: Path) -> set[int]:
    """The steps whose best weights some checkpoint counts on."""
    steps = set()
    root = checkpoint_root(run)
    for folder in (one for world in worlds_in(root) for one in folders_in(root_of(root, 0, world))):
        try:
            best = read_manifest(folder).document.get("progress", {}).get("best")
        except RunError:
            continue
        if best:
            steps.add(int(best["step"]))
    return steps


def _why_none(run: Path) -> str:
    hint = ""
    if (run / OLD).is_dir():
        hint = f" {run / OLD} has format version 1, which is no longer read."
    elif worlds := worlds_in(checkpoint_root(run)):
        hint = f" Of the {worlds[-1]} ranks that wrote there no step is common to all."
    return f"{run} has no checkpoint to resume from.{hint} Start it again with --overwrite."


def _same_places(entry: Entry, learner: Learner) -> bool:
    """Whether this rank saved what it has now; the same answer on all of them."""
    saved, wanted = entry.manifest.tables, shapes_of(learner.tables)
    return all(name not in saved or saved[name].placement == one.placement for name, one in wanted.items())


def _load_own(
    found: SavedCheckpoint, learner: Learner, world: World, say: Callable[[str], None]
) -> tuple[dict[str, Any], Interval]:
    """What the newest checkpoint says of the run; its rows and weights are loaded."""
    newest = found.folders[world.rank]
    root = newest.parent
    try:
        entry = _entry(newest)
        interval = Interval.from_state(tensors_of(entry, INTERVAL), learner.device)
        if _same_places(entry, learner):
            for note in load_entry(entry, learner.tables, learner.model, learner.optimizer):
                say(note)
        else:
            load_all([_entry(folder) for folder in found.folders], learner, world.rank)
            say(
                f"the checkpoint of step {found.step:,} was saved with tables placed otherwise on the ranks: all rows are "
                "there, the contents of caches are not"
            )
    except RunError as error:
        older = "" if len(folders_in(root)) == 1 else f" To resume from the one before it, move {newest} away."
        run = root.parent if world.size == 1 else root.parent.parent
        hint = f" `hotbed checkpoint verify {run}` names all damage.{older}" if "damaged" in str(error) else ""
        raise RunError(f"{error}{hint}") from error
    world.stage("agreeing where the run stands")
    first = world.from_first(entry.manifest.document)
    return {**entry.manifest.document, "progress": first["progress"]}, interval


def _load_others(
    found: SavedCheckpoint, learner: Learner, world: World, say: Callable[[str], None]
) -> tuple[dict[str, Any], Interval]:
    """From another number of ranks; rank 0 takes over the open interval."""
    entries = [_entry(folder) for folder in found.folders]
    states = [tensors_of(entry, INTERVAL) for entry in entries]
    load_all(entries, learner)
    whole = join_states(states).state()
    interval = Interval.from_state(whole, learner.device)
    say(
        f"the checkpoint of step {found.step:,} was saved by {_ranks(found.world)} and continues with {_ranks(world.size)}: "
        "all rows and weights are there, the contents of caches are not, and the samples left in the epoch are distributed "
        "again"
    )
    return entries[0].manifest.document, interval if world.is_first else interval.emptied()


def _entry(folder: Path) -> Entry:
    entry = Entry(folder, read_manifest(folder))
    if "progress" not in entry.manifest.document:
        raise RunError(f"{entry.folder} was not saved by `hotbed train`; it does not say where its run stood.")
    return entry


def _ranks(number: int) -> str:
    return "one process" if number == 1 else f"{number} ranks"


def _config_of(run: Path) -> dict[str, Any]:
    """The run's settings as they are on disk; none when the run was built in Python."""
    try:
        found = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _generators(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _set_generators(saved: dict[str, Any], device: torch.device) -> None:
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()
    }
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _reseed(rank: int) -> None:
    """Another stream of random numbers for every rank but the first."""
    for _ in range(rank):
        torch.manual_seed(int(torch.randint(1 << 62, (), device="cpu")))


class BestWeights:
    """The weights of the best evaluation so far, in `best/STEP` of the run; a checkpoint names those that it needs."""

    def __init__(self, run: Path, world: World) -> None:
        self._run, self._world = run, world

    def exist(self, progress: Progress) -> bool:
        """Whether the best weights so far were written; asked by all ranks."""
        return self._world.from_first(self._folder(progress).is_dir())

    def check(self, progress: Progress) -> None:
        """Raise unless they are there as they were written."""
        check_folder(self._folder(progress))

    def save(self, progress: Progress, learner: Learner) -> None:
        """Write the weights as they are, which are the best so far."""
        if self._world.is_first:
            write_folder(self._folder(progress), lambda folder: save_weights(folder, learner, self._world))
        else:
            send_weights(learner, self._world)

    def load(self, progress: Progress, learner: Learner) -> None:
        """Put them in place of the last ones."""
        load_weights(self._folder(progress), learner.model, learner.tables)

    def tidy(self, progress: Progress) -> None:
        """After a checkpoint: remove those that no checkpoint names."""
        if not self._world.is_first:
            return
        named = {str(step) for step in best_steps(self._run)} | {self._folder(progress).name}
        for folder in (self._run / "best").glob("*"):
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, progress: Progress) -> Path:
        return self._run / "best" / str(progress.best.step if progress.best else 0)
