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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotbed.cache.contents import CacheContents, contents_of, restore_contents
from hotbed.store.counts import TierContents

if TYPE_CHECKING:
    from hotbed.tables.group.cached import CachedRows

_CHUNK = 1 << 18  # rows brought in at once


def state_of(rows: CachedRows, name: str) -> dict[str, Tensor]:
    """What a group's cache and its tier in memory hold now."""
    num_rows = rows.keyspace.num_rows
    prefix, held = f"cache.{name}.", contents_of(rows.cache)
    held = held.only(held.keys < num_rows)  # temporary rows belong to their batch alone
    tensors = {
        "policy": torch.tensor(list(rows.cache.policy.name.encode()), dtype=torch.uint8, device="cpu"),
        "device": torch.tensor([rows.num_slots, held.clock], device="cpu"),
        "device.keys": _narrow(held.keys, num_rows),
        "device.last": held.last,
        "device.uses": held.uses,
        "device.hot": held.hot,
    }
    tier = rows.store.contents()
    if tier is not None:
        tensors["memory"] = torch.tensor([tier.num_slots, tier.clock, tier.hand], device="cpu")
        tensors["memory.keys"] = _narrow(torch.from_numpy(tier.keys), num_rows)
        tensors["memory.last"], tensors["memory.uses"] = torch.from_numpy(tier.last), torch.from_numpy(tier.uses)
        tensors["memory.free"] = torch.from_numpy(tier.free)
    return {prefix + part: tensor for part, tensor in tensors.items()}


def load_state(rows: CachedRows, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill the empty cache of a group whose rows have been loaded; what was left out, and why.

    A checkpoint that says nothing of caches leaves nothing out.
    """
    prefix = f"cache.{name}."
    saved = {part.removeprefix(prefix): tensor for part, tensor in tensors.items() if part.startswith(prefix)}
    left_out = []
    if "memory" in saved:
        tier = _tier(rows, saved)
        if rows.store.restore_contents(tier) is False:
            left_out.append(f"memory over the ssd had another size for {name}, {tier.num_slots:,} rows")
    if "device" in saved:
        num_slots, policy = int(saved["device"][0]), bytes(saved["policy"].tolist()).decode()
        if (num_slots, policy) == (rows.num_slots, rows.cache.policy.name):
            _fill(rows, _device(rows, saved))
        else:
            now = f"{rows.num_slots:,} of {rows.cache.policy.name}"
            left_out.append(f"the cache of {name} had {num_slots:,} slots of {policy}, now {now}")
    return left_out


def _fill(rows: CachedRows, held: CacheContents) -> None:
    """Rows first, then the index: where reading fails the cache is as empty as it was."""
    keys = torch.sort(held.keys).values
    for start in range(0, keys.shape[0], _CHUNK):
        some = keys[start : start + _CHUNK]
        records = torch.empty(some.shape[0], rows.layout.width, dtype=torch.float32, device="cpu")
        rows.store.read(some, records)
        rows.records[start : start + some.shape[0]] = records.to(rows.records.device)
    restore_contents(rows.cache, held)


def _device(rows: CachedRows, saved: Mapping[str, Tensor]) -> CacheContents:
    keys = saved["device.keys"].to(torch.int64)
    held = CacheContents(
        int(saved["device"][1]), keys, saved["device.last"], saved["device.uses"], saved["device.hot"].clone()
    )
    return held.only(rows.keyspace.is_live(keys) & _first_time(keys))


def _tier(rows: CachedRows, saved: Mapping[str, Tensor]) -> TierContents:
    num_slots, clock, hand = saved["memory"].tolist()
    keys, free = saved["memory.keys"].to(torch.int64), saved["memory.free"]
    gone = (keys >= 0) & ~rows.keyspace.is_live(keys)
    keys = torch.where(gone, -1, keys)
    free = torch.cat([free, gone.nonzero().squeeze(1)])
    parts = (keys, saved["memory.last"], saved["memory.uses"], free)
    return TierContents(num_slots, clock, hand, *(part.numpy().copy() for part in parts))


def _first_time(keys: Tensor) -> Tensor:
    """bool [N]: where a key stands for the first time. Files of 0.1 name some rows twice: temporary ones, cut to 32 bits."""
    first = np.zeros(keys.shape[0], dtype=np.bool_)
    first[np.unique(keys.numpy(), return_index=True)[1]] = True
    return torch.from_numpy(first)


def _narrow(keys: Tensor, num_rows: int) -> Tensor:
    """In half of the bytes, where they fit."""
    return keys.to(torch.int32) if num_rows <= 1 << 31 else keys
