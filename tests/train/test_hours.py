"""Hours of a followed log: exact enough, the same after a resume, and no larger with more rows."""

import numpy as np
import pytest
import torch

from hotbed.data.follow.loader import BUCKETS, BatchFacts, HourPart, Place
from hotbed.ids import IdCounts
from hotbed.train.hours import Hours, divergence, stability_index
from hotbed.train.metrics import measure

HOUR = 472_222


def facts_of(hour, rows, late=None, watermark=None, buckets=None):
    """A batch of one hour, or of two: `late` marks the rows of the one before."""
    counts = np.zeros((2, BUCKETS), np.int64) if buckets is None else buckets
    unknown = np.array([1, 0])
    parts = [HourPart(hour, None if late is None else ~late, unknown, counts)]
    if late is not None:
        parts.insert(0, HourPart(hour - 1, late, unknown * 0, counts * 0))
    after = Place(0, 1, watermark if watermark is not None else hour * 3600)
    return BatchFacts(after, rows, tuple(parts), 0)


def draw(seed, rows=2000):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.2, rows).astype(np.float32)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def hours():
    return Hours(["user", "ad"], ["user"])


def test_an_hour_has_the_metrics_of_its_rows():
    one, batches = hours(), [draw(seed) for seed in range(3)]
    for logits, labels in batches:
        assert not one.add(facts_of(HOUR, len(labels)), logits, labels)
    (record,) = one.close((HOUR + 1) * 3600 + 600, {})
    labels, logits = (np.concatenate([pair[n].numpy() for pair in batches]) for n in (1, 0))
    exact = measure(labels, logits)
    assert record["hour"] == "2023-11-14 22:00"
    assert record["hour_samples"] == exact.samples
    assert record["positives"] == exact.positives
    assert record["auc"] == pytest.approx(exact.auc, abs=2e-5)
    assert record["log_loss"] == pytest.approx(exact.log_loss, rel=1e-6)
    assert record["calibration"] == pytest.approx(exact.calibration, rel=1e-6)


def test_bad_rows_count_in_the_last_hour_of_their_batch():
    one, (logits, labels) = hours(), draw(0, 10)
    late = np.arange(10) < 4
    one.add(facts_of(HOUR, 10, late)._replace(bad_rows=3), logits, labels)
    one.add(facts_of(HOUR, 10)._replace(bad_rows=2), logits, labels)
    found = one.close(HOUR * 3600, {}, at_end=True)
    assert [record["bad_rows"] for record in found] == [0, 5]


def test_an_hour_is_closed_ten_minutes_after_its_end_and_later_rows_count_in_the_next():
    one, (logits, labels) = hours(), draw(0, 10)
    one.add(facts_of(HOUR, 10), logits, labels)
    end = (HOUR + 1) * 3600
    assert not one.add(facts_of(HOUR + 1, 10, watermark=end + 599), logits, labels)
    assert one.add(facts_of(HOUR + 1, 10, watermark=end + 600), logits, labels)
    assert [line["hour_samples"] for line in one.close(end + 600, {})] == [10]
    late = np.arange(10) < 4
    one.add(facts_of(HOUR + 1, 10, late, end + 700), logits, labels)
    (last,) = one.close(end + 700, {}, at_end=True)
    assert (last["hour_samples"], last["late_rows"]) == (30, 4)


def test_a_resumed_run_writes_the_same_records():
    whole, first = hours(), hours()
    batches = [(facts_of(HOUR + n // 3, 500, buckets=np.full((2, BUCKETS), n)), *draw(n, 500)) for n in range(9)]
    for batch in batches[:4]:
        first.add(*batch)
    document, tensors = first.state()
    second = hours()
    second.load_state(document, {name: one.clone() for name, one in tensors.items()})
    for batch in batches:
        whole.add(*batch)
    for batch in batches[4:]:
        second.add(*batch)
    counts = {"ad": IdCounts(10, 3, 1, 0)}
    assert repr(whole.close(0, counts, at_end=True)) == repr(second.close(0, counts, at_end=True))


def test_memory_of_an_hour_does_not_grow_with_its_rows():
    one = hours()
    sizes = []
    for seed in range(4):
        one.add(facts_of(HOUR, 2000), *draw(seed))
        sizes.append(sum(tensor.nbytes for tensor in one.state()[1].values()))
    assert len(set(sizes)) == 1


def test_drift_and_new_ids_against_the_hour_before():
    one, (logits, labels) = hours(), draw(0)
    same = np.zeros((2, BUCKETS), np.int64)
    same[:, :4] = 100
    other = same.copy()
    other[1] = np.roll(same[1], 8)
    one.add(facts_of(HOUR, 2000, buckets=same), logits, labels)
    one.add(facts_of(HOUR + 1, 2000, buckets=other), logits + 1, labels)
    counts = {"ad": IdCounts(100, 5, 10, 0)}
    before, after = one.close(0, counts, at_end=True)
    assert before["drift"] == {}
    assert before["new_ids"] == {"user": 1 / 400, "ad": 0.15}
    assert after["drift"]["score"] > 0.25
    assert after["drift"]["ids"] == pytest.approx(0.5)
    assert after["drift_most"] == {"ad": pytest.approx(1.0), "user": pytest.approx(0.0)}
    assert after["new_ids"] == {"user": 1 / 400}  # no lookups of dynamic ids since


def test_measures_of_drift_are_zero_where_nothing_moved():
    counts = np.array([5, 0, 7])
    assert stability_index(counts, counts) == 0
    assert divergence(counts, counts * 3) == pytest.approx(0)
    assert divergence(np.array([1, 0]), np.array([0, 9])) == pytest.approx(1)
    assert np.isnan(divergence(np.zeros(2), counts[:2]))
