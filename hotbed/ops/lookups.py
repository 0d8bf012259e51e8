"""One batch's lookups into one group of tables, flattened: what the ops `keys`, `lookup` and `update` share.

Two forms. One value per bag (an id matrix [B, F], or a sequence): lookup i writes output row i, `bags` is None. Bags:
values stand feature after feature, sample after sample; bag n is values[starts[n]:starts[n + 1]] and writes output row
out_rows[n]. A span says which positions belong to one feature, a table is a run of spans.

Shapes: L lookups, N bags, O output rows, P spans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Span(NamedTuple):
    """The lookups of one feature: positions start, start + stride, ... (`length` of them)."""

    feature: str
    start: int
    length: int
    stride: int


class Ticket:
    """The promise that rows stay in their slots; the cache takes it back before it moves them."""

    def __init__(self, learns: bool) -> None:
        self.valid = True
        self.learns = learns  # the rows are marked as changed

    def holds(self, learns: bool) -> bool:
        """Whether the rows are in their slots, and will be written back if they are to be updated."""
        return self.valid and (self.learns or not learns)


class KeyMeaning(NamedTuple):
    """What the keys of one batch of dynamic ids mean, and until when."""

    learns: bool
    number: int  # of the training batch; outside training, of the one trained last
    epoch: int  # batches of another one, if not trained, were taken back
    temporary: object | None = None  # ids without a row, kept as long as the batch is


class LookupIds(NamedTuple):
    """The ids of lookups, for a caller that needs them besides the keys."""

    ids: Tensor  # int64 [L]
    tables: Tensor | None = None  # int32 [L]: the number of each id's table


Origin = KeyMeaning | LookupIds | None  # of keys; None: preset keys, which hold for ever


class RankRoute(Protocol):
    """How rows travel between ranks (parallel/routes.py)."""

    @property
    def num_vectors(self) -> int:
        """Vectors that come back to the rank that requests them."""


class Bags(NamedTuple):
    """Which lookups belong together, and where their vectors go."""

    starts: Tensor  # int64 [N + 1]
    out_rows: Tensor  # int64 [N]
    scale: Tensor | None = None  # [L]: weight of the lookup, and 1 / bag size for mean pooling
    out_row: Tensor | None = None  # [L], where it is known ahead: the output row of each lookup


class SortedKeys(NamedTuple):
    """The keys of all lookups in ascending order."""

    keys: Tensor  # [L]
    order: Tensor  # [L], their positions; equal keys keep the order of the batch


class BatchSlots(NamedTuple):
    """What a recording found out about the L lookups of a batch; of N bags also where each begins."""

    slots: Tensor  # [L]; int32 slots of a cache, or keys
    sorted: SortedKeys  # [L]
    starts: Tensor | None = None  # int64 [N + 1]
    out_row: Tensor | None = None  # int32 [L]
    scale: Tensor | None = None  # float32 [L]

    def cut(self, num_lookups: int, num_bags: int) -> BatchSlots:
        """Without what is beyond these numbers."""
        return BatchSlots(
            self.slots[:num_lookups],
            SortedKeys(*(part[:num_lookups] for part in self.sorted)),
            None if self.starts is None else self.starts[: num_bags + 1],
            None if self.out_row is None else self.out_row[:num_lookups],
            None if self.scale is None else self.scale[:num_lookups],
        )


class IdCheck(NamedTuple):
    """A check of ids that the device may not have finished."""

    flag: Tensor  # int64 [1]: NONE, or the position of a bad id; then the update does nothing
    wait: Callable[[], None] | None = None  # waits for it and raises IdError; None: whoever recorded the check does


class Lookups(NamedTuple):
    """The lookups of one batch in one group."""

    slots: Tensor  # int64 [L]; -1 is padding and contributes nothing
    spans: tuple[Span, ...]  # in table order: spans of one table are neighbours
    num_out: int  # O
    bags: Bags | None = None  # None: lookup i writes output row i
    keys: Tensor | None = None  # [L], where a slot is not its key: sums run in key order, never in slot order
    sorted: SortedKeys | None = None  # on CUDA, where they are known ahead
    check: IdCheck | None = None  # on CUDA
    ticket: Ticket | None = None  # says whether the slots still hold
    origin: Origin = None  # of the keys
    renew: Callable[[], Lookups] | None = None  # where keys are not kept: the lookups again, with keys as slots
    requested: Lookups | None = None  # with several ranks, of own lookups: what all ranks request from this one
    route: RankRoute | None = None  # of requested lookups: the way of their rows

    def out_row_of_lookup(self) -> Tensor | None:
        """The output row each lookup goes to, [L]; None when lookup i goes to row i."""
        if self.bags is None or self.bags.out_row is not None:
            return None if self.bags is None else self.bags.out_row
        return torch.repeat_interleave(self.bags.out_rows, self.bags.starts.diff(), output_size=self.slots.shape[0])

    @property
    def scale(self) -> Tensor | None:
        """Factors [L] of the lookups, where they have some."""
        return None if self.bags is None else self.bags.scale

    def with_scale(self, scale: Tensor | None) -> Lookups:
        """The same lookups with other factors."""
        return self if self.bags is None else self._replace(bags=self.bags._replace(scale=scale))

    def check_ids(self) -> None:
        """Raise IdError for a bad id, once the device has looked."""
        if self.check is not None and self.check.wait is not None:
            self.check.wait()


@lru_cache(maxsize=64)
def span_array(spans: tuple[Span, ...]) -> NDArray[np.int64]:
    """[P, 3]: start, length, stride. Batches of one shape share the array: read it only."""
    return np.array([span[1:] for span in spans], dtype=np.int64).reshape(len(spans), 3)
