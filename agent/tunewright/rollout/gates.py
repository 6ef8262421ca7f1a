"""One metric of a canary at a time: each gate says pass, fail or inconclusive, with the numbers and the reason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.measurement import LatencyName
from tunewright.domain.promotion import Analysis
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading
from tunewright.observe import names
from tunewright.rollout.evidence import Evidence, Latency
from tunewright.rollout.inference import (
    apart,
    chance_of_fewer,
    chance_of_more,
    clustering,
    mean_ratio,
    share_lower,
    share_upper,
)

LATENCIES: dict[LatencyName, str] = {"ttft": names.TTFT, "tpot": names.TPOT, "e2e": names.E2E}
"""SLO names to histograms. `itl` is not judged: its histogram counts engine steps, not tokens, under speculation."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

TAIL_WORSE = 2.5
"""A tail is held to so many times the tolerance: it needs far more requests to be known as well as a mean."""
TAIL_SLOPE = 3.0
"""By which power of a factor on all latencies the share of slow ones grows; log-normal latencies have 2 to 5 there."""
TAIL_SHARE, TAIL_SHARES = 0.05, (0.01, 0.25)
"""Share of requests that are called slow: beyond the bucket edge that comes nearest to it, inside these limits."""
LEAST_TOLERANCE = 0.02
"""With a tolerance of 0 nothing that is merely as good could ever be told from worse."""
_ERROR_SHARE = f'{names.FINISHED}{{finished_reason="error"}} / finished'
SLO_SLACK = 1.1
"""No pass while a percentile may be beyond its bound by this factor."""


@dataclass(frozen=True)
class Case:
    """What the single metrics are judged with. `alpha` and `beta` are the levels of this one look at one metric."""

    canary: Evidence
    stable: Evidence
    analysis: Analysis
    start: float
    end: float
    alpha: float
    beta: float
    too_few: str
    too_short: str
    compared: bool

    @property
    def too_early(self) -> str:
        """Why nothing may pass yet; empty when it may."""
        return self.too_few or self.too_short

    def reading(self, query: str, value: float | None, samples: float) -> Reading:
        """A number of the whole window."""
        return Reading(query=query, value=value, samples=samples, start=self.start, end=self.end)


def errors(case: Case) -> MetricVerdict:
    """Errors fail a canary at any time; they pass once the share is bounded, or nothing failed at all.

    Where the stable servers fail as much as is allowed themselves, the canary is only held to be no worse.
    """
    allowed = case.analysis.max_error_rate
    shown = [
        case.reading(_ERROR_SHARE, _share(side.errors, side.finished), side.finished or 0.0)
        for side in (case.canary, case.stable)
    ]
    hits, of = case.canary.errors, case.canary.finished
    metric = "error rate"
    if hits is None or of is None:
        return verdict_of(
            metric, Outcome.INCONCLUSIVE, f"there is no {names.FINISHED} with finished_reason error", shown
        )
    if of <= 0:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early or "no request finished", shown)
    hits = min(hits, of)
    said = f"{hits:.0f} of {of:.0f} requests ended in an error"
    other = shown[1].value
    as_bad = other is not None and other > allowed
    if not as_bad and share_lower(hits, of, case.alpha) > allowed:
        return verdict_of(metric, Outcome.FAIL, f"{said}, above {allowed:.2%}", shown)
    if hits / of > allowed / 2 and surely_more(case, hits, of, case.stable.errors, case.stable.finished):
        return verdict_of(metric, Outcome.FAIL, f"{said}, surely more than of the stable servers ({other:.2%})", shown)
    if case.too_early:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early, shown)
    if as_bad and other is not None:
        outcome = Outcome.PASS if hits / of <= other else Outcome.INCONCLUSIVE
        return verdict_of(metric, outcome, f"{said}, and {other:.2%} of the stable servers' too", shown)
    if hits == 0 or share_upper(hits, of, case.beta) <= allowed:
        return verdict_of(metric, Outcome.PASS, said, shown)
    return verdict_of(metric, Outcome.INCONCLUSIVE, f"{said}: not settled whether below {allowed:.2%}", shown)


