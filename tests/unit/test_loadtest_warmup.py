"""The test that ends a warm-up: not before the server is steady, and soon after."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmups import Load, exponential, linear, warm_ups, waves

from tunewright.loadtest import statistics

H200 = Load(life=12, window=25, limit=120)
"""512 tokens in and out, as on the GPU where a cold start was measured while it still got faster."""
steady = settings(deadline=None, derandomize=True, max_examples=8)


def bad(ends, most=0.05) -> int:
    """Runs that end by the test, are measured too slow, and do not see it in their window either."""
    return sum(end.by_test and end.bias < -most and end.moved is None for end in ends)


@pytest.mark.parametrize(
    "speed",
    [
        linear(0.57, 60),
        linear(0.80, 30),
        exponential(0.57, 20),
        waves([0.57, 1.0], 21),
        waves([0.57, 0.70, 0.80, 0.90, 1.0], 15),
    ],
)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_gpu_that_gets_faster_for_a_minute_is_waited_for(speed, in_step):
    ends = warm_ups(H200._replace(in_step=in_step), speed)
    assert all(end.by_test for end in ends)
    assert min(end.bias for end in ends) > -0.05
    assert all(end.at < 110 for end in ends)


def test_what_is_not_steady_by_the_limit_is_not_called_so():
    ends = warm_ups(H200._replace(limit=45), linear(0.57, 60))
    assert not any(end.by_test for end in ends)


def test_a_steady_gpu_is_measured_after_two_lives_of_a_request():
    ends = warm_ups(H200, lambda _: 1.0, runs=24)
    assert all(end.by_test for end in ends)
    assert np.mean([end.at for end in ends]) < 30
    assert max(end.at for end in ends) < 50


@pytest.mark.parametrize("load", [Load(2, 35, 120, spread=0.4), Load(0.6, 4, 8, noise=0.05, lasts=0.5)])
def test_short_requests_on_a_steady_server_cost_little_more_than_the_window_at_most(load):
    ends = warm_ups(load, lambda _: 1.0, runs=24)
    assert all(end.by_test for end in ends)
    assert np.mean([end.at for end in ends]) < 1.3 * load.window


def test_on_a_shared_cpu_the_warm_up_is_as_long_as_the_window_and_no_longer():
    ends = warm_ups(Load(5, 35, 120, noise=0.15, lasts=1.5), lambda _: 1.0, runs=24)
    assert all(end.by_test for end in ends)
    assert np.mean([end.at for end in ends]) < 45


@steady
@given(
    st.floats(0.5, 0.85),
    st.floats(0.004, 0.03),
    st.floats(1, 15),
    st.floats(0, 0.04),
    st.booleans(),
    st.integers(0, 999),
)
def test_a_slow_start_is_waited_for_or_seen_in_the_window(start, rate, life, noise, in_step, seed):
    """By 0.4 to 3 % a second, with noise that lasts. What the warm-up lets through, the window's own halves show."""
    load = Load(life, 30, 120, noise=noise, in_step=in_step, streams=16)
    assert bad(warm_ups(load, linear(start, (1 - start) / rate), runs=6, seed=seed)) <= 1


@steady
@given(st.lists(st.floats(0.8, 0.92), min_size=1, max_size=4), st.floats(4, 15), st.integers(0, 999))
def test_steps_of_whole_waves_are_waited_for(steps, life, seed):
    """A server that is steady within a wave of requests and faster in the next: the first 256 on a GPU are so."""
    speeds = [math.prod(steps[:count]) for count in range(len(steps), -1, -1)]
    ends = warm_ups(Load(life, 30, 120, streams=16), waves(speeds, life / speeds[0]), runs=6, seed=seed)
    assert bad(ends) == 0


def told(events, ttfts=None, life=0.5, **more) -> bool:
    spans = {"width": 1.0, "life": life, "window": 32.0, "limit": 64.0} | more
    return statistics.settled(events, ttfts or [[0.1, 0.11, 0.09]] * len(events), **spans)


@pytest.mark.parametrize(
    "events",
    [
        [100] * 7,  # too short to tell
        [57, 63, 69, 75, 81, 87, 93, 100],  # kernels still compile
        [57, 60, 58, 59, 99, 101, 100, 100],
        [100, 99, 101, 100, 100, 0, 100, 100],  # a stall
        [0] * 8,
        [100, 100, 100, 100, 89, 90, 91, 90],  # getting slower
        [100, 98, 100, 98, 140, 60, 120, 81],  # too noisy to tell yet
    ],
)
def test_a_series_that_moves_is_not_settled(events):
    assert not told(events)
    assert told([100, 101, 99, 100, 100, 99, 101, 100])


def test_waves_are_compared_with_waves():
    wave = [150.0, 120, 90, 60, 80, 100]
    assert told(wave * 2, life=6.0)
    assert not told(wave * 2, life=7.0)  # two lives have not been seen yet
    assert not told([*wave, *(0.8 * rate for rate in wave)], life=6.0)


def test_a_latency_that_moves_is_not_settled():
    rising = [[0.1 + 0.05 * i + 0.001 * j for j in range(3)] for i in range(8)]
    assert not told([100.0] * 8, rising)
    assert told([100.0] * 8, [[], [0.1], [], [], [0.9], [], [], []])  # too few to tell


def test_a_process_that_was_held_up_is_no_server_that_moved():
    times = [0.0, 1, 2, 3, 8, 8, 8, 8, 8.001, 9, 10, 11, 12, 13, 14, 15, 16]  # it slept from 3 to 8
    rates = statistics.part_rates(times, [round(100 * at) for at in times])
    assert rates == pytest.approx([100.0] * statistics.PARTS)
    assert statistics.moved(rates) is None
    slower = statistics.part_rates(times, [round(100 * at if at <= 8 else 800 + 80 * (at - 8)) for at in times])
    assert statistics.moved(slower) == pytest.approx(-0.2, abs=0.01)


@pytest.mark.parametrize(
    ("shares", "share"),
    [
        ([None], None),
        ([0.04], 0.04),
        ([None, 0.04], None),
        ([-0.05, -0.04], -0.04),
        ([None, None, 0.2, None], None),
        ([None, 0.03, 0.05, math.inf], 0.03),
    ],
)
def test_what_one_of_several_processes_saw_alone_is_chance(shares, share):
    assert statistics.moved_together(shares) == share


def test_a_window_that_moved_is_seen_and_chance_is_not():
    assert statistics.moved([100.0] * 8 + [108.0] * 8) == pytest.approx(0.08)
    assert statistics.moved([100.0] * 8 + [92.0] * 8) == pytest.approx(-0.08)
    assert statistics.moved([100.0] * 8 + [102.0] * 8) is None
    assert statistics.moved([0.0] * 16) is None
    assert math.isinf(statistics.moved([0.0] * 8 + [1.0] * 8) or 0)
    rng = np.random.default_rng(1)
    called = sum(statistics.moved(list(rng.normal(100, 10, 16))) is not None for _ in range(500))
    assert called / 500 < 0.07
