"""A user's inputs, described for recordings: how many lookups each group has, and where ids, offsets and weights are.

The counterpart of `inputs.py`, which flattens a batch launch by launch. Here only what the host knows of tensors is looked at
(shapes, types, addresses), so nothing waits for the device; kernels check ids and offsets later. Inputs that cannot be
described get a reason instead, and go launch by launch, which also raises the errors of malformed ones.

Batches whose features come in the same kinds (one id, bags, bags with weights) are laid out alike, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.inputs import (
    HEADER,
    NUM_LOOKUPS,
    NUM_SAMPLES,
    SPAN,
    Capacity,
    Description,
    InputLayout,
    bucket,
    describe,
)
from hotbed.ops.inputs import LEARNS as _LEARNS
from hotbed.ops.lookups import Bags, BatchSlots, Lookups, Span
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import Feature, GroupInputs
from hotbed.tables.keyed import bags_of, is_keyed
from hotbed.types import Jagged

SINGLE, BAGS, WEIGHTED = "one id", "bags", "weighted bags"
Kinds = tuple[str, ...]  # of all features
MALFORMED = "its inputs do not match the features"  # which the launch-by-launch way reports
_SIZES = 64  # of batches whose descriptions are begun already


class FeatureParts(NamedTuple):
    """The ids of one feature in a batch, by their addresses."""

    kind: str
    values: int  # address of int64 numbers, `step` apart
    step: int
    length: int
    samples: int
    bag: int = 1  # ids of every bag; 0 where offsets say it
    offsets: int = 0  # address
    weights: int = 0  # address


class BatchParts(NamedTuple):
    """A batch that can be described."""

    size: int  # B
    kinds: Kinds
    features: list[FeatureParts]
    matrix: Tensor | None = None  # contiguous [B, F], if that is all there is; then `features` is empty
    kept: Any = None  # tensors whose addresses the features name

    @property
    def varies(self) -> bool:
        """Whether batches of as many samples may have more lookups."""
        return any(part.bag == 0 for part in self.features)


def why_not_described(features: Sequence[Feature]) -> str | None:
    """Why no batch of these features can be described; None where it can."""
    sequences = [feature.name for feature in features if feature.pooling == "none"]
    return f"feature {sequences[0]!r} is not pooled" if sequences else None


def parts_of(features: Sequence[Feature], ids: Any, bags: Any, device: torch.device) -> BatchParts | str:
    """The parts of a batch, or why it cannot be described. Tensors that must be converted are, on the current stream."""
    kept: list[Tensor] = []
    if isinstance(ids, Tensor):
        if not _is_plain(ids, device) or ids.ndim != 2:
            return MALFORMED
        ids = ids.to(torch.int64)
        if not bags and ids.shape[1] == len(features):
            return BatchParts(int(ids.shape[0]), (SINGLE,) * len(features), [], ids.contiguous())
        parts = _beside_matrix(features, ids, bags or {}, device, kept)
    else:
        given = bags_of(ids) if is_keyed(ids) else ids
        names = {feature.name for feature in features}
        if not isinstance(given, Mapping) or bags is not None or given.keys() != names:
            return MALFORMED
        parts = [_parts_of(given[feature.name], device, kept) for feature in features]
    size, found = -1, []
    for feature, part in zip(features, parts):
        if isinstance(part, str):
            return part
        if part.samples != size:
            if size >= 0:
                return MALFORMED
            size = part.samples
        if part.kind == WEIGHTED and feature.pooling != "sum":
            return MALFORMED
        found.append(part)
    if len(found) < len(features) or (size == 0 and any(part.length for part in found)):
        return MALFORMED
    return BatchParts(size, tuple([part.kind for part in found]), found, kept=kept)


def _beside_matrix(
    features: Sequence[Feature], ids: Tensor, bags: Mapping[str, Any], device: torch.device, kept: list[Tensor]
) -> list[FeatureParts | str]:
    """For each feature its bag, or else the next column of the matrix [B, S]; nothing if the names do not match."""
    kept.append(ids)
    size, num_columns = ids.shape
    down, across = ids.stride()
    address, across, column = ids.data_ptr(), 8 * across, 0
    found: list[FeatureParts | str] = []
    for feature in features:
        bag = bags.get(feature.name)
        if bag is None:
            found.append(FeatureParts(SINGLE, address + across * column, down, size, size))
            column += 1
        else:
            found.append(_bag(bag, device, kept) if isinstance(bag, Jagged) else MALFORMED)
    return found if column == num_columns and len(features) == column + len(bags) else []


def _is_plain(value: Any, device: torch.device) -> bool:
    """Whether it is a tensor of ids."""
    return (
        isinstance(value, Tensor)
        and not value.is_nested
        and value.layout == torch.strided
        and value.dtype in (torch.int64, torch.int32)
        and value.device == device
    )


def _parts_of(value: Any, device: torch.device, kept: list[Tensor]) -> FeatureParts | str:
    """A Jagged; or a tensor: one id for each sample [B], or bags [B, T]."""
    if isinstance(value, Jagged):
        return _bag(value, device, kept)
    if not _is_plain(value, device) or value.ndim not in (1, 2):
        return MALFORMED
    values, size = value.to(torch.int64), int(value.shape[0])
    if values.ndim == 2:
        values = values.contiguous()
    kept.append(values)
    if values.ndim == 1:
        return FeatureParts(SINGLE, values.data_ptr(), int(values.stride(0)), size, size)
    return FeatureParts(BAGS, values.data_ptr(), 1, int(values.numel()), size, bag=int(values.shape[1]))


def _is_ready(tensor: Any, device: torch.device) -> bool:
    """Whether it can be described as it is: most are."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype is torch.int64
        and tensor.layout is torch.strided
        and tensor.dim() == 1
        and tensor.device == device
        and tensor.is_contiguous()
    )


