"""Tables sharded over ranks: every row has one owner, which stores it, looks it up and updates it.

    torchrun --nproc-per-node 2 train.py        # in it: tables = hotbed.ShardedTables({...}, optimizer, cache=0.015)

Forward: each rank requests the distinct rows of its batch from their owners and pools them, or has each owner pool its part of
every bag, whichever moves fewer bytes. Backward: sums of gradients over the batch, or one gradient for each part, go to the
owners, which add them in the order of the ranks and update. Each owner has its own cache and stores; to them the requests of
other ranks are a batch like any other.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from hotbed.errors import ConfigError
from hotbed.host.threads import share_cores
from hotbed.ops.shard import Shard
from hotbed.optim import RowOptimizer
from hotbed.parallel.auto import Mode, check_mode
from hotbed.parallel.exchange import Pooled, RankExchange, SharingOptions
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import RankOrder
from hotbed.parallel.shard_front import TYPES, FrontContext, TrafficType
from hotbed.store.counts import Tiers
from hotbed.tables.lookup import Bags, Ids, Vectors
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.placement import Placement
from hotbed.tables.spec import Table

_LOG = logging.getLogger("hotbed.parallel")
REPLICAS = 0.5  # of hbm=: with two ranks and one state, replicas and cache hold the same batches
_ALIKE = ("seed", "precision", "store_precision")  # options that must be the same on all ranks


class ShardedTables(EmbeddingTables):
    """EmbeddingTables whose rows are sharded over all ranks.

    Made with the same arguments on every rank, after `torch.distributed.init_process_group`; byte budgets are those of one
    rank. A call looks up the rank's own part of the global batch, which may be empty; all ranks call the tables and run
    backward equally often.

    `gradients="mean"` divides the sums by the number of ranks, as DistributedDataParallel does with those of the model: right
    when every rank's loss is the mean over its part. With "sum" the ranks' losses add up to the loss.

    `traffic="bf16"` or "fp16" sends rows and gradients in 16 bits: an approximation (docs/numerics.md).

    `mode="replicated"` also keeps recently used rows at every rank; "auto" chooses for every group, from its first batches and
    the speed of the wires. The rows are the same to the bit (docs/distributed.md). "all-reduce" keeps whole records at every
    rank, which applies every update itself, as MixCache publishes it; sums of more than two ranks may round differently.

    `pooled="auto"` lets owners sum their parts of bags if that moves fewer bytes than rows; vectors are then sums of at most W
    partial sums, which round differently than in one process. "never" moves rows and gives the vectors of one process to the
    bit. Dynamic ids, weighted bags and the other modes always move rows. "always" is for measuring.

    `once_per_node=True` sends a row that several ranks of a node request to that node once, and the sum of their gradients
    back, which adds them in another order: ranks of a node first, then nodes. It always moves rows, with `mode="sharded"`;
    dynamic ids and `scale_by_count` travel as before (docs/scaling.md).

    Replicas have the share `replicas` of the bytes of `hbm=`, and the cache the rest; a batch of all ranks that does not fit
    there is refused. Where the cache is a share of the rows, or holds all, replicas take what four batches need, in addition.

    `placement="row"` spreads the rows of every table over all ranks, "table" keeps each table on one rank, "column" gives every
    rank a slice of each row; Table(placement=) says it for one table. The rows are the same to the bit (docs/distributed.md).

    A single rank exchanges nothing and has the speed of EmbeddingTables.
    """

    is_shared = True

    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizer: RowOptimizer | None = None,
        *,
        mesh: Mesh | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        traffic: TrafficType = "fp32",
        mode: Mode = "sharded",
        pooled: Pooled = "auto",
        replicas: float = REPLICAS,
        once_per_node: bool = False,
        placement: Placement = "row",
        **options: Any,
    ) -> None:
        cores = share_cores()
        if cores is not None and int(os.environ.get("RANK", "0")) == 0:
            _LOG.info("%s", cores)
        mesh = Mesh.from_environment() if mesh is None else mesh
        order = RankOrder(mesh)
        try:
            _check_settings(gradients, traffic, pooled, replicas)
            _check_once(once_per_node, mode, pooled)
            _check_once_by_row(once_per_node, tables, placement)
            share = replica_share(mode, replicas, mesh.size)
            shard = Shard(mesh.rank, mesh.size)
            super().__init__(tables, optimizer, shard=shard, replicas=share, placement=placement, **options)
            check_mode(mode, self.groups)
        except BaseException as error:
            order.refuse(error)
            raise
        self.mesh, self.order = mesh, order
        sharing = SharingOptions(gradients, traffic, mode, pooled, once_per_node)
        order.compare(_description(self, sharing._asdict() | {name: options.get(name) for name in _ALIKE}))
        self.ranks: RankExchange | None = None
        if mesh.size == 1:  # nothing travels: these are the tables of one process, and recorded as they are
            self.is_shared = False
            return
        self.stop_recording()  # recordings are for one rank
        self.ranks = RankExchange(self, FrontContext(mesh, order), sharing)
        self.exchange = self.ranks

    def tiers(self) -> Tiers | None:
        """See EmbeddingTables; replicas are in memory where that is the cache."""
        found = super().tiers()
        if found is None or found.sizes.memory_slots:
            return found
        return found._replace(
            sizes=found.sizes._replace(memory_bytes=found.sizes.memory_bytes + self.exchange.replica_bytes)
        )

    def _looked_up(self, ids: Ids, bags: Bags) -> Vectors:
        """The vectors of this rank's part of a batch; see EmbeddingTables."""
        if self.ranks is None:
            return super()._looked_up(ids, bags)
        self.ranks.begin_call(trains=torch.is_grad_enabled() and self.learns)
        try:
            return super()._looked_up(ids, bags)
        except BaseException as error:
            self.ranks.refuse_call(error)
            raise


