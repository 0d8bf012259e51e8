"""Keeps ranks in step: before every collective each rank announces what it does, and all stop if they differ.

Operations on shared tables are collectives. A collective that meets another one ends in an abort of the process (Gloo), a hang
(NCCL) or wrong rows. So each is preceded by a small one of fixed size, over a Gloo group that carries nothing else: a rank that
skips a backward, evaluates alone or has failed is named on every rank immediately. The timeout of the process group limits the
wait for a rank that announces nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hotbed.errors import ConfigError, RankError
from hotbed.parallel.mesh import Mesh

_FAILED = "has failed"
DOES = (
    _FAILED,
    "makes its tables",
    "begins to prefetch",
    "looks up a training batch",
    "looks up a training batch of a prefetch",
    "looks up a batch without training",
    "looks up a batch of a prefetch without training",
    "has the rows of a batch in place",
    "is in a backward pass and updates rows",
    "is in a backward pass and reads rows again",
)
_NUMBER = {what: number for number, what in enumerate(DOES)}
_RULE = (
    "Every rank must call the tables and run backward equally often, in the same order. A rank that would skip a backward (its "
    "loss is not finite, say) runs it with a loss of 0 * vectors.sum(); one without samples calls the tables with an empty "
    "batch; an evaluation is one of all ranks"
)
_ALIKE = "All ranks set lr_factor (set_lr, rates) alike, and load checkpoints of the same step"
_BITS = 62  # of a whole number on the wire


class RowUpdate(NamedTuple):
    """What rows of all ranks must have in common to be those of one process."""

    number: int  # of the updates before it
    lr_factor: float

    def __str__(self) -> str:
        return f"makes update {self.number + 1} with lr_factor={self.lr_factor:g}"


class RankAction(NamedTuple):
    """The next operation of a rank, in whole numbers."""

    what: int
    call: int  # of the tables, counted from 1
    groups: int  # of tables, one bit for each; 0: all
    number: int  # of an update
    rate: int  # the bits of its factor

    @property
    def place(self) -> tuple[int, int, int]:
        """Which operation it is."""
        return self[:3]

    @property
    def update(self) -> RowUpdate:
        """The update of an action that updates rows."""
        return RowUpdate(self.number, struct.unpack("d", struct.pack("q", self.rate))[0])

    def __str__(self) -> str:
        groups = [str(number) for number in range(_BITS) if self.groups >> number & 1]
        where = [f"call {self.call}"] * (self.call > 0)
        where += [f"group{'s' * (len(groups) > 1)} {', '.join(groups)} of its tables"] * bool(groups)
        return DOES[self.what] + (f" ({', '.join(where)})" if where else "")


class RankOrder:
    """The order of operations of one ShardedTables; making it is a collective."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._size = mesh.rank, mesh.size
        self._group: Any = None
        if mesh.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=mesh.timeout or _default_timeout())

    def meet(
        self,
        what: str,
        call: int = 0,
        groups: Sequence[int] = (),
        *,
        update: RowUpdate = RowUpdate(0, 1.0),  # noqa: B008  a tuple
        failure: str = "",
    ) -> None:
        """Return if all ranks do the same, else raise on all of them; a collective."""
        if self._size == 1:
            return
        bits = sum(1 << number for number in {group % _BITS for group in groups})
        rate = struct.unpack("q", struct.pack("d", update.lr_factor))[0]
        act = RankAction(_NUMBER[what], call, bits, update.number, rate)
        mine = torch.tensor([act] * self._size, dtype=torch.int64, device="cpu")
        said = torch.empty_like(mine)
        texts = [failure] * self._size
        try:
            dist.all_to_all_single(said, mine, group=self._group)
            acts = [RankAction(*each) for each in said.tolist()]
            if any(DOES[each.what] == _FAILED for each in acts):
                dist.all_gather_object(texts, failure, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self._rank} {act}, and other ranks do not answer: they have ended, or wait for something else. "
                f"{_RULE}. ({error})"
            ) from error
        failed = [f"rank {rank}: {texts[rank]}" for rank, each in enumerate(acts) if DOES[each.what] == _FAILED]
        if failed and what != _FAILED:
            raise RankError(f"this rank stops because of another. {'; '.join(failed)}")
        if not failed and len({each.place for each in acts}) > 1:
            raise RankError(f"ranks are out of step: {_by_rank(acts)}. {_RULE}")
        if not failed and len(set(acts)) > 1:
            updates = _by_rank([each.update for each in acts])
            raise RankError(f"ranks would update their rows differently: {updates}. {_ALIKE}")

    def refuse(self, error: BaseException) -> None:
        """Instead of `meet`, on a rank that has failed: all others stop and name it."""
        self.meet(_FAILED, failure=f"{type(error).__name__}: {error}")

    def compare(self, mine: dict[str, str]) -> None:
        """A ConfigError on all ranks if the arguments of one differ from those of rank 0; a collective."""
        self.meet("makes its tables")
        given = [mine] * self._size
        if self._size > 1:
            dist.all_gather_object(given, mine, group=self._group)
        wrong = []
        for name in dict.fromkeys(name for each in given for name in each):
            values = [each.get(name, "none") for each in given]
            others = [f"{value} on rank {rank}" for rank, value in enumerate(values) if value != values[0]]
            if others:
                wrong.append(f"{name}: {values[0]} on rank 0, {', '.join(others)}")
        if wrong:
            raise ConfigError(
                "\n  - ".join(["ShardedTables must be the same on all ranks, and they differ in:", *wrong])
            )


def _by_rank(acts: Sequence[Hashable]) -> str:
    ranks: dict[Hashable, list[int]] = {}
    for rank, act in enumerate(acts):
        ranks.setdefault(act, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, who))} {act}" for act, who in ranks.items())


def _default_timeout() -> timedelta | None:
    """The timeout of the default process group, which torch does not pass on to new ones."""
    group: Any = dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    return None
