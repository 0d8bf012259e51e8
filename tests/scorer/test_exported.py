"""Exports score as the run they come from: exactly in fp32, closely where rows have fewer bits."""

import numpy as np
import pytest

import hotbed
from tests.fresh import run_python

COLUMNS = {"price": [1.5, None], "age": [1, 2], "user": ["u7", "?"], "tags": [["a"], []], "ad": [1_000_003, 5]}


# rows, precision, how far scores may be apart
KINDS = [
    ("safetensors", "fp32", 0),
    ("parquet", "fp32", 0),
    ("safetensors", "fp16", 1e-4),
    ("safetensors", "int8", 1e-2),
]
# The command, several times in one process: most of its time goes into loading what writes ONNX, whose warnings are not ours.
EXPORT = """
import sys
from hotbed.cli import main
for one in sys.argv[3:]:
    try:
        rows, precision = one.split()
        main(["export", sys.argv[1], "--out", f"{sys.argv[2]}/{one}", "--row-format", rows, "--precision", precision])
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture(scope="module")
def exports(from_raw, tmp_path_factory):
    """A folder with an export of each kind."""
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("exports")
    done = run_python(EXPORT, from_raw, folder, *(f"{one[0]} {one[1]}" for one in KINDS))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("rows", "precision", "apart"), KINDS)
def test_an_export_scores_as_its_run(from_raw, exports, rows, precision, apart):
    folder = exports / f"{rows} {precision}"
    with hotbed.load(from_raw) as run, hotbed.load(folder, memory="1MB") as export:
        np.testing.assert_allclose(export.score(COLUMNS), run.score(COLUMNS), rtol=0, atol=apart)
        with hotbed.load(folder, memory="1MB", mapped=True) as mapped:
            np.testing.assert_array_equal(mapped.score(COLUMNS), export.score(COLUMNS))
