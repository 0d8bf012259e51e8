"""The Open Inference Protocol (v2 REST of KServe and Triton): tensors by column in, a tensor of scores for every label out.

    {"inputs": [{"name": "user", "datatype": "BYTES", "shape": [1], "data": ["u7"]},
                {"name": "ad", "datatype": "INT64", "shape": [3], "data": [4, 5, 6]}]}

A tensor becomes a column of the ScoreRequest that POST /score makes too: both are encoded, batched and scored by the same code.
One value is the context of all candidates, null a missing value. The protocol has no ragged tensors: bags are [B, L], and null
fills up the shorter ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hotbed.data.encode import raw_column
from hotbed.data.schema import Schema
from hotbed.scorer.columns import ColumnEncoder
from hotbed.scorer.tensors import inputs_of, is_bag, outputs_of
from hotbed.serve.request import Limits, RequestError, ScoreRequest, check_names, kind_of, read_object, size_of

PLATFORM = "hotbed"
_TYPES: dict[str, set[type]] = {
    "BYTES": {str},
    **{f"{sign}INT{bits}": {int} for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": {int, float} for bits in (16, 32, 64)},
}
_PARTS = ("id", "parameters", "inputs", "outputs")


class InferRequest:
    """A RequestForm: one request of the protocol, for the model `name` and, if it was named, one version of it."""

    def __init__(self, name: str, version: str | None = None) -> None:
        self._name, self._version = name, version
        self._id: str | None = None
        self._outputs: list[str] = []  # the names that were asked for; none: all

    def read(self, body: bytes, encoder: ColumnEncoder, limits: Limits) -> ScoreRequest:
        tree = read_object(body, _PARTS, "inputs")
        self._id = tree.get("id")
        if self._id is not None and not isinstance(self._id, str):
            raise RequestError(422, f"id must be a string, not {kind_of(self._id)}", where="id")
        self._outputs = _asked_outputs(tree)
        columns = _columns(tree.get("inputs"), encoder.schema, limits)
        size = max(map(len, columns.values()))
        context = {name: values[0] for name, values in columns.items() if size > 1 and len(values) == 1}
        candidates = {name: values for name, values in columns.items() if name not in context}
        request = ScoreRequest(size_of(candidates, "inputs", limits), context, candidates, "inputs")
        check_names(request, encoder.names)
        return request

    def write(self, scores: Mapping[str, NDArray[np.float64]], version: str) -> bytes:
        check_version(self._version, version)
        answer: dict[str, Any] = {"model_name": self._name, "model_version": version}
        if self._id is not None:
            answer["id"] = self._id
        found = {one.name: (one, data) for one, data in zip(outputs_of(list(scores)), scores.values())}
        for number, name in enumerate(self._outputs):
            if name not in found:
                raise RequestError(
                    422,
                    f"there is no output {name[:60]!r}; there is {', '.join(map(repr, found))}",
                    where=f"outputs[{number}]",
                )
        answer["outputs"] = [
            {**found[name][0]._asdict(), "shape": [len(found[name][1])], "data": found[name][1]}
            for name in self._outputs or found
        ]
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def check_version(asked: str | None, current: str) -> None:
    if asked not in (None, current):
        raise RequestError(404, f"there is no version {asked[:60]!r} here; the current one is {current!r}")


def infer_example(schema: Schema, tree: dict[str, Any]) -> dict[str, Any]:
    """A request of POST /score, without missing values, as one of the protocol."""
    columns = {name: [value] for name, value in tree["context"].items()} | tree["candidates"]
    inputs = []
    for one in inputs_of(schema):
        data = columns[one.name]
        if one.datatype == "BYTES":
            data = [list(map(str, value)) if isinstance(value, list) else str(value) for value in data]
        inputs.append({**one._asdict(), "shape": list(np.shape(data)), "data": data})
    return {"id": "1", "inputs": inputs}


def _asked_outputs(tree: dict[str, Any]) -> list[str]:
    """The names of the outputs that were asked for; a RequestError for binary ones."""
    outputs = tree.get("outputs")
    if outputs is not None and not isinstance(outputs, list):
        raise RequestError(422, f"outputs must be a list of objects, not {kind_of(outputs)}", where="outputs")
    for number, one in enumerate(outputs or []):
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise RequestError(422, "an output must be an object with a name, a string", where=f"outputs[{number}]")
    for place, one in (
        ("parameters", tree),
        *((f"outputs[{n}].parameters", one) for n, one in enumerate(outputs or [])),
    ):
        given = one.get("parameters")
        if given is not None and not isinstance(given, dict):
            raise RequestError(422, f"parameters must be an object, not {kind_of(given)}", where=place)
        if given and (given.get("binary_data_output") or given.get("binary_data")):
            raise RequestError(422, "binary tensors are not written here; leave the parameter out", where=place)
    return list(dict.fromkeys(one["name"] for one in outputs or []))


def _columns(inputs: Any, schema: Schema, limits: Limits) -> dict[str, list[Any]]:
    """Values by name."""
    if not isinstance(inputs, list) or not inputs:
        raise RequestError(422, f"inputs must be a list of tensors, not {kind_of(inputs)}", where="inputs")
    bags = {raw_column(one) for one in schema.features if is_bag(one)}
    found: dict[str, list[Any]] = {}
    for number, one in enumerate(inputs):
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str):
            raise RequestError(422, "an input must be an object with a name, a string", where=f"inputs[{number}]")
        if name in found:
            raise RequestError(422, f"{name[:60]!r} is there twice", where=f"inputs[{number}]")
        found[name] = _values(one, f"inputs.{name[:60]}", name in bags, limits)
    return found


def _values(tensor: dict[str, Any], where: str, is_bag: bool, limits: Limits) -> list[Any]:
    """One value, or list, for each candidate."""
    shape, kind, data = tensor.get("shape"), tensor.get("datatype"), tensor.get("data")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise RequestError(422, f"datatype must be one of {', '.join(_TYPES)}, not {kind!r:.60}", where=where)
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
        raise RequestError(422, "shape must be a list of whole numbers", where=where)
    if not isinstance(data, list):
        what = (
            "binary tensors are not read here; send data, as JSON" if "parameters" in tensor and data is None else None
        )
        raise RequestError(422, what or f"data must be a list, not {kind_of(data)}", where=where)
    if len(shape) != 2 if is_bag else len(shape) != 1 and shape[1:] != [1]:
        rule = "[B, L], for it holds bags; null fills up the shorter ones" if is_bag else "[B] or [B, 1]"
        raise RequestError(422, f"shape {str(shape)[:60]} must be {rule}", where=where)
    if shape[0] > limits.candidates:  # before a list of that length is made
        raise RequestError(413, f"{shape[0]} candidates are too many", where=where, limit=limits.candidates)
    flat = _flat(data, shape, where)
    if set(map(type, flat)) - {*_TYPES[kind], type(None)}:
        number = next(n for n, one in enumerate(flat) if type(one) not in {*_TYPES[kind], type(None)})
        raise RequestError(422, f"{kind_of(flat[number])} is not of datatype {kind}", where=f"{where}[{number}]")
    if not is_bag:
        return flat
    rows = (flat[start : start + shape[1]] for start in range(0, len(flat), shape[1])) if shape[1] else [[]] * shape[0]
    return [[one for one in row if one is not None] for row in rows]


def _flat(data: list[Any], shape: list[int], where: str) -> list[Any]:
    """All values, row by row; `data` may be flat or nested."""
    if len(shape) == 2 and data and all(isinstance(row, list) for row in data):
        if len(data) != shape[0] or any(len(row) != shape[1] for row in data):
            raise RequestError(422, f"data must have the shape {shape}, or be flat", where=where)
        return list(chain.from_iterable(data))
    if len(data) != math.prod(shape):
        raise RequestError(422, f"data has {len(data)} values, but the shape {str(shape)[:60]}", where=where)
    return data
