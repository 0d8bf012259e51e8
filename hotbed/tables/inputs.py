"""A user's inputs, checked and flattened: an id matrix, a mapping of tensors and bags, or both -> Lookups of each group.

A TorchRec KeyedJaggedTensor is a mapping of bags.

An id matrix whose features are all pooled takes the short way (one value per bag, no copies for a single group);
everything else is flattened feature by feature into bags. Every mistake is a ShapeError that names the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hotbed.errors import IdError, ShapeError
from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import Bags, IdCheck, Lookups, Origin, Span
from hotbed.tables.group.group import TableGroup
from hotbed.tables.keyed import KeyedJagged, bags_of, is_keyed
from hotbed.types import Jagged

_INT_TYPES = (torch.int64, torch.int32)
MakeKeys = Callable[
    [Tensor, tuple[Span, ...], tuple[str, ...], bool], tuple[Tensor, FirstBad, Origin]
]  # TableGroup.keys


class Feature(NamedTuple):
    """One input feature and the table it reads."""

    name: str
    table: str
    pooling: str  # sum, mean or none


class BatchInputs(NamedTuple):
    """The inputs of one forward call, normalised."""

    size: int  # B
    matrix: Tensor  # int64 [B, F1]
    columns: dict[str, int]  # feature -> column of the matrix
    bags: dict[str, Jagged]
    shapes: dict[str, tuple[int, ...]]  # the input shape of every sequence feature


def read_inputs(
    features: Sequence[Feature],
    ids: Tensor | Mapping[str, Tensor | Jagged] | KeyedJagged,
    bags: Mapping[str, Jagged] | None,
    device: torch.device,
) -> BatchInputs:
    """Check the inputs against the features and bring them into one form."""
    ids = bags_of(ids) if is_keyed(ids) else cast("Tensor | Mapping[str, Tensor | Jagged]", ids)
    names = [feature.name for feature in features]
    if isinstance(ids, Tensor):
        bags = dict(bags or {})
        _check_names(names, bags, all_needed=False)
        single = [name for name in names if name not in bags]
        matrix = _integers("ids", ids, device)
        if matrix.ndim != 2 or matrix.shape[1] != len(single):
            raise ShapeError(
                f"ids must be a tensor [B, {len(single)}], one column for each of {_some(single)}; got {list(ids.shape)}"
            )
        given = {name: _bag(name, bag, device) for name, bag in bags.items()}
        size = int(matrix.shape[0])
        columns = {name: column for column, name in enumerate(single)}
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(single, (size,))
    elif not isinstance(ids, Mapping):
        raise ShapeError(
            f"ids must be a tensor int64 [B, F], a mapping of features or a KeyedJaggedTensor, not {type(ids).__name__}; "
            "torch.as_tensor(ids) makes a tensor of an array or of lists"
        )
    else:
        if bags is not None:
            raise ShapeError("give bags together with an id matrix, or everything in one mapping, not both")
        _check_names(names, ids, all_needed=True)
        flat = {name: ids[name] for name in names}
        single = [name for name, value in flat.items() if isinstance(value, Tensor) and value.ndim == 1]
        given = {name: _bag(name, value, device) for name, value in flat.items() if name not in single}
        sizes = {name: _size(value) for name, value in flat.items()}
        size = next(iter(sizes.values()), 0)
        if any(other != size for other in sizes.values()):
            raise ShapeError(f"all features must have the same number of samples; got {sizes}")
        matrix = torch.empty(size, 0, dtype=torch.int64, device=device)
        if single:
            matrix = torch.stack([_integers(name, flat[name], device) for name in single], dim=1)
        columns = {name: column for column, name in enumerate(single)}
        shapes = {name: tuple(value.shape) for name, value in flat.items() if isinstance(value, Tensor)}
    for name, bag in given.items():
        if bag.offsets.shape[0] != size + 1:
            raise ShapeError(
                f"feature {name!r} has offsets for {bag.offsets.shape[0] - 1} samples, but the batch has {size}"
            )
    return BatchInputs(size, matrix, columns, given, shapes)


class GroupInputs:
    """The features of one group, and what every batch of one size would otherwise work out again."""

    def __init__(self, group: TableGroup, features: Sequence[Feature]) -> None:
        place = {table: i for i, table in enumerate(group.members)}
        self.features = tuple(features)
        self.order = sorted(range(len(features)), key=lambda j: place[features[j].table])  # tables together
        self.tables = tuple(features[j].table for j in self.order)
        self.all_pooled = all(feature.pooling != "none" for feature in features)
        self.names = frozenset(feature.name for feature in features)
        self._matrix_spans: dict[int, tuple[Span, ...]] = {}

    def matrix_spans(self, size: int) -> tuple[Span, ...]:
        """The columns of a matrix of `size` samples."""
        spans = self._matrix_spans.get(size)
        if spans is None:
            if len(self._matrix_spans) >= 64:
                self._matrix_spans.clear()  # a reader thread may do so at any time
            width = len(self.features)
            spans = tuple(Span(self.features[j].name, j, size, width) for j in self.order)
            self._matrix_spans[size] = spans
        return spans


def flatten(
    group: TableGroup, inputs: GroupInputs, given: BatchInputs, learns: bool = False, make: MakeKeys | None = None
) -> Lookups:
    """The lookups of one group's features, with spans in the order of `inputs.tables`; their slots are keys so far.

    Output rows: sample-major for the pooled features, [B, F'] flattened, then the values of each sequence feature.
    `learns`: dynamic ids take it for the next training batch. `make` makes the keys; without it, the group does.
    """
    make = make or group.keys
    if inputs.all_pooled and inputs.names <= given.columns.keys():
        return _flatten_matrix(group, inputs, given, learns, make)
    return _flatten_bags(group, inputs, given, learns, make)


def _flatten_matrix(
    group: TableGroup, inputs: GroupInputs, given: BatchInputs, learns: bool, make: MakeKeys
) -> Lookups:
    features = inputs.features
    columns = [given.columns[feature.name] for feature in features]
    matrix = given.matrix
    if columns != list(range(matrix.shape[1])):
        matrix = matrix[:, columns]
    ids = matrix.contiguous().view(-1)
    spans = inputs.matrix_spans(given.size)
    keys, first_bad, origin = make(ids, spans, inputs.tables, learns)

    def refuse(position: int) -> IdError:
        sample, j = divmod(position, len(features))
        return group.refuse(features[j].table, features[j].name, sample, int(ids[position]))

    return _checked(Lookups(keys, spans, num_out=ids.shape[0], origin=origin), first_bad, refuse)


def _flatten_bags(group: TableGroup, inputs: GroupInputs, given: BatchInputs, learns: bool, make: MakeKeys) -> Lookups:
    features, order, tables = inputs.features, inputs.order, inputs.tables
    size, device = given.size, given.matrix.device
    pooled = [feature.name for feature in features if feature.pooling != "none"]
    one_each = torch.arange(size + 1, device=device)
    bags = {
        f.name: given.bags[f.name] if f.name in given.bags else Jagged(given.matrix[:, given.columns[f.name]], one_each)
        for f in features
    }
    values, starts, out_rows, spans = [], [], [], []
    position, num_out = 0, size * len(pooled)
    first_row = {}
    for feature in features:  # sequences follow the pooled rows in declared order
        if feature.pooling == "none":
            first_row[feature.name] = num_out
            num_out += int(bags[feature.name].values.shape[0])
    for j in order:
        name, bag = features[j].name, bags[features[j].name]
        count = int(bag.values.shape[0])
        values.append(bag.values)
        spans.append(Span(name, position, count, 1))
        if features[j].pooling == "none":
            each = torch.arange(count, device=device)
            starts.append(each + position)
            out_rows.append(each + first_row[name])
        else:
            starts.append(bag.offsets[:-1] + position)
            out_rows.append(torch.arange(size, device=device) * len(pooled) + pooled.index(name))
        position += count
    starts.append(torch.tensor([position], device=device))
    ids = torch.cat(values) if values else torch.empty(0, dtype=torch.int64, device=device)
    keys, first_bad, origin = make(ids, tuple(spans), tables, learns)

    def refuse(position: int) -> IdError:
        p = next(p for p, span in enumerate(spans) if span.start <= position < span.start + span.length)
        offsets = bags[spans[p].feature].offsets
        sample = (
            int(torch.searchsorted(offsets, torch.tensor(position - spans[p].start, device=device), right=True)) - 1
        )
        return group.refuse(tables[p], spans[p].feature, sample, int(ids[position]))

    scale = _scales([features[j] for j in order], bags, keys, spans, group.records.dtype)
    found = Bags(torch.cat(starts), torch.cat(out_rows), scale)
    lookups = Lookups(keys, tuple(spans), num_out, found, origin=origin)
    return _checked(lookups, first_bad, refuse)


def _checked(lookups: Lookups, first_bad: FirstBad, refuse: Callable[[int], IdError]) -> Lookups:
    """Raise for a bad id where that is known at once; else let the lookups carry the question."""

    def check() -> None:
        position = first_bad.get()
        if position is not None:
            raise refuse(position)

    if first_bad.flag is None:
        check()
        return lookups
    return lookups._replace(check=IdCheck(first_bad.flag, check))


def _scales(
    features: list[Feature], bags: dict[str, Jagged], keys: Tensor, spans: list[Span], dtype: torch.dtype
) -> Tensor | None:
    """[L]: the weight of every lookup; 1 / (values that are not padding) for mean pooling. None when all are 1."""
    if not any(feature.pooling == "mean" or bags[feature.name].weights is not None for feature in features):
        return None
    scales = []
    for feature, span in zip(features, spans):
        bag = bags[feature.name]
        if bag.weights is not None:
            if feature.pooling != "sum":
                raise ShapeError(f"feature {feature.name!r}: weights need sum pooling, not {feature.pooling!r}")
            scales.append(bag.weights.to(dtype))
        elif feature.pooling == "mean":
            real = (keys[span.start : span.start + span.length] >= 0).to(torch.int64)
            before = torch.nn.functional.pad(real.cumsum(0), (1, 0))
            counts = (before[bag.offsets[1:]] - before[bag.offsets[:-1]]).clamp(min=1)
            scales.append(torch.repeat_interleave(1.0 / counts.to(dtype), bag.offsets.diff(), output_size=span.length))
        else:
            scales.append(torch.ones(span.length, dtype=dtype, device=keys.device))
    return torch.cat(scales)


def _bag(name: str, value: Tensor | Jagged, device: torch.device) -> Jagged:
    """A checked Jagged; a matrix [B, T] becomes B bags of T values."""
    if isinstance(value, Tensor):
        flat = _integers(name, value, device)
        if value.ndim != 2:
            raise ShapeError(
                f"feature {name!r} must be a tensor [B] or [B, T], or a Jagged; got shape {list(value.shape)}"
            )
        rows, width = value.shape
        return Jagged(flat.reshape(-1), torch.arange(rows + 1, device=device) * width)
    if not isinstance(value, Jagged):
        raise ShapeError(
            f"feature {name!r} must be a tensor or a hotbed.Jagged, not {type(value).__name__}; "
            "torch.as_tensor makes a tensor of an array or of lists"
        )
    values, offsets = _integers(name, value.values, device), _integers(f"{name} offsets", value.offsets, device)
    count = int(values.shape[0]) if values.ndim == 1 else -1
    if values.ndim != 1 or offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ShapeError(f"feature {name!r}: values and offsets must have one dimension, offsets B + 1 entries")
    ends = (int(offsets[0]), int(offsets[-1]))
    if ends != (0, count) or bool((offsets.diff() < 0).any()):
        raise ShapeError(f"feature {name!r}: offsets must rise from 0 to {count}, the number of values; they go {ends}")
    weights = value.weights
    if weights is not None and (weights.shape != values.shape or weights.device != device):
        raise ShapeError(
            f"feature {name!r}: weights must be {list(values.shape)} on {device}, "
            f"as the values are; got {list(weights.shape)} on {weights.device}"
        )
    return Jagged(values.contiguous(), offsets.contiguous(), weights)


def as_tensor(name: str, value: object) -> Tensor:
    """Refuse what is not a plain tensor."""
    if not isinstance(value, Tensor):
        raise ShapeError(
            f"{name!r} must be a tensor of int64 ids, not {type(value).__name__}; torch.as_tensor makes a tensor of an array"
        )
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else "sparse"
        raise ShapeError(
            f"{name!r} is a {kind} tensor; give its ids as hotbed.Jagged(values [L], offsets [B + 1]), which a nested tensor "
            "of layout torch.jagged has as .values() and .offsets(), or as a plain tensor"
        )
    return value


def _integers(name: str, given: object, device: torch.device) -> Tensor:
    value = as_tensor(name, given)
    if value.dtype not in _INT_TYPES:
        raise ShapeError(f"{name!r} must hold int64 ids, not {value.dtype}")
    if value.device != device:
        raise ShapeError(
            f"{name!r} is on {value.device}, but the tables are on {device}; move it with .to({str(device)!r})"
        )
    return value.to(torch.int64)


def _size(value: Tensor | Jagged) -> int:
    return int(value.shape[0]) if isinstance(value, Tensor) and value.ndim else int(value.offsets.shape[0]) - 1  # type: ignore[union-attr]


def _check_names(names: list[str], given: Mapping[str, object], *, all_needed: bool) -> None:
    unknown = [name for name in given if name not in names]
    missing = [name for name in names if name not in given] if all_needed else []
    if unknown or missing:
        raise ShapeError(
            "inputs do not match the features"
            + (f"; unknown: {_some(unknown)}" if unknown else "")
            + (f"; missing: {_some(missing)}" if missing else "")
            + f"; the features are {_some(names)}"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
