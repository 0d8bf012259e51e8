"""The model.py of a folder that Triton Inference Server serves with its Python backend; `hotbed export --triton` copies it.

It needs hotbed in Triton's Python. Inputs are the tensors of config.pbtxt, the output is `scores`, and `scores_NAME` for each
further label. Empty strings, NaN and the smallest int64 are missing values; in a bag they fill up the row. A tensor of one
value is for all candidates. `memory` of the parameters in config.pbtxt is for cached rows.
"""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import hotbed
from hotbed.errors import HotbedError
from hotbed.scorer.tensors import outputs_of

_MISSING = np.iinfo(np.int64).min


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._utils: Any = import_module("triton_python_backend_utils")  # Triton has it
        self._names = [one["name"] for one in config["input"]]
        self._scorer = hotbed.load(
            Path(__file__).resolve().parents[1], memory=config["parameters"]["memory"]["string_value"]
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._scorer.close()

    def _answer(self, request: Any) -> Any:
        try:
            columns = {name: self._values(request, name) for name in self._names}
            size = max(map(len, columns.values()))
            columns = {name: one * size if len(one) == 1 else one for name, one in columns.items()}
            found = self._scorer.score_tasks(columns)
        except (HotbedError, UnicodeError) as error:
            return self._utils.InferenceResponse(output_tensors=[], error=self._utils.TritonError(str(error)))
        tensors = [self._utils.Tensor(one.name, scores) for one, scores in zip(outputs_of(list(found)), found.values())]
        return self._utils.InferenceResponse(output_tensors=tensors)

    def _values(self, request: Any, name: str) -> list[Any]:
        array = self._utils.get_input_tensor_by_name(request, name).as_numpy()
        if array.ndim == 1:
            return [_value(one) for one in array.tolist()]
        return [[one for one in map(_value, row) if one is not None] for row in array.tolist()]


def _value(one: Any) -> Any:
    """A value of a raw column; None: missing."""
    if isinstance(one, bytes):
        return one.decode() or None
    return None if one == _MISSING or math.isnan(one) else one
