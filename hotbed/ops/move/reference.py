"""Moving whole records, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.init_rows import reference
from hotbed.ops.move.initial import InitialRows
from hotbed.ops.precision.reference import round_nearest


def initial_records(keys: Tensor, first: InitialRows) -> Tensor:
    """The records [U, W] that the rows of `keys` [U] start from."""
    layout, device = first.layout, keys.device
    weights = torch.zeros(keys.shape[0], layout.dim, device=device, dtype=torch.float32)
    bases = torch.tensor([table.base for table in first.tables], device=device)
    table_of_key = torch.searchsorted(bases, keys, right=True) - 1
    for number, table in enumerate(first.tables):
        mine = table_of_key == number
        ids = keys[mine] - table.base
        part = torch.empty(ids.shape[0], layout.dim, device=device, dtype=torch.float32)
        reference.init_rows(part, ids, table.stream, table.init, first.first_column)
        if table.padding_id is not None:
            part[ids == table.padding_id] = 0
        weights[mine] = part
    records = torch.zeros(keys.shape[0], layout.width, device=device, dtype=torch.float32)
    if layout.precision != "fp32":
        weights = round_nearest(weights, layout.numbers(records).dtype)
    layout.weights(records).copy_(weights)
    weights = weights.float()  # state starts from the weights as they are stored
    f = tuple(torch.tensor(value, dtype=torch.float32, device=device) for value in first.constants)
    states = first.rule.bind_first({"where": torch.where})(weights, f)
    for name, value in zip(layout.element_states, states):
        records[:, layout.columns(name)] = value
    for name in layout.row_states:
        records[:, layout.columns(name)] = f[2]
    return records


def unpack(records: Tensor, slots: Tensor, source: Tensor, staging: Tensor, keys: Tensor, first: InitialRows) -> None:
    """records[slots[i]] = staging[source[i]], or the first record of keys[i] where source[i] < 0; slots < 0 are skipped."""
    values = initial_records(keys, first)
    fetched = source >= 0
    values[fetched] = staging[source[fetched]]
    wanted = slots >= 0
    records[slots[wanted]] = values[wanted]


def pack(records: Tensor, slots: Tensor, out: Tensor) -> None:
    """out[i] = records[slots[i]]."""
    torch.index_select(records, 0, slots, out=out)
