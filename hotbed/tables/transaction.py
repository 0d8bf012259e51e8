"""The one rule for moving rows.

**The rule.** Whatever changes an index, a translator, slots or a store does so inside `with changes.changing("..."):`, from the
first change to the last write. Either all of it happens, or the tables refuse every further call and say why:

    before the first change   the mark is set
    after the last write      the mark is cleared
    a refusal                 (REFUSALS) the code that raised it has changed nothing, or has undone it: the mark is cleared
    anything else             the mark stays, and every further call refuses

The mark is one attribute, so an exception that a signal handler raises between any two instructions finds it set or finds
nothing changed. Ctrl-C waits until the change is done (a second one does not). Nothing that may take long, such as a batch
of a loader, is waited for inside a change. Changes are not nested.

**Loads** replace rows in many changes. From the first to the last of them the tables are half loaded, whatever stops it on the
way: every further call refuses, but for a load of the same rows, which mends it. One of all rows, such as a checkpoint's, also
mends a change that was broken off.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from hotbed.errors import BudgetError, ConfigError, HotbedError, IdError, RankError, ShapeError
from hotbed.host import interrupts

REFUSALS = (BudgetError, ConfigError, IdError, RankError, ShapeError)
P = ParamSpec("P")
R = TypeVar("R")


class Changes:
    """The changes of one EmbeddingTables: which thread is inside one, and what has begun and is not done."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.broken: BaseException | None = None
        self.open: str | None = None  # the change that has begun
        self.half_loaded: dict[
            str, bool
        ] = {}  # tables whose rows are being replaced -> whether optimizer state is, too
        self._loads = False  # this thread is the one that replaces them

    def __reduce__(self) -> tuple[type[Changes], tuple[()]]:
        return Changes, ()  # a copy of tables has its own

    def changing(self, what: str) -> Change:
        """A context in which rows are moved, and `what` is done."""
        return Change(self, what)

    @property
    def is_broken(self) -> bool:
        """Whether a change was not finished."""
        return self.broken is not None or self.open is not None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the middle of a change. What the garbage collector calls there must not begin another."""
        return self.open is not None and self.broken is None and self.lock._is_owned()  # type: ignore[attr-defined]

    def begin_load(self, claim: Callable[[], None], tables: Iterable[str], *, whole: bool, anew: bool = False) -> None:
        """The rows of these tables are replaced from now on, once `claim` has taken ownership.

        `whole`: with their optimizer state. `anew`: and all that finds them, so a change that an earlier load broke off is no
        more.
        """
        if anew and self.half_loaded:  # nothing but a load can have broken since
            self.broken = self.open = None
        claim()
        self.half_loaded |= {table: whole or self.half_loaded.get(table, False) for table in tables}

    def end_load(self, tables: Iterable[str], *, whole: bool) -> None:
        """They are replaced."""
        done = {table for table in tables if whole or not self.half_loaded.get(table, False)}
        self.half_loaded = {table: all_of_it for table, all_of_it in self.half_loaded.items() if table not in done}

    @contextmanager
    def load_turn(self) -> Iterator[None]:
        """Inside, what belongs to a load is not refused."""
        with self.lock:
            before, self._loads = self._loads, True
            try:
                yield
            finally:
                self._loads = before

    @contextmanager
    def loading(self, claim: Callable[[], None], tables: Iterable[str], *, whole: bool) -> Iterator[None]:
        """Around a load, from `claim` to its last row. What is to be refused is refused before."""
        names = list(tables)
        with self.load_turn():
            self.begin_load(claim, names, whole=whole)
            yield
            self.end_load(names, whole=whole)

    def check(self) -> None:
        """Raise if a change was not finished, or a load."""
        if self.open is not None or self.broken is not None or self.half_loaded:
            self._refuse()

    def _refuse(self) -> None:
        if self.half_loaded and not self._loads:
            names = list(self.half_loaded)
            some = f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
            of_all = " from a checkpoint: rows were lost, too, and it replaces them all" if self.is_broken else ""
            raise HotbedError(
                f"a load of these tables was interrupted: rows of {some} are in part the previous ones, in part the new ones. "
                f"Load again{of_all}."
            ) from self.broken
        if self.is_broken:
            what = self.open or "moving them"
            why = f" ({type(self.broken).__name__}: {self.broken})" if self.broken is not None else ""
            raise HotbedError(
                f"these tables lost rows when {what} was broken off{why}; create them again and load their last checkpoint"
            ) from self.broken


class Change:
    """From the first change to the last write; see the rule above."""

    __slots__ = ("_changes", "_held", "_normal", "_what")

    def __init__(self, changes: Changes, what: str) -> None:
        self._changes, self._what = changes, what
        self._held = False
        self._normal: Any = None

    def __enter__(self) -> None:
        self._changes.check()
        if torch.is_inference_mode_enabled():  # what is kept from here on outlives it
            self._normal = torch.inference_mode(False)
            self._normal.__enter__()
        self._held = interrupts.hold()
        self._changes.open = self._what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, REFUSALS):
            self._changes.open = None
        else:
            self._changes.broken = error
        if self._normal is not None:
            self._normal.__exit__(None, None, None)
        if self._held:
            interrupts.release()


def exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """A method of something with `changes` that one thread at a time may be in."""

    @functools.wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with args[0].changes.lock:  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    return locked
