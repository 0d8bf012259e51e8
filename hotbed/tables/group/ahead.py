"""Dynamic ids of one batch in one group, made ready while earlier batches train; the keys are settled when it is planned.

    any thread        ids -> entries, the number of each lookup's entry, rows of entries that are known; all goes to the device
    training thread   ids that are new get rows; the keys of entries go to the device again, if any was new

Kernels find the key of a lookup as map[number]. So a batch of known ids needs nothing in the training thread but a look at
whether ids were removed meanwhile. What the first part found is a function of the batch; rows are checked (`KnownRows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.devices import pinned_empty
from hotbed.ids import Translator
from hotbed.ids.distinct import LENGTH, BatchIds, DistinctIds, KnownRows
from hotbed.ids.index import Ints
from hotbed.ops.streams import current

_LINE = 64  # bytes


class IdsAhead:
    """The ids of one batch in one group. L lookups, span after span; E entries."""

    def __init__(
        self, given: BatchIds, host: Tensor, map_start: int, starts: Ints, known: KnownRows, device: torch.device
    ) -> None:
        self.given = given
        self.starts = starts  # [P]: where the numbers of each span begin
        self._known: KnownRows | None = known  # until it is used
        self._host: Tensor | None = host  # as `_memory`; what the first copy reads
        self._memory = host.to(device, non_blocking=True)  # numbers int32 [L], then the map int64 [E]
        self._map_start = map_start
        self._is_taken_over = device.type != "cuda"

    @property
    def num_lookups(self) -> int:
        assert self.given.totals is not None, "lookups are counted where repeats are removed"
        return int(self.given.totals.sum())

    @property
    def numbers(self) -> Tensor:
        """int32 [L], on the device."""
        return self._memory[: 4 * self.num_lookups].view(torch.int32)

    @property
    def map(self) -> Tensor:
        """int64 [E], on the device: the key of every entry, once it is settled."""
        return self._memory[self._map_start :].view(torch.int64)

    @property
    def addresses(self) -> tuple[int, int]:
        """(of the numbers, of the map)."""
        first = self._memory.data_ptr()
        return first, first + self._map_start

    def settle(self, translate: Callable[[BatchIds, KnownRows | None], Ints]) -> None:
        """Have the keys made, now, and put them into the map, on the current stream. Again where they were taken back."""
        known, self._known = self._known, None
        host, self._host = self._host, None
        keys = translate(self.given, known)
        if known is None or host is None or keys is not known.rows:
            self.map.copy_(self._pages(keys), non_blocking=True)
        elif not known.is_whole:  # else the map is right as it is
            self.map.copy_(host[self._map_start :].view(torch.int64), non_blocking=True)
        if not self._is_taken_over:
            self._memory.record_stream(current(self._memory.device))
            self._is_taken_over = True

    def _pages(self, keys: Ints) -> Tensor:
        found = torch.from_numpy(keys)
        if self._memory.device.type == "cuda":
            pages = pinned_empty((keys.shape[0],), torch.int64)
            return pages.copy_(found)
        return found


def read_ahead(
    distinct: DistinctIds, translator: Translator, spans: NDArray[np.int64], num_tables: int, device: torch.device
) -> IdsAhead:
    """Read ahead a batch whose ids are in host memory: spans [P, 6] (ids/distinct.py). Current stream; waits for nothing."""
    assert translator.first_row == 0, (
        f"rows are keys where they are looked up ahead; the first is {translator.first_row}"
    )
    lengths = spans[:, LENGTH]
    starts = np.cumsum(lengths) - lengths
    num_lookups = int(lengths.sum())
    map_start = -(-4 * num_lookups // _LINE) * _LINE
    host = _empty(map_start + 8 * num_lookups, device)
    numbers: NDArray[Any] = host[: 4 * num_lookups].view(torch.int32).numpy()
    pieces = distinct.number(spans, numbers)
    given = distinct.gather(pieces, numbers, num_tables)
    host = host[: map_start + 8 * pieces.num_entries]
    known = translator.look_ahead(distinct, given, host[map_start:].view(torch.int64).numpy())
    return IdsAhead(given, host, map_start, starts, known, device)


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return pinned_empty((num_bytes,), torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
