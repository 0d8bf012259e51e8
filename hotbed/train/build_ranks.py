"""What ranks of one run have that a single process has not: config and a world in, their shares and optimizers out.

Ranks must be given the same config and dataset; `compare` says where they were not.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import hotbed
from hotbed.data.draws import key_of
from hotbed.errors import ConfigError
from hotbed.ops.records import Precision, layout_of
from hotbed.optim import KStepAdam, RowOptimizer
from hotbed.optim.kstep.merge import MergeRule
from hotbed.parallel.auto import Mode
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.shard_front import TrafficType
from hotbed.parallel.sharded import ShardedTables
from hotbed.parallel.world import World
from hotbed.run.config import RunConfig
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.budget import parse_ssd
from hotbed.tables.sizing.placement import largest_rank
from hotbed.tables.spec import Table

_PACKAGES = ("torch", "numpy", "numba", "pyarrow")


def rank_problems(config: RunConfig, world: World) -> list[str]:
    """What one process can do and several cannot."""
    problems: list[str] = []
    if world.size == 1:
        return problems
    for name, size in (("batch_size", config.data.batch_size), ("eval_batch_size", config.data.eval_batch_size)):
        if size < world.size:
            problems.append(
                f"data.{name}: must be at least {world.size}, a sample for each rank, not {size}; it is of all ranks together"
            )
    if config.dense.optimizer == "adagrad":
        problems.append(f"dense.optimizer: must be adam or sgd with {world.size} ranks, not 'adagrad'")
    if config.parallel.local_ranks and world.size % config.parallel.local_ranks:
        problems.append(
            f"parallel.local_ranks: must divide the {world.size} ranks, not {config.parallel.local_ranks}; 0: as torchrun says"
        )
    if config.parallel.mode in ("replicated", "all-reduce") and config.tables.decay_scope == "table":
        problems.append(
            f"parallel.mode: must be sharded or auto with tables.decay_scope=table, not {config.parallel.mode!r}; replicas are "
            "of the rows that batches use, and every row decays at every step"
        )
    if config.parallel.mode in ("replicated", "all-reduce") and config.tables.store_precision == "int8":
        problems.append(
            f"parallel.mode: must be sharded or auto with tables.store_precision=int8, not {config.parallel.mode!r}; rows are "
            "rounded when they leave the cache of their owner, and replicas are not"
        )
    if config.parallel.once_per_node and config.parallel.mode != "sharded":
        problems.append(
            f"parallel.once_per_node: must be false with parallel.mode={config.parallel.mode}; replicas cross once as they are"
        )
    kinds = {one.rpartition("=")[2].strip() for one in config.parallel.placement.split(",")}
    if config.parallel.once_per_node and kinds != {"row"}:
        problems.append(
            f"parallel.once_per_node: must be false with parallel.placement={config.parallel.placement}; it is for rows"
        )
    if "column" in kinds and len(kinds) > 1 and (config.tables.warmup or config.tables.policy == "static"):
        problems.append(
            f"parallel.placement: must be column for all tables or for none with tables.warmup or the static policy, not "
            f"{config.parallel.placement!r}; columns have a cache of their own, and the most frequent rows are those of one"
        )
    if config.dense.optimizer == "sgd" and config.parallel.merge == "shared_v":
        problems.append("parallel.merge: must be params or moments with dense.optimizer=sgd, not 'shared_v'")
    return problems


def compare(config: RunConfig, fingerprint: str, world: World) -> None:
    """A ConfigError on all ranks where one was given something else than rank 0."""
    sections = dataclasses.asdict(config)
    mine: dict[str, Any] = {f"{section}.{name}": one for section in sections for name, one in sections[section].items()}
    mine["the dataset's fingerprint"] = fingerprint
    mine["hotbed"], mine["python"] = hotbed.__version__, platform.python_version()
    mine |= {package: version(package) for package in _PACKAGES}
    world.stage("comparing settings")
    given = world.gather(mine)
    wrong = []
    for name, value in given[0].items():
        others = {rank: other[name] for rank, other in enumerate(given) if other[name] != value}
        if others:
            said = ", ".join(f"{other!r} on rank {rank}" for rank, other in others.items())
            wrong.append(f"{name}: {value!r} on rank 0, {said}")
    if wrong:
        raise ConfigError("\n  - ".join(["all ranks must be given the same, and they differ in:", *wrong]))


def tables_of(config: RunConfig, world: World, replicas: float) -> Any:
    """The kind of tables; `replicas`: the share of the cache's bytes for replicas of rows, 0 without any."""
    if world.size == 1:
        return EmbeddingTables
    mode, traffic = cast(Mode, config.parallel.mode), cast(TrafficType, config.parallel.traffic)
    share: dict[str, Any] = {"replicas": replicas} if replicas else {}
    share |= {"once_per_node": True} if config.parallel.once_per_node else {}
    return partial(ShardedTables, gradients="sum", mesh=_mesh(config), mode=mode, traffic=traffic, **share)


