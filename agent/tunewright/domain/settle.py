"""Is a finalist better than the baseline? A sequential test on fresh starts, taken in turns."""

import math
from collections.abc import Sequence

from scipy.stats import t as student

from tunewright.domain.measurement import Estimate
from tunewright.domain.state import WIDEST_GAIN, ConfirmStatus, Gain

ERROR_RATE = 0.05
"""Chance that an equal candidate is called better over all looks together (the looks share it by Bonferroni)."""


def ratio_interval(logs: Sequence[float], error_rate: float) -> Estimate:
    """Mean ratio minus 1 with its two-sided interval, from paired log ratios; Student's t on the log scale."""
    n = len(logs)
    mean = sum(logs) / n
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (n - 1)) / math.sqrt(n)
    reach = float(student.ppf(1 - error_rate / 2, n - 1)) * spread
    low, high = (math.expm1(min(mean + side * reach, 50.0)) for side in (-1, 1))
    return Estimate(value=math.expm1(mean), low=low, high=high)


def settle(
    baseline: Sequence[float], candidate: Sequence[float], *, min_gain: float, min_rounds: int, max_rounds: int
) -> Gain:
    """Compare values (larger is better, all positive) of as many fresh starts on each side, paired by round.

    Better: the interval is above 0 and its middle reaches `min_gain`. Not better: the interval is below `min_gain`.
    A look is taken after every round from `min_rounds` to `max_rounds`; each gets an equal part of `ERROR_RATE`.
    """
    rounds = min(len(baseline), len(candidate))
    if rounds < 2:
        return Gain(
            estimate=Estimate(value=0.0, low=-1.0, high=1e9),
            rounds=rounds,
            status=ConfirmStatus.RUNNING,
            reason=f"{rounds} of at least {min_rounds} rounds",
        )
    logs = [math.log(new / old) for old, new in zip(baseline[:rounds], candidate[:rounds], strict=True)]
    estimate = ratio_interval(logs, ERROR_RATE / (max_rounds - min_rounds + 1))
    bounds = f"from {estimate.low:+.1%} to {estimate.high:+.1%}" if estimate.high <= WIDEST_GAIN else "not bounded yet"
    interval = f"{estimate.value:+.1%} ({bounds}) over {rounds} fresh starts"
    if rounds < min_rounds:
        status, reason = ConfirmStatus.RUNNING, f"{interval}; {min_rounds} are wanted"
    elif estimate.low > 0 and estimate.value >= min_gain:
        status, reason = ConfirmStatus.BETTER, interval
    elif estimate.high < min_gain:
        status, reason = ConfirmStatus.NOT_BETTER, f"{interval}; {min_gain:.0%} were wanted"
    elif rounds >= max_rounds:
        status, reason = ConfirmStatus.NOT_SETTLED, f"{interval}: still open after the last round"
    else:
        status, reason = ConfirmStatus.RUNNING, f"{interval}: not settled yet"
    return Gain(estimate=estimate, rounds=rounds, status=status, reason=reason)
