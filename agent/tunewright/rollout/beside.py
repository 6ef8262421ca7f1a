"""What is judged beside latencies and errors: aborted requests, preemptions, and tokens per second and GPU.

| metric | better is | compared |
|---|---|---|
| aborted | lower | share of requests, exactly; worse is `abortedTolerance` more |
| preemptions | lower | per finished request, by blocks of time; worse is `preemptionTolerance` more |
| throughput | higher | output tokens per second and GPU, by blocks of time; worse is `throughputTolerance` less |

Throughput says something of a server only while requests wait on both sides: else it is what was asked for.
A metric that is not there is inconclusive where `analysis.required` names it, and told as not judged elsewhere.
"""

import math
from collections.abc import Callable, Mapping

from tunewright.domain.promotion import Analysis, FurtherMetric
from tunewright.domain.verdict import MetricVerdict, Outcome
from tunewright.observe import names
from tunewright.rollout.gates import LEAST_TOLERANCE, Case, surely_more, verdict_of
from tunewright.rollout.inference import Estimated, mean_difference, mean_ratio

Judged = MetricVerdict | str
"""The verdict on a metric, or why it is not judged."""

QUEUED = 0.8
"""Share of the time in which requests wait, from which on traffic saturates a server."""


def further(case: Case) -> tuple[list[MetricVerdict], list[str]]:
    """The verdicts, and what is not judged, with the reason."""
    found: list[MetricVerdict] = []
    unjudged: list[str] = []
    for metric, gate in _GATES.items():
        judged = gate(case)
        if isinstance(judged, MetricVerdict):
            found.append(judged)
        elif metric in case.analysis.required:
            nothing = [case.reading(metric, None, 0.0)] * 2
            found.append(verdict_of(metric, Outcome.INCONCLUSIVE, case.too_early or f"{metric}: {judged}", nothing))
        else:
            unjudged.append(f"{metric} ({judged})")
    return found, unjudged


def needed(analysis: Analysis) -> tuple[str, ...]:
    """Names of the metrics without which `analysis` comes to no verdict."""
    more = {
        FurtherMetric.ABORTED: (names.FINISHED,),
        FurtherMetric.PREEMPTIONS: (names.PREEMPTIONS,),
        FurtherMetric.THROUGHPUT: (names.GENERATED, names.WAITING),
    }
    extra = [name for metric in analysis.required for name in more[metric]]
    return tuple(dict.fromkeys((*names.ANALYSIS_METRICS, *extra)))


def aborted(case: Case) -> Judged:
    """Clients that give up on the canary more than on the others."""
    sides = (case.canary, case.stable)
    for side, who in zip(sides, ("canary", "stable servers"), strict=True):
        if side.aborted is None or side.finished is None:
            return f"there is no {names.FINISHED} with finished_reason abort of the {who}"
    totals = [(side.aborted or 0.0) + (side.finished or 0.0) for side in sides]
    query = f'{names.FINISHED}{{finished_reason="abort"}} / all'
    shares = [(side.aborted or 0.0) / total if total else None for side, total in zip(sides, totals, strict=True)]
    shown = [case.reading(query, share, total) for share, total in zip(shares, totals, strict=True)]
    hits, (of, other_of) = case.canary.aborted or 0.0, totals
    said = f"{hits:.0f} of {of:.0f} requests were aborted"
    more = (shares[0] or 0.0) - (shares[1] or 0.0)
    if more > case.analysis.aborted_tolerance and surely_more(case, hits, of, case.stable.aborted, other_of):
        reason = f"{said}, surely more than of the stable servers' ({shares[1] or 0.0:.2%})"
        return verdict_of(FurtherMetric.ABORTED, Outcome.FAIL, reason, shown)
    if case.too_early:
        return verdict_of(FurtherMetric.ABORTED, Outcome.INCONCLUSIVE, case.too_early, shown)
    return verdict_of(FurtherMetric.ABORTED, Outcome.PASS, said, shown)


