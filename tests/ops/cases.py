"""Random lookups for the op tests: odd shapes, shared tables, padding, empty bags, duplicates."""

from __future__ import annotations

import torch

from hotbed.ops.lookups import Bags, Lookups, Span
from hotbed.ops.update import TableRows


def random_matrix(rows, batch, generator):
    """One value per bag: an id matrix over len(rows) tables."""
    bases = [sum(rows[:i]) for i in range(len(rows))]
    columns = [torch.randint(0, n, (batch,), generator=generator) + base for n, base in zip(rows, bases)]
    slots = torch.stack(columns, dim=1).reshape(-1)
    slots[torch.rand(slots.shape, generator=generator) < 0.1] = -1
    spans = tuple(Span(f"f{i}", i, batch, len(rows)) for i in range(len(rows)))
    tables = tuple(TableRows(base, n, i, i + 1) for i, (n, base) in enumerate(zip(rows, bases)))
    return Lookups(slots, spans, num_out=slots.shape[0]), tables


def random_bags(rows, batch, generator, dtype=torch.float32):
    """Bags over len(rows) tables; the first table is read by two features."""
    owners = [0, *range(len(rows))]
    bases = [sum(rows[:i]) for i in range(len(rows))]
    slots, starts, out_rows, spans, position = [], [], [], [], 0
    for f, table in enumerate(owners):
        lengths = torch.randint(0, 5, (batch,), generator=generator)
        count = int(lengths.sum())
        slots.append(torch.randint(0, rows[table], (count,), generator=generator) + bases[table])
        starts.append(torch.cumsum(lengths, 0) - lengths + position)
        out_rows.append(torch.arange(batch) * len(owners) + f)
        spans.append(Span(f"f{f}", position, count, 1))
        position += count
    slots = torch.cat(slots)
    slots[torch.rand(slots.shape, generator=generator) < 0.1] = -1
    tables = tuple(
        TableRows(bases[t], rows[t], owners.index(t), len(owners) - owners[::-1].index(t)) for t in range(len(rows))
    )
    scale = torch.randn(position, generator=generator, dtype=dtype)
    starts = torch.cat([*starts, torch.tensor([position])])
    return Lookups(slots, tuple(spans), batch * len(owners), Bags(starts, torch.cat(out_rows), scale)), tables
