"""What caches hold, for checkpoints: keys and what the policies know of them out, the same rows in the same cache back.

Rows themselves come from the store, so what is saved here can make a run faster and never wrong: the first steps after a
resume hit as those of a run that never stopped. It is taken between two steps, 16 bytes a slot, in the tensors of the rest
of a checkpoint:

    cache.<group>.policy             its name
    cache.<group>.device             slots, clock; with .keys .last .uses .hot
    cache.<group>.memory             slots, clock, hand of a tier in memory over an ssd; with .keys .last .uses .free

A batch that was planned ahead when the checkpoint was taken is planned again; its rows are in the cache by then.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hotbed.cache.holdings import Holdings, holdings_of, take_up
from hotbed.store import TieredStore
from hotbed.store.counts import TierHoldings
from hotbed.tables.group.cached import CachedGroup

_CHUNK = 1 << 18  # rows brought in at once


def tensors_of(group: CachedGroup, name: str) -> dict[str, Tensor]:
    """What a group's cache and its tier in memory hold now."""
    prefix, held = f"cache.{name}.", holdings_of(group.cache)
    held = held.only(held.keys < group.num_rows)  # guests are rows of their batch alone
    tensors = {
        "policy": torch.tensor(list(group.cache.policy.name.encode()), dtype=torch.uint8, device="cpu"),
        "device": torch.tensor([group.num_slots, held.clock], device="cpu"),
        "device.keys": _narrow(held.keys, group.num_rows),
        "device.last": held.last,
        "device.uses": held.uses,
        "device.hot": held.hot,
    }
    if isinstance(group.store, TieredStore):
        tier = group.store.holdings()
        tensors["memory"] = torch.tensor([tier.num_slots, tier.clock, tier.hand], device="cpu")
        tensors["memory.keys"] = _narrow(torch.from_numpy(tier.keys), group.num_rows)
        tensors["memory.last"], tensors["memory.uses"] = torch.from_numpy(tier.last), torch.from_numpy(tier.uses)
        tensors["memory.free"] = torch.from_numpy(tier.free)
    return {prefix + part: tensor for part, tensor in tensors.items()}


def bring_in(group: CachedGroup, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill the empty cache of a group whose rows have been loaded; what was left out, and why.

    A checkpoint that says nothing of caches leaves nothing out.
    """
    prefix = f"cache.{name}."
    saved = {part.removeprefix(prefix): tensor for part, tensor in tensors.items() if part.startswith(prefix)}
    left_out = []
    if isinstance(group.store, TieredStore) and "memory" in saved:
        tier = _tier(group, saved)
        if not group.store.take_up(tier):
            left_out.append(f"memory over the ssd had another size for {name}, {tier.num_slots:,} rows")
    if "device" in saved:
        num_slots, policy = int(saved["device"][0]), bytes(saved["policy"].tolist()).decode()
        if (num_slots, policy) == (group.num_slots, group.cache.policy.name):
            _fill(group, _device(group, saved))
        else:
            now = f"{group.num_slots:,} of {group.cache.policy.name}"
            left_out.append(f"the cache of {name} had {num_slots:,} slots of {policy}, now {now}")
    return left_out


def _fill(group: CachedGroup, held: Holdings) -> None:
    """Rows first, then the index: where reading fails the cache is as empty as it was."""
    keys = torch.sort(held.keys).values
    for start in range(0, keys.shape[0], _CHUNK):
        some = keys[start : start + _CHUNK]
        rows = torch.empty(some.shape[0], group.layout.width, dtype=torch.float32, device="cpu")
        group.store.read(some, rows)
        group.records[start : start + some.shape[0]] = rows.to(group.records.device)
    take_up(group.cache, held)


def _device(group: CachedGroup, saved: Mapping[str, Tensor]) -> Holdings:
    keys = saved["device.keys"].to(torch.int64)
    held = Holdings(
        int(saved["device"][1]), keys, saved["device.last"], saved["device.uses"], saved["device.hot"].clone()
    )
    return held if group.ids is None else held.only(_live(group, keys) & _first_time(keys))


def _tier(group: CachedGroup, saved: Mapping[str, Tensor]) -> TierHoldings:
    num_slots, clock, hand = saved["memory"].tolist()
    keys, free = saved["memory.keys"].to(torch.int64), saved["memory.free"]
    if group.ids is not None:
        gone = (keys >= 0) & ~_live(group, keys)
        keys = torch.where(gone, -1, keys)
        free = torch.cat([free, gone.nonzero().squeeze(1)])
    parts = (keys, saved["memory.last"], saved["memory.uses"], free)
    return TierHoldings(num_slots, clock, hand, *(part.numpy().copy() for part in parts))


def _live(group: CachedGroup, keys: Tensor) -> Tensor:
    """bool [N]: rows that an id has. Those of ids that were only looked ahead when the checkpoint was taken have none."""
    assert group.ids is not None
    numbers = keys.numpy()
    live = np.zeros(numbers.shape[0], dtype=np.bool_)
    inside = np.flatnonzero((numbers >= 0) & (numbers < group.num_rows))
    live[inside] = group.ids.translator.is_live(numbers[inside])
    return torch.from_numpy(live)


def _first_time(keys: Tensor) -> Tensor:
    """bool [N]: where a key stands for the first time. Files of 0.1 name some rows twice: guests, cut to 32 bits."""
    first = np.zeros(keys.shape[0], dtype=np.bool_)
    first[np.unique(keys.numpy(), return_index=True)[1]] = True
    return torch.from_numpy(first)


def _narrow(keys: Tensor, num_rows: int) -> Tensor:
    """In half of the bytes, where they fit."""
    return keys.to(torch.int32) if num_rows <= 1 << 31 else keys
