"""Labels that are conditions on a number: --positive 'rating>=4'."""

from __future__ import annotations

import numpy as np
import pytest

from hotbed.data.formats.chunk import Faults, Floats, Integers
from hotbed.data.prepare.prepare import prepare
from hotbed.data.raw_reader import RawReader
from hotbed.data.values import LabelReader, LabelThreshold
from hotbed.errors import ConfigError, FormatError
from tests.data.raw_files import text_of, write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rating>=4", ("rating", ">=", 4.0)),
        (" score < -0.5 ", ("score", "<", -0.5)),
        ("<=3", ("", "<=", 3.0)),
        (">50K", None),
        ("yes", None),
        ("4", None),
    ],
)
def test_conditions(text, expected):
    assert LabelThreshold.parse(text) == expected


def test_numbers_become_labels_whatever_their_type():
    reader = LabelReader("rating", positive="rating>=4", signed=False)
    faults = Faults(4)
    assert reader.read(text_of(["5", "3.5", "4", "1e1"]), faults).tolist() == [1, 0, 1, 1]
    integers = Integers(np.array([5, 3, 4, 0]), np.zeros(4, np.bool_))
    assert reader.read(integers, faults).tolist() == [1, 0, 1, 0]
    assert reader.read(Floats(np.array([4.5, 3.9, 4.0, 0.0])), faults).tolist() == [1, 0, 1, 0]
    assert not faults.any
    reader.read(text_of(["5", "", "good", "0x5"]), faults)
    assert faults.good.tolist() == [True, False, False, False]


def test_a_condition_names_the_label_and_holds_for_raw_rows_later(tmp_path):
    raw = write(tmp_path / "f.csv", "user,rating", *(f"u{i % 5},{i % 6}" for i in range(60)))
    report = prepare(raw, tmp_path / "out", positive="rating>=4")
    assert report.schema.label == "rating"
    assert report.schema.splits["train"].positives == 20
    (batch,) = RawReader(tmp_path / "out", [raw])
    assert batch.labels.sum() == 20
    with pytest.raises(ConfigError, match="condition on rating, but --label is user"):
        prepare(raw, tmp_path / "other", positive="rating>=4", label="user")
    with pytest.raises(FormatError, match="not a number"):
        prepare(raw, tmp_path / "other", positive=">=4", label="user")
