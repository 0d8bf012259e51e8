"""A schema in, the tensors of a model out, as Triton and the Open Inference Protocol name them.

The protocol has no ragged tensors: a bag is a row of [B, L].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotbed.data.encode import raw_column
from hotbed.data.schema import IdFeature, Schema, clock_of


class TensorSpec(NamedTuple):
    """An input or output; a size of -1 is not fixed."""

    name: str
    datatype: str  # BYTES, INT64 or FP64
    shape: tuple[int, ...]


OUTPUT = TensorSpec("scores", "FP64", (-1,))


def outputs_of(labels: Sequence[str]) -> list[TensorSpec]:
    """One for every label that a model learned: `scores`, of a further one `scores_NAME`."""
    return [OUTPUT, *(OUTPUT._replace(name=f"{OUTPUT.name}_{name}") for name in labels[1:])]


def inputs_of(schema: Schema) -> list[TensorSpec]:
    """One for every raw column."""
    found = {one.name: TensorSpec(one.name, "FP64", (-1,)) for one in schema.dense}
    for feature in schema.features:
        name = raw_column(feature)
        found.setdefault(name, TensorSpec(name, _datatype(feature), (-1, -1) if is_bag(feature) else (-1,)))
    return list(found.values())


def is_bag(feature: IdFeature) -> bool:
    """Whether its values are lists, not strings that are split."""
    return feature.multi and not feature.separator


def _datatype(feature: IdFeature) -> str:
    if feature.source == "bucket":
        return "FP64"
    if clock := clock_of(feature.source):
        return "BYTES" if clock.unit == "s" or clock.unit.startswith("%") else "INT64"
    return "INT64" if feature.source == "integer" and not feature.separator else "BYTES"
