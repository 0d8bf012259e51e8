"""Checkpoints of a run of one or many ranks: each writes its own rows, and one counts when all have it.

Ranks take a checkpoint at the same steps. Where one of them is still writing the last, all leave this one out. Old ones go only
when all ranks are known to have newer ones, so a rank that is killed while it writes, or whose disk is full, leaves a step that
all have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hotbed.checkpoint import Policy, Saver, State
from hotbed.checkpoint.chain import folders_in, locked, remove
from hotbed.checkpoint.layouts import Saved, remove_others, root_of, step_of, unneeded_before
from hotbed.checkpoint.types import Rows
from hotbed.parallel.world import World

_ALL = 1 << 30  # a saver that removes nothing itself


class RankSaver:
    """The saver of one rank; alone, a Saver."""

    def __init__(
        self, checkpoints: Path, tables: Rows, policy: Policy, say: Callable[[str], None], world: World
    ) -> None:
        self._checkpoints, self._world, self._say = checkpoints, world, say
        self._keep = policy.keep
        self.root = root_of(checkpoints, world.rank, world.size)
        self._saver = Saver(self.root, tables, policy if world.size == 1 else policy._replace(keep=_ALL), say)

    @property
    def num_failed(self) -> int:
        return self._saver.num_failed

    def save(self, state: State, *, wait: bool) -> bool:
        """Take a checkpoint; False when it was left out because some rank is still writing the last one."""
        if self._world.size == 1:
            return self._saver.save(state, wait=wait)
        if not wait and self._world.any(self._saver.busy):
            if self._world.is_first:
                self._say(f"step {state.step:,}: no checkpoint, because the last one is still being written")
            return False
        self._saver.settle()
        if not wait:
            self.prune()
        return self._saver.save(state, wait=wait)

    def prune(self) -> None:
        """Remove what no rank needs any more; all ranks, when none is writing."""
        if self._world.size > 1:
            mine = {step_of(folder) for folder in folders_in(self.root)}
            common = sorted(set.intersection(*self._world.gather(mine)))
            if common:
                cut = common[-self._keep :][0]
                self._remove_before(cut)
        if self._world.is_first:
            remove_others(self._checkpoints, self._world.size)

    def go_back_to(self, saved: Saved) -> None:
        """A run goes on from here, whoever saved it: later checkpoints of this rank are of another history, and go.

        They did not count, because other ranks do not have them; together with what those write from now on they would.
        """
        if self._world.size > 1:
            later = [folder for folder in folders_in(self.root) if step_of(folder) > saved.step]
            if later:
                with locked(self.root):
                    remove(later)

    def poll(self) -> bool:
        """Between steps: tell what went wrong; True when one was finished since the last call."""
        return self._saver.poll()

    def settle(self) -> bool:
        """Wait for the checkpoint under way."""
        return self._saver.settle()

    def cancel(self) -> None:
        """Give up the checkpoint under way."""
        self._saver.cancel()

    def _remove_before(self, cut: int) -> None:
        with locked(self.root):
            remove(unneeded_before(self.root, cut))
