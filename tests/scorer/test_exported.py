"""Exports score as the run they come from: exactly in fp32, closely where rows have fewer bits."""

import subprocess
import sys

import numpy as np
import pytest

import hotbed

COLUMNS = {"price": [1.5, None], "age": [1, 2], "user": ["u7", "?"], "tags": [["a"], []], "ad": [1_000_003, 5]}


@pytest.mark.parametrize(
    ("rows", "precision", "apart"),
    [("safetensors", "fp32", 0), ("parquet", "fp32", 0), ("safetensors", "fp16", 1e-4), ("safetensors", "int8", 1e-2)],
)
def test_an_export_scores_as_its_run(from_raw, tmp_path, rows, precision, apart):
    pytest.importorskip("onnxscript")
    command = [sys.executable, "-m", "hotbed", "export", str(from_raw), "--out", str(tmp_path / "export")]
    subprocess.run([*command, "--rows", rows, "--precision", precision], check=True, capture_output=True)
    with hotbed.load(from_raw) as run, hotbed.load(tmp_path / "export", memory="1MB") as export:
        np.testing.assert_allclose(export.score(COLUMNS), run.score(COLUMNS), rtol=0, atol=apart)
        with hotbed.load(tmp_path / "export", memory="1MB", mapped=True) as mapped:
            np.testing.assert_array_equal(mapped.score(COLUMNS), export.score(COLUMNS))
