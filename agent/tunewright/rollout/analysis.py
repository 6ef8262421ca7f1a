"""The canary's verdict: a pure function of stored readings.

Which mistakes are bounded, and by what:
- A canary that is within tolerance, meets the SLO and makes no more errors than allowed is sent back by *any* look of
  a whole analysis with probability `ALPHA` at most. Each test of each look gets an equal part of it (Bonferroni).
- A canary whose mean latency is worse by `UNACCEPTABLE["mean"]` times the tolerance or more (at 10 %: by 25 %) passes
  at any look with probability `BETA` at most; the same holds for a 95th percentile at `UNACCEPTABLE["p95"]` times. What
  is asked of the numbers falls with the root of the time watched, so that looking on costs nothing: the chance that a
  random walk ever crosses a line is twice that of being beyond it at the end (the reflection principle).
- Between the two, and with too little data, the verdict is inconclusive; what is inconclusive for too long goes back.

The spread behind these is that of blocks of time (see `inference`), so it is an estimate itself: the bounds hold as
far as the blocks are alike. Errors are judged by exact binomial bounds, from the first request on: a canary that fails
requests is not watched for `minDuration`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtr, ndtri

from tunewright.domain.measurement import LatencyName
from tunewright.domain.tuning import Analysis, Slo
from tunewright.domain.units import format_duration
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading, Verdict
from tunewright.observe import names
from tunewright.observe.names import ANALYSIS_METRICS
from tunewright.ports import SeriesWindow
from tunewright.rollout.evidence import Evidence, Latency, evidence, readings
from tunewright.rollout.inference import (
    Ratio,
    clustering,
    first_bucket_holds,
    mean_ratio,
    quantile_ratio,
    share_lower,
)

__all__ = ["ANALYSIS_METRICS", "compare", "hold_to_slo", "judge", "readings"]

ALPHA = 0.05
BETA = 0.05
UNACCEPTABLE = {"mean": 2.5, "p95": 5.0}
"""Multiples of the tolerance that are not let through. A tail needs far more requests to be known as well as a mean."""
LEAST_TOLERANCE = 0.02
"""For the multiples above: with a tolerance of 0 nothing that is merely as good could ever be told from worse."""

LATENCIES: dict[LatencyName, str] = {"ttft": names.TTFT, "tpot": names.TPOT, "e2e": names.E2E}
"""SLO names to histograms. `itl` is not judged: its histogram counts engine steps, not tokens, under speculation."""
COMPARED: tuple[tuple[LatencyName, str], ...] = (
    ("ttft", "mean"), ("ttft", "p95"), ("tpot", "mean"), ("e2e", "mean"), ("e2e", "p95"),
)  # fmt: skip
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class _Case:
    """What the single metrics are judged with."""

    canary: Evidence
    stable: Evidence
    analysis: Analysis
    start: float
    end: float
    alpha: float
    beta: float
    too_early: str
    compared: bool

    def reading(self, query: str, value: float | None, samples: float) -> Reading:
        return Reading(query=query, value=value, samples=samples, start=self.start, end=self.end)


def compare(
    canary: SeriesWindow, stable: Sequence[SeriesWindow], slo: Slo, analysis: Analysis, *, at: float
) -> Verdict:
    """The canary against the stable servers over the same window, and against the SLO's bounds."""
    return judge(readings(canary, stable), slo, analysis, at=at)


def hold_to_slo(
    window: SeriesWindow,
    slo: Slo,
    analysis: Analysis,
    *,
    at: float,
    horizon: float | None = None,
    before: Verdict | None = None,
) -> Verdict:
    """All servers against the SLO's bounds and the allowed errors, without anything to compare with.

    `horizon` is how long it will be looked at, in seconds. A bound that the stable servers missed as well in the
    verdict `before` is not held: going back would not meet it either.
    """
    excused = {m.metric for m in before.metrics if _stable_missed(slo, m)} if before else set()
    return judge(readings(window, ()), slo, analysis, at=at, horizon=horizon, compared=False, excused=excused)


