"""What a loader may yield, and where its ids are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.host.devices import pinned
from hotbed.ops.streams import after, current
from hotbed.tables.keyed import is_keyed, tensors_of
from hotbed.tables.ownership import Contents, RoutedBatch, contents_of
from hotbed.types import Batch, Jagged


class Ids(NamedTuple):
    """The arguments with which the tables will be called for a batch."""

    ids: Any  # Tensor, a mapping of features or a KeyedJaggedTensor
    bags: Mapping[str, Jagged] | None
    contents: Contents  # as they are now
    ahead: Any = None  # what was read ahead of dynamic ids


class IdFinder:
    """Finds the ids of a batch: where `given` says they are, else by the kind of the batch.

    Kinds: a Batch; a tensor of ids; a tuple or list that starts with ids; a mapping with `ids`, or of the features themselves.
    """

    def __init__(self, features: Sequence[str], given: Callable[[Any], Any] | None = None) -> None:
        """`given` maps a batch to what the tables are called with for it: ids, or the tuple (ids, bags)."""
        self._features, self._given = features, given
        self._is_tried = given is None

    def __call__(self, batch: Any) -> Ids:
        if self._given is None:
            return self._by_kind(batch)
        found = self._ask(batch)
        if not self._is_tried:
            again = self._ask(batch)
            pairs = zip(found.contents, again.contents)
            if len(found.contents) != len(again.contents) or any(one is not other for (one, _), (other, _) in pairs):
                raise ShapeError(
                    f"the ids= of prefetch makes new tensors from a batch of type {type(batch).__name__}. A batch is known "
                    "by the tensors in it, so the tables would never find its rows ready: return tensors that the batch holds, "
                    "and make new ones in the loader (collate_fn)."
                )
            self._is_tried = True
        return found

    def _ask(self, batch: Any) -> Ids:
        assert self._given is not None
        try:
            found = self._given(batch)
        except Exception as error:
            raise ShapeError(
                f"the ids= of prefetch fails for a batch of type {type(batch).__name__}: {type(error).__name__}: {error}"
            ) from error
        ids, bags = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not _are_ids(ids, bags):
            raise ShapeError(
                f"the ids= of prefetch returns {_kinds(ids, bags)} for a batch of type {type(batch).__name__}; it must return "
                "what the tables are called with: a tensor of ids, a mapping of the features, a KeyedJaggedTensor, or a tuple "
                "(ids, bags)."
            )
        return Ids(ids, bags or None, contents_of(ids, bags or None))

    def _by_kind(self, batch: Any) -> Ids:
        ids: Any = batch
        bags: Any = None
        if isinstance(batch, (tuple, list)) and batch:
            ids = batch[0]
        if isinstance(ids, Batch):
            ids, bags = ids.ids, ids.bags or None
        elif isinstance(batch, Mapping) and "ids" in batch and "ids" not in self._features:
            ids, bags = batch["ids"], batch.get("bags") or None
        if _are_ids(ids, bags):
            return Ids(ids, bags, contents_of(ids, bags))
        inside = "" if ids is batch else f" that has {_kinds(ids, bags)} for ids"
        raise ShapeError(
            f"prefetch cannot find the ids in a batch of type {type(batch).__name__}{inside}. "
            "Yield a hotbed.types.Batch, a tensor of ids or a KeyedJaggedTensor, a tuple that starts with them, "
            "or a mapping with the key 'ids' or of the features; or say where they are, as in ids=lambda batch: batch.items."
        )


def _are_ids(ids: Any, bags: Any) -> bool:
    return (isinstance(ids, (Tensor, Mapping)) or is_keyed(ids)) and isinstance(bags, (Mapping, type(None)))


def _kinds(ids: Any, bags: Any) -> str:
    return type(ids).__name__ + ("" if bags is None else f" and {type(bags).__name__} for bags")


def take_over(value: Any, device: torch.device, point: Any) -> None:
    """Let the current stream use a batch of the reader from `point` on: its memory is not given out again before it is done."""
    if device.type != "cuda":
        return
    after(device, point)
    stream = current(device)
    for tensor in tensors_in(value):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def tensors_in(value: Any) -> list[Tensor]:
    """All that a batch holds."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Batch):
        found = [value.labels, value.dense, value.ids]
        found += [one for one in (value.targets, value.weights) if one is not None]
        for bag in value.bags.values():
            found += [part for part in bag if part is not None]
        return found
    if isinstance(value, RoutedBatch):  # a feed keeps the rest of it itself
        return tensors_in(value.batch)
    if is_keyed(value):
        return [*tensors_of(value)]
    if isinstance(value, (tuple, list, Mapping)):
        parts = value.values() if isinstance(value, Mapping) else value
        return [tensor for part in parts for tensor in tensors_in(part)]
    return [tensor for part in _fields(value).values() for tensor in tensors_in(part)]


def _fields(value: Any) -> dict[str, Any]:
    """The parts of a dataclass, or of an object that moves itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}
    return dict(vars(value)) if _moves_itself(value) and hasattr(value, "__dict__") else {}


def _moves_itself(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def to_device(value: Any, device: torch.device) -> Any:
    """Every tensor inside `value` on the device, copied from pinned memory; everything else as it is.

    Of objects: dataclasses, and those with a method `to(device)`.
    """
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if device.type == "cuda" and value.device.type == "cpu" and not value.is_pinned():
            value = pinned(value)
        return value.to(device, non_blocking=True)
    if isinstance(value, Batch):
        if all(tensor.device == device for tensor in tensors_in(value)):
            return value
        fields = (value.labels, value.dense, value.ids, value.bags, value.targets, value.weights)
        return Batch(*(to_device(field, device) for field in fields))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(part, device) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(part, device) for part in value)
    if is_keyed(value):
        moves: Any = value  # it moves itself
        return value if all(one.device == device for one in tensors_of(value)) else moves.to(device, non_blocking=True)
    if isinstance(value, Mapping) and not _moves_itself(value):
        return {name: to_device(part, device) for name, part in value.items()}
    if all(tensor.device == device for tensor in tensors_in(value)):
        return value
    moved: Any = copy.copy(value)  # the loader's stays: it may give it again
    if _moves_itself(value):
        return moved.to(device)
    for name, part in _fields(value).items():
        object.__setattr__(moved, name, to_device(part, device))
    return moved
