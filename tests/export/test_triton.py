"""The folder for Triton's Python backend: its model.py runs with a stand-in for Triton's module, and scores to the bit."""

import json
import re
import runpy
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest

import hotbed
from hotbed.errors import ConfigError
from hotbed.export.write import ExportOptions, export
from tests.scorer.conftest import from_raw  # noqa: F401  a fixture

ROWS = ExportOptions(onnx=False, triton=True)
MISSING = np.iinfo(np.int64).min
KINDS = {"TYPE_STRING": "object", "TYPE_INT64": "int64", "TYPE_FP64": "float64"}


class Tensor:
    def __init__(self, name, array):
        self.name, self._array = name, array

    def as_numpy(self):
        return self._array


class Response:
    def __init__(self, output_tensors, error=None):
        self.outputs, self.error = {one.name: one.as_numpy() for one in output_tensors}, error


@pytest.fixture(scope="module")
def folder(from_raw, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("models") / "clicks"
    export(from_raw, out, ROWS)
    return out


@contextmanager
def served_by_triton(folder, monkeypatch):
    """served(columns) -> the response to one request; the model is loaded as Triton does it."""
    utils = types.ModuleType("triton_python_backend_utils")
    utils.Tensor, utils.InferenceResponse, utils.TritonError = Tensor, Response, lambda message: message
    utils.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name])
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    config = {
        "input": [{"name": name} for name in inputs_of(folder)],
        "parameters": {"memory": {"string_value": "1MB"}},
    }
    model = runpy.run_path(str(folder / "1" / "model.py"))["TritonPythonModel"]()
    model.initialize({"model_config": json.dumps(config), "model_name": "clicks"})
    yield lambda *requests: model.execute(list(requests))
    model.finalize()


@pytest.fixture
def served(folder, monkeypatch):
    with served_by_triton(folder, monkeypatch) as found:
        yield found


def inputs_of(folder):
    """{name: (type of its array, dims)} of config.pbtxt."""
    text = (folder / "config.pbtxt").read_text()
    listed = text[text.index("input [") : text.index("output [")]
    found = re.findall(r'name: "(\w+)", data_type: (\w+), dims: (\[[-\d, ]+\])', listed)
    return {name: (KINDS[kind], json.loads(dims)) for name, kind, dims in found}


GOOD = {
    "price": np.array([1.5, np.nan, -2.0]), "age": np.array([1.0, 2.0, 3.0]),
    "user": np.array([b"u7", b"", "nöbody".encode()], dtype=object), "ad": np.array([0, 1_000_003, MISSING]),
    "tags": np.array([[b"a", b"b"], [b"", b""], [b"c", b""]], dtype=object),
}  # fmt: skip
COLUMNS = {
    "price": [1.5, None, -2.0], "age": [1.0, 2.0, 3.0], "user": ["u7", None, "nöbody"], "ad": [0, 1_000_003, None],
    "tags": [["a", "b"], [], ["c"]],
}  # fmt: skip


def test_the_config_names_the_columns(folder):
    assert inputs_of(folder) == {
        "price": ("float64", [-1]), "age": ("float64", [-1]), "user": ("object", [-1]), "ad": ("int64", [-1]),
        "tags": ("object", [-1, -1]),
    }  # fmt: skip
    text = (folder / "config.pbtxt").read_text()
    assert 'output [\n  { name: "scores", data_type: TYPE_FP64, dims: [-1] }\n]' in text
    assert 'backend: "python"' in text
    assert "1/model.py" in (folder / "README.md").read_text()


def test_scores_are_those_of_the_export_to_the_bit(folder, served):
    with hotbed.load(folder) as scorer:
        first, second = served(GOOD, GOOD | {"age": np.array([9.0])})
        np.testing.assert_array_equal(first.outputs["scores"], scorer.score(COLUMNS))
        np.testing.assert_array_equal(second.outputs["scores"], scorer.score(COLUMNS | {"age": [9.0] * 3}))
    assert first.outputs["scores"].dtype == np.float64
    assert (first.error, second.error) == (None, None)


def test_a_bad_request_is_an_error_of_its_own(served):
    bad = GOOD | {"age": np.array([1.0, 1e300, 2.0])}
    short = GOOD | {"age": np.array([1.0, 2.0])}
    letters = GOOD | {"user": np.array([b"\xff", b"a", b"b"], dtype=object)}
    answers = served(bad, GOOD, short, letters)
    assert [one.error is None for one in answers] == [False, True, False, False]
    assert "age" in answers[0].error
    assert "different lengths" in answers[2].error


def test_it_needs_rows(from_raw, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match="--triton serves the rows"):
        export(from_raw, tmp_path / "out", ROWS._replace(rows="none", onnx=True))
    export(from_raw, tmp_path / "plain", ROWS._replace(triton=False))
    assert not (tmp_path / "plain" / "config.pbtxt").exists()
