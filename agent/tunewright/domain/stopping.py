"""When a trial need not go on: it can't be the best any more, can't meet the SLO, or takes far too long to start."""

import math
from collections.abc import Sequence
from statistics import median

from tunewright.domain.measurement import Interim
from tunewright.domain.tuning import Objective, Slo
from tunewright.domain.units import format_duration

BETWEEN_STARTS = 0.15
"""Share by which two fresh starts of one configuration may differ: three sds of what was seen on one H200."""
WIDER = 1.5
"""The interval at 95 % is widened by this, to some 99.7 %: several looks are taken, and windows are short."""

SLOWER, MORE_SECONDS, KNOWN_STARTS = 3.0, 60.0, 3
"""A start is given up past so many times the median, and so many seconds more; so many must have been measured."""


def hopeless(objective: Objective, slo: Slo, best: float | None, interim: Interim) -> str | None:
    """Why a measurement that is under way need not be ended; None while it may still win.

    `best` is the largest objective measured so far within the SLO. Nothing is decided on an unsound measurement,
    or while no request has completed.
    """
    measured = interim.measurement
    if measured.void or not measured.warmup_settled or not measured.completed:
        return None
    after = format_duration(round(measured.duration))
    for latency, percentile, bound in slo.bounds():
        name = f"{latency}{percentile.upper()}"
        least = interim.at_least.get(name, 0.0)
        if least > bound:
            least_ms, bound_ms = f"{least * 1e3:.4g} ms", f"{bound * 1e3:.4g} ms"
            return f"misses the SLO for sure after {after}: {name} is at least {least_ms}, and {bound_ms} are allowed"
    if best is None:
        return None
    most = _most(objective, interim)
    if most is None:
        return None
    if objective.minimize is not None:
        if -most > -best * (1 + BETWEEN_STARTS):
            return f"can't reach the best any more after {after}: {objective.minimize} is at least {-most:.4g} s"
        return None
    if most < best * (1 - BETWEEN_STARTS):
        return f"can't reach the best any more after {after}: at most {most:.4g} against {best:.4g}"
    return None


def _most(objective: Objective, interim: Interim) -> float | None:
    """The largest objective that the interval leaves; None where it says nothing."""
    measured = interim.measurement
    rate = measured.output_tokens_per_second
    highest = rate.value + WIDER * (rate.high - rate.value)
    match objective.maximize:
        case "outputTokensPerSecond":
            return highest
        case "tokensPerDollar":
            return highest * 3600 / (objective.gpu_price_per_hour or 1.0)
        case "goodput":
            good = measured.duration * (measured.requests_per_second if measured.goodput is None else measured.goodput)
            # Counts vary by their square root, whatever their distribution is like; 9 covers a count of none.
            return (good + 3 * math.sqrt(good + 9)) / measured.duration
    least: float | None = interim.at_least.get(objective.minimize or "")
    return -least if least else None


def too_slow(start_seconds: float | None, starts: Sequence[float]) -> str | None:
    """Why a start is given up; None while it may go on. `starts` are those measured before, in seconds."""
    if start_seconds is None or len(starts) < KNOWN_STARTS:
        return None
    usual = median(starts)
    if start_seconds <= max(SLOWER * usual, usual + MORE_SECONDS):
        return None
    return (
        f"not ready after {start_seconds:.0f} s, where half of {len(starts)} starts took at most {usual:.0f} s: "
        "given up as hung"
    )
