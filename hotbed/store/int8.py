"""A store whose rows have weights of int8: a row is packed when it is written and unpacked when it is read.

Records come and go in float32; ops/int8 defines what is rounded. Rows are packed by the thread that moves them. No caller can
move rows itself (`array` is None), so each passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ops.int8 import pack, packed_width, unpack
from hotbed.ops.records import Layout
from hotbed.store.counts import TierContents, Tiers
from hotbed.store.held import FrozenFiles, Holder, Keys
from hotbed.store.memory import MemoryStore
from hotbed.store.ssd import frozen_items


class Int8Store:
    """Packed records of all keys 0..R-1 in host memory."""

    array: None = None
    tiered: None = None

    def __init__(
        self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor], *, grows: bool = False
    ) -> None:
        self._rows = MemoryStore(num_rows, packed_width(layout), first, grows=grows)
        self._num_rows, self._layout, self._first = num_rows, layout, first

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W]; what was never written reads as its initial value."""
        found, source = torch.empty_like(out), torch.empty(keys.shape[0], dtype=torch.int32, device="cpu")
        num_found, late = self.fetch(keys, found, source)
        assert not late.shape[0], "rows that are on their way are not read"
        written = source >= 0
        out[written] = found[source[written].long()]
        if num_found < keys.shape[0]:
            out[~written] = self._first(keys[~written])

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out`: (their number, positions of those expected)."""
        packed = torch.empty(keys.shape[0], packed_width(self._layout), dtype=torch.float32, device="cpu")
        num_found, late = self._rows.fetch(keys, packed, source)
        unpack(packed[:num_found], self._layout, out[:num_found])
        return num_found, late

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, rounded."""
        self._rows.write(keys, pack(records, keys, self._layout))

    def items(self, chunk: int = 1 << 16) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        return self._unpacked(self._rows.items(chunk))

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """The keys of every row ever written, ascending."""
        return self._rows.keys()

    def holder(self) -> Holder:
        """Holds the rows of one moment for a checkpoint; their records are unpacked when they are read."""
        return _UnpackedRows(self._rows.holder(), self._unpacked)

    def adopt(self, folder: Path) -> None:
        """Write the rows of a checkpoint's folder; a key that is outside has no id here."""
        for keys, records in frozen_items(folder):
            inside = keys < self._num_rows
            self.write(keys[inside], records[inside])

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here."""
        self._rows.expect(keys)

    def forget(self, keys: Tensor) -> None:
        """These rows read as their initial values again."""
        self._rows.forget(keys)

    def clear(self) -> None:
        """Every row reads as its initial value."""
        self._rows.clear()

    def flush(self) -> None:
        """There is nothing below."""

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""
        self._rows.count_as_saved()

    def tiers(self, num_keys: int) -> Tiers | None:
        """No ssd."""
        return None

    def contents(self) -> TierContents | None:
        """No tier."""
        return None

    def restore_contents(self, held: TierContents) -> bool | None:
        """No tier."""
        return None

    def close(self) -> None:
        """Memory is freed with the store."""

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self._rows.num_bytes

    def _unpacked(self, items: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for keys, packed in items:
            records = torch.empty(keys.shape[0], self._layout.width, dtype=torch.float32, device="cpu")
            unpack(packed.contiguous(), self._layout, records)
            yield keys, records


class _UnpackedRows:
    """A Holder of packed rows that gives them unpacked."""

    files: Sequence[FrozenFiles] = ()

    def __init__(self, held: Holder, unpacked: Callable[..., Iterator[tuple[Tensor, Tensor]]]) -> None:
        self._held, self._unpacked = held, unpacked
        self.take, self.in_files = held.take, held.in_files
        self.commit, self.give_back = held.commit, held.give_back

    @property
    def keys(self) -> Keys:
        """Keys of the rows that `items` gives, ascending."""
        return self._held.keys

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records), each once; in any thread."""
        return self._unpacked(self._held.items())