def _description(tables: EmbeddingTables, settings: dict[str, Any]) -> dict[str, str]:
    """The arguments that must be the same on all ranks; budgets and places may differ."""
    cached = [sorted(group.members) for group in tables.groups if group.num_slots]
    found = {"the tables": list(tables.tables), **{f"table {name!r}": table for name, table in tables.tables.items()}}
    found |= {"optimizer": tables.optimizer, "output": tables.output, "tables behind a cache": cached, **settings}
    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in found.items()}


def replica_share(mode: str, replicas: float, world: int) -> float:
    """The share of the cache's bytes that replicas have in this mode."""
    return replicas if mode != "sharded" and world > 1 else 0.0


def _check_once(once_per_node: bool, mode: str, pooled: str) -> None:
    if once_per_node and (mode != "sharded" or pooled == "always"):
        raise ConfigError(
            f"once_per_node=True needs mode='sharded' and pooled='auto' or 'never', not mode={mode!r}, pooled={pooled!r}: "
            "replicas cross once as they are, and parts of bags are of one rank"
        )


def _check_once_by_row(once_per_node: bool, tables: Mapping[str, Table], placement: str) -> None:
    """Ranks of a node merge requests by the numbers of rows, which are alike on all ranks where tables are placed by row."""
    others = {name: table.placement or placement for name, table in tables.items()}
    found = next((f"{name} by {one}" for name, one in others.items() if one != "row"), None)
    if once_per_node and found is not None:
        raise ConfigError(
            f"once_per_node=True needs placement='row' for all tables, and {found} is not; leave one of the two out"
        )


def _check_settings(gradients: str, traffic: str, pooled: str, replicas: float) -> None:
    wrong = []
    if gradients not in ("mean", "sum"):
        wrong.append(f"gradients must be 'mean' or 'sum', not {gradients!r}")
    if traffic not in TYPES:
        wrong.append(f"traffic must be one of {', '.join(map(repr, TYPES))}, not {traffic!r}")
    if pooled not in get_args(Pooled):
        wrong.append(f"pooled must be one of {', '.join(map(repr, get_args(Pooled)))}, not {pooled!r}")
    if isinstance(replicas, bool) or not isinstance(replicas, int | float) or not 0 < replicas < 1:
        wrong.append(f"replicas is the share of hbm= for replicas of rows, above 0 and below 1, not {replicas!r}")
    if wrong:
        raise ConfigError("; ".join(wrong))
