"""Metrics against scikit-learn, against counting every pair, and at the edges of what is defined."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import ConfigError, DataError, ShapeError
from hotbed.train.metrics import (
    CalibrationBin,
    Metrics,
    auc,
    auc_of_tensors,
    calibration,
    calibration_curve,
    log_loss,
    measure,
    normalized_entropy,
    pr_auc,
)

FLOATS = [np.float32, np.float64]
COARSE = st.integers(-4, 4).map(lambda k: k / 2)  # many ties
FINE = st.floats(-30, 30)
EXTREME = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def samples(draw, scores=COARSE | FINE, min_size=1):
    rows = draw(st.lists(st.tuples(st.integers(0, 1), scores), min_size=min_size, max_size=60))
    labels = np.array([label for label, _ in rows], dtype=draw(st.sampled_from([np.float32, np.int64, np.bool_])))
    return labels, np.array([score for _, score in rows], dtype=draw(st.sampled_from(FLOATS)))


def count_pairs(labels, scores) -> float:
    wins = Fraction(0)
    ups, downs = scores[labels == 1], scores[labels == 0]
    for up in ups:
        for down in downs:
            wins += Fraction(1) if up > down else Fraction(1, 2) if up == down else Fraction(0)
    return float(wins / (len(ups) * len(downs)))


def both_classes(labels) -> bool:
    return 0 < int(labels.sum()) < len(labels)


@settings(deadline=None, max_examples=200)
@given(samples(COARSE | FINE | EXTREME))
def test_auc_is_the_exact_share_of_ordered_pairs(drawn):
    from sklearn import metrics as sk

    labels, scores = drawn
    on_device = auc_of_tensors(torch.from_numpy(labels), torch.from_numpy(scores))
    if not both_classes(labels):
        assert math.isnan(auc(labels, scores))
        assert math.isnan(on_device)
        return
    assert on_device == auc(labels, scores)
    assert auc(labels, scores) == count_pairs(labels, scores)
    assert auc(labels, scores) == pytest.approx(sk.roc_auc_score(labels, scores.astype(np.float64)), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(samples(), st.randoms(use_true_random=False))
def test_auc_and_curve_do_not_depend_on_sample_order(drawn, random):
    labels, scores = drawn
    order = list(range(len(labels)))
    random.shuffle(order)
    assert auc(labels, scores) == pytest.approx(auc(labels[order], scores[order]), abs=0, nan_ok=True)
    assert calibration_curve(labels, scores, 5) == calibration_curve(labels[order], scores[order], 5)


@settings(deadline=None, max_examples=200)
@given(samples())
def test_loss_and_calibration_agree_with_scikit_learn(drawn):
    from sklearn import metrics as sk

    labels, logits = drawn
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = sk.log_loss(labels, np.stack([1 - probabilities, probabilities], axis=1), labels=[0, 1])
    found = measure(labels, logits)
    assert found.log_loss == pytest.approx(expected, rel=1e-3, abs=1e-12)  # scikit-learn loses digits in 1 - p
    assert found.log_loss == log_loss(labels, logits)
    if labels.any():
        assert found.calibration == pytest.approx(probabilities.sum() / labels.sum(), rel=1e-12)
    if both_classes(labels):
        base = np.full(len(labels), labels.mean(dtype=np.float64))
        assert found.normalized_entropy == pytest.approx(found.log_loss / sk.log_loss(labels, base), rel=1e-12)


def test_loss_agrees_with_scikit_learn_tightly_where_it_is_exact():
    from sklearn import metrics as sk

    random = np.random.default_rng(5)
    labels, logits = random.integers(0, 2, 5000), random.normal(size=5000) * 2
    probabilities = 1 / (1 + np.exp(-logits))
    assert log_loss(labels, logits) == pytest.approx(sk.log_loss(labels, probabilities), rel=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_logits_neither_overflow_nor_clip(dtype):
    labels = np.array([1, 0, 1, 0])
    logits = np.array([900, -900, -900, 900], dtype=dtype)
    assert log_loss(labels, logits) == 450.0
    assert calibration(labels, logits) == 1.0
    assert auc(labels, logits) == 0.5


def test_infinite_logits_have_a_meaning():
    inf = math.inf
    assert measure(np.array([1, 0]), np.array([inf, -inf])) == Metrics(1.0, 0.0, 0.0, 1.0, 2, 1, 1.0)
    assert log_loss([1, 0], [-inf, -1.0]) == inf
    assert auc([1, 0, 1], [inf, inf, -inf]) == 0.25


def test_small_losses_keep_their_digits():
    assert log_loss([1], [40.0]) == pytest.approx(math.exp(-40), rel=1e-12)


def test_float32_scores_tie_as_float32():
    near = np.array([1.0, 1.0 + 1e-9])
    assert auc([0, 1], near) == 1.0
    assert auc([0, 1], near.astype(np.float32)) == 0.5
    assert auc([0, 1], np.array([0.0, -0.0])) == 0.5


def test_average_precision_is_that_of_scikit_learn():
    from sklearn import metrics as sk

    draw = np.random.default_rng(3)
    labels = draw.integers(0, 2, 500)
    for scores in (draw.normal(size=500) + labels, draw.integers(0, 4, 500).astype(np.float32), np.zeros(500)):
        assert pr_auc(labels, scores) == pytest.approx(sk.average_precision_score(labels, scores), rel=1e-12)
        assert measure(labels, scores).pr_auc == pr_auc(labels, scores)
    assert math.isnan(pr_auc(np.zeros(3), np.zeros(3)))


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint8, np.uint16, np.uint64, np.int64, np.float16])
def test_scores_of_any_kind_of_number_are_ordered_alike(kind):
    labels, scores = np.array([0, 1, 0, 1, 0, 1]), np.array([0, 3, 1, 2, 0, 0]).astype(kind)
    wide = scores.astype(np.float64)
    for metric in (auc, pr_auc, log_loss, normalized_entropy, calibration):
        assert metric(labels, scores) == metric(labels, wide)
    assert measure(labels, scores) == measure(labels, wide)
    assert calibration_curve(labels, scores, 3) == calibration_curve(labels, wide, 3)


def test_predicting_the_base_rate_has_normalized_entropy_one():
    labels = np.array([1, 0, 0, 0, 0])
    logits = np.full(5, math.log(0.2 / 0.8))
    found = measure(labels, logits)
    assert found.normalized_entropy == pytest.approx(1.0, rel=1e-14)
    assert found.calibration == pytest.approx(1.0, rel=1e-14)
    assert normalized_entropy(labels, logits) == found.normalized_entropy
    assert found.auc == 0.5


@pytest.mark.parametrize(("label", "calibrated"), [(0, math.nan), (1, 0.5)])
def test_one_class_leaves_auc_and_entropy_undefined(label, calibrated):
    found = measure(np.full(7, label), np.zeros(7))
    assert math.isnan(found.auc)
    assert math.isnan(found.normalized_entropy)
    assert found.calibration == pytest.approx(calibrated, nan_ok=True)
    assert found.log_loss == pytest.approx(math.log(2))
    assert (found.samples, found.positives) == (7, 7 * label)


def test_nothing_is_nan_without_samples_but_counts():
    found = measure(np.empty(0), np.empty(0))
    assert all(math.isnan(value) for value in found[:4])
    assert found[4:6] == (0, 0)
    assert math.isnan(found.pr_auc)
    assert calibration_curve([], []) == []


def test_auc_of_many_samples_stays_in_integers():
    positives, negatives = 300_000, 500_001
    scores = np.concatenate([np.arange(positives) * 2 + 1, np.arange(negatives) * 2]).astype(np.float32)
    labels = np.concatenate([np.ones(positives), np.zeros(negatives)])
    wins = positives * (positives + 1) // 2
    assert auc(labels, scores) == wins / (positives * negatives)
    assert auc_of_tensors(torch.from_numpy(labels), torch.from_numpy(scores)) == wins / (positives * negatives)


@pytest.mark.parametrize(
    ("label", "score", "wrong"), [(2.0, 0.5, "neither 0 nor 1"), (1.0, math.nan, "scores are nan")]
)
def test_on_a_device_too_what_is_wrong_is_named(label, score, wrong):
    with pytest.raises(DataError, match=wrong):
        auc_of_tensors(torch.tensor([0.0, label]), torch.tensor([0.1, score]))


def test_calibration_curve_has_equal_bins_and_keeps_every_sample():
    random = np.random.default_rng(0)
    logits = random.normal(size=1003)
    labels = random.random(1003) < 1 / (1 + np.exp(-logits))
    curve = calibration_curve(labels, logits, bins=10)
    assert len(curve) == 10
    assert {bin_.samples for bin_ in curve} == {100, 101}
    assert sum(bin_.mean_label * bin_.samples for bin_ in curve) == pytest.approx(labels.sum())
    predictions = [bin_.mean_prediction for bin_ in curve]
    assert predictions == sorted(predictions)
    assert sum(bin_.mean_prediction * bin_.samples for bin_ in curve) / labels.sum() == pytest.approx(
        calibration(labels, logits)
    )


def test_calibration_curve_never_splits_ties():
    assert calibration_curve([1, 0, 0, 1], np.zeros(4), bins=3) == [CalibrationBin(0.5, 0.5, 4)]
    curve = calibration_curve(np.array([0, 0, 0, 1, 1]), np.array([-9, -9, -9, -9, 9]), bins=2)
    assert [bin_.samples for bin_ in curve] == [4, 1]
    curve = calibration_curve(np.array([0, 1, 1, 1, 1]), np.array([-9, 9, 9, 9, 9]), bins=2)
    assert [bin_.samples for bin_ in curve] == [1, 4]
    assert [bin_.samples for bin_ in calibration_curve([0, 1], [-1.0, 1.0], bins=20)] == [1, 1]


@settings(deadline=None, max_examples=60)
@given(samples(EXTREME | COARSE), st.integers(1, 70))
def test_calibration_curve_conserves_samples(drawn, bins):
    labels, logits = drawn
    curve = calibration_curve(labels, logits, bins)
    assert len(curve) <= bins
    assert sum(bin_.samples for bin_ in curve) == len(labels)
    assert round(sum(bin_.mean_label * bin_.samples for bin_ in curve)) == labels.sum()
    assert all(0 <= bin_.mean_prediction <= 1 and bin_.samples > 0 for bin_ in curve)


@pytest.mark.parametrize("metric", [auc, log_loss, normalized_entropy, calibration, measure, calibration_curve])
def test_wrong_inputs_are_named(metric):
    with pytest.raises(DataError, match=r"2 of 3 scores are nan, the first at position 1.*learning rate"):
        metric([0, 1, 1], np.array([0.0, np.nan, np.nan], dtype=np.float32))
    with pytest.raises(DataError, match=r"1 of 2 labels are neither 0 nor 1; the first is 0.5 at position 1"):
        metric([0, 0.5], [0.0, 1.0])
    with pytest.raises(DataError, match="neither 0 nor 1"):
        metric([0, math.nan], [0.0, 1.0])
    with pytest.raises(ShapeError, match=r"labels \[2\] and scores \[1\]"):
        metric([0, 1], [0.0])
    with pytest.raises(ShapeError, match=r"labels \[2, 1\]"):
        metric([[0], [1]], [[0.0], [1.0]])
    with pytest.raises(ShapeError, match="labels have dtype"):
        metric(["0", "1"], [0.0, 1.0])


def test_curve_needs_a_bin():
    with pytest.raises(ConfigError, match="at least 1 bin, not 0"):
        calibration_curve([0, 1], [0.0, 1.0], bins=0)
