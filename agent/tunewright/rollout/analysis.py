"""The canary's verdict: a pure function of stored readings.

Which mistakes are bounded, and by what:
- A canary that is as good as the stable servers is sent back by *any* look of a whole analysis with probability `ALPHA`
  at most: each test gets an equal part of it (Bonferroni), and each look of a test the level at which looking at every
  moment errs no more than that part (`level_of_a_look`).
- A canary that is worse by the tolerance in a mean latency, or by 2.5 times the tolerance in the slow requests, passes
  at any look with probability `BETA` at most, by each of the metrics in which it is worse.
- Between the two it goes the way that it is nearer to. With too little data the verdict is inconclusive; what is
  inconclusive for too long goes back.

The spread behind these is that of blocks of time (see `inference`), so it is an estimate itself: the bounds hold as
far as the blocks are alike. Errors are judged by exact binomial bounds from the first request on, latencies from the
first look that has enough requests and blocks: what is surely worse is not watched for `minDuration`.
docs/rollout.md has the figures that come of it.
"""

from collections.abc import Mapping, Sequence

from tunewright.domain.measurement import LatencyName
from tunewright.domain.promotion import Analysis
from tunewright.domain.tuning import Slo
from tunewright.domain.units import format_duration
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading, Verdict
from tunewright.observe import names
from tunewright.observe.names import ANALYSIS_METRICS
from tunewright.ports import SeriesWindow
from tunewright.rollout import gates
from tunewright.rollout.beside import QUEUED, further
from tunewright.rollout.evidence import Evidence, evidence, readings
from tunewright.rollout.gates import LATENCIES, Case, slo_name
from tunewright.rollout.inference import level_of_a_look

__all__ = ["ANALYSIS_METRICS", "compare", "hold_to_slo", "judge", "readings", "weigh"]

ALPHA = 0.02
BETA = 0.05

MEANS: tuple[LatencyName, ...] = ("ttft", "tpot", "e2e")
TAILS: tuple[LatencyName, ...] = ("ttft", "e2e")


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
    start, end = min(r.start for r in stored), max(r.end for r in stored)
    return weigh(
        evidence(stored), start, end, slo, analysis, at=at, horizon=horizon, compared=compared, excused=excused
    )


def weigh(
    sides: Mapping[str, Evidence],
    start: float,
    end: float,
    slo: Slo,
    analysis: Analysis,
    *,
    at: float,
    horizon: float | None = None,
    compared: bool = True,
    excused: frozenset[str] | set[str] = frozenset(),
) -> Verdict:
    """The verdict that follows from the evidence of both sides over the window from `start` to `end`."""
    bounds = [b for b in slo.bounds() if b[0] in LATENCIES and slo_name(b[0], b[1]) not in excused]
    saturated = all((side.queued or 0.0) >= QUEUED for side in sides.values())
    tests = 1 + len(bounds) + (2 + saturated + len(MEANS) + len(TAILS) if compared else 0)
    last = max(horizon or analysis.max_duration, end - start)
    case = Case(
        canary=sides["canary"],
        stable=sides["stable"],
        analysis=analysis,
        start=start,
        end=end,
        alpha=level_of_a_look(ALPHA / tests, analysis.interval, last),
        beta=level_of_a_look(BETA, max(analysis.min_duration, analysis.interval), last),
        too_few=_too_few(sides["canary"], sides["stable"], analysis, compared),
        too_short=_too_short(end - start, analysis),
        compared=compared,
    )
    found: list[MetricVerdict | None] = [gates.errors(case)]
    unjudged: list[str] = []
    if compared:
        more, unjudged = further(case)
        found += more
        found += [gates.mean(case, latency) for latency in MEANS] + [gates.tail(case, latency) for latency in TAILS]
    held = [(f"{latency} {p}", gates.absolute(case, latency, p, bound)) for latency, p, bound in bounds]
    unresolved = [f"{latency} {p}" for latency, p, _ in slo.bounds() if latency not in LATENCIES]
    unresolved += [name for name, verdict in held if verdict is None]
    unjudged += [f"{name} (the histograms don't resolve it)" for name in unresolved]
    found += [verdict for _, verdict in held]
    return _whole(case, [verdict for verdict in found if verdict is not None], unjudged, at)


def _whole(case: Case, found: Sequence[MetricVerdict], unjudged: Sequence[str], at: float) -> Verdict:
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        reasons = list(dict.fromkeys(m.reason for m in found if m.outcome is outcome))
        if outcome is Outcome.INCONCLUSIVE and case.too_early:
            reasons = [case.too_early]
        if reasons and any(m.outcome is outcome for m in found):
            problems = case.canary.problems if outcome is Outcome.INCONCLUSIVE else ()
            return Verdict(outcome=outcome, reason="; ".join((*reasons, *problems)), at=at, metrics=tuple(found))
    reason = ", ".join(m.reason for m in found)
    if unjudged:
        reason += f"; not judged here: {', '.join(unjudged)}"
    return Verdict(outcome=Outcome.PASS, reason=reason, at=at, metrics=tuple(found))


def _too_few(canary: Evidence, stable: Evidence, analysis: Analysis, compared: bool) -> str:
    """Which requests are missing for a verdict; empty when there are enough."""
    for side, known in (("canary", canary), ("stable", stable)) if compared else (("production", canary),):
        if known.finished is None:
            return f"there is no {names.FINISHED} of the {side}"
        if known.finished < analysis.min_requests:
            return f"{known.finished:.0f} of {analysis.min_requests} requests finished ({side})"
    return ""


def _too_short(watched: float, analysis: Analysis) -> str:
    """How much time is missing for a pass; empty when there was enough."""
    if watched < analysis.min_duration:
        return f"watched {format_duration(round(watched))} of {format_duration(round(analysis.min_duration))}"
    return ""


def _stable_missed(slo: Slo, verdict: MetricVerdict) -> bool:
    bounds = [bound for latency, p, bound in slo.bounds() if slo_name(latency, p) == verdict.metric]
    stable = verdict.stable
    return bool(bounds) and stable.samples > 0 and (stable.value is None or stable.value > bounds[0])
