"""Checkpoints while training continues: taken between two steps, written by another thread.

One is written at a time. A request that comes while the last one is still being written is skipped and reported: a checkpoint
that takes longer than its interval must not slow down training, and the next request covers it. `wait=True` (at the end, and
when asked to stop) waits instead. A disk that refuses a checkpoint does not end the run: stopping would lose what was learned
since the last good one, continuing loses nothing, and space may be free at the next request. Any other error is raised in the
training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.chain import Entry, advance, chain_of, last_of, locked, remove, unneeded
from hotbed.checkpoint.types import Rows, Snapshot
from hotbed.checkpoint.write import State, WriteOptions, write_checkpoint
from hotbed.errors import RunError, StoreError
from hotbed.host.background import be_nice
from hotbed.store.history import history_of

_NICE = 19  # one thread of lowest priority that sleeps half of the time, so that training keeps its cores


class Policy(NamedTuple):
    """When a checkpoint holds all rows, and how many are kept."""

    full_every: int = 8  # at least every k-th is full; 1: every one
    keep: int = 2  # the newest, and everything they need


DEFAULT_POLICY = Policy()


class _PendingSave(NamedTuple):
    """A checkpoint to be written."""

    state: State
    snapshot: Snapshot
    parent: Entry | None
    history: object


class Saver:
    """Writes the checkpoints of one training into one folder."""

    def __init__(
        self, root: Path, tables: Rows, policy: Policy = DEFAULT_POLICY, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.root = root
        self.policy = policy
        self.num_failed = 0
        self._tables = tables
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unsaid = ""  # a message of the writing thread
        self._cancelled = threading.Event()
        self._hurry = threading.Event()  # the training thread waits for the checkpoint in progress

    def save(self, state: State, *, wait: bool = False) -> bool:
        """Take a checkpoint now; False if it was skipped because the last one is still being written."""
        if self.busy and not wait:
            self._say(f"step {state.step:,}: no checkpoint, because the last one is still being written")
            return False
        self.settle()
        owned = [ExitStack()]
        started = False
        try:
            history, parent = history_of(self._tables), self._parent()
            snapshot = owned[0].enter_context(self._tables.snapshot(touched=parent is not None))
            taken = _PendingSave(state, snapshot, parent, history)
            if wait:
                self._write(taken, WriteOptions(cancelled=self._cancelled.is_set))
                self._tell()
                return True
            started = self._start(owned, taken)
        finally:
            if not started and (held := _taken_out(owned)) is not None:
                held.close()
        return started

    def _start(self, owned: list[ExitStack], taken: _PendingSave) -> bool:
        """Start a thread that writes and owns the snapshot from then on; False if the system has no thread."""
        thread = threading.Thread(target=self._write_aside, args=(owned, taken), name="checkpoint", daemon=True)
        try:
            self._thread = thread
            thread.start()
        except BaseException as error:
            if thread.ident is None:
                self._thread = None
            if not isinstance(error, RuntimeError):
                raise
            self.num_failed += 1  # as if the disk had refused
            self._say(f"warning: no checkpoint was written; the last one is kept: {error}")
            return False
        return True

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> bool:
        """Between steps: report what went wrong; True when one was finished since the last call."""
        if self._thread is None or self._thread.is_alive():
            return False
        return self.settle()

    def settle(self) -> bool:
        """Wait for the checkpoint in progress; True when it was written."""
        if self._thread is None:
            return False
        self._hurry.set()
        self._thread.join()
        self._hurry.clear()
        self._thread, error, self._error = None, self._error, None
        self._tell()
        if error is None:
            return True
        if not isinstance(error, RunError | StoreError):  # the latter: ssd files could not be linked
            raise error
        self.num_failed += 1
        self._say(f"warning: no checkpoint was written; the last one is kept: {error}")
        return False

    def cancel(self) -> None:
        """Cancel the checkpoint in progress; nothing of it stays."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tell(self) -> None:
        if self._unsaid:
            self._say(self._unsaid)
            self._unsaid = ""

    def _write_aside(self, owned: list[ExitStack], taken: _PendingSave) -> None:
        be_nice(_NICE)
        try:
            options = WriteOptions(1, self._cancelled.is_set, lambda: not self._hurry.is_set())
            held = _taken_out(owned)
            if held is not None:
                with held:
                    self._write(taken, options)
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def _write(self, taken: _PendingSave, options: WriteOptions) -> None:
        entry = write_checkpoint(self.root, taken.state, taken.snapshot, taken.parent, options)
        advance(self._tables, entry, taken.history, taken.snapshot.commit)
        try:
            with locked(self.root):
                remove(unneeded(self.root, self.policy.keep, entry.folder))
        except RunError as error:  # the checkpoint itself is complete
            self._unsaid = f"warning: old checkpoints stay: {error}"

    def _parent(self) -> Entry | None:
        """The checkpoint that an incremental one adds to; None when a full one is due."""
        last = last_of(self._tables, self.root)
        if last is None:
            return None
        try:
            chain = chain_of(last)
        except RunError:  # a part of it was removed
            return None
        added = sum(entry.manifest.num_bytes for entry in chain[1:])
        if len(chain) >= self.policy.full_every or added > chain[0].manifest.num_bytes:
            return None
        return last


def _taken_out(owned: list[ExitStack]) -> ExitStack | None:
    """The snapshot to be closed, for the first of two threads that asks."""
    try:
        return owned.pop()
    except IndexError:
        return None
