"""Which rows the data set's counts call hot."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.dataset import Dataset, hot_rows, num_warm
from hotbed.data.schema import IdFeature, Schema, Split


def make(directory, features, counts):
    """A dataset of nothing but counts files: {feature: [(id, count), ...]}."""
    (directory / "counts").mkdir(parents=True)
    Schema("label", (), tuple(features), {"train": Split((), ())}).save(directory)
    for name, lines in counts.items():
        ids, times = zip(*lines)
        table = pa.table({"id": np.array(ids, dtype=np.int64), "count": np.array(times, dtype=np.int64)})
        pq.write_table(table, directory / "counts" / f"{name}.parquet")
    return Dataset.open(directory)


def test_rows_of_every_mode(tmp_path):
    dataset = make(
        tmp_path / "d",
        [IdFeature("a", 4), IdFeature("b", 10, mode="hash"), IdFeature("c", 5, mode="direct")],
        {
            "a": [(777, 50), (-3, 7), (12, 1)],  # rows 1, 2, 3 of table a, whatever the raw ids are
            "b": [(21, 9), (3, 8), (-9, 6)],  # 21 and -9 share row 1: 15 uses
            "c": [(4, 20), (0, 2)],
        },
    )
    # by count: a1 50, c4 20, b1 15, b3 8, a2 7, c0 2, a3 1
    base_b, base_c = 4, 14
    assert hot_rows(dataset, 3).keys.tolist() == sorted([1, base_c + 4, base_b + 1])
    assert hot_rows(dataset, 5).keys.tolist() == sorted([1, base_c + 4, base_b + 1, base_b + 3, 2])
    every = hot_rows(dataset, 90)
    assert every.keys.tolist() == sorted([1, 2, 3, base_b + 1, base_b + 3, base_c, base_c + 4])
    assert every.uses.tolist() == [50, 7, 1, 15, 8, 2, 20]


@pytest.mark.parametrize("num_slots", [1, 10, 95])
def test_room_is_left_for_rows_that_come_and_go(tmp_path, num_slots):
    dataset = make(tmp_path / "d", [IdFeature("a", 200)], {"a": [(i, 500 - i) for i in range(150)]})
    hot = hot_rows(dataset, num_warm(num_slots, "static", 0.0))
    assert hot.keys.tolist() == list(range(1, 1 + int(0.9 * num_slots)))
