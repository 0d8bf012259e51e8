"""The made-up click log: reproducible, of Criteo's shape, with a signal whose best AUC is known."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.arrow_file import read_index
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.data.synthetic import MISSING_ID, MISSING_INTEGER, SHAPES, ClickLog, write_dataset, write_tsv
from hotbed.data.synthetic.shapes import ID_COLUMNS, INTEGER_COLUMNS, MISSING_SHARE, inverse_cdf, probabilities
from hotbed.data.synthetic.write import binned_auc
from hotbed.errors import ConfigError, DataError

ROWS = 100_000


def criteo_like(seed=0, rows_per_day=None):
    return ClickLog(SHAPES["criteo-like"], seed, rows_per_day)


@pytest.fixture(scope="module")
def log():
    return criteo_like()


@pytest.fixture(scope="module")
def sample(log):
    """A slice of the train days at the default size."""
    return log.rows(0, ROWS, threads=2)


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def cut(rows, start, stop):
    return type(rows)(*(values[..., start:stop] for values in rows))


@settings(max_examples=20)
@given(start=st.integers(0, ROWS - 1), length=st.integers(0, 20_000), threads=st.integers(1, 4))
def test_any_range_is_a_part_of_the_whole(log, sample, start, length, threads):
    stop = min(start + length, ROWS)
    assert same(log.rows(start, stop, threads), cut(sample, start, stop))


def test_the_log_of_a_seed_never_changes(log):
    """If this fails on purpose, raise the generation of the shape, or old caches will be taken for the new log."""
    rows = log.rows(199_000, 201_000)  # across a change of day
    digest = hashlib.sha256(rows.ids.tobytes() + rows.integers.tobytes() + rows.labels.tobytes())
    assert digest.hexdigest()[:16] == "72673821f796f113"
    assert rows.probability[:3] == pytest.approx(
        [0.2061541976320621, 0.12690392789607743, 0.18270993756914558], abs=1e-9
    )


def test_seeds_differ(sample):
    other = criteo_like(seed=1).rows(0, 1000)
    for mine, theirs in zip(cut(sample, 0, 1000), other, strict=True):
        assert not np.array_equal(mine, theirs)


def test_far_rows_and_empty_ranges(log):
    assert log.rows(10**12, 10**12 + 5).labels.shape == (5,)
    assert log.rows(7, 7).ids.shape == (26, 0)
    with pytest.raises(ConfigError, match="0 <= start <= stop"):
        log.rows(5, 4)
    with pytest.raises(ConfigError, match="rows_per_day is 0"):
        criteo_like(rows_per_day=0)


def test_shape_of_the_columns(sample):
    assert sample.labels.mean() == pytest.approx(0.256, abs=0.01)
    for number, column in enumerate(ID_COLUMNS):
        ids = sample.ids[number]
        assert np.mean(ids == MISSING_ID) == pytest.approx(MISSING_SHARE.get(column.missing, 0), abs=0.01)
        assert ids.max() < column.cardinality
        if column.cardinality < 30:
            assert len(np.unique(ids[ids >= 0])) == column.cardinality
    for number, column in enumerate(INTEGER_COLUMNS):
        values = sample.integers[number]
        present = values[values != MISSING_INTEGER]
        assert 1 - len(present) / ROWS == pytest.approx(MISSING_SHARE.get(column.missing, 0), abs=0.01)
        assert present.min() >= column.quantiles[0]
        assert present.max() <= column.quantiles[-1]
        assert np.quantile(present, 0.95) == pytest.approx(column.quantiles[5], rel=0.1)


def test_the_skew_is_that_of_the_real_log(sample):
    """The first 60,000 real rows have about 160,000 distinct ids; the most frequent 1.5 % take 76 % of the lookups."""
    counts = [np.unique(ids[:60_000], return_counts=True)[1] for ids in sample.ids]
    together = np.sort(np.concatenate(counts))[::-1]
    assert len(together) == pytest.approx(160_000, rel=0.1)
    assert together[: int(0.015 * len(together))].sum() / together.sum() == pytest.approx(0.76, abs=0.03)


@pytest.mark.parametrize("column", [ID_COLUMNS[2], ID_COLUMNS[8], ID_COLUMNS[15]], ids=lambda column: column.name)
def test_the_inverse_gives_the_power_law(column):
    """The share of the first k ids by their probabilities is where the inverse passes k."""
    ranks = inverse_cdf(column) / 2**16
    assert ranks[0] == 0
    assert ranks[-1] == column.cardinality
    assert np.all(np.diff(ranks) >= 0)
    for k in (1, 2, 50, 4096, 100_000):
        if k < column.cardinality:
            level = np.interp(k, ranks, np.linspace(0, 1, len(ranks)))
            assert level == pytest.approx(probabilities(column, k).sum(), abs=2e-3)


def test_popularity_drifts_within_octaves(log):
    """C3's ids 64 .. 127 share their lookups differently after ten days; their sum stays."""
    first, later = (log.rows(day * log.rows_per_day, day * log.rows_per_day + 60_000).ids[2] for day in (0, 10))
    shares = [np.bincount(ids[(ids >= 64) & (ids < 128)] - 64, minlength=64) for ids in (first, later)]
    assert shares[0].sum() == pytest.approx(shares[1].sum(), rel=0.1)
    assert np.corrcoef(*shares)[0, 1] < 0.5
    same_day = log.rows(60_000, 120_000).ids[2]
    again = np.bincount(same_day[(same_day >= 64) & (same_day < 128)] - 64, minlength=64)
    assert np.corrcoef(shares[0], again)[0, 1] > 0.5


