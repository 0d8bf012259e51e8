"""A checkpoint and one id in, the last columns that were saved of its row out; whoever wrote them and wherever they were."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.read import check_sizes, rows_of
from hotbed.ops.shard import Shard
from hotbed.scorer.checkpoints import parts_of


def saved_row(entries: Sequence[Entry], table: str, id_: int) -> dict[str, Tensor]:
    """Weight, optimizer states and further numbers; nothing where the row was never written, or is no more."""
    found: dict[str, Tensor] = {}
    for rank, entry in enumerate(entries):
        chain = chain_of(entry)
        check_sizes(chain)
        for part in parts_of(chain, Shard(rank, len(entries)), rows_of):
            if part.table == table:
                at = (part.ids == id_).nonzero()
                if at.shape[0]:
                    row = int(at[-1])
                    columns = {name: one[row].clone() for name, one in part.columns.items()}
                    found = found | columns if columns else {}
    return found if "weight" in found else {}
