"""When a trial need not go on."""

import random

import numpy as np
import pytest
from world import Behaviour, measured

from tunewright.domain.measurement import Estimate, Interim, Measurement
from tunewright.domain.stopping import hopeless, too_slow
from tunewright.domain.tuning import Objective, Slo
from tunewright.loadtest.statistics import at_least

TOKENS = Objective(maximize="outputTokensPerSecond")


def interim(tokens: float = 1000.0, half: float = 20.0, least: dict | None = None, **changes) -> Interim:
    rate = Estimate(value=tokens, low=tokens - half, high=tokens + half)
    whole = measured(Behaviour(tokens=tokens))
    part: Measurement = whole.model_copy(update={"output_tokens_per_second": rate, "duration": 12.0, **changes})
    return Interim(measurement=part, at_least=least or {})


@pytest.mark.parametrize(
    ("tokens", "half", "best", "stops"),
    [
        (700.0, 20.0, 1000.0, True),
        (840.0, 20.0, 1000.0, False),  # two starts may differ by so much
        (700.0, 150.0, 1000.0, False),  # the interval reaches it
        (700.0, 20.0, None, False),  # nothing has met the SLO yet
        (1200.0, 20.0, 1000.0, False),
    ],
)
def test_what_can_t_reach_the_best_is_ended(tokens, half, best, stops):
    why = hopeless(TOKENS, Slo(), best, interim(tokens, half))
    assert (why is not None) is stops
    if why:
        assert "at most 730 against 1000" in why


def test_a_price_a_goodput_and_a_latency_are_judged_by_their_own_measure():
    price = Objective(maximize="tokensPerDollar", gpu_price_per_hour=2.0)
    assert hopeless(price, Slo(), 1000.0 * 1800, interim(700.0))
    assert not hopeless(price, Slo(), 700.0 * 1800, interim(700.0))
    goodput = Objective(maximize="goodput")
    assert hopeless(goodput, Slo(), 20.0, interim(requests_per_second=10.0, goodput=8.0))
    assert not hopeless(goodput, Slo(), 10.0, interim(requests_per_second=10.0, goodput=8.0))
    latency = Objective(minimize="ttftP95")
    assert hopeless(latency, Slo(), -0.5, interim(least={"ttftP95": 0.6}))
    assert not hopeless(latency, Slo(), -0.5, interim(least={"ttftP95": 0.55}))
    assert not hopeless(latency, Slo(), -0.5, interim(least={"ttftP50": 9.0}))


def test_what_misses_the_slo_for_sure_is_ended_also_when_it_is_the_fastest():
    slo = Slo.model_validate({"ttftP95": "1s"})
    why = hopeless(TOKENS, slo, 100.0, interim(least={"ttftP95": 1.2}))
    assert why == "misses the SLO for sure after 12s: ttftP95 is at least 1200 ms, and 1000 ms are allowed"
    assert hopeless(TOKENS, slo, None, interim(least={"ttftP95": 1.2}))
    assert not hopeless(TOKENS, slo, 100.0, interim(least={"ttftP95": 0.99, "ttftP99": 3.0}))


@pytest.mark.parametrize("changes", [{"void": ("the generator lagged",)}, {"warmup_settled": False}, {"completed": 0}])
def test_nothing_is_decided_on_an_unsound_measurement(changes):
    assert hopeless(TOKENS, Slo(), 1000.0, interim(10.0))
    assert not hopeless(TOKENS, Slo(), 1000.0, interim(10.0, **changes))


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95])
def test_the_bound_of_a_percentile_holds_in_99_of_100(q):
    """Of latencies with a long tail, whose true percentile is known."""
    rng, n, wrong, told = np.random.default_rng(1), 150, 0, 0
    truth = float(np.quantile(np.random.default_rng(2).lognormal(0.0, 0.7, 400_000), q))
    for _ in range(3000):
        bound = at_least(rng.lognormal(0.0, 0.7, n), q)
        told += bound is not None
        wrong += bound is not None and bound > truth
    assert told == 3000
    assert 0 <= wrong <= 15


def test_too_few_samples_bound_nothing():
    assert at_least(np.array([5.0] * 8), 0.5) is None
    assert at_least(np.array([]), 0.95) is None


@pytest.mark.parametrize(
    ("seconds", "starts", "ended"),
    [
        (400.0, [100.0, 120.0, 90.0], True),
        (290.0, [100.0, 120.0, 90.0], False),  # not three times the median yet
        (50.0, [10.0, 10.0, 10.0], False),  # three times as long, and not a minute more
        (71.0, [10.0, 10.0, 10.0], True),
        (4000.0, [100.0, 120.0], False),  # too few are known
        (None, [10.0, 10.0, 10.0], False),  # it waits for its node
    ],
)
def test_a_start_is_given_up_by_what_others_took(seconds, starts, ended):
    random.Random(1).shuffle(starts)
    assert (too_slow(seconds, starts) is not None) is ended
