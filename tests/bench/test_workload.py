import math
from dataclasses import replace

import pytest
import torch

from hotbed.bench.setting import IDS, KAGGLE_ROWS, Setting, scaled_rows
from hotbed.bench.workload import id_of_row, make_workload, offsets_of, values_of, zipf_ids
from hotbed.data.synthetic.shapes import BAG_SIZES

CPU = torch.device("cpu")


def setting_of(rows, batch, ids="single"):
    return Setting(CPU, rows=rows, batch=batch, ids=ids)


@pytest.mark.parametrize("kind", ["single", "dynamic"])
def test_both_forms_hold_the_same_ids(kind):
    workload = make_workload(setting_of((7, 100, 1), 33, kind), 3)
    for flat, matrix in zip(workload.flat, workload.batches):
        assert matrix.shape == (33, 3)
        assert matrix.is_contiguous()
        rows = flat.values.view(3, 33).t()
        assert torch.equal(matrix, rows if kind == "single" else id_of_row(rows))
        assert flat.offsets.tolist() == list(range(100))
        assert flat.starts == (0, 33, 66, 99)


@pytest.mark.parametrize("kind", ["bags", "varying"])
def test_both_forms_hold_the_same_bags(kind):
    setting = setting_of((7, 100, 9, 30), 33, kind)
    made = make_workload(setting, 3)
    for flat, batch in zip(made.flat, made.batches):
        column = 0
        for f, size in enumerate(setting.bag_sizes):
            values, offsets = values_of(flat, f), offsets_of(flat, f, 33)
            if f"C{f}" in batch.bags:
                assert torch.equal(batch.bags[f"C{f}"].values, values)
                assert torch.equal(batch.bags[f"C{f}"].offsets, offsets)
            else:
                assert torch.equal(batch.ids[:, column], values)
                column += 1
            lengths = offsets.diff()
            assert int(lengths.max()) <= (size if kind == "bags" else 2 * size)
            assert (lengths.unique().numel() > 1) == (kind == "varying")
        assert column == batch.ids.shape[1] == (1 if kind == "bags" else 0)


def test_bags_are_mlperfs():
    assert sum(BAG_SIZES) == 214
    assert len(BAG_SIZES) == len(KAGGLE_ROWS)
    assert setting_of(KAGGLE_ROWS, 8, "varying").ids_per_sample == 214
    assert setting_of(KAGGLE_ROWS, 8).ids_per_sample == 26
    made = make_workload(setting_of((50,) * 26, 64, "varying"), 8)
    assert sum(flat.values.numel() for flat in made.flat) / (8 * 64) == pytest.approx(214, rel=0.1)


@pytest.mark.parametrize("kind", IDS)
def test_ranks_share_a_batch(kind):
    setting = setting_of((7, 100, 9, 30), 33, kind)
    whole = make_workload(setting, 2)
    parts = [whole.part(rank, 3) for rank in range(3)]
    assert [part.batch for part in parts] == [11, 11, 11]
    for number, batch in enumerate(whole.batches):
        pieces = [part.batches[number] for part in parts]
        if isinstance(batch, torch.Tensor):
            assert torch.equal(torch.cat(pieces), batch)
            continue
        assert torch.equal(torch.cat([piece.ids for piece in pieces]), batch.ids)
        for name, bag in batch.bags.items():
            assert torch.equal(torch.cat([piece.bags[name].values for piece in pieces]), bag.values)
            lengths = [piece.bags[name].offsets.diff() for piece in pieces]
            assert torch.equal(torch.cat(lengths), bag.offsets.diff())
            assert all(int(piece.bags[name].offsets[0]) == 0 for piece in pieces)


@pytest.mark.parametrize("kind", IDS)
def test_a_longer_run_begins_with_the_ids_of_a_shorter_one(kind):
    short, long = (make_workload(setting_of((7, 100), 16, kind), count) for count in (2, 5))
    assert all(torch.equal(one.values, other.values) for one, other in zip(short.flat, long.flat))
    assert not torch.equal(long.flat[0].values, long.flat[1].values)


def test_dynamic_ids_differ_and_use_all_bits():
    ids = id_of_row(torch.arange(100_000))
    assert ids.unique().numel() == 100_000
    assert int(ids.min()) < -(2**62)
    assert int(ids.max()) > 2**62


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
    apart = [make_workload(setting_of((n,), 500), 1).distinct_keys() for n in (1, 1, 20)]
    together = make_workload(setting_of((1, 1, 20), 500), 1).distinct_keys()
    assert apart[:2] == [1, 1]
    assert 2 + 15 < together <= 2 + 20
    flatter = replace(setting_of((5000,), 500), zipf=0.5)
    assert make_workload(flatter, 1).distinct_keys() > make_workload(replace(flatter, zipf=1.5), 1).distinct_keys()


def test_scaled_tables_keep_small_ones():
    rows = scaled_rows(0.001)
    assert len(rows) == 26
    assert rows[8] == KAGGLE_ROWS[8] == 3
    assert rows[2] == round(KAGGLE_ROWS[2] / 1000)
    assert rows[0] == 100
    assert scaled_rows(1.0) == KAGGLE_ROWS
