"""A verdict is a pure function of stored raw numbers; it is never a bare yes."""

from enum import StrEnum

from tunewright.domain.model import Model


class Outcome(StrEnum):
    """No data, NaN and too few samples are inconclusive, never a pass."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Reading(Model):
    """One raw number a verdict rests on: what was asked, what came back, over which window."""

    query: str
    value: float | None
    samples: float
    start: float
    end: float


class MetricVerdict(Model):
    """The canary against the stable replicas in one metric over the same window."""

    metric: str
    outcome: Outcome
    reason: str
    canary: Reading
    stable: Reading


class Verdict(Model):
    """The verdict on a canary, with the verdicts on each metric that it follows from."""

    outcome: Outcome
    reason: str
    at: float
    metrics: tuple[MetricVerdict, ...] = ()
