"""What ids stand for in the raw log, held against raw values that come to them."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.cli import main
from hotbed.data.dataset import Dataset
from hotbed.forecast.explain.explain import meanings


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    home = tmp_path_factory.mktemp("meaning")
    lines = [f"{k % 2},{'' if k % 9 == 0 else k % 50 - 10},w{k % 4}" for k in range(400)]
    (home / "log.csv").write_text("\n".join(["click,age,word", *lines]) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["prepare", str(home / "log.csv"), "--out", str(home / "data"), "--integers", "bucket"])
    assert not ended.value.code
    return Dataset.open(home / "data")


def test_buckets_are_ranges_that_hold_their_values(dataset):
    (feature,) = [one for one in dataset.schema.features if one.name == "age_bucket"]
    found = meanings(dataset, feature, range(feature.rows))
    assert found[0] == "values that train does not have"
    assert found.count("missing values") == 1
    assert found.count("values between -1 and 1") == 1
    covered = set()
    for text in found[1:]:
        if match := re.fullmatch(r"values from (-?)(\d+) to (?:below|above) -?(\d+)", text):
            sign = -1 if match[1] else 1
            covered |= {sign * value for value in range(int(match[2]), int(match[3]))}
    assert covered >= set(range(-10, 40)) - {0}


def test_texts_are_not_made_up(dataset):
    (feature,) = [one for one in dataset.schema.features if one.name == "word"]
    assert meanings(dataset, feature, [0, 1, 4, 99]) == ["values that train does not have", "", "", ""]


def test_whole_numbers_are_themselves(tmp_path):
    pq.write_table(pa.table({"click": [0, 1] * 30, "ad": [7, 7, 10_000_000_019] * 20}), tmp_path / "log.parquet")
    with pytest.raises(SystemExit):
        main(["prepare", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "data"), "--ids", "ad"])
    dataset = Dataset.open(tmp_path / "data")
    assert meanings(dataset, dataset.schema.features[0], [1, 2]) == ["value 7", "value 10000000019"]
