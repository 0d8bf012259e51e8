"""Click logs of every shape: published sizes, skew, drift, bags, hours, and a best AUC that is what it says."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.synthetic import MISSING_ID, SHAPES, ClickLog, find_shape
from hotbed.data.synthetic.kernels import _turn
from hotbed.data.synthetic.shapes import FRACTION_BITS, KNOTS, inverse_cdf, probabilities
from hotbed.data.synthetic.write import bin_chances, binned_auc
from hotbed.errors import ConfigError

ROWS = 60_000
GOLDEN = {
    "criteo-like": "72673821f796f113",
    "criteo-1tb-like": "e32447218ed8d07c",
    "criteo-1tb-bags-like": "e32447218ed8d07c",
    "avazu-like": "1bb3a99baf6b52ca",
}


@pytest.fixture(scope="module")
def logs():
    return {name: ClickLog(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def samples(logs):
    return {name: log.rows(0, ROWS) for name, log in logs.items()}


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_the_log_of_a_seed_never_changes(name, logs):
    """If this fails on purpose, raise the generation of the shape, or old caches will be taken for the new log."""
    rows = logs[name].rows(199_000, 201_000)
    digest = hashlib.sha256(rows.ids.tobytes() + rows.integers.tobytes() + rows.labels.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[name]


def test_published_sizes():
    cardinality = {name: sum(column.cardinality for column in shape.ids) for name, shape in SHAPES.items()}
    assert cardinality == {
        "criteo-like": 33_762_577,
        "criteo-1tb-like": 187_767_399,
        "criteo-1tb-bags-like": 187_767_399,
        "avazu-like": 9_449_445,
    }
    assert {name: (len(shape.ids), len(shape.integers)) for name, shape in SHAPES.items()} == {
        "criteo-like": (26, 13),
        "criteo-1tb-like": (26, 13),
        "criteo-1tb-bags-like": (26, 13),
        "avazu-like": (22, 0),
    }
    assert sum(column.bag for column in SHAPES["criteo-1tb-bags-like"].ids) == 214
    assert max(column.bag for column in SHAPES["criteo-1tb-bags-like"].ids) == 100


def drawn_columns():
    return [column for shape in SHAPES.values() for column in shape.ids if not column.clock]


def test_every_id_can_be_drawn():
    """A step between knots is cut into 2 ** 20 pieces: none may jump over a rank, and the last must end at the cardinality."""
    for column in drawn_columns():
        knots = inverse_cdf(column)
        assert len(knots) == KNOTS + 1
        assert knots[0] == 0
        assert knots[-1] == column.cardinality << FRACTION_BITS
        assert np.diff(knots).min() >= 0
        assert np.diff(knots).max() < 1 << (20 + FRACTION_BITS), column
    column = SHAPES["criteo-1tb-like"].ids[19]  # the most ids of all
    knots = inverse_cdf(column)
    reached = (knots[-2] + ((knots[-1] - knots[-2]) * np.arange(1 << 20) >> 20)) >> FRACTION_BITS
    assert np.array_equal(np.unique(reached), np.arange(knots[-2] >> FRACTION_BITS, column.cardinality))


@given(cardinality=st.integers(1, 5_000), day=st.integers(0, 1_000))
def test_a_day_permutes_the_ids(cardinality, day):
    ids = np.arange(cardinality) << FRACTION_BITS
    _turn(ids, np.empty(cardinality), day, cardinality)
    assert np.array_equal(np.sort(ids), np.arange(cardinality))


@pytest.mark.parametrize("column", [column for column in SHAPES["avazu-like"].ids if column.top], ids=lambda c: c.name)
def test_the_top_id_has_its_share(column):
    assert probabilities(column, column.cardinality).sum() == pytest.approx(1, abs=1e-6)
    knots = inverse_cdf(column) >> FRACTION_BITS
    assert np.mean(knots[:-1] == 0) == pytest.approx(column.top, abs=2 / KNOTS)


def test_avazu_has_the_skew_of_the_real_log(samples):
    """The first 8,999 real rows: distinct ids of some columns, and the share of the most frequent 1.5 %."""
    ids = dict(zip([column.name for column in SHAPES["avazu-like"].ids], samples["avazu-like"].ids[:, :8_999]))
    real = {"device_ip": 6678, "device_id": 975, "device_model": 1111, "site_id": 361, "C14": 259, "hour": 1}
    for name, distinct in real.items():
        assert len(np.unique(ids[name])) == pytest.approx(distinct, rel=0.15), name
    counts = np.concatenate([np.unique(values, return_counts=True)[1] for values in ids.values()])
    falling = np.sort(counts)[::-1]
    assert falling[: int(0.015 * len(falling))].sum() / falling.sum() == pytest.approx(0.87, abs=0.03)
    assert np.mean(ids["device_id"] == 0) == pytest.approx(0.873, abs=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_clicks_and_the_best_auc(name, logs, samples):
    """The AUC of the true probability is what follows from the probabilities alone."""
    shape, rows = SHAPES[name], samples[name]
    last = logs[name].rows((shape.days - 1) * shape.rows_per_day, (shape.days - 1) * shape.rows_per_day + ROWS)
    for part in (rows, last):
        assert part.labels.mean() == pytest.approx(shape.positive_rate, rel=0.06)
        order = np.sort(part.probability)
        below = np.cumsum(1 - order) - (1 - order)
        bayes = np.sum(order * below) / (order.sum() * (1 - order).sum())
        positives = float(part.labels.sum())
        assert binned_auc(bin_chances(part)) == pytest.approx(bayes, abs=float(2 * 0.3 / np.sqrt(positives)))
        assert 0.775 < bayes < 0.825


@settings(max_examples=15)
@given(
    name=st.sampled_from(list(SHAPES)), start=st.integers(0, 500), length=st.integers(0, 300), seed=st.integers(0, 1)
)
def test_parts_of_days_of_any_length_are_parts_of_the_whole(name, start, length, seed):
    log = ClickLog(SHAPES[name], seed, rows_per_day=97)
    whole = log.rows(0, 900)
    assert same(log.rows(start, start + length, threads=2), [values[..., start : start + length] for values in whole])


def test_seeds_and_shapes_differ(samples):
    other = ClickLog(SHAPES["avazu-like"], seed=1).rows(0, 1000)
    assert not np.array_equal(other.ids, samples["avazu-like"].ids[:, :1000])
    assert not np.array_equal(other.labels, samples["avazu-like"].labels[:1000])
    assert not np.array_equal(samples["criteo-like"].labels, samples["criteo-1tb-like"].labels)
    assert not np.array_equal(samples["criteo-like"].integers, samples["criteo-1tb-like"].integers)


def test_the_hour_is_the_clock(logs):
    log = logs["avazu-like"]
    hours = log.rows(0, 24_000, threads=2).ids[0]
    assert np.all(np.diff(hours) >= 0)
    assert hours[0] == 0
    assert hours[-1] == 2  # 240,000 rows a day
    (last,) = log.rows(10 * log.rows_per_day - 1, 10 * log.rows_per_day).ids[0]
    (again,) = log.rows(10 * log.rows_per_day, 10 * log.rows_per_day + 1).ids[0]
    assert (last, again) == (239, 0)


def test_popularity_drifts(logs):
    """Ids 1,024 .. 2,047 of device_ip share their lookups otherwise after five days, and alike within a day."""
    log, column = logs["avazu-like"], 10
    rare = []
    for start in (0, 120_000, 5 * log.rows_per_day):
        ids = log.rows(start, start + 120_000).ids[column]
        rare.append(np.bincount(ids[(ids >= 1024) & (ids < 2048)] % 1024 // 64, minlength=16))
    assert np.corrcoef(rare[0], rare[1])[0, 1] > 0.6
    assert np.corrcoef(rare[0], rare[2])[0, 1] < 0.3


def test_bags(logs, samples):
    log, shape = logs["criteo-1tb-bags-like"], SHAPES["criteo-1tb-bags-like"]
    assert same(samples["criteo-1tb-bags-like"], samples["criteo-1tb-like"])  # the same log, seen with bags
    column = 20
    first = samples["criteo-1tb-bags-like"].ids[column][:5_000]
    values, offsets = log.bags(column, first)
    assert np.array_equal(np.diff(offsets), np.where(first == MISSING_ID, 0, 100))
    bags = values.reshape(-1, 100)
    present = first[first != MISSING_ID]
    assert np.array_equal(bags[:, 0], present)
    _, places, inverse = np.unique(present, return_index=True, return_inverse=True)
    assert np.array_equal(bags, bags[places][inverse])  # the first id says the rest
    others = bags[places][:, 1:]
    assert others.min() >= 0
    assert others.max() < shape.ids[column].cardinality
    assert np.bincount(
        others.ravel() * 10 // shape.ids[column].cardinality, minlength=10
    ) / others.size == pytest.approx(0.1, abs=0.01)
    assert log.bags(column, first[:0]).offsets.tolist() == [0]


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"'criteo' cannot be generated; these can: criteo-like, .*avazu-like"):
        find_shape("criteo")
