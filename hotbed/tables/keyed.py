"""A TorchRec KeyedJaggedTensor, or anything with its methods, in; one Jagged for each of its keys out. TorchRec is not needed.

Key k of K has the bags k * B to (k + 1) * B - 1, one after the other:

    keys     "user"   "ad"             user  values [7], [3]       ad  values [5, 5], []
    lengths  [1, 1,   2, 0]      ->          offsets [0, 1, 2]         offsets [0, 2, 2]
    values   [7, 3,   5, 5]

Values are not copied. Where each key begins is known on the host: of tensors on a device, asking for it waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.types import Jagged

_METHODS = ("keys", "values", "lengths", "offsets", "weights_or_none")


class KeyedJagged(Protocol):
    """What is used of a KeyedJaggedTensor."""

    def keys(self) -> list[str]:
        """The features."""

    def values(self) -> Tensor:
        """Ids of all bags [L]."""

    def lengths(self) -> Tensor:
        """Ids of every bag [K * B]."""

    def offsets(self) -> Tensor:
        """Where every bag begins [K * B + 1]."""

    def weights_or_none(self) -> Tensor | None:
        """One for each id [L], if there are any."""


def is_keyed(value: Any) -> TypeGuard[KeyedJagged]:
    """Whether a value has the methods of a KeyedJaggedTensor."""
    if value is None or isinstance(value, (Tensor, Mapping, tuple)):
        return False
    return all(callable(getattr(value, m, None)) for m in _METHODS)


def bags_of(keyed: KeyedJagged) -> dict[str, Jagged]:
    """The bags of every key."""
    keys, values, offsets, weights = list(keyed.keys()), keyed.values(), keyed.offsets(), keyed.weights_or_none()
    if len(set(keys)) < len(keys):
        raise ShapeError(f"a KeyedJaggedTensor names each feature once; its keys are {keys}")
    num_bags = int(offsets.shape[0]) - 1
    variable = getattr(keyed, "variable_stride_per_key", None)
    if (callable(variable) and variable()) or num_bags < 0 or (keys and num_bags % len(keys)):
        raise ShapeError(
            f"a KeyedJaggedTensor must have as many samples of every key; it has {max(num_bags, 0)} bags of {len(keys)} keys"
        )
    size = num_bags // len(keys) if keys else 0
    starts = offsets[:: max(size, 1)].tolist() if size else [0] * (len(keys) + 1)
    found = {}
    for number, key in enumerate(keys):
        first, last = starts[number], starts[number + 1]
        theirs = offsets[number * size : (number + 1) * size + 1]
        found[key] = Jagged(values[first:last], theirs - first, None if weights is None else weights[first:last])
    return found


def tensors_of(keyed: KeyedJagged) -> tuple[Tensor, ...]:
    """All that it is made of."""
    weights = keyed.weights_or_none()
    return (keyed.values(), keyed.offsets(), *(() if weights is None else (weights,)))