def mean(case: Case, latency: LatencyName) -> MetricVerdict | None:
    """Canary against stable in the mean of one latency; None where there is nothing to tell.

    Two hypotheses: as good, or worse by the tolerance. It fails when it is surely not as good and nearer to worse; it
    passes when it is surely not worse and nearer to as good.
    """
    metric, name = f"{latency} mean", LATENCIES[latency]
    canary, stable = case.canary.latencies.get(name), case.stable.latencies.get(name)
    if canary is None or stable is None or canary.count <= 0 or stable.count <= 0:
        side = "canary" if canary is None or canary.count <= 0 else "stable servers"
        missing = [case.reading(name, None, known.count if known else 0.0) for known in (canary, stable)]
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early or f"there is no {name} of the {side}", missing)
    if canary.mean == stable.mean == 0:
        return None  # every answer has one token only: no time between tokens
    query = f"increase({name}_sum) / increase({name}_count)"
    shown = [case.reading(query, side.mean, side.count) for side in (canary, stable)]
    if too_few := case.too_few or _few(case, latency, canary, stable):
        return verdict_of(metric, Outcome.INCONCLUSIVE, too_few, shown)
    ratio = mean_ratio(canary.blocks, stable.blocks)
    if ratio is None:
        reason = case.too_early or f"{metric}: too few blocks of time to compare"
        return verdict_of(metric, Outcome.INCONCLUSIVE, reason, shown)
    worse = max(case.analysis.tolerance, LEAST_TOLERANCE)
    change = f"{metric} {math.expm1(ratio.estimate):+.1%}"
    nearer_to_worse = ratio.estimate > math.log1p(worse) / 2
    if nearer_to_worse and ratio.lower(case.alpha) > 0:
        reason = f"{change}, surely worse ({_ms(shown[0])} against {_ms(shown[1])}; {worse:.0%} are not let through)"
        return verdict_of(metric, Outcome.FAIL, reason, shown)
    if case.too_early:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early, shown)
    highest = ratio.upper(case.beta)
    if not nearer_to_worse and highest < math.log1p(worse):
        return verdict_of(metric, Outcome.PASS, change, shown)
    bounded = f"it may be {math.expm1(highest):+.0%}" if highest < math.log(10) else "too few requests to bound it"
    return verdict_of(metric, Outcome.INCONCLUSIVE, f"{change}, not settled: {bounded}", shown)


def tail(case: Case, latency: LatencyName) -> MetricVerdict | None:
    """Canary against stable in the share of slow requests; None where no bucket edge sets some of them apart.

    Counts beyond an edge are exact; a percentile would be an interpolation in a bucket that may reach from 2.5 to 5 s.
    The hypotheses are as for the mean; the edge is chosen by both sides together, which favours none.
    """
    name = LATENCIES[latency]
    canary, stable = case.canary.latencies.get(name), case.stable.latencies.get(name)
    if canary is None or stable is None or canary.count <= 0 or stable.count <= 0:
        return None  # told by the mean
    edge = _slow_from(canary, stable)
    if edge is None:
        return None
    (hits, of), (other_hits, other_of) = ((_beyond(side, edge), side.histogram.total) for side in (canary, stable))
    query = f'1 - increase({name}_bucket{{le="{edge!r}"}}) / increase({name}_count)'
    shown = [case.reading(query, hits / of, of), case.reading(query, other_hits / other_of, other_of)]
    metric = f"{latency} tail"
    if too_few := case.too_few or _few(case, latency, canary, stable):
        return verdict_of(metric, Outcome.INCONCLUSIVE, too_few, shown)
    # Requests that are alike count less.
    wider = apart(canary.blocks, stable.blocks, (canary.histogram, stable.histogram))
    counted = (hits / wider, of / wider, other_hits / wider, other_of / wider)
    worse = (1 + TAIL_WORSE * max(case.analysis.tolerance, LEAST_TOLERANCE)) ** TAIL_SLOPE
    change = f"{latency} above {edge:g} s: {hits / of:.1%} against {other_hits / other_of:.1%}"
    nearer_to_worse = hits / of > math.sqrt(worse) * other_hits / other_of
    if nearer_to_worse and chance_of_more(*counted) < case.alpha:
        return verdict_of(metric, Outcome.FAIL, f"{change}, surely more", shown)
    if case.too_early:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early, shown)
    if not nearer_to_worse and chance_of_fewer(*counted, worse) < case.beta:
        return verdict_of(metric, Outcome.PASS, change, shown)
    return verdict_of(
        metric, Outcome.INCONCLUSIVE, f"{change}, not settled: it may be {worse:.1f} times as many", shown
    )


