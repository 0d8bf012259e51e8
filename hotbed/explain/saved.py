"""A checkpoint and one id in, the last columns that were saved of its row out; whoever wrote them and wherever they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import check_sizes, gone_of, rows_of
from hotbed.checkpoint.types import RowPart
from hotbed.shard import Shard
from hotbed.snapshot import thawed


def saved_row(entries: Sequence[Entry], table: str, id_: int) -> dict[str, Tensor]:
    """Weight, optimizer states and further numbers; nothing where the row was never written, or is no more."""
    found: dict[str, Tensor] = {}
    for rank, entry in enumerate(entries):
        for part in _parts(chain_of(entry), Shard(rank, len(entries))):
            if part.table == table:
                at = (part.ids == id_).nonzero()
                if at.shape[0]:
                    row = int(at[-1])
                    columns = {name: one[row].clone() for name, one in part.columns.items()}
                    found = found | columns if columns else {}
    return found if "weight" in found else {}


def _parts(chain: Sequence[Entry], shard: Shard) -> Iterator[RowPart]:
    """Of one rank, oldest first: the last one counts. No columns: the row is forgotten."""
    check_sizes(chain)
    owners = Owners(chain)
    last = {Path(name).parts[1]: entry for entry in chain for name in entry.manifest.linked}
    for entry in chain:
        for folder in sorted({Path(name).parts[1] for name in entry.manifest.linked}):
            frozen = entry.folder / "frozen" / folder
            if not owners.is_dynamic(folder):
                yield from thawed(folder, frozen, entry.manifest.tables, shard)
            elif last[folder] is entry:
                yield from owners.thawed(folder, frozen)
        yield from (RowPart(table, ids, {}) for table, ids in gone_of(entry))
        for part in rows_of(entry):
            kept = owners.owned(part)
            yield RowPart(part.table, part.ids[kept], {name: one[kept] for name, one in part.columns.items()})
