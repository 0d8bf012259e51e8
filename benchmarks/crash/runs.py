"""One training run: started, killed, verified, resumed as a user would, and what must be the same at its end."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.crash.processes import Command, CommandEnd
from benchmarks.crash.stages import STAGES
from hotbed.checkpoint.chain import Entry, chain_of, find, folders_in
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import rows_of, tensors_of
from hotbed.checkpoint.write import REST
from hotbed.ops.shard import WHOLE
from hotbed.store.ssd import frozen_items
from hotbed.types import RowPart

# what a clock said, or cache and tiers of one process did
TIMES = (
    "samples_per_s",
    "steady_samples_per_s",
    "seconds",
    "train_seconds",
    "times",
    "memory",
    "cache",
    "tiers",
    "log_position",
)
SETTINGS = (
    "data.batch_size=32",
    "data.eval_batch_size=500",
    "model.dim=8",
    "model.options.hidden=[16]",
    "model.options.dropout=0.2",
    "model.options.batch_norm=true",
    "train.device=cpu",
    "train.eval_every=70",
    "train.log_every=7",
    "train.schedule=cosine",
    "train.checkpoint_every=20",
)
TIERS = {  # {ssd} is a folder; the caps leave little room in addition to the rows
    "plain": (),
    "cache over memory": ("--cache", "0.3"),
    "memory over ssd": ("--memory", "1500KiB", "--ssd", "{ssd}:8MiB"),
    "three tiers": ("--hbm", "600KiB", "--memory", "1MiB", "--ssd", "{ssd}:8MiB"),
}
_COUNTED = ("--dynamic", "--admit", "after 2", "--expire", "unused 60 steps, every 8")
_SCORED = ("--dynamic", "--admit", "after 3, sketch 4KiB", "--expire", "score below 0.4, half-life 12, every 5")
DYNAMIC = {  # ids wait, get rows, lose them and come back; memory holds the index and a part of the rows
    "dynamic ids, cache over memory": (*_COUNTED, "--hbm", "600KiB"),
    "dynamic ids, memory over ssd": (*_COUNTED, "--memory", "4MiB", "--ssd", "{ssd}:24MiB"),
    "dynamic ids, three tiers": (*_COUNTED, "--hbm", "600KiB", "--memory", "4MiB", "--ssd", "{ssd}:24MiB"),
    "scored dynamic ids, three tiers": (*_SCORED, "--hbm", "600KiB", "--memory", "6MiB", "--ssd", "{ssd}:24MiB"),
}
CHECKPOINTS = {"incremental": (), "full": ("--set", "train.checkpoint_full_every=1")}
KINDS = ("at a moment", "at a change on the disk", "in a stage")
SHORT_STAGES = tuple(stage for stage in STAGES if stage not in ("training", "building tables"))
_IN_STAGE = 0.03  # seconds, about as long as such a stage takes


class Failure(Exception):  # noqa: N818
    """The run is not as it should be."""


class Case(NamedTuple):
    """One way to train."""

    tiers: str
    checkpoints: str
    data: str = "criteo-like:4000"
    epochs: int = 4

    def __str__(self) -> str:
        return f"{self.tiers}, {self.checkpoints}"

    def arguments(self, root: Path) -> list[str]:
        """Of `hotbed train`."""
        sets = [part for one in SETTINGS for part in ("--set", one)]
        places = [one.format(ssd=root / "ssd") for one in (TIERS | DYNAMIC)[self.tiers]]
        length = ["--data", self.data, "--epochs", str(self.epochs)]
        return ["train", *length, *sets, *places, *CHECKPOINTS[self.checkpoints], "--out", str(root / "run")]

    @property
    def ids(self) -> str:
        """Cases with the same word here train the same rows: "", "dynamic ids", "scored dynamic ids"."""
        return self.tiers.partition(",")[0] if self.tiers in DYNAMIC else ""


CASES = tuple(Case(tiers, checkpoints) for tiers in TIERS | DYNAMIC for checkpoints in CHECKPOINTS)


class ReferenceRun(NamedTuple):
    """The run that was left alone."""

    end: dict[str, Any]
    seconds: float
    num_changes: int


class Tally(NamedTuple):
    """What was killed."""

    stages: Counter[str]  # a kill may fall into several: a checkpoint is written while training continues
    leftovers: Counter[str]  # endings of the names of unfinished files and folders
    kinds: Counter[str]
    lives: Counter[int]  # kills that one run has seen

    @property
    def num_kills(self) -> int:
        return self.kinds.total()


def no_kills() -> Tally:
    return Tally(Counter(), Counter(), Counter(), Counter())


def undisturbed(case: Case, root: Path) -> ReferenceRun:
    """Train once without a kill."""
    root.mkdir(parents=True)
    began = time.perf_counter()
    ended = Command(case.arguments(root), root).ended()
    if ended.code != 0:
        raise Failure(f"the undisturbed run ended with {ended.code}:\n{ended.text}")
    return ReferenceRun(end_of(root / "run"), time.perf_counter() - began, ended.num_changes)


class KilledRun:
    """One run in its folder, from its start to its end."""

    def __init__(self, case: Case, root: Path, whole: ReferenceRun, draw: random.Random, tally: Tally) -> None:
        self._case, self._root, self._whole, self._draw, self._tally = case, root, whole, draw, tally
        self._run = root / "run"
        root.mkdir(parents=True)

    def live(self, most_kills: int) -> int:
        """Kill it at most so often, let it come to its end, and compare; the number of kills."""
        kills = 0
        while True:
            ended = self._killed(self._next(), most_kills - kills)
            if ended is None:
                break
            kills += 1
            self._verify()
            if kills < most_kills and folders_in(self._run / "checkpoints") and self._draw.random() < 0.15:
                kills += self._prune()
        self._tally.lives[kills] += 1
        differences = differences_of(self._whole.end, end_of(self._run))
        if differences:
            raise Failure(f"after {kills} kills the end is another: {', '.join(differences)}")
        return kills

    def _next(self) -> list[str]:
        """What a user would type now."""
        if folders_in(self._run / "checkpoints"):
            return ["train", "--resume", str(self._run)]
        again = ["--overwrite"] if (self._run / "config.json").exists() else []
        return [*self._case.arguments(self._root), *again]

    def _killed(self, arguments: list[str], kills_left: int) -> CommandEnd | None:
        """None when it came to its end."""
        kind = "at the end" if kills_left <= 0 else self._draw.choice(KINDS)
        whole, draw = self._whole, self._draw
        fatal = draw.randint(1, whole.num_changes) if kind == "at a change on the disk" else 0
        command = Command(arguments, self._root, fatal)
        if kind == "at a moment":
            ended = command.ended(draw.uniform(0, whole.seconds))
        elif kind == "in a stage":
            ended = command.ended_in(draw.choice(SHORT_STAGES), draw.uniform(0, _IN_STAGE))
        else:
            ended = command.ended()
        if ended.code == -signal.SIGKILL:
            self._tally.kinds[kind] += 1
            return self._note(ended)
        finished = ended.code == 0 or (ended.code == 1 and "is finished" in ended.text)
        if not finished:
            raise Failure(f"hotbed {' '.join(arguments)} ended with {ended.code}:\n{ended.text}")
        return None

    def _note(self, ended: CommandEnd) -> CommandEnd:
        self._tally.stages.update(ended.stages)
        endings = {path.suffix for path in self._run.rglob("*") if path.suffix in (".new", ".old", ".gone", ".tmp")}
        self._tally.leftovers.update(endings)
        return ended

    def _verify(self) -> None:
        if folders_in(self._run / "checkpoints"):
            ended = Command(["checkpoint", "verify", str(self._run)], self._root).ended()
            if ended.code != 0:
                raise Failure(f"verify ended with {ended.code}:\n{ended.text}")

    def _prune(self) -> int:
        """Kill `hotbed checkpoint prune` as well; 1 if it was still there to be killed."""
        arguments = ["checkpoint", "prune", str(self._run), "--keep", "1"]
        ended = Command(arguments, self._root, self._draw.randint(1, 30)).ended()
        if ended.code not in (0, -signal.SIGKILL):
            raise Failure(f"prune ended with {ended.code}:\n{ended.text}")
        if ended.code == 0:
            return 0
        self._tally.kinds["of `checkpoint prune`"] += 1
        self._note(ended)
        self._verify()
        return 1


def result_of(run: Path) -> dict[str, Any]:
    """By name: lines of metrics without times, and the files of the model."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = [path for path in sorted((run / "model").rglob("*")) if path.is_file()]
    return {"metrics.jsonl": [_timeless(line) for line in lines]} | {
        str(path.relative_to(run)): path.read_bytes() for path in files
    }