def absolute(case: Case, latency: LatencyName, percentile: str, bound: float) -> MetricVerdict | None:
    """The canary against one bound of the SLO; None where the bound lies inside the lowest bucket."""
    metric, name, q = slo_name(latency, percentile), LATENCIES[latency], QUANTILES[percentile]
    canary, stable = case.canary.latencies.get(name), case.stable.latencies.get(name)
    shown = [_quantile(case, name, percentile, side) for side in (canary, stable)]
    if canary is None or canary.count <= 0 or case.too_few:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early or f"there is no {name} to judge", shown)
    if few := _few(case, latency, canary):
        return verdict_of(metric, Outcome.INCONCLUSIVE, few, shown)
    histogram = canary.histogram
    if histogram.edges and bound < histogram.edges[0] and histogram.counts[0] > 0:
        return None
    beyond = histogram.overflow + sum(
        count for low, count in zip((0.0, *histogram.edges[:-1]), histogram.counts, strict=True) if low >= bound
    )
    wider = clustering(canary.blocks, histogram)
    surely = share_lower(beyond / wider, histogram.total / wider, case.alpha) > 1 - q
    value, stable_value = shown[0].value, shown[1].value
    against = f"{metric} {_ms(shown[0])} against {bound * 1e3:.4g} ms"
    stable_missed = stable is not None and stable.count > 0 and (stable_value is None or stable_value > bound)
    if surely and not stable_missed:
        return verdict_of(metric, Outcome.FAIL, f"{against}: surely missed", shown)
    if case.too_early:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early, shown)
    if value is not None and value <= bound and not surely:
        if stable is not None and stable.count > 0:  # what both sides share is no doubt about the canary
            wider = apart(canary.blocks, stable.blocks, (histogram, stable.histogram))
        highest = histogram.quantile(share_upper(q * histogram.total / wider, histogram.total / wider, case.beta))
        if highest is not None and highest <= bound * SLO_SLACK:
            return verdict_of(metric, Outcome.PASS, against, shown)
        return verdict_of(metric, Outcome.INCONCLUSIVE, f"{against}: met, but not surely", shown)
    if stable_missed:
        return verdict_of(
            metric, Outcome.PASS, f"{against}, which the stable servers miss too ({_ms(shown[1])})", shown
        )
    return verdict_of(metric, Outcome.INCONCLUSIVE, f"{against}: not met, but not surely missed", shown)


def _few(case: Case, latency: str, *sides: Latency) -> str:
    """How many samples of one latency are missing for a verdict on it; empty when there are enough. Not every request
    has each: one of a single token has no time between tokens."""
    least, wanted = min(side.count for side in sides), case.analysis.min_requests
    return "" if least >= wanted else f"{least:.0f} of {wanted} requests tell their {latency}"


def slo_name(latency: str, percentile: str) -> str:
    """What the verdict on one bound of the SLO is called."""
    return f"slo {latency} {percentile}"


def surely_more(case: Case, hits: float, of: float, other_hits: float | None, other_of: float | None) -> bool:
    """Whether the canary's share is surely above the stable servers'."""
    if not case.compared or other_hits is None or not other_of or of <= 0:
        return False
    return chance_of_more(hits, of, other_hits, other_of) < case.alpha


def _slow_from(canary: Latency, stable: Latency) -> float | None:
    """The edge beyond which the share of all requests comes nearest to `TAIL_SHARE`."""
    total = canary.histogram.total + stable.histogram.total
    shares = {e: (_beyond(canary, e) + _beyond(stable, e)) / total for e in canary.histogram.edges}
    low, high = TAIL_SHARES
    telling = [edge for edge, share in shares.items() if low <= share <= high]
    return min(telling, key=lambda e: abs(math.log(shares[e] / TAIL_SHARE)), default=None)


def _beyond(side: Latency, edge: float) -> float:
    """Observations above one of the edges."""
    histogram = side.histogram
    return histogram.overflow + sum(c for e, c in zip(histogram.edges, histogram.counts, strict=True) if e > edge)


def _quantile(case: Case, name: str, percentile: str, side: Latency | None) -> Reading:
    value = side.histogram.quantile(QUANTILES[percentile]) if side else None
    query = f"histogram_quantile({QUANTILES[percentile]}, increase({name}_bucket))"
    return case.reading(query, value, side.count if side else 0.0)


def verdict_of(metric: str, outcome: Outcome, reason: str, shown: Sequence[Reading]) -> MetricVerdict:
    """The verdict on one metric, from the readings of canary and stable servers."""
    return MetricVerdict(metric=str(metric), outcome=outcome, reason=reason, canary=shown[0], stable=shown[1])


def _share(hits: float | None, of: float | None) -> float | None:
    return hits / of if hits is not None and of else None


def _ms(reading: Reading) -> str:
    return "beyond the last bucket" if reading.value is None else f"{reading.value * 1e3:.4g} ms"