def judge(
    stored: Sequence[Reading],
    slo: Slo,
    analysis: Analysis,
    *,
    at: float,
    horizon: float | None = None,
    compared: bool = True,
    excused: frozenset[str] | set[str] = frozenset(),
) -> Verdict:
    """The verdict that follows from stored readings: the same readings, the same verdict."""
    if not stored:
        return Verdict(outcome=Outcome.INCONCLUSIVE, reason="nothing was read", at=at)
    sides = evidence(stored)
    start, end = min(r.start for r in stored), max(r.end for r in stored)
    bounds = [b for b in slo.bounds() if b[0] in LATENCIES and _slo_name(b[0], b[1]) not in excused]
    looks = math.ceil(max(horizon or analysis.max_duration, end - start) / analysis.interval) + 1
    tests = 1 + len(bounds) + (len(COMPARED) if compared else 0)
    case = _Case(
        canary=sides["canary"],
        stable=sides["stable"],
        analysis=analysis,
        start=start,
        end=end,
        alpha=ALPHA / looks / tests,
        beta=_passing_level(end - start, horizon or analysis.max_duration),
        too_early=_too_early(sides["canary"], sides["stable"], analysis, end - start, compared),
        compared=compared,
    )
    found = [_errors(case)]
    if compared:
        found += [verdict for latency, what in COMPARED if (verdict := _relative(case, latency, what)) is not None]
    unjudged = [f"{latency} {p}" for latency, p, _ in slo.bounds() if latency not in LATENCIES]
    for latency, percentile, bound in bounds:
        verdict = _absolute(case, latency, percentile, bound)
        if verdict is None:
            unjudged.append(f"{latency} {percentile}")
        else:
            found.append(verdict)
    return _whole(case, found, unjudged, at)


def _whole(case: _Case, found: Sequence[MetricVerdict], unjudged: Sequence[str], at: float) -> Verdict:
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        reasons = list(dict.fromkeys(m.reason for m in found if m.outcome is outcome))
        if outcome is Outcome.INCONCLUSIVE and case.too_early:
            reasons = [case.too_early]
        if reasons and any(m.outcome is outcome for m in found):
            problems = case.canary.problems if outcome is Outcome.INCONCLUSIVE else ()
            return Verdict(outcome=outcome, reason="; ".join((*reasons, *problems)), at=at, metrics=tuple(found))
    reason = ", ".join(m.reason for m in found)
    if unjudged:
        reason += f"; not judged here, since the histograms don't resolve it: {', '.join(unjudged)}"
    return Verdict(outcome=Outcome.PASS, reason=reason, at=at, metrics=tuple(found))


def _too_early(canary: Evidence, stable: Evidence, analysis: Analysis, watched: float, compared: bool) -> str:
    """Why there is no verdict yet; empty when there may be one."""
    for side, known in (("canary", canary), ("stable", stable)) if compared else (("production", canary),):
        if known.finished is None:
            return f"there is no {names.FINISHED} of the {side}"
        if known.finished < analysis.min_requests:
            return f"{known.finished:.0f} of {analysis.min_requests} requests finished ({side})"
    if watched < analysis.min_duration:
        return f"watched {format_duration(round(watched))} of {format_duration(round(analysis.min_duration))}"
    return ""


def _passing_level(watched: float, whole: float) -> float:
    """The level of the bound that has to be acceptable for a pass after `watched` seconds of `whole`."""
    return float(ndtr(ndtri(BETA / 2) * math.sqrt(max(1.0, whole / max(watched, 1.0)))))


def _errors(case: _Case) -> MetricVerdict:
    """More errors than allowed, surely: fail, at any time. Otherwise their share decides once there is enough."""
    query, allowed = f'{names.FINISHED}{{finished_reason="error"}} / finished', case.analysis.max_error_rate
    shares = [
        case.reading(query, _share(side.errors, side.finished), side.finished or 0.0)
        for side in (case.canary, case.stable)
    ]
    hits, of = case.canary.errors, case.canary.finished
    if hits is None or of is None:
        outcome, reason = Outcome.INCONCLUSIVE, f"there is no {names.FINISHED} with finished_reason error"
    elif of > 0 and share_lower(min(hits, of), of, case.alpha) > allowed:
        outcome, reason = Outcome.FAIL, f"{hits:.0f} of {of:.0f} requests ended in an error, above {allowed:.2%}"
    elif case.too_early or of <= 0:
        outcome, reason = Outcome.INCONCLUSIVE, case.too_early or "no request finished"
    elif hits / of > allowed:
        outcome = Outcome.INCONCLUSIVE
        reason = f"{hits:.0f} of {of:.0f} requests ended in an error, above {allowed:.2%} but not surely"
    else:
        outcome, reason = Outcome.PASS, f"{hits:.0f} of {of:.0f} requests ended in an error"
    return _verdict("error rate", outcome, reason, shares)


