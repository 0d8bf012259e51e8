"""Miss-ratio curves are the simulator's counts, at every size."""

import numpy as np
import pytest

from hotbed.forecast.curves import lru_curve, policy_points, sizes_between, table_curves
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import LookAhead, Replay, simulate
from hotbed.forecast.trace import trace_of


def skewed(num_batches=60, size=40, num_rows=500, seed=0):
    rng = np.random.default_rng(seed)
    return trace_of([(rng.random(size) ** 4 * num_rows).astype(np.int64) for _ in range(num_batches)], num_rows)


def test_the_curve_of_lru_is_the_simulator_at_every_size():
    trace = skewed()
    curve = lru_curve(trace)
    assert curve.num_rows == trace.distinct().shape[0]
    assert curve.error == 0
    assert curve.sampled == 1
    checked = 0
    for size, misses, missed_lookups in zip(curve.sizes, curve.misses, curve.missed_lookups):
        if size >= trace.most_keys:
            counts = simulate(trace, int(size), "lru", look_ahead=0)
            assert misses == pytest.approx(counts.misses / counts.keys, abs=1e-12)
            assert missed_lookups == pytest.approx(counts.missed_lookups / counts.lookups, abs=1e-12)
            checked += 1
    assert checked > 10


def test_every_table_has_a_curve_of_its_own():
    rng = np.random.default_rng(1)
    batches = [np.concatenate([rng.integers(0, 30, 20), 30 + rng.integers(0, 200, 20)]) for _ in range(50)]
    trace = trace_of(batches, 240)
    small, large = table_curves(trace, ["small", "large", "unused"], [30, 230, 240])
    assert (small.name, large.name) == ("small", "large")
    alone = trace_of([batch[batch >= 30] for batch in batches], 240)
    assert np.allclose(large.misses, lru_curve(alone).misses)
    assert small.at(30) < large.at(30)


def test_a_sample_of_the_rows_states_its_error_and_keeps_it():
    trace = skewed(num_batches=150, size=2000, num_rows=100_000)
    whole, sampled = lru_curve(trace), lru_curve(trace, most_entries=trace.keys.shape[0] // 8)
    assert sampled.sampled == pytest.approx(1 / 8, rel=0.01)
    assert 0 < sampled.error < 0.03
    off = np.abs(whole.misses - np.interp(whole.sizes, sampled.sizes, sampled.misses))
    assert off.max() < 4 * sampled.error + 0.005


def test_points_of_a_policy_are_simulated():
    trace = skewed(seed=3)
    sizes = sizes_between(trace.most_keys, 300, 5)
    assert sizes[0] == trace.most_keys
    assert sizes[-1] == 300
    curve = policy_points(Replay(trace), "oracle", sizes, LookAhead(1, None))
    for size, misses in zip(sizes, curve.misses):
        assert misses == pytest.approx(1 - simulate(trace, size, "oracle", window=1).hit_rate)
    assert (np.diff(curve.misses) <= 0).all()


def test_shares_are_of_batches_whatever_the_windows():
    """Larger caches plan several batches together; over windows their shares would grow, and be below the optimum."""
    trace = skewed(seed=4)
    sizes = sizes_between(trace.most_keys, 500, 6)
    best = np.array([optimum(trace, size) for size in sizes]) / trace.keys.shape[0]
    points = policy_points(Replay(trace), "oracle", sizes)
    assert np.all(points.misses >= best - 1e-12)
    assert np.all(np.diff(points.misses) < 0.02)
    assert points.misses[-1] < 1.05 * best[-1]