def own_rows(
    tables: Mapping[str, Table], optimizer: RowOptimizer, precision: Precision, world: World
) -> dict[str, Table]:
    """Tables with the rows of the rank that has most bytes, for a forecast of memory; columns of rows count as fewer rows."""
    if world.size == 1:
        return dict(tables)
    rank, owners = largest_rank(tables, optimizer, precision, world.size)
    all_columns = all(table.placement == "column" for table in tables.values())
    found = {}
    for name, table in tables.items():
        width = layout_of(table.dim, optimizer, precision).width
        part = layout_of(max(1, table.dim // world.size), optimizer, precision).width
        if table.rows is None:
            found[name] = table
        elif all_columns:
            found[name] = dataclasses.replace(table, dim=table.dim // world.size)
        elif table.placement == "column":
            found[name] = dataclasses.replace(table, rows=-(-table.rows * part // width))
        elif table.placement == "table":
            found[name] = dataclasses.replace(table, rows=table.rows if owners[name] == rank else 0)
        else:
            found[name] = dataclasses.replace(table, rows=-(-table.rows // world.size))
    return found


def own_ids(known: Mapping[str, int], world: World) -> dict[str, int]:
    """Ids of every table that a rank will have of all; by a hash, so it may be some more than its share."""
    if world.size == 1:
        return dict(known)
    shares = {name: count / world.size for name, count in known.items()}
    return {name: math.ceil(share + 4 * math.sqrt(share)) for name, share in shares.items()}


def own_folder(ssd: str, world: World) -> str:
    """A folder for each rank: `/fast:500GiB` becomes `/fast/rank-1:500GiB`."""
    if not ssd or world.size == 1:
        return ssd
    folder, _ = parse_ssd(ssd)
    return f"{folder / f'rank-{world.rank}'}:{ssd.rpartition(':')[2]}"


def dense_weights(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer moves: parameters of whole numbers are constants that a model keeps as such."""
    return [one for one in model.parameters() if one.is_floating_point()]


def merged_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of the dense weights, which ranks have in common."""
    parameters = dense_weights(model)
    if not parameters:
        return None
    dense, parallel = config.dense, config.parallel
    return KStepAdam(
        parameters,
        lr=dense.lr,
        k=parallel.k_step,
        merge=None if parallel.merge == "auto" else cast(MergeRule, parallel.merge),
        scale_lr=parallel.scale_lr,
        overlap=parallel.overlap,
        delay=parallel.delay or None,
        across_only=parallel.across_only,
        inner="sgd" if dense.optimizer == "sgd" else "adam",
        mesh=_mesh(config),
        weight_decay=dense.weight_decay,
        buffers=list(model.buffers()),
    )


def _mesh(config: RunConfig) -> Mesh:
    local = config.parallel.local_ranks
    return Mesh(dist.get_world_size() // local, local) if local else Mesh.from_environment()


def seed_apart(seed: int, world: World) -> None:
    """Every rank draws other random numbers in training, such as those of dropout."""
    if world.size > 1:
        torch.manual_seed(key_of(seed, world.rank) >> 1)