def _relative(case: _Case, latency: LatencyName, what: str) -> MetricVerdict | None:
    """Canary against stable in one latency; None where the mean alone can tell (or there is nothing to tell)."""
    metric, name = f"{latency} {what}", LATENCIES[latency]
    canary, stable = case.canary.latencies.get(name), case.stable.latencies.get(name)
    if canary is None or stable is None or canary.count <= 0 or stable.count <= 0:
        side = "canary" if canary is None or canary.count <= 0 else "stable servers"
        shown = [case.reading(name, None, known.count if known else 0.0) for known in (canary, stable)]
        return _verdict(metric, Outcome.INCONCLUSIVE, case.too_early or f"there is no {name} of the {side}", shown)
    if what == "mean" and canary.mean == stable.mean == 0:
        return None  # every answer has one token only: no time between tokens
    if what != "mean" and all(first_bucket_holds(QUANTILES[what], side.histogram) for side in (canary, stable)):
        return None
    shown = [_shown(case, name, what, side) for side in (canary, stable)]
    if case.too_early:
        return _verdict(metric, Outcome.INCONCLUSIVE, case.too_early, shown)
    ratio = _ratio(what, canary, stable)
    if ratio is None:
        return _verdict(metric, Outcome.INCONCLUSIVE, f"{metric}: too few blocks of time or buckets to compare", shown)
    tolerance = case.analysis.tolerance
    limit = math.log1p(tolerance)
    unacceptable = math.log1p(UNACCEPTABLE[what] * max(tolerance, LEAST_TOLERANCE))
    change = f"{metric} {math.expm1(ratio.estimate):+.1%}"
    if ratio.lower(case.alpha) > limit:
        reason = f"{change}, surely worse than {tolerance:.0%} ({_ms(shown[0])} against {_ms(shown[1])})"
        return _verdict(metric, Outcome.FAIL, reason, shown)
    highest = ratio.upper(case.beta)
    if ratio.estimate <= limit and highest <= unacceptable:
        return _verdict(metric, Outcome.PASS, change, shown)
    bounded = f"it may be {math.expm1(highest):+.0%}" if highest < math.log(10) else "too few requests to bound it"
    reason = f"{change}, not settled: {bounded}"
    return _verdict(metric, Outcome.INCONCLUSIVE, reason, shown)


def _ratio(what: str, canary: Latency, stable: Latency) -> Ratio | None:
    means = mean_ratio(canary.blocks, stable.blocks)
    if what == "mean":
        return means
    return quantile_ratio(QUANTILES[what], canary.histogram, stable.histogram, means)


def _absolute(case: _Case, latency: LatencyName, percentile: str, bound: float) -> MetricVerdict | None:
    """The canary against one bound of the SLO; None where the bound lies inside the lowest bucket."""
    metric, name, q = _slo_name(latency, percentile), LATENCIES[latency], QUANTILES[percentile]
    canary, stable = case.canary.latencies.get(name), case.stable.latencies.get(name)
    shown = [_shown(case, name, percentile, side) for side in (canary, stable)]
    if canary is None or canary.count <= 0 or case.too_early:
        return _verdict(metric, Outcome.INCONCLUSIVE, case.too_early or f"there is no {name} to judge", shown)
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
    if value is not None and value <= bound and not surely:
        return _verdict(metric, Outcome.PASS, against, shown)
    if stable_missed:
        return _verdict(metric, Outcome.PASS, f"{against}, which the stable servers miss too ({_ms(shown[1])})", shown)
    if surely:
        return _verdict(metric, Outcome.FAIL, f"{against}: surely missed", shown)
    return _verdict(metric, Outcome.INCONCLUSIVE, f"{against}: not met, but not surely missed", shown)


def _shown(case: _Case, name: str, what: str, side: Latency | None) -> Reading:
    if what == "mean":
        value = side.mean if side else None
        return case.reading(f"increase({name}_sum) / increase({name}_count)", value, side.count if side else 0.0)
    value = side.histogram.quantile(QUANTILES[what]) if side else None
    query = f"histogram_quantile({QUANTILES[what]}, increase({name}_bucket))"
    return case.reading(query, value, side.count if side else 0.0)


def _verdict(metric: str, outcome: Outcome, reason: str, shown: Sequence[Reading]) -> MetricVerdict:
    return MetricVerdict(metric=metric, outcome=outcome, reason=reason, canary=shown[0], stable=shown[1])


def _slo_name(latency: str, percentile: str) -> str:
    return f"slo {latency} {percentile}"


def _stable_missed(slo: Slo, verdict: MetricVerdict) -> bool:
    bounds = [bound for latency, p, bound in slo.bounds() if _slo_name(latency, p) == verdict.metric]
    stable = verdict.stable
    return bool(bounds) and stable.samples > 0 and (stable.value is None or stable.value > bounds[0])


def _share(hits: float | None, of: float | None) -> float | None:
    return hits / of if hits is not None and of else None


def _ms(reading: Reading) -> str:
    return "beyond the last bucket" if reading.value is None else f"{reading.value * 1e3:.4g} ms"
