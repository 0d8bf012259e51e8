"""A checkpoint of some number of ranks in, a learner of another number out: every rank reads all rows and keeps its own.

Rows, their optimizer state and the dense weights are all there. Dense weights of ranks that were between two merges are
averaged, as a merge does. What caches held is left out: it was of other shares of the rows. Random generators begin anew on
all ranks but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of, forget
from hotbed.checkpoint.dense import DENSE, OPTIMIZER, load_optimizer, mean_of
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import check_sizes, gone_of, refuse_misfits, rows_of, tensors_of
from hotbed.checkpoint.types import RowPart, Sink
from hotbed.checkpoint.write import REST
from hotbed.errors import HotbedError, RunError
from hotbed.ops.shard import Shard
from hotbed.optim import KStepAdam
from hotbed.tables.snapshot.snapshot import TablesSink
from hotbed.train.step import Learner

_OF_RANKS = ("kstep_counts", "kstep_arriving", "max_exp_avg_sq")  # state that ranks alone have


def load_all(entries: Sequence[Entry], learner: Learner) -> None:
    """Put the rows and weights of all ranks in place."""
    weights = mean_of([tensors_of(entry, DENSE) for entry in entries])
    states = mean_of([tensors_of(entry, OPTIMIZER) for entry in entries])

    def load_dense() -> None:
        try:
            learner.model.load_state_dict(weights)
            if learner.optimizer is not None:
                load_optimizer(learner.optimizer, _fitting(states, learner.optimizer))
        except (RuntimeError, ValueError, KeyError) as error:
            raise RunError(f"the dense weights of {entries[0].folder} do not fit the model: {error}") from error

    forget(learner.tables)
    _load_rows(entries, learner.tables.restore(), load_dense)


def _load_rows(entries: Sequence[Entry], sink: TablesSink, load_rest: Callable[[], None]) -> None:
    for entry in entries:
        check_sizes(chain_of(entry))
        refuse_misfits(entry, sink.tables)
    rests = [tensors_of(entry, REST) for entry in entries]
    try:
        sink.begin()
        for rank, entry in enumerate(entries):
            for part in _parts(chain_of(entry), sink, Shard(rank, len(entries))):
                sink.add(part)
        sink.rest_of_ranks(rests)
        load_rest()
        sink.end()
    except (HotbedError, OSError):
        sink.begin()  # better no rows than some
        sink.end()
        raise


def _parts(chain: Sequence[Entry], sink: Sink, shard: Shard) -> Iterator[RowPart]:
    """The rows of one rank, oldest first; files of an ssd are read, for their keys are numbers of that rank.

    Dynamic ids come without the numbers of their rows: those are of that rank, too.
    """
    owners = Owners(chain)
    last = {Path(name).parts[1]: entry for entry in chain for name in entry.manifest.linked}
    for entry in chain:
        for name in sorted({Path(name).parts[1] for name in entry.manifest.linked}):
            folder = entry.folder / "frozen" / name
            if not owners.is_dynamic(name):
                yield from sink.thaw(name, folder, entry.manifest.tables, shard)
            elif last[name] is entry:  # the files hold all rows there are, under numbers that ids may since have lost
                yield from owners.thawed(name, folder)
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
