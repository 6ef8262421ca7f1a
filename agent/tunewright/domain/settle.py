"""Is a finalist better than the baseline? A sequential test on fresh starts, taken in turns."""

import math
from collections.abc import Sequence

from scipy.stats import t as student

from tunewright.domain.measurement import Estimate
from tunewright.domain.state import WIDEST_GAIN, ConfirmStatus, Gain

FALSE_BETTER = 0.01
"""Chance, over all looks together, that a candidate that is as good as the baseline is called better."""
FALSE_NOT_BETTER = 0.05
"""Chance, over all looks together, that a candidate that gains all of `min_gain` is called not better."""
_LATE = 3.0


def share_of_look(rounds: int, min_rounds: int, max_rounds: int) -> float:
    """The part of an error rate that the look after `rounds` rounds may use; all looks' parts add up to 1.

    After k of n rounds (k/n)^3 of it is used up: a few starts tell little, so most of it is kept for the last looks.
    """

    def used(k: int) -> float:
        return (k / max_rounds) ** _LATE if k >= min_rounds else 0.0

    return used(rounds) - used(rounds - 1)


def ratio_interval(baseline: Sequence[float], candidate: Sequence[float], below: float, above: float) -> Estimate:
    """The ratio of candidate to baseline minus 1, and its interval, which errs with `below` and `above` on its sides.

    Welch's t on the logs of two values or more on each side. Sides are not paired: that would throw half of the degrees
    of freedom away, and what a round has in common only makes this interval wider than it needs to be.
    """
    old, new = ([math.log(value) for value in values] for values in (baseline, candidate))
    difference = sum(new) / len(new) - sum(old) / len(old)
    parts = [_variance(logs) / len(logs) for logs in (old, new)]
    total = sum(parts)
    error, freedom = math.sqrt(total), 1.0
    if total > 0:
        weights = zip(parts, (len(old), len(new)), strict=True)
        freedom = total**2 / sum(part**2 / (n - 1) for part, n in weights)
    low = difference - float(student.isf(below, freedom)) * error
    high = difference + float(student.isf(above, freedom)) * error
    low, high = (math.expm1(min(value, 50.0)) for value in (low, high))
    return Estimate(value=math.expm1(difference), low=low, high=high)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def settle(
    baseline: Sequence[float], candidate: Sequence[float], *, min_gain: float, min_rounds: int, max_rounds: int
) -> Gain:
    """Compare values (larger is better, all positive) of as many fresh starts on each side.

    Better: the interval is above 0 and its middle reaches `min_gain`. Not better: the interval is below `min_gain`.
    A look is taken after every round from `min_rounds` to `max_rounds`; together they err as often as stated above.
    """
    rounds = min(len(baseline), len(candidate))
    if rounds < 2:
        return Gain(
            estimate=Estimate(value=0.0, low=-1.0, high=1e9),
            rounds=rounds,
            status=ConfirmStatus.RUNNING,
            reason=f"{rounds} of at least {min_rounds} rounds",
        )
    part = share_of_look(min(max(rounds, min_rounds), max_rounds), min_rounds, max_rounds)
    estimate = ratio_interval(baseline[:rounds], candidate[:rounds], FALSE_BETTER * part, FALSE_NOT_BETTER * part)
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