def end_of(run: Path) -> dict[str, Any]:
    """All that must be the same, by name: the result, and what the last checkpoint holds."""
    end, newest = result_of(run), find(run)
    for name in ("dense", "dense_optimizer", "interval"):
        end[f"{name} of the last checkpoint"] = (newest.folder / f"{name}.safetensors").read_bytes()
    document = newest.manifest.document
    end["progress"], end["generators"] = _timeless(document["progress"]), document["generators"]
    end["rows"], end["rest"] = rows_at(newest), _rest_at(newest)
    summary = json.loads((run / "summary.json").read_text())
    end["summary"] = {name: summary[name] for name in ("final", "best_epoch", "epochs", "steps", "samples", "finished")}
    return end


def _rest_at(entry: Entry) -> dict[str, Any]:
    """What is no row's, without what caches held; who waits to be admitted in an order of its own."""
    rest = {name: one.tolist() for name, one in tensors_of(entry, REST).items() if not name.startswith("cache.")}
    for group in {name.rpartition(".")[0] for name in rest if name.startswith("ids.")}:
        waiting = [rest.pop(f"{group}.waiting_{part}") for part in ("tables", "ids", "counts")]
        rest[f"{group}.waiting"] = sorted(zip(*waiting))
        used = rest[f"{group}.next_row"][0]  # beyond are rows of batches that were only looked ahead
        rest[f"{group}.free_rows"] = [row for row in rest[f"{group}.free_rows"] if row < used]
    return rest


