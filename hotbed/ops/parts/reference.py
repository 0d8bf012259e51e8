"""Bags to parts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def count_ways(
    places: Tensor, starts: Tensor, table_of_bag: Tensor, counts: list[int], rank: int, num_tables: int
) -> Tensor:
    """[3, T]: distinct keys, lookups and parts of every table, as far as others own them."""
    owner_of_place, bag = _owners(counts, places), _bags(starts, places)
    chosen = (places >= 0) & (table_of_bag[bag] >= 0)
    chosen[chosen.clone()] = owner_of_place[places[chosen]] != rank
    bag, place = bag[chosen], places[chosen]
    table = table_of_bag[bag]
    pairs = torch.unique(bag * len(counts) + owner_of_place[place])
    table_of_place = torch.zeros_like(owner_of_place)
    table_of_place[place] = table  # a key is of one table
    tables = (table_of_place[torch.unique(place)], table, table_of_bag[pairs // len(counts)])
    return torch.stack([torch.bincount(one, minlength=num_tables) for one in tables])


def split(
    places: Tensor, starts: Tensor, in_parts: Tensor, keys: Tensor, counts: list[int]
) -> tuple[Tensor, list[int], list[int], Tensor, Tensor, Tensor]:
    """(keys by owner, how many for each, vectors of each, slots and sources of the lookups that are left, their starts)."""
    world = len(counts)
    owner_of_place, bag = _owners(counts, places), _bags(starts, places)
    is_real, is_part = places >= 0, in_parts[bag]
    by_row = torch.zeros_like(owner_of_place, dtype=torch.bool)
    by_row[places[is_real & ~is_part]] = True
    rows = by_row.nonzero().squeeze(1)
    pooled = (is_real & is_part).nonzero().squeeze(1)
    pooled = pooled[torch.argsort(owner_of_place[places[pooled]], stable=True)]  # by owner, in the order of the batch
    owners = owner_of_place[places[pooled]]
    pair = owners * in_parts.shape[0] + bag[pooled]
    is_first = torch.ones_like(pair, dtype=torch.bool)
    is_first[1:] = pair[1:] != pair[:-1]
    all_owners, order = torch.sort(torch.cat([owner_of_place[rows], owners]), stable=True)  # rows before parts
    begins = torch.cat([torch.ones_like(rows, dtype=torch.bool), is_first])
    all_keys = torch.cat([keys[rows], keys[places[pooled]]])[order]
    number = torch.empty_like(order)
    number[order] = torch.cumsum(begins[order], 0) - 1  # of the vector that each key belongs to
    vector_of_place = torch.full_like(owner_of_place, -1)
    vector_of_place[rows] = number[: rows.shape[0]]
    left = ~is_part
    left[pooled[is_first]] = True
    vector = torch.full_like(places, -1)
    vector[~is_part & is_real] = vector_of_place[places[~is_part & is_real]]
    vector[pooled[is_first]] = number[rows.shape[0] :][is_first]
    source = left.nonzero().squeeze(1)
    before = torch.nn.functional.pad(torch.cumsum(left, 0), (1, 0))
    num_vectors = torch.bincount(all_owners[begins[order]], minlength=world).tolist()
    sent = torch.where(begins[order], all_keys, ~all_keys)
    return (
        sent,
        torch.bincount(all_owners, minlength=world).tolist(),
        num_vectors,
        vector[source],
        source,
        before[starts],
    )


def _owners(counts: list[int], places: Tensor) -> Tensor:
    """The owner of every distinct key."""
    return torch.repeat_interleave(torch.arange(len(counts), device="cpu"), torch.tensor(counts, device="cpu")).to(
        places.device
    )


def _bags(starts: Tensor, places: Tensor) -> Tensor:
    """The bag of every lookup."""
    bags = torch.arange(starts.shape[0] - 1, device=starts.device)
    return torch.repeat_interleave(bags, starts.diff(), output_size=places.shape[0])
