"""The ids that every system gets: Zipf draws from tables of Criteo-Kaggle's sizes, scattered over the rows.

The same ids come in two forms, both on the device before anything is timed: table by table with offsets, as FBGEMM takes them,
and as hotbed's loader gives them, a matrix of single ids and a Jagged for every feature with bags. Batches are drawn in order
from one seed, so a longer run begins with the ids of a shorter one.

    single    one id of every feature
    bags      as many as MLPerf's multi-hot Criteo has, 214 a sample
    varying   0 to twice as many, drawn for every sample: 214 on average
    dynamic   one id of every feature, 64 bits wide; systems without such ids get the number of its row

Shapes: B samples of a batch, F features (one table each), L ids of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.bench.setting import Setting
from hotbed.types import Batch, Jagged

_SCATTER = -7046029254386353131  # odd, so that no two rows get the same id: 0x9E3779B97F4A7C15 as int64


class FlatIds(NamedTuple):
    """The rows that one batch reads, table by table."""

    values: Tensor  # int64 [L]
    offsets: Tensor  # int64 [F * B + 1]: bag f * B + b is that of sample b in table f
    starts: tuple[int, ...]  # F + 1, on the host: where the values of each table begin


@dataclass(frozen=True)
class Workload:
    """The ids of a run."""

    batch: int
    flat: list[FlatIds]
    batches: list[Tensor | Batch]  # the same as hotbed takes them; a Tensor is int64 [B, F]

    def distinct_keys(self, batches: int = 8) -> float:
        """The mean number of distinct rows a batch touches, over the first `batches`."""
        some = self.flat[:batches]
        counts: list[int] = [
            torch.unique(values_of(ids, f)).numel() for ids in some for f in range(len(ids.starts) - 1)
        ]
        return sum(counts) / len(some)

    def part(self, rank: int, ranks: int) -> Workload:
        """What one of several ranks reads."""
        start, stop = part_of(self.batch, rank, ranks)
        return Workload(stop - start, self.flat, [_samples(batch, start, stop) for batch in self.batches])


def part_of(batch: int, rank: int, ranks: int) -> tuple[int, int]:
    """The samples of one rank: first, and one past the last."""
    return batch * rank // ranks, batch * (rank + 1) // ranks


def values_of(ids: FlatIds, table: int) -> Tensor:
    """The rows that a batch reads of one table."""
    return ids.values[ids.starts[table] : ids.starts[table + 1]]


def offsets_of(ids: FlatIds, table: int, batch: int) -> Tensor:
    """[B + 1]: where the bags of one table begin, from 0."""
    return ids.offsets[table * batch : (table + 1) * batch + 1] - ids.starts[table]


def make_workload(setting: Setting, count: int, *, seed: int = 0) -> Workload:
    """Draw `count` batches on the device of the setting."""
    generator = torch.Generator(device=setting.device).manual_seed(seed)
    flat = [_draw(setting, generator) for _ in range(count)]
    if setting.ids in ("single", "dynamic"):
        shape = (len(setting.rows), setting.batch)
        matrices = [ids.values.view(shape).t().contiguous() for ids in flat]
        return Workload(setting.batch, flat, [id_of_row(one) if setting.ids == "dynamic" else one for one in matrices])
    return Workload(setting.batch, flat, [_batch(ids, setting) for ids in flat])


def id_of_row(rows: Tensor) -> Tensor:
    """The 64-bit id of a row with dynamic ids: of any size, also negative."""
    return rows * _SCATTER


def zipf_ids(num_rows: int, count: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Bounded Zipf ranks, scattered over the rows by a multiplicative permutation: position and frequency are unrelated."""
    uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    rank: Tensor = ((float(num_rows) ** (1 - exponent) - 1) * uniform + 1) ** (1 / (1 - exponent))
    rank = (rank.floor().long() - 1).clamp_(0, num_rows - 1)
    stride = 2654435761 % num_rows if num_rows > 1 else 1
    while num_rows > 1 and (stride < 1 or gcd(stride, num_rows) != 1):
        stride += 1
    return rank * stride % num_rows


def _draw(setting: Setting, generator: torch.Generator) -> FlatIds:
    values, lengths, starts = [], [], [0]
    for rows, size in zip(setting.rows, setting.bag_sizes):
        if setting.ids == "varying":
            each = torch.randint(0, 2 * size + 1, (setting.batch,), generator=generator, device=setting.device)
        else:
            each = torch.full((setting.batch,), size, device=setting.device)
        lengths.append(each)
        starts.append(starts[-1] + int(each.sum()))
        values.append(zipf_ids(rows, starts[-1] - starts[-2], setting.zipf, generator))
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    return FlatIds(torch.cat(values), offsets, tuple(starts))


def _batch(ids: FlatIds, setting: Setting) -> Batch:
    """As a loader gives it: features of one id in a matrix, the others as bags."""
    columns, bags = [], {}
    for f, size in enumerate(setting.bag_sizes):
        if size == 1 and setting.ids == "bags":
            columns.append(values_of(ids, f))
        else:
            bags[f"C{f}"] = Jagged(values_of(ids, f).clone(), offsets_of(ids, f, setting.batch))
    unused = torch.zeros(setting.batch, 0, device=setting.device)
    matrix = torch.stack(columns, dim=1) if columns else unused.long()
    return Batch(unused.sum(1), unused, matrix, bags)


def _samples(batch: Tensor | Batch, start: int, stop: int) -> Tensor | Batch:
    if isinstance(batch, Tensor):
        return batch[start:stop].contiguous()
    bags = {}
    for name, (values, offsets, _) in batch.bags.items():
        first, last = int(offsets[start]), int(offsets[stop])
        bags[name] = Jagged(values[first:last].clone(), offsets[start : stop + 1] - first)
    return Batch(batch.labels[start:stop], batch.dense[start:stop], batch.ids[start:stop].contiguous(), bags)
