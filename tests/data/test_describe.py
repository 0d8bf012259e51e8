"""Figures of a dataset, exact to the lookup."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.dataset import Dataset, describe, skew
from hotbed.data.prepare.prepare import prepare
from tests.data.small import ROWS, make_dataset


def test_sizes_and_positives(tmp_path):
    make_dataset(tmp_path / "d", {"train": [20, 10], "test": [0]}, bags=True)
    found = describe(Dataset.open(tmp_path / "d"))
    assert found["splits"] == {
        "train": {"rows": 30, "positive_rate": pytest.approx(1 / 3)},
        "test": {"rows": 0, "positive_rate": None},
    }
    assert list(found["splits"]) == ["train", "test"]
    assert [(feature["name"], feature["rows"]) for feature in found["features"]] == [
        ("a", ROWS),
        ("b", 50),
        ("tags", ROWS),
    ]
    assert found["total"]["rows"] == 2 * ROWS + 50
    assert found["total"]["distinct"] == 3 * (ROWS - 1)
    json.dumps(found, allow_nan=False)


def test_prepared_counts_are_the_look_ups_of_train(tmp_path):
    rows = [("x" if i % 4 else f"rare{i}", "1" if i % 2 else "0") for i in range(200)]
    (tmp_path / "raw.csv").write_text("site,label\n" + "".join(f"{site},{label}\n" for site, label in rows))
    prepare([tmp_path / "raw.csv"], tmp_path / "d", split={"train": 100, "test": 100})
    (site,) = describe(Dataset.open(tmp_path / "d"))["features"]
    assert (site["distinct"], site["lookups"], site["top_share"]) == (26, 100, 0.75)
    assert site["curve"][0] == [1 / 26, 0.75]
    assert site["curve"][-1] == [1.0, 1.0]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10**9), max_size=500))
def test_skew_against_a_plain_count(counts):
    found = skew(np.asarray(counts, dtype=np.int64))
    falling = sorted(counts, reverse=True)
    assert found["distinct"] == len(counts)
    assert found["lookups"] == sum(counts)
    if not counts:
        assert found["top_share"] is None
        return
    top = -(-len(counts) * 15 // 1000)
    assert found["top_share"] == sum(falling[:top]) / sum(falling)
    assert len(found["curve"]) <= 64
    for ids, lookups in found["curve"]:
        assert lookups == sum(falling[: round(ids * len(counts))]) / sum(falling)
    assert found["curve"][-1] == [1.0, 1.0]
    assert found["curve"] == sorted(found["curve"])
