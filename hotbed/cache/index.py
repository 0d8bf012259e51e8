"""The index: which slot holds which key, as two sorted arrays of the size of the cache.

Finding is a binary search, changing is a merge; both are a handful of torch ops, the same on every device, and nothing here
grows with the table. (A hash index finds faster, but must be probed and repaired; sorted keys are what the plan has anyway.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class SortedIndex:
    """slot_of_key for at most as many keys as there are slots."""

    def __init__(self, device: torch.device) -> None:
        self.keys = torch.empty(0, dtype=torch.int64, device=device)  # ascending
        self.slots = torch.empty(0, dtype=torch.int64, device=device)

    def find(self, keys: Tensor) -> Tensor:
        """The slot of each key [U], -1 where it is absent."""
        if self.keys.shape[0] == 0:
            return torch.full_like(keys, -1)
        place = torch.searchsorted(self.keys, keys).clamp(max=self.keys.shape[0] - 1)
        return torch.where(self.keys[place] == keys, self.slots[place], -1)

    def replace(self, gone: Tensor, keys: Tensor, slots: Tensor) -> None:
        """Forget the keys `gone`, learn `keys` (ascending, new) with their slots."""
        kept_keys, kept_slots = self.keys, self.slots
        if gone.shape[0]:
            stays = torch.ones_like(kept_keys, dtype=torch.bool)
            stays[torch.searchsorted(kept_keys, gone)] = False
            kept_keys, kept_slots = kept_keys[stays], kept_slots[stays]
        total = kept_keys.shape[0] + keys.shape[0]
        merged_keys, merged_slots = kept_keys.new_empty(total), kept_slots.new_empty(total)
        # a key's place in the merged array is its rank among its own plus its rank among the others
        for mine, others, values in ((kept_keys, keys, kept_slots), (keys, kept_keys, slots)):
            place = torch.arange(mine.shape[0], device=mine.device) + torch.searchsorted(others, mine)
            merged_keys[place], merged_slots[place] = mine, values
        self.keys, self.slots = merged_keys, merged_slots