def preemptions(case: Case) -> Judged:
    """Requests that a server throws out and computes again, since its KV cache is full.

    They come in bursts, so their spread is taken from blocks of time. Two hypotheses: as often, or so many more per
    request as the tolerance allows.
    """
    canary, stable = case.canary.preemptions, case.stable.preemptions
    if not canary or not stable:
        return f"there is no {names.PREEMPTIONS} of the {'stable servers' if canary else 'canary'}"
    counts = [math.fsum(block.count for block in side) for side in (canary, stable)]
    totals = [math.fsum(block.total for block in side) for side in (canary, stable)]
    each = [total / count if count else None for total, count in zip(totals, counts, strict=True)]
    query = f"increase({names.PREEMPTIONS}) / increase({names.FINISHED})"
    shown = [case.reading(query, value, count) for value, count in zip(each, counts, strict=True)]
    metric = FurtherMetric.PREEMPTIONS
    if case.too_few or each[0] is None or each[1] is None:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_few or "no request finished", shown)
    apart = mean_difference(canary, stable)
    if apart is None:
        reason = case.too_early or f"{metric}: too few blocks of time to compare"
        return verdict_of(metric, Outcome.INCONCLUSIVE, reason, shown)
    said = f"{each[0]:.3f} preemptions per request against {each[1]:.3f}"
    tolerance = max(case.analysis.preemption_tolerance, LEAST_TOLERANCE)
    outcome, reason = _settled(case, apart, tolerance, said, worse="more")
    return verdict_of(metric, outcome, reason, shown)


def throughput(case: Case) -> Judged:
    """Output tokens per second and GPU, while requests wait on both sides."""
    canary, stable = case.canary.tokens, case.stable.tokens
    if not canary or not stable:
        return f"there is no {names.GENERATED} of the {'stable servers' if canary else 'canary'}"
    for side, who in ((case.canary, "canary"), (case.stable, "stable servers")):
        if side.queued is None:
            return f"there is no {names.WAITING} of the {who}"
        if side.queued < QUEUED:
            return f"requests waited on the {who} in {side.queued:.0%} of the time: it is what was asked for"
    counts = [math.fsum(block.count for block in side) for side in (canary, stable)]
    rates = [math.fsum(b.total for b in side) / count for side, count in zip((canary, stable), counts, strict=True)]
    query = f"increase({names.GENERATED}) / GPU seconds"
    shown = [case.reading(query, rate, count) for rate, count in zip(rates, counts, strict=True)]
    metric = FurtherMetric.THROUGHPUT
    if case.too_few:
        return verdict_of(metric, Outcome.INCONCLUSIVE, case.too_few, shown)
    less = mean_ratio(stable, canary)  # more is better: how many times as much as the canary the others make
    if less is None:
        reason = case.too_early or f"{metric}: too few blocks of time to compare"
        return verdict_of(metric, Outcome.INCONCLUSIVE, reason, shown)
    said = f"{rates[0]:.0f} output tokens per second and GPU against {rates[1]:.0f}"
    tolerance = math.log(1 + max(case.analysis.throughput_tolerance, LEAST_TOLERANCE))
    outcome, reason = _settled(case, less, tolerance, said, worse="less")
    return verdict_of(metric, outcome, reason, shown)


def _settled(case: Case, apart: Estimated, tolerance: float, said: str, *, worse: str) -> tuple[Outcome, str]:
    """Two hypotheses: no difference, or one of `tolerance` to the worse; between them, the nearer."""
    if apart.estimate > tolerance / 2 and apart.lower(case.alpha) > 0:
        return Outcome.FAIL, f"{said}, surely {worse}"
    if case.too_early:
        return Outcome.INCONCLUSIVE, case.too_early
    if apart.estimate <= tolerance / 2 and apart.upper(case.beta) < tolerance:
        return Outcome.PASS, said
    return Outcome.INCONCLUSIVE, f"{said}, not settled"


_GATES: Mapping[FurtherMetric, Callable[[Case], Judged]] = {
    FurtherMetric.ABORTED: aborted,
    FurtherMetric.PREEMPTIONS: preemptions,
    FurtherMetric.THROUGHPUT: throughput,
}
