"""What the ranks of a run agree on while they train: when to stop, what an interval and an evaluation have seen.

Every rank has its part of the samples. What is reported of all of them (a line of metrics.jsonl, the metrics of a split) is
worked out on rank 0 from what the others send, and is the same on every rank: what comes next depends on it.

`load_all`: a checkpoint of some number of ranks in, a learner of another number out: every rank reads all rows and keeps its
own.

Rows, their optimizer state and the dense weights are all there. Dense weights of ranks that were between two merges are
averaged, as a merge does. What caches held is left out: it was of other shares of the rows. Random generators begin anew on
all ranks but the first.

`RankSaver`: checkpoints of a run of one or many ranks: each writes its own rows, and one counts when all have it.

Ranks take a checkpoint at the same steps. Where one of them is still writing the last, all leave this one out. Old ones go only
when all ranks are known to have newer ones, so a rank that is killed while it writes, or whose disk is full, leaves a step that
all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotbed.checkpoint import Policy, Saver, State
from hotbed.checkpoint.chain import Entry, chain_of, folders_in, locked, remove
from hotbed.checkpoint.files import DENSE, OPTIMIZER, load_optimizer, mean_of
from hotbed.checkpoint.layouts import SavedCheckpoint, remove_others, root_of, step_of, unneeded_before
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import check_sizes, filling, gone_of, refuse_misfits, rows_of, tensors_of
from hotbed.checkpoint.types import Rows, Sink
from hotbed.checkpoint.write import REST
from hotbed.errors import RunError
from hotbed.ops.shard import Shard
from hotbed.optim import KStepAdam
from hotbed.parallel.world import World
from hotbed.store.history import begin_history
from hotbed.tables.snapshot.snapshot import TablesSink
from hotbed.train.interval import Interval, IntervalSummary
from hotbed.train.step import Learner
from hotbed.types import RowPart

_ALL = 1 << 30  # a saver that removes nothing itself
_OF_RANKS = ("kstep_counts", "kstep_arriving", "max_exp_avg_sq")  # state that ranks alone have
_BETWEEN = 8  # questions of which one goes to all ranks


class AgreedStop:
    """A wish to stop that one rank had and all grant, between the same two steps.

    All ranks ask equally often; one question in eight is answered by all of them, the others by the last such answer.
    """

    def __init__(self, requested: Callable[[], bool], world: World) -> None:
        self._requested, self._world = requested, world
        self._count, self._stops = 0, False

    def __call__(self) -> bool:
        if self._world.size == 1:
            return self._requested()
        if not self._stops and self._count % _BETWEEN == 0:
            self._stops = self._world.any(self._requested())
        self._count += 1
        return self._stops


def first_bad(interval: Interval, world: World) -> int | None:
    """The offset of the first step whose loss is not finite on some rank."""
    found = [offset for offset in world.gather(interval.first_bad()) if offset is not None]
    return min(found, default=None)


def summary_of(interval: Interval, world: World) -> IntervalSummary:
    """Over the samples of all ranks."""
    if world.size == 1:
        return interval.summary()
    whole = joined(interval, world)
    return world.from_first(whole.summary() if world.is_first else None)


def joined(interval: Interval, world: World) -> Interval:
    """The steps of all ranks as those of one, on rank 0."""
    state = interval.state()
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world.size)]
    for name, tensor in state.items():
        for part, array in zip(parts, world.collect(tensor.numpy())):
            part[name] = torch.from_numpy(array)
    return join_states(parts) if world.is_first else Interval()


def join_states(parts: list[dict[str, torch.Tensor]]) -> Interval:
    """What ranks have seen, step by step; a rank without samples has no part in the mean."""
    if not parts[0]:
        return Interval()
    sizes = np.stack([part["interval.sizes"].numpy() for part in parts])  # [W, steps]
    losses = np.stack([part["interval.losses"].double().numpy() for part in parts])
    logits = [torch.split(part["interval.logits"], row.tolist()) for part, row in zip(parts, sizes)]
    labels = [torch.split(part["interval.labels"], row.tolist()) for part, row in zip(parts, sizes)]
    means = (losses * sizes).sum(0) / sizes.sum(0)
    whole = Interval()
    for step, mean in enumerate(means):
        whole.add(
            torch.tensor(mean, dtype=torch.float32, device="cpu"),
            torch.cat([one[step] for one in logits]),
            torch.cat([one[step] for one in labels]),
        )
    return whole


def load_all(entries: Sequence[Entry], learner: Learner, rank: int | None = None) -> None:
    """Put the rows and weights of all ranks in place; where only rows moved between ranks, the weights are those of `rank`."""
    dense = entries if rank is None else [entries[rank]]
    weights = mean_of([tensors_of(entry, DENSE) for entry in dense])
    states = mean_of([tensors_of(entry, OPTIMIZER) for entry in dense])

    def load_dense() -> None:
        try:
            learner.model.load_state_dict(weights)
            if learner.optimizer is not None:
                fitting = states if rank is not None else _fitting(states, learner.optimizer)
                load_optimizer(learner.optimizer, fitting)
        except (RuntimeError, ValueError, KeyError) as error:
            raise RunError(f"the dense weights of {entries[0].folder} do not fit the model: {error}") from error

    begin_history(learner.tables)
    _load_rows(entries, learner.tables.restore(), load_dense)


def _load_rows(entries: Sequence[Entry], sink: TablesSink, load_rest: Callable[[], None]) -> None:
    for entry in entries:
        check_sizes(chain_of(entry))
        refuse_misfits(entry, sink.tables, any_rank=True)
    rests = [tensors_of(entry, REST) for entry in entries]
    with filling(sink):
        for rank, entry in enumerate(entries):
            for part in _parts(chain_of(entry), sink, Shard(rank, len(entries))):
                sink.add(part)
        sink.rest_of_ranks(rests)
        load_rest()


def _parts(chain: Sequence[Entry], sink: Sink, shard: Shard) -> Iterator[RowPart]:
    """The rows of one rank, oldest first; files of an ssd are read, for their keys are numbers of that rank.

    Dynamic ids come without the numbers of their rows: those are of that rank, too.
    """
    owners = Owners(chain)
    for entry in chain:
        yield from owners.thaw(entry, shard, sink.thaw)
        for table, ids in gone_of(entry):
            sink.gone(table, ids)
        for part in rows_of(entry):
            if "row" not in part.columns:
                yield part
            elif "weight" in part.columns:
                mine = owners.owned(part)
                columns = {name: column[mine] for name, column in part.columns.items() if name != "row"}
                yield RowPart(part.table, part.ids[mine], columns)


def _fitting(states: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    left_out = _OF_RANKS[:2] if isinstance(optimizer, KStepAdam) else _OF_RANKS
    return {name: value for name, value in states.items() if name.partition(".")[2] not in left_out}


class RankSaver:
    """The saver of one rank; alone, a Saver."""

    def __init__(
        self, checkpoints: Path, tables: Rows, policy: Policy, say: Callable[[str], None], world: World
    ) -> None:
        self._checkpoints, self._world, self._say = checkpoints, world, say
        self._keep = policy.keep
        self.root = root_of(checkpoints, world.rank, world.size)
        self._saver = Saver(self.root, tables, policy if world.size == 1 else policy._replace(keep=_ALL), say)

    @property
    def num_failed(self) -> int:
        return self._saver.num_failed

    def save(self, state: State, *, wait: bool) -> bool:
        """Take a checkpoint; False when it was left out because some rank is still writing the last one."""
        if self._world.size == 1:
            return self._saver.save(state, wait=wait)
        if not wait and self._world.any(self._saver.busy):
            if self._world.is_first:
                self._say(f"step {state.step:,}: no checkpoint, because the last one is still being written")
            return False
        self._saver.settle()
        if not wait:
            self.prune()
        return self._saver.save(state, wait=wait)

    def prune(self) -> None:
        """Remove what no rank needs; called on all ranks, when none is writing."""
        if self._world.size > 1:
            mine = {step_of(folder) for folder in folders_in(self.root)}
            common = sorted(set.intersection(*self._world.gather(mine)))
            if common:
                cut = common[-self._keep :][0]
                self._remove_before(cut)
        if self._world.is_first:
            remove_others(self._checkpoints, self._world.size)

    def go_back_to(self, saved: SavedCheckpoint) -> None:
        """A run continues from here, whichever rank saved it: later checkpoints of this rank are of another history, and go.

        They did not count, because other ranks do not have them; together with what those write from now on they would.
        """
        if self._world.size == 1:
            return
        folders, name = folders_in(self.root), saved.folders[0].name
        kept = sum(step_of(folder) < saved.step for folder in folders)
        if saved.world == self._world.size:
            kept = [folder.name for folder in folders].index(name) + 1
        if folders[kept:]:
            with locked(self.root):
                remove(folders[kept:])

    def poll(self) -> bool:
        """Between steps: report what went wrong; True when one was finished since the last call."""
        return self._saver.poll()

    def settle(self) -> bool:
        """Wait for the checkpoint under way."""
        return self._saver.settle()

    def cancel(self) -> None:
        """Give up the checkpoint under way."""
        self._saver.cancel()

    def _remove_before(self, cut: int) -> None:
        with locked(self.root):
            remove(unneeded_before(self.root, cut))
