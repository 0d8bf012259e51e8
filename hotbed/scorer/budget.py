"""A budget of bytes in; what id lists, marks and cached rows get of it out, or how much would be enough.

Id lists are in memory if all of a kind (vocabularies, dynamic ids) fit into an eighth of the budget, or into what finding them
in files would take; else they are in files with a cache, and take that. Where newer models will follow, everything but the
cache counts twice, with room for new ids. The cache gets what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from hotbed.errors import BudgetError
from hotbed.host.memory import in_words, parse_bytes, typed
from hotbed.scorer.id_map import bytes_in_file, bytes_in_memory

_IDS_SHARE = 8
_GROWTH_SHARE = 16


class Needs(NamedTuple):
    """What a model needs memory for."""

    vocabularies: Mapping[str, int]  # ids by table
    dynamic: Mapping[str, int]
    grow: bool  # newer checkpoints may bring new ids
    mark_bytes: int  # of one version
    set_bytes: int  # of the smallest cache


class Budget(NamedTuple):
    """How much memory rows and their indexes may use, and where files go."""

    memory: int  # of one process
    scratch: Path
    device: torch.device
    updated: bool = False  # newer versions will follow
    mapped: bool = False  # files of rows are mapped, see scratch.py
    processes: int = 1  # that divide what the user gave

    @property
    def growth(self) -> int:
        """How much the lists and marks of dynamic ids may grow until the model is read again."""
        return self.memory // _GROWTH_SHARE if self.updated else 0

    def file_cache(self, lists: Mapping[str, int], name: str) -> int | None:
        """What a list may take with its ids in a file; None if all these lists fit in memory."""
        room = self.memory // _IDS_SHARE
        least = sum(bytes_in_file(size, 0) for size in lists.values())
        if sum(bytes_in_memory(size) for size in lists.values()) <= max(room, least):
            return None
        return room * lists[name] // max(1, sum(lists.values()))

    def left_for_cache(self, needs: Needs) -> int:
        """What id lists and marks leave for cached rows; below 0 if they do not fit."""
        indexes = self._list_bytes(needs) + needs.mark_bytes + (self.growth if needs.grow else 0)
        return self.memory - self._times * indexes

    def check(self, needs: Needs) -> None:
        """A BudgetError that names enough memory, if this is too little."""
        if self.left_for_cache(needs) >= needs.set_bytes:
            return
        enough = self._enough(needs)
        lists = self._replace(memory=parse_bytes(enough, "memory") // self.processes)._list_bytes(needs)
        divided = f", divided among {self.processes} processes," if self.processes > 1 else ""
        twice = " (both twice, for the next version)" if self.updated else ""
        raise BudgetError(
            f"memory={in_words(self.memory * self.processes)}{divided} is too little: lists of ids take {in_words(lists)}, "
            f"marks of rows {in_words(needs.mark_bytes)}{twice}, and the smallest cache of rows {in_words(needs.set_bytes)}. "
            f"Give memory={enough!r} (--memory {enough}) or more."
        )

    @property
    def _times(self) -> int:
        """Versions whose indexes are in memory while one model replaces another."""
        return 2 if self.updated else 1

    def _list_bytes(self, needs: Needs) -> int:
        total = 0
        for lists in (needs.vocabularies, needs.dynamic):
            for name, size in lists.items():
                memory = self.file_cache(lists, name)
                total += bytes_in_memory(size) if memory is None else max(memory, bytes_in_file(size, 0))
        return total

    def _enough(self, needs: Needs) -> str:
        """The least budget of all processes that is enough, rounded up to what a user types."""

        def fits(memory: int) -> bool:
            return self._replace(memory=memory).left_for_cache(needs) >= needs.set_bytes

        least = max(1, self.memory)
        while not fits(most := 2 * least):
            least = most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if fits(middle) else (middle, most)
        while not fits(parse_bytes(typed(most * self.processes), "memory") // self.processes):
            most += 1 + most // 100  # shares are rounded down, so a larger budget may leave some bytes less
        return typed(most * self.processes)
