"""What tables and a model will take, in bytes, against what the machine has left: told before anything is allocated.

Whole tables take all their records on the device. Behind a cache the device takes the cache's share or budget, and host
memory the records that can ever be used: no more than there are samples, for a feature with one id per sample. A batch must
fit into the cache at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from hotbed.errors import BudgetError
from hotbed.memory import available_memory, in_words, parse_bytes
from hotbed.ops.records import Precision, layout_of
from hotbed.optim import RowOptimizer
from hotbed.tables import Table
from hotbed.types import Batch

_CPU = torch.device("cpu")


class Storage(NamedTuple):
    """How rows are kept: all on the device, or a share of them, or what fits in bytes such as "2GiB"."""

    cache: float | None = None
    hbm: str | None = None
    memory: str | None = None
    precision: Precision = "fp32"


def table_problems(
    tables: Mapping[str, Table],
    optimizer: RowOptimizer,
    device: torch.device,
    storage: Storage = Storage(),  # noqa: B008  frozen
    most_used: Mapping[str, int] | None = None,
) -> list[str]:
    """Nothing, or what does not fit with the ways out; `most_used` bounds the rows of a table that are ever used."""
    rows = {name: table.rows for name, table in tables.items()}
    record = {name: layout_of(table.dim, optimizer, storage.precision).width * 4 for name, table in tables.items()}
    whole = sum(rows[name] * record[name] for name in tables)
    what = f"{sum(rows.values()):,} rows with the state of {optimizer.rule.name} take {in_words(whole)}"
    if not storage.cache and not storage.hbm:
        free = available_memory(device)
        if free is None or whole <= free:
            return []
        return [f"the tables do not fit: {what}, and {device} has {in_words(free)} left. {_ways_out(device)}"]
    on_device = parse_bytes(storage.hbm, "tables.hbm") if storage.hbm else int((storage.cache or 0) * whole)
    used = sum(min(rows[name], (most_used or {}).get(name, rows[name])) * record[name] for name in tables)
    return _cached_problems(min(on_device, 2 * whole), used, device)


def _cached_problems(on_device: int, used: int, device: torch.device) -> list[str]:
    problems = []
    free, host = available_memory(device), available_memory(_CPU)
    if free is not None and on_device > free:
        problems.append(
            f"the cache does not fit: it takes {in_words(on_device)}, and {device} has {in_words(free)} left. Lower "
            "tables.cache or tables.hbm"
        )
    needed = used + (on_device if device == _CPU else 0)
    if host is not None and needed > host:
        problems.append(
            f"the rows behind the cache do not fit: up to {in_words(used)} of records will be used, and the host has "
            f"{in_words(host)} left. {_ways_out(_CPU)}"
        )
    return problems


def _ways_out(device: torch.device) -> str:
    ways = (
        "Lower model.dim, take a row optimizer with less state (rowwise_adagrad, sgd), or make the vocabulary smaller with "
        "`hotbed prepare --min-count`"
    )
    if device.type == "cuda":
        return f"Keep a share of the rows there and the rest in host memory (--cache 0.015, or --hbm 2GiB). {ways}"
    return ways


def rows_of_batch(tables: Mapping[str, Table], batch: Batch) -> int:
    """The distinct rows one batch needs; every table is read by the feature of its name."""
    single = [name for name in tables if name not in batch.bags]
    ids = {name: batch.ids[:, column] for column, name in enumerate(single)}
    ids |= {name: bag.values for name, bag in batch.bags.items()}
    return sum(
        torch.unique(ids[name] % table.rows if table.hashing else ids[name]).numel() for name, table in tables.items()
    )


def too_small(what: str, needed: int, sizes: Mapping[str, int], tables: Mapping[str, Table]) -> BudgetError:
    """The error for a cache that cannot hold a batch, with the smallest that can.

    Distinct rows of equally large batches scatter by less than the root of their number; four times that on top holds the
    largest of a long epoch, too.
    """
    rows = sum(table.rows for table in tables.values())
    enough = min(needed + 4 * math.isqrt(needed), rows)
    share = math.ceil(1e4 * enough / rows) / 1e4
    amount = in_words(math.ceil(1.05 * enough * sizes["device_bytes"] / sizes["slots"])).replace(" ", "")
    return BudgetError(
        f"the cache is too small: {what} needs {needed:,} rows at once, and the cache holds {sizes['slots']:,}. Take "
        f"--cache {share:g} or --hbm {amount} or more, or smaller batches.",
        enough,
    )


def model_problems(model: nn.Module, device: torch.device) -> list[str]:
    """Nothing, or that the dense weights do not fit; the model may be a shape without memory."""
    free = available_memory(device)
    weights = sum(one.numel() for one in model.parameters())
    needed = weights * 4 * 4  # float32, with the gradient and the two states of Adam
    if free is None or needed <= free:
        return []
    return [
        f"the model does not fit: its {weights:,} dense weights with gradient and optimizer state take {in_words(needed)}, "
        f"and {device} has {in_words(free)} left. Lower model.dim or the widths in model.options"
    ]
