import math

import torch

from hotbed.bench.workload import KAGGLE_ROWS, make_workload, scaled_rows, zipf_ids

CPU = torch.device("cpu")


def test_both_shapes_hold_the_same_ids():
    workload = make_workload((7, 100, 1), 33, 3, CPU)
    for flat, matrix in zip(workload.flat, workload.matrices):
        assert matrix.shape == (33, 3)
        assert matrix.is_contiguous()
        assert torch.equal(matrix.t().reshape(-1), flat)


def test_a_longer_run_begins_with_the_ids_of_a_shorter_one():
    short, long = make_workload((7, 100), 16, 2, CPU), make_workload((7, 100), 16, 5, CPU)
    assert all(map(torch.equal, short.flat, long.flat))
    assert not torch.equal(long.flat[0], long.flat[1])


def test_ids_follow_a_bounded_zipf_law():
    rows = 1009
    counts = torch.bincount(zipf_ids(rows, 400_000, 1.05, torch.Generator().manual_seed(0)), minlength=rows)
    top = counts.sort(descending=True).values.double() / 400_000
    mass = [(k + 1) ** -0.05 - (k + 2) ** -0.05 for k in range(rows - 1)]  # of rank k, before scaling
    scale = 1 / (1 - rows**-0.05)
    for rank in (0, 1, 9):
        assert math.isclose(float(top[rank]), mass[rank] * scale, rel_tol=0.05)


def test_frequent_ids_are_scattered():
    counts = torch.bincount(zipf_ids(10_007, 100_000, 1.05, torch.Generator().manual_seed(0)), minlength=10_007)
    hot = counts.sort(descending=True).indices[:20].sort().values
    assert int((hot[1:] - hot[:-1]).median()) > 50


def test_distinct_keys_count_tables_apart():
    apart = [make_workload((n,), 500, 1, CPU).distinct_keys() for n in (1, 1, 20)]
    together = make_workload((1, 1, 20), 500, 1, CPU).distinct_keys()
    assert apart[:2] == [1, 1]
    assert 2 + 15 < together <= 2 + 20


def test_scaled_tables_keep_small_ones():
    rows = scaled_rows(0.001)
    assert len(rows) == 26
    assert rows[8] == KAGGLE_ROWS[8] == 3
    assert rows[2] == round(KAGGLE_ROWS[2] / 1000)
    assert rows[0] == 100
    assert scaled_rows(1.0) == KAGGLE_ROWS