def _bag(bag: Jagged, device: torch.device, kept: list[Tensor]) -> FeatureParts | str:
    values, offsets, weights = bag
    if weights is None and _is_ready(values, device) and _is_ready(offsets, device):
        samples = offsets.numel() - 1
        kept += (values, offsets)
        parts = FeatureParts(BAGS, values.data_ptr(), 1, values.numel(), samples, 0, offsets.data_ptr())
        return parts if samples >= 0 else MALFORMED
    if not _is_plain(values, device) or not _is_plain(offsets, device):
        return MALFORMED
    if values.ndim != 1 or offsets.ndim != 1 or offsets.shape[0] < 1:
        return MALFORMED
    if weights is not None:
        if weights.shape != values.shape or weights.device != device:
            return MALFORMED
        if weights.requires_grad:
            return "the weights of a bag want a gradient"
        weights = weights.to(torch.float32).contiguous()
        kept.append(weights)
    values, offsets = values.to(torch.int64), offsets.to(torch.int64).contiguous()
    kept += (values, offsets)
    return FeatureParts(
        BAGS if weights is None else WEIGHTED,
        values.data_ptr(),
        int(values.stride(0)),
        int(values.shape[0]),
        int(offsets.shape[0]) - 1,
        0,
        offsets.data_ptr(),
        0 if weights is None else weights.data_ptr(),
    )


class GroupDescriber:
    """The batches of some kinds for one group."""

    def __init__(self, group: TableGroup, inputs: GroupInputs, names: Sequence[str], kinds: Kinds) -> None:
        self._inputs = inputs
        places = [names.index(feature.name) for feature in inputs.features]
        is_bags = any(kinds[place] != SINGLE for place in places)
        order = inputs.order if is_bags else list(range(len(places)))
        self._features = [inputs.features[j] for j in order]
        self._places = [places[j] for j in order]
        is_mean = tuple(feature.pooling == "mean" for feature in self._features)
        weighted = any(kinds[place] == WEIGHTED for place in places)
        self.layout = InputLayout(
            group.addresses(tuple(feature.table for feature in self._features)),
            is_bags,
            columns=tuple(order) if is_bags else (),
            is_mean=is_mean if is_bags else (),
            is_scaled=is_bags and (weighted or any(is_mean)),
        )
        self._columns = np.array(self._places, dtype=np.int64) * 8
        self._begun: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._out_rows: dict[int, Tensor] = {}

    def describe(self, batch: BatchParts, learns: bool) -> Description:
        """A batch for this group."""
        if batch.matrix is not None:
            return self._describe_matrix(batch.matrix, learns)
        spans, position = [], 0
        for place in self._places:
            _, values, step, length, _, bag, offsets, weights = batch.features[place]
            spans.append([values, step, position, length, offsets, bag, weights, 0])
            position += length
        return describe(spans, position, batch.size, learns, kept=batch.kept)

    def _describe_matrix(self, matrix: Tensor, learns: bool) -> Description:
        """As `describe`, in 4 us instead of 30: all that differs between batches of one size is one address."""
        size, width = matrix.shape
        begun = self._begun.get(size)
        if begun is None:
            if len(self._begun) >= _SIZES:
                self._begun.clear()
            spans = [[0, width, 0, size, 0, 1, 0, 0] for _ in self._places]
            begun = self._begun[size] = describe(spans, size * len(spans), size, False).words
        words = begun.copy()
        words[HEADER::SPAN] = self._columns + matrix.data_ptr()
        words[_LEARNS] = learns
        return Description(words, int(words[NUM_LOOKUPS]), int(words[NUM_SAMPLES]), matrix)

    def lookups(self, batch: Description, row: BatchSlots) -> Lookups:
        """The lookups of a batch with what its recording found out."""
        size = batch.num_samples
        num_out = size * len(self._features)
        if row.starts is None:
            return Lookups(row.slots, self._inputs.matrix_spans(size), num_out, sorted=row.sorted)
        counts = batch.words[HEADER:].reshape(-1, SPAN)[:, 2:4].tolist()
        spans = tuple(Span(feature.name, first, count, 1) for feature, (first, count) in zip(self._features, counts))
        bags = Bags(row.starts, self._rows_of_bags(size, row.slots.device), row.scale, row.out_row)
        return Lookups(row.slots, spans, num_out, bags, sorted=row.sorted)

    def _rows_of_bags(self, size: int, device: torch.device) -> Tensor:
        """The output row int64 [N] of every bag."""
        rows = self._out_rows.get(size)
        if rows is None or rows.device != device:
            if len(self._out_rows) >= _SIZES:
                self._out_rows.clear()
            columns = torch.tensor(self.layout.columns, dtype=torch.int64, device="cpu")[:, None]
            rows = (torch.arange(size, device="cpu") * len(self._features) + columns).reshape(-1).to(device)
            self._out_rows[size] = rows
        return rows


def capacity_for(need: Capacity, varies: bool, before: Capacity) -> Capacity:
    """The capacity of buffers for batches like one, no less than before: exact, or a larger bucket if lookups vary.

    Where there was a capacity before, they do.
    """
    num_lookups, num_samples = need
    if varies or before.num_samples:
        num_lookups, num_samples = bucket(num_lookups + num_lookups // 16), bucket(num_samples)
    return Capacity(max(num_lookups, before.num_lookups), max(num_samples, before.num_samples))
