"""A request in, a Batch out, as ColumnEncoder would make it, with little Python for each value.

Strings of all features are joined by zero bytes and hashed in one compiled pass; numbers become one array. Everything else
(missing values, numbers instead of strings, lists, zero bytes, values out of range) is encoded column by column as
ColumnEncoder does, which also reports what is wrong. A feature of the context is encoded once for all candidates.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from hotbed.data.encode import raw_column
from hotbed.data.formats.chunk import Column, Faults
from hotbed.data.formats.parquet import read_columns
from hotbed.data.hash import MISSING_ID, hash_span
from hotbed.data.schema import DenseColumn, IdFeature
from hotbed.data.values import FLOAT32_MAX, LARGEST, Bags, read_dense, read_ids, standardise
from hotbed.errors import FormatError, reason_of
from hotbed.host.jit import njit
from hotbed.scorer.columns import ColumnEncoder, as_bags
from hotbed.serve.request import Limits, RequestError, ScoreRequest
from hotbed.types import Batch, Jagged

_HERE = Path("the request")


class RequestEncoder:
    """Encodes requests for one model."""

    def __init__(self, encoder: ColumnEncoder, limits: Limits) -> None:
        self._encoder, schema = encoder, encoder.schema
        self._most_ids = limits.bag_ids
        self._features, self._dense = schema.features, schema.dense
        self._single = [one for one in schema.features if not one.multi]
        self._multi = [one for one in schema.features if one.multi]
        self._log = np.array([one.transform == "log" for one in schema.dense])
        self._mean = np.array([one.mean for one in schema.dense])
        self._scale = np.array([one.scale for one in schema.dense])

    def batch(self, request: ScoreRequest) -> Batch:
        """All candidates; a RequestError says which value cannot be read."""
        size = request.size
        ids = np.empty((size, len(self._single)), dtype=np.int64)
        hashed = self._hashed(request)
        for place, feature in enumerate(self._single):
            found = hashed.get(feature.name)
            if found is None:
                found = self._one_by_one(request, feature)
            ids[:, place] = self._encoder.rows_of(feature, found)  # a value of the context is broadcast
        bags, room = {}, self._most_ids
        for feature in self._multi:
            bags[feature.name] = self._bag(request, feature, room)
            room -= bags[feature.name].values.shape[0]
        return Batch(
            labels=torch.empty(size, dtype=torch.float32, device="cpu"),
            dense=torch.from_numpy(self._numbers(request)),
            ids=torch.from_numpy(ids),
            bags=bags,
        )

    def _hashed(self, request: ScoreRequest) -> dict[str, NDArray[np.int64]]:
        """The ids of features whose values are all strings."""
        names, lists = [], []
        for feature in self._single:
            if feature.source == "string":
                values = _values(request, raw_column(feature))
                if set(map(type, values)) == {str}:
                    names.append(feature.name)
                    lists.append(values)
        if not names:
            return {}
        text = "\0".join(chain.from_iterable(lists))
        count = sum(map(len, lists))
        ids = np.empty(count, dtype=np.int64)
        if hash_joined(np.frombuffer(text.encode(), dtype=np.uint8), ids) != count:
            return {}  # a value has a zero byte in it
        found, start = {}, 0
        for name, values in zip(names, lists):
            found[name] = ids[start : start + len(values)]
            start += len(values)
        return found

    def _one_by_one(self, request: ScoreRequest, feature: IdFeature) -> NDArray[np.int64]:
        """The ids of a feature whose values are not all plain strings."""
        name = raw_column(feature)
        values = _values(request, name)
        if feature.source == "integer" and set(map(type, values)) == {int}:
            array = _array(values)
            if array is not None and array.dtype == np.int64 and array.min() > MISSING_ID:
                return array
        faults = Faults(len(values))
        found = self._read(request, name, lambda column: read_ids(column, feature, faults), faults)
        return np.asarray(found)

    def _bag(self, request: ScoreRequest, feature: IdFeature, room: int) -> Jagged:
        name, size = raw_column(feature), request.size
        faults = Faults(len(_values(request, name)))
        found: Bags = self._read(request, name, lambda column: read_ids(column, feature, faults), faults, feature)
        rows, offsets = self._encoder.rows_of(feature, found.ids), found.offsets
        if name not in request.candidates:
            if len(rows) * size > room:
                many = f"{len(rows)} ids for each of {size} candidates are too many"
                raise RequestError(413, many, where=request.where(name), limit=self._most_ids)
            rows, offsets = np.tile(rows, size), np.arange(size + 1) * len(rows)
        return Jagged(torch.from_numpy(rows), torch.from_numpy(offsets))

    def _numbers(self, request: ScoreRequest) -> NDArray[np.float32]:
        """[B, N], standardised."""
        size = request.size
        out = np.empty((size, len(self._dense)), dtype=np.float32)
        for in_context in (False, True):
            here = [n for n, one in enumerate(self._dense) if (one.name not in request.candidates) == in_context]
            if not here:
                continue
            values = [_values(request, self._dense[n].name) for n in here]
            plain = _plain_numbers(values)
            if plain is None:
                for n in here:
                    out[:, n] = self._number(request, self._dense[n])
                continue
            log = self._log[here]
            plain[log] = np.sign(plain[log]) * np.log1p(np.abs(plain[log]))
            standard = (plain - self._mean[here, None]) / self._scale[here, None]
            out[:, here] = np.clip(standard, -FLOAT32_MAX, FLOAT32_MAX).T.astype(np.float32)
        return out

    def _number(self, request: ScoreRequest, spec: DenseColumn) -> NDArray[np.float32]:
        faults = Faults(len(_values(request, spec.name)))
        return standardise(
            self._read(request, spec.name, lambda column: read_dense(column, spec, faults), faults), spec
        )

    def _read(self, request: ScoreRequest, name: str, read: Any, faults: Faults, bags: IdFeature | None = None) -> Any:
        """Read a column like raw data; an error names the place in the request."""
        try:
            found = read(_column(name, _values(request, name), bags))
        except FormatError as error:
            raise RequestError(422, str(error), where=request.where(name)) from None
        if faults.any:
            bad = faults.bad_rows("", np.arange(len(faults.good)), lambda _: "")[0]
            raise RequestError(422, f"{bad.reason}", where=request.where(name, bad.line))
        return found


def _values(request: ScoreRequest, name: str) -> list[Any]:
    """The values of a column; only one if it is in the context."""
    return request.candidates[name] if name in request.candidates else [request.context[name]]


def _array(values: list[Any]) -> NDArray[Any] | None:
    try:
        return np.array(values)
    except (ValueError, OverflowError, TypeError):
        return None


def _plain_numbers(values: list[list[Any]]) -> NDArray[np.float64] | None:
    """[columns, values] if all are numbers within range, else None."""
    if set(map(type, chain.from_iterable(values))) - {int, float}:
        return None
    array = _array(values)
    if array is None or array.dtype.kind not in "if":
        return None
    numbers: NDArray[np.float64] = array.astype(np.float64)
    return numbers if np.abs(numbers).max(initial=0.0) <= LARGEST else None


def _column(name: str, values: list[Any], bags: IdFeature | None) -> Column:
    """The values as an Arrow column."""
    try:
        array = pa.array(values) if bags is None else as_bags(pa.array(values), bags)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError) as error:
        raise FormatError(f"{name} holds values of different types: {reason_of(error)[:200]}") from None
    try:
        return read_columns(pa.RecordBatch.from_arrays([array], names=[name]), _HERE, None)[name]
    except FormatError:
        raise FormatError(f"{name} holds values of type {array.type}; it must hold numbers, strings or lists") from None


@njit(nogil=True, cache=True)
def hash_joined(data: Any, ids: Any) -> Any:
    """The ids of values separated by zero bytes; an empty value is missing. Returns how many there were."""
    count, start = 0, 0
    for at in range(data.shape[0] + 1):
        if at == data.shape[0] or data[at] == 0:
            if count == ids.shape[0]:
                return count + 1
            ids[count] = hash_span(data, start, at) if at > start else MISSING_ID
            count += 1
            start = at + 1
    return count