def differences_of(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def rows_at(entry: Entry) -> dict[tuple[str, int], bytes]:
    """The record of every row of a checkpoint, with its chain."""
    rows: dict[tuple[str, int], bytes] = {}
    chain = chain_of(entry)
    owners = Owners(chain)
    for one in chain:
        for group in {Path(name).parts[1] for name in one.manifest.linked}:  # files of an ssd hold all rows there are
            rows = {key: record for key, record in rows.items() if key[0] != group}
            if not group.endswith("-dynamic"):
                for keys, records in frozen_items(one.folder / "frozen" / group):
                    rows |= _named(group, keys, [records])
        for part in owners.thaw(one, WHOLE, lambda *_: iter(())):  # dynamic ids; the others are by key, above
            rows |= _by_id(part, owners)
        for part in rows_of(one):
            rows |= _by_id(part, owners)
    return rows


def _by_id(part: RowPart, owners: Owners) -> Iterator[tuple[tuple[str, int], bytes]]:
    """Every column for itself: the numbers of a dynamic id may come apart from its record. Its row is the same in every run."""
    owned = owners.owned(part)
    shared = part.columns["shared"] != 0 if "shared" in part.columns else torch.zeros_like(owned)
    for which, ending in ((owned & ~shared, ""), (owned & shared, " that ids share")):
        for name, column in part.columns.items() if which.any() else ():
            yield from _named(f"{name} of {part.table}{ending}", part.ids[which], [column[which]])


def _named(table: str, ids: Tensor, columns: list[Tensor]) -> Iterator[tuple[tuple[str, int], bytes]]:
    flat = [column.reshape(ids.shape[0], -1).contiguous().numpy() for column in columns]
    for n, number in enumerate(ids.tolist()):
        yield (table, number), b"".join(column[n].tobytes() for column in flat)


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}
