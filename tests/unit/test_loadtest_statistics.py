import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.loadtest import statistics


def test_percentiles_are_of_the_samples():
    found = statistics.latency(np.arange(1, 101, dtype=float))
    assert (found.count, found.mean, found.p50) == (100, 50.5, 50.5)
    assert found.p99 == pytest.approx(99.01)
    assert statistics.latency(np.empty(0)).count == 0


def test_a_rate_s_interval_holds_the_true_rate_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        times = np.sort(rng.uniform(0, 10, rng.poisson(1000)))
        found = statistics.rate(times, np.ones(len(times)), 0.0, 10.0)
        held += found.low <= 100 <= found.high
    assert 0.92 < held / 400 < 0.98


def test_slow_swings_widen_the_interval():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        swing = np.repeat(rng.normal(100, 15, 10), 10)  # 100 bins, alike in tens
        times = np.repeat(np.arange(100) + 0.5, np.maximum(rng.poisson(swing), 0))
        found = statistics.rate(times, np.ones(len(times)), 0.0, 100.0)
        held += found.low <= 100 <= found.high
    assert held / 300 > 0.88


def test_a_rate_counts_weights_inside_the_window_only():
    found = statistics.rate(np.array([-1.0, 0.5, 1.5, 99.0]), np.array([9.0, 2.0, 2.0, 9.0]), 0.0, 2.0)
    assert found.value == pytest.approx(2.0)


@given(st.floats(0.1, 600))
def test_the_warm_up_looks_back_for_seconds_that_fit_the_window(duration):
    assert 2 <= statistics.warmup_span(duration) <= 15