def test_the_best_auc(log, sample):
    from sklearn.metrics import roc_auc_score

    best = roc_auc_score(sample.labels, sample.probability)
    assert 0.795 < best < 0.815
    later = log.rows(11 * log.rows_per_day, 11 * log.rows_per_day + ROWS)
    assert 0.795 < roc_auc_score(later.labels, later.probability) < 0.815
    for seed in (1, 2):
        rows = criteo_like(seed).rows(0, ROWS)
        assert 0.79 < roc_auc_score(rows.labels, rows.probability) < 0.82


def test_probabilities_are_those_of_the_labels(sample):
    """Calibrated in every tenth of the rows by probability."""
    for part in np.array_split(np.argsort(sample.probability), 10):
        expected = sample.probability[part]
        error = np.sqrt(np.sum(expected * (1 - expected))) / len(part)
        assert abs(sample.labels[part].mean() - expected.mean()) < 4 * error


def test_binned_auc_is_the_auc():
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 1000), random.integers(0, 30, 1000)
    counts = np.stack([np.bincount(scores[labels == label], minlength=30) for label in (0, 1)])
    assert binned_auc(counts) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small dataset directory and the text of the same rows."""
    directory = tmp_path_factory.mktemp("written")
    seen = []
    write_dataset(
        directory / "d",
        train=40_000,
        valid=1,
        test=9_000,
        seed=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (89_001, 89_001)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for split, start, stop in (("train", 0, 40_000), ("valid", 40_000, 40_001), ("test", 40_001, 49_001)):
        write_tsv(directory / f"{split}.tsv", start, stop, seed=3)
    return directory


def test_the_directory_holds_the_log(written):
    dataset = Dataset.open(written / "d")
    assert [group.rows for group in dataset.split("train")] == [16384, 16384, 40_000 - 2 * 16384]
    rows = criteo_like(3).rows(40_001, 49_001)
    (batch,) = Loader(dataset, "test", batch_size=9_000).epoch(0)
    assert np.array_equal(batch.labels.numpy(), rows.labels)
    assert batch.ids.shape == (9_000, 26)
    assert (batch.ids[:, 2] == 0).float().mean() > 0.2  # C3: many ids of test were never seen in train
    for number, feature in enumerate(dataset.schema.features):
        ids, counts = dataset.counts(feature.name)
        assert counts.sum() == 40_000
        assert np.all(np.diff(counts) <= 0)
        assert len(np.unique(ids)) == len(ids) == feature.rows - 1 == feature.distinct
        known = batch.ids[:, number].numpy()
        same_row = known[:, None][:200] == known[None, :200]
        same_id = rows.ids[number][:200, None] == rows.ids[number][None, :200]
        seen = known[:200] > 0
        assert np.array_equal(same_row[seen][:, seen], same_id[seen][:, seen])


def test_the_best_auc_is_in_the_schema(written):
    from sklearn.metrics import roc_auc_score

    schema = Dataset.open(written / "d").schema
    rows = criteo_like(3).rows(40_001, 49_001)
    assert schema.best_auc["test"] == pytest.approx(roc_auc_score(rows.labels, rows.probability), abs=1e-5)
    assert set(schema.best_auc) == {"train", "test"}  # one row has no AUC
    assert schema.notes == {"generator": "criteo-like", "seed": 3, "rows_per_day": 200_000}


def test_preparing_the_text_gives_the_same_dataset(written):
    """The generator's directory is what `prepare` makes of the generator's text, value for value."""
    prepare([(split, written / f"{split}.tsv") for split in ("train", "valid", "test")], written / "p", format="criteo")
    ours, theirs = Dataset.open(written / "d"), Dataset.open(written / "p")
    for mine, other in zip(ours.schema.features, theirs.schema.features, strict=True):
        assert mine == dataclasses.replace(other, distinct_estimate=mine.distinct)  # ours is exact, theirs a sketch's
    assert ours.schema.raw_format == theirs.schema.raw_format
    for mine, other in zip(ours.schema.dense, theirs.schema.dense, strict=True):
        assert (mine.name, mine.transform) == (other.name, other.transform)
        assert mine.mean == pytest.approx(other.mean, rel=1e-9)
        assert mine.scale == pytest.approx(other.scale, rel=1e-9)
    for feature in ours.schema.features:
        assert all(np.array_equal(a, b) for a, b in zip(ours.counts(feature.name), theirs.counts(feature.name)))
    for split in ("train", "valid", "test"):
        (left,) = Loader(ours, split, batch_size=40_000).epoch(0)
        (right,) = Loader(theirs, split, batch_size=40_000).epoch(0)
        assert np.array_equal(left.labels, right.labels)
        assert np.array_equal(left.ids, right.ids)
        np.testing.assert_allclose(left.dense, right.dense, rtol=0, atol=1e-6)


def test_the_text_holds_the_values(written):
    rows = criteo_like(3).rows(40_001, 40_301)
    lines = (written / "test.tsv").read_text().splitlines()[:300]
    names = [{} for _ in range(26)]
    for number, line in enumerate(lines):
        fields = line.split("\t")
        assert float(fields[0]) == rows.labels[number]
        expected = ["" if value == MISSING_INTEGER else str(value) for value in rows.integers[:, number]]
        assert fields[1:14] == expected
        for column, name in enumerate(fields[14:]):
            id_ = int(rows.ids[column, number])
            assert (name == "") == (id_ == MISSING_ID)
            assert names[column].setdefault(id_, name) == name
    for column in names:
        assert len(set(column.values())) == len(column)


def test_any_number_of_threads_writes_the_same_bytes(tmp_path):
    for threads in (1, 3):
        write_dataset(tmp_path / f"{threads}", train=2_000, valid=0, test=500, threads=threads)
    one, three = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "1", tmp_path / "3")
    )
    assert one == three
    assert "valid" not in json.loads(one[next(path for path in one if path.name == "schema.json")])["splits"]


def test_files_have_plain_values_of_four_bytes(written):
    """What the loader's speed rests on."""
    index = read_index(written / "d" / "train" / "part-00000.arrow")
    assert set(map(str, index.schema.types)) == {"float", "int32"}
    for place in index.places:
        assert place.length < 4.2 * place.rows * len(index.schema)


def test_wrong_sizes_and_places(tmp_path):
    with pytest.raises(ConfigError, match="train needs at least 1 row"):
        write_dataset(tmp_path / "d", train=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_dataset(tmp_path / "file", train=10, valid=0, test=0)
    with pytest.raises(DataError, match="cannot be written"):
        write_tsv(tmp_path / "no" / "such" / "place", 0, 10)


def test_half_a_log_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotbed.data.synthetic.text_files.run_ahead", full)
    with pytest.raises(DataError, match="No space left"):
        write_tsv(tmp_path / "log.tsv", 0, 10)
    assert list(tmp_path.iterdir()) == []
