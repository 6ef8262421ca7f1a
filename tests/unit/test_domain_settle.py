"""The confirm test: its error rates, its verdicts, and that a look is paid for."""

import math

import numpy as np
import pytest

from tunewright.domain.settle import FALSE_BETTER, ratio_interval, settle, share_of_look
from tunewright.domain.state import ConfirmStatus, Gain

GOOD = [100.0, 103.0, 98.0, 101.0, 99.0, 102.0]


def look(candidate: list[float], baseline: list[float] = GOOD, **more: float) -> Gain:
    given = {"min_gain": 0.05, "min_rounds": 3, "max_rounds": 6, **more}
    return settle(baseline[: len(candidate)], candidate, **given)  # type: ignore[arg-type]


def scaled(factor: float, rounds: int) -> list[float]:
    return [factor * value for value in reversed(GOOD[:rounds])]


@pytest.mark.parametrize(("low", "high"), [(2, 2), (3, 6), (3, 50), (50, 50)])
def test_the_looks_parts_add_up_to_one(low: int, high: int) -> None:
    parts = [share_of_look(k, low, high) for k in range(low, high + 1)]
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) > 0


def test_the_verdicts() -> None:
    assert look(scaled(1.5, 3)).status is ConfirmStatus.BETTER
    assert look(scaled(0.5, 3)).status is ConfirmStatus.NOT_BETTER
    assert look(scaled(1.08, 3)).status is ConfirmStatus.RUNNING
    assert look(scaled(1.08, 6)).status is ConfirmStatus.BETTER
    assert look(scaled(1.045, 6)).status is ConfirmStatus.NOT_SETTLED  # surely above 0, and not surely below 5 %
    assert look(scaled(1.0, 6)).status is ConfirmStatus.NOT_BETTER


def test_too_few_rounds_settle_nothing_whatever_they_say() -> None:
    assert look([500.0]).status is ConfirmStatus.RUNNING
    two = look([500.0, 501.0])
    assert two.status is ConfirmStatus.RUNNING
    assert "3 are wanted" in two.reason


def test_equal_values_have_an_interval_of_no_width() -> None:
    gain = look([120.0] * 3, [100.0] * 3)
    assert gain.status is ConfirmStatus.BETTER
    assert (gain.estimate.low, gain.estimate.high) == pytest.approx((0.2, 0.2))


def test_the_interval_is_welch_s() -> None:
    """Against the textbook's example worked by scipy: unequal variances cost degrees of freedom."""
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(1)
    old, new = rng.lognormal(0, 0.02, 6), rng.lognormal(0.1, 0.2, 6)
    wanted = ttest_ind(np.log(new), np.log(old), equal_var=False).confidence_interval(0.95)
    found = ratio_interval(old.tolist(), new.tolist(), 0.025, 0.025)
    assert (math.log1p(found.low), math.log1p(found.high)) == pytest.approx((wanted.low, wanted.high))


@pytest.mark.parametrize("spread", [(0.15, 0.15), (0.02, 0.3)], ids=["equal", "unequal"])
@pytest.mark.parametrize(("low", "high"), [(2, 2), (2, 4), (3, 6)])
def test_an_equal_candidate_is_rarely_called_better(spread: tuple[float, float], low: int, high: int) -> None:
    """At a noise so large that the least gain is no help: the test alone must hold its error rate over all looks."""
    rng = np.random.default_rng(5)
    wrong, comparisons = 0, 800
    for _ in range(comparisons):
        old, new = (rng.lognormal(0, sd, high).tolist() for sd in spread)
        looks = (
            settle(old[:k], new[:k], min_gain=0.0, min_rounds=low, max_rounds=high).status for k in range(low, high + 1)
        )
        wrong += ConfirmStatus.BETTER in looks
    assert wrong <= FALSE_BETTER * comparisons + 3 * math.sqrt(FALSE_BETTER * comparisons)


def test_a_clear_gain_is_mostly_found() -> None:
    rng = np.random.default_rng(6)
    found = 0
    for _ in range(100):
        old, new = rng.lognormal(0, 0.039, 6), 1.15 * rng.lognormal(0, 0.039, 6)
        looks = (look(new[:k].tolist(), old[:k].tolist()).status for k in range(3, 7))
        found += ConfirmStatus.BETTER in looks
    assert found >= 90
