"""The ways in which ranks share rows, by name: a mode and a group in, what answers the group's look-ups out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, get_args

from hotbed.errors import ConfigError
from hotbed.optim import RowOptimizer
from hotbed.parallel.auto import AutoFront
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.replicated import ReplicatedFront
from hotbed.tables.group.group import TableGroup

if TYPE_CHECKING:
    from hotbed.parallel.sharded import ShardFront

Mode = Literal["sharded", "replicated", "auto"]
_LOG = logging.getLogger("hotbed.parallel")


def check_mode(mode: str, optimizer: RowOptimizer | None) -> None:
    """Refuse what cannot be."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    if mode == "replicated" and optimizer is not None and optimizer.decay_scope == "table":
        raise ConfigError(
            "mode='replicated' keeps copies of the rows that batches use, but decay_scope='table' changes all rows at every "
            "step; use decay_scope='touched', or mode='sharded'"
        )


def way_of(mode: Mode, sharded: ShardFront, mesh: Mesh, group: TableGroup) -> ShardFront | ReplicatedFront | AutoFront:
    """What answers look-ups of a group."""
    if mode == "replicated":
        return ReplicatedFront(sharded, mesh, group)
    if mode == "sharded":
        return sharded
    if group.optimizer.decay_scope == "table":
        if mesh.rank == 0:
            _LOG.info("tables of dim %d are sharded: decay_scope='table' changes all rows", group.layout.dim)
        return sharded
    return AutoFront(sharded, mesh, group)
