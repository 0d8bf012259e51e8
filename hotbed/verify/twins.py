"""Trains two twins on the same batches, one plain and one with another storage, and gives a verdict.

Both are made by the same function and take steps alternately, each with its own state of torch's random numbers, so that
dropout is the same too. The first difference of a step is named by its cause:

before the lookup   records differ, but were right after their last use: the row, its optimizer state, or, if it left the device
                    since, its way to the store and back
the lookup          records are the same, vectors are not
the model           vectors are the same, the loss or the gradients are not: the tables are not the cause
the update          records and gradients were the same, the new records are not
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.pipeline import prefetch
from hotbed.pipeline.batches import to_device
from hotbed.tables.group.group import TableGroup
from hotbed.tables.module import EmbeddingTables
from hotbed.verify.watch import GroupCall, TableWatch, bits_of

Step = Callable[[Any], Tensor]  # a batch -> its loss, after backward and the optimizer's step
Make = Callable[..., tuple[EmbeddingTables, Step]]  # keyword arguments of EmbeddingTables -> a twin; deterministic


class Difference(NamedTuple):
    """The first difference."""

    step: int  # 1 is the first
    what: str  # row, optimizer state, write-back, lookup, update, gradient, loss
    plain: float
    other: float
    table: str = ""
    id: int | None = None
    column: str = ""  # weight, or the name of a state
    element: int = 0  # of the column
    since: str = ""  # when the value was last right

    def text(self) -> str:
        """As text."""
        row = f"table {self.table!r}, id {self.id}: " if self.table else ""
        place = f"{self.column}[{self.element}]" if self.column else self.what
        bits = f"{_hex(self.plain)} and {_hex(self.other)}"
        tail = f" {self.since}" if self.since else ""
        return f"step {self.step}, {self.what}: {row}{place} is {self.plain!r} plain and {self.other!r} here ({bits}).{tail}"


class UseHistory:
    """When rows were used, and when they came to the device."""

    def __init__(self) -> None:
        self._used: list[list[NDArray[np.int64]]] = []  # by step, by group
        self._came: list[tuple[int, int, NDArray[np.int64]]] = []  # (the step they came for, group, keys)

    def note(self, seen: list[GroupCall], came: list[tuple[int, Tensor]]) -> None:
        """Record a step without a difference."""
        self._used.append([np.unique(one.keys.cpu().numpy()) for one in seen])
        self._came += [(len(self._used), group, keys.numpy()) for group, keys in came]

    def used(self, group: int) -> NDArray[np.int64]:
        """All keys of a group so far, ascending."""
        keys = [step[group] for step in self._used]
        found = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
        return found[found >= 0]

    def last_use(self, group: int, key: int) -> int:
        """The last step that used the row; 0: none."""
        for step in range(len(self._used), 0, -1):
            keys = self._used[step - 1][group]
            at = int(np.searchsorted(keys, key))
            if at < keys.shape[0] and keys[at] == key:
                return step
        return 0

    def was_away(self, group: int, key: int, since: int, came: list[tuple[int, Tensor]]) -> bool:
        """Whether the row came to the device after step `since`."""
        late = [keys for step, number, keys in self._came if number == group and step > since]
        late += [keys.numpy() for number, keys in came if number == group]
        return any(bool((keys == key).any()) for keys in late)


def first_difference(
    step: int,
    plain: list[GroupCall],
    other: list[GroupCall],
    losses: tuple[Tensor, Tensor],
    history: UseHistory,
    came: list[tuple[int, Tensor]],
) -> Difference | None:
    """The first difference in one step of both twins."""
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        found = _first(one.before, two.before)
        if found is not None:
            return _of_row(step, one, two, found[0], history, number, came)
        found = _first(one.vectors, two.vectors)
        if found is not None:
            return _of_vector(step, one, two, found)
    at = _first(losses[0].reshape(1, -1), losses[1].reshape(1, -1))
    if at is not None:
        same = "All vectors were the same: the model itself does not repeat its bits."
        return Difference(step, "loss", float(losses[0]), float(losses[1]), since=same)
    for one, two in zip(plain, other, strict=True):
        found = _first(one.grad, two.grad)
        if found is not None:
            assert one.grad is not None
            assert two.grad is not None
            same = "All vectors were the same: the model itself does not repeat its bits."
            return Difference(step, "gradient", float(one.grad[found]), float(two.grad[found]), since=same)
        found = _first(one.after, two.after)
        if found is not None:
            assert one.after is not None
            assert two.after is not None
            name = two.group.keyspace.name_of(int(two.keys[found[0]]))
            column = _column(two.group, one.after[found[0]], two.after[found[0]])
            same = "Row and gradient were the same before the update."
            return Difference(step, "update", column[2], column[3], *name, column[0], column[1], same)
    return None


def last_difference(step: int, plain: TableGroup, other: TableGroup, keys: NDArray[np.int64]) -> Difference | None:
    """The first difference in rows that were used, in any tier."""
    for start in range(0, keys.shape[0], 1 << 18):
        part = torch.from_numpy(keys[start : start + (1 << 18)])
        one, two = plain.read_rows(part), other.read_rows(part)
        found = _first(one, two)
        if found is not None:
            column = _column(other, one[found[0]], two[found[0]])
            name = other.keyspace.name_of(int(part[found[0]]))
            tail = "It was right after its last use; read from its tier at the end, it is not."
            return Difference(step, "write-back", column[2], column[3], *name, column[0], column[1], tail)
    return None


def _of_row(
    step: int, one: GroupCall, two: GroupCall, at: int, history: UseHistory, number: int, came: list[tuple[int, Tensor]]
) -> Difference:
    key = int(two.keys[at])
    column, element, value, wrong = _column(two.group, one.before[at], two.before[at])
    last = history.last_use(number, key)
    what = "row" if column == "weight" else "optimizer state"
    if last == 0:
        since = "It was never used before: its initial value is wrong."
    elif history.was_away(number, key, last, came):
        what, since = "write-back", f"It was right after step {last}, left the device, and came back wrong."
    else:
        since = f"It was right after step {last} and has stayed on the device."
    return Difference(step, what, value, wrong, *two.group.keyspace.name_of(key), column, element, since)


def _of_vector(step: int, one: GroupCall, two: GroupCall, found: tuple[int, int]) -> Difference:
    """A vector may be pooled from many rows: names the first of them."""
    out, element = found
    at = out
    group = two.group
    if two.out_rows is not None:
        at = int((two.out_rows == out).nonzero()[0])
    values = float(one.vectors[found]), float(two.vectors[found])
    same = "The rows it was made of are the same."
    return Difference(step, "lookup", *values, *group.keyspace.name_of(int(two.keys[at])), "vector", element, same)


def _first(one: Tensor | None, two: Tensor | None) -> tuple[int, int] | None:
    """(row, column) of the first number whose bits differ."""
    if one is None or two is None:
        assert one is None
        assert two is None
        return None
    assert one.shape == two.shape, f"{tuple(one.shape)} and {tuple(two.shape)}"
    differ = bits_of(one.contiguous()) != bits_of(two.contiguous())
    if not bool(differ.any()):
        return None
    row, column = differ.nonzero()[0].tolist()
    return int(row), int(column)


def _column(group: TableGroup, one: Tensor, two: Tensor) -> tuple[str, int, float, float]:
    """(column, element, both values) of the first difference between two records."""
    layout = group.layout
    parts: dict[str, Any] = {"weight": layout.weights}
    parts |= {state: lambda records, state=state: records[:, layout.columns(state)] for state in layout.states}
    for name, cut in parts.items():
        a, b = cut(one[None]), cut(two[None])
        found = _first(a, b)
        if found is not None:
            return name, found[1], float(a[found]), float(b[found])
    found = _first(one[None], two[None])
    assert found is not None
    return "record", found[1], float(one[found[1]]), float(two[found[1]])


def _hex(value: float) -> str:
    return f"0x{np.float32(value).view(np.uint32):08x}"


@dataclass(frozen=True)
class TwinStorage:
    """How the other twin keeps its rows."""

    name: str
    where: dict[str, Any] = field(default_factory=dict)  # cache=, hbm=, memory=, ssd=, policy= ... of EmbeddingTables
    ahead: bool = True  # batches come through hotbed.prefetch
    window: int | None = None
    look_ahead: int | None = None


class Verdict(NamedTuple):
    """The result for one storage."""

    way: TwinStorage
    steps: int  # that were compared
    lookups: int
    rows: int  # distinct rows that were compared, each with its optimizer state
    evictions: int  # rows that left the device; with none, little is proved
    difference: Difference | None

    @property
    def same(self) -> bool:
        """Whether every bit was the same."""
        return self.difference is None


def verify(
    make: Make,
    batches: Sequence[Any],
    way: TwinStorage,
    progress: Callable[[int], None] = lambda step: None,
    injected: Callable[[EmbeddingTables], None] | None = None,
    agree: Callable[[bool], bool] = lambda ends: ends,
) -> Verdict:
    """Train a plain twin and one of `way` on the batches, and compare every bit until one differs.

    `progress` is called with the number of steps done; `injected` may damage the other twin's tables before it starts;
    `agree` says whether some rank has found a difference.
    """
    plain, other = _Twin(make, {}, None), _Twin(make, way.where, injected)
    history = UseHistory()
    lookups = step = 0
    difference, ended = None, False
    try:
        with closing(_ahead(batches, other.tables, way)) as theirs:
            for step, (mine, their) in enumerate(zip(batches, theirs, strict=True), start=1):
                loss, other_loss = plain.step(to_device(mine, plain.tables.device)), other.step(their)
                seen, other_seen = plain.watch.take(), other.watch.take()
                came = other.watch.take_came()
                difference = first_difference(step, seen, other_seen, (loss, other_loss), history, came)
                ended = agree(difference is not None)
                if ended:
                    break
                history.note(other_seen, came)
                lookups += sum(int((one.keys >= 0).sum()) for one in other_seen)
                progress(step)
        evictions = other.tables.counters().evictions
        rows = 0
        for number, groups in enumerate(zip(plain.tables.groups, other.tables.groups, strict=True)):
            used = history.used(number)
            rows += used.shape[0]
            if difference is None and not ended:
                difference = last_difference(step, *groups, used)
        return Verdict(way, step, lookups, rows, evictions, difference)
    finally:
        plain.watch.close()
        other.watch.close()


def _ahead(batches: Sequence[Any], tables: EmbeddingTables, way: TwinStorage) -> Generator[Any, None, None]:
    if way.ahead:
        yield from prefetch(batches, tables, window=way.window, look_ahead=way.look_ahead)
    else:
        yield from (to_device(batch, tables.device) for batch in batches)


class _Twin:
    """Watched tables, and their step with its own state of random numbers."""

    def __init__(self, make: Make, where: dict[str, Any], injected: Callable[[EmbeddingTables], None] | None) -> None:
        with _keep_random_states():
            self.tables, self._step = make(**where)
            self._states = _random_states()
        if injected is not None:
            injected(self.tables)
        self.watch = TableWatch(self.tables)

    def step(self, batch: Any) -> Tensor:
        with _keep_random_states():
            _set_random_states(self._states)
            loss = self._step(batch)
            self._states = _random_states()
        return loss.detach()


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Leave torch's random numbers as they were."""
    before = _random_states()
    try:
        yield
    finally:
        _set_random_states(before)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
