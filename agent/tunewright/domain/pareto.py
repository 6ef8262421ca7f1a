"""Several measures at once: which trials no other one beats in all of them."""

from collections.abc import Sequence

from tunewright.domain.measurement import Measurement
from tunewright.domain.state import TrialOutcome, TrialRecord
from tunewright.domain.tuning import LATENCIES, PERCENTILES

RATES = {"outputTokensPerSecond": "output tokens/s", "goodput": "good requests/s"}
"""Measures of which more is better, with their units; every other one is a latency in seconds."""


def measure(name: str, measured: Measurement) -> float:
    """One measure as people read it. Raises `ValueError` for a name that is none."""
    if name == "outputTokensPerSecond":
        return measured.output_tokens_per_second.value
    if name == "goodput":
        return measured.requests_per_second if measured.goodput is None else measured.goodput
    for latency in LATENCIES:
        for percentile in PERCENTILES:
            if name == f"{latency}{percentile.upper()}":
                return measured.latency(latency, percentile)
    raise ValueError(f"{name} names nothing that is measured")


def pareto_front(trials: Sequence[TrialRecord], names: Sequence[str]) -> list[TrialRecord]:
    """The trials that were measured whole and meet the SLO, and that no other such one beats: it would have to be as
    good in every measure and better in one. Best in the last measure first.
    """
    met = [(t, t.measurement) for t in trials if t.outcome is TrialOutcome.COMPLETE and t.measurement is not None]
    points = [(t, tuple(_larger_is_better(name, measured) for name in names)) for t, measured in met]
    front = [(t, own) for t, own in points if not any(_beats(other, own) for _, other in points)]
    return [t for t, _ in sorted(front, key=lambda pair: (*(-value for value in reversed(pair[1])), pair[0].number))]


def _larger_is_better(name: str, measured: Measurement) -> float:
    value = measure(name, measured)
    return value if name in RATES else -value


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
