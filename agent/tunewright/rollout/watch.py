"""After the roll: is it worse than before it, whatever the SLO says? Pure.

Before and after are other minutes, so nothing cancels out: a mean latency has become worse only when it is surely above
the one before by more than the tolerance, and only while each server has no more to do than before. Where it has, the
comparison would blame the candidate for the traffic, so it is not made, and that is told.

Over all looks and latencies together, equal traffic is called worse with probability `ALPHA` at most, as far as blocks
of time tell how latencies vary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tunewright.domain.promotion import Analysis
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading, Verdict
from tunewright.observe import names
from tunewright.observe.window import clean
from tunewright.ports import SeriesWindow
from tunewright.rollout.evidence import blocks_of_means, readings
from tunewright.rollout.gates import LATENCIES, LEAST_TOLERANCE, verdict_of
from tunewright.rollout.inference import Block, level_of_a_look, mean_of, ratio_of_other_times

WATCH_METRICS: tuple[str, ...] = (*names.CANARY_METRICS, names.PROMPTED)

ALPHA = 0.02
ALIKE = 1.2
"""A server has as much to do as before while this factor is not passed in any of `_LOAD`."""

_RATE, _PROMPT, _OUTPUT = "requests per second and server", "prompt tokens per request", "output tokens per request"
_LOAD = (_RATE, _PROMPT, _OUTPUT)


class Compared(NamedTuple):
    """One verdict per latency, or why there is none."""

    metrics: tuple[MetricVerdict, ...] = ()
    unjudged: str = ""


def told(window: SeriesWindow) -> tuple[Reading, ...]:
    """The numbers of one window of all of production that are compared: means by block of time, and the load."""
    cleaned = clean(window)
    finished = cleaned.increase(names.FINISHED)
    server_seconds = 0.0
    for server in cleaned.servers:
        times = [at for series in server.series.get(names.FINISHED, ()) for at, _ in series.samples]
        server_seconds += max(times) - min(times) if times else 0.0
    load = {
        _RATE: (finished, server_seconds),
        _PROMPT: (cleaned.increase(names.PROMPTED), finished),
        _OUTPUT: (cleaned.increase(names.GENERATED), finished),
    }
    found = [r for r in readings(window, ()) if "_bucket" not in r.query and r.query.startswith("canary")]
    for query, (part, whole) in load.items():
        value = part / whole if part is not None and whole else None
        found.append(Reading(query=query, value=value, samples=finished or 0.0, start=window.start, end=window.end))
    return tuple(found)


def compare_with_before(
    before: Sequence[Reading], after: Sequence[Reading], analysis: Analysis, *, horizon: float
) -> Compared:
    """The latencies after the roll against those before it; `horizon` is how long it will be looked at, in seconds."""
    if not before or not after:
        return Compared(unjudged="nothing is known of before the roll" if after else "nothing was read yet")
    then, now = ({r.query: r for r in side if r.query in _LOAD} for side in (before, after))
    for query in _LOAD:
        old, new = then[query].value, now[query].value
        if old is None or new is None:
            return Compared(unjudged=f"{query} is not known {'before' if old is None else 'after'} the roll")
        if new > ALIKE * old:
            return Compared(unjudged=f"a server has more to do than before: {new:.3g} {query} against {old:.3g}")
    fewest = min(then[_RATE].samples, now[_RATE].samples)
    if fewest < analysis.min_requests:
        return Compared(unjudged=f"{fewest:.0f} of {analysis.min_requests} requests finished")
    alpha = level_of_a_look(ALPHA / len(LATENCIES), analysis.interval, max(horizon, analysis.interval))
    old_means, new_means = blocks_of_means(before), blocks_of_means(after)
    found = [
        _latency(name, new_means.get(metric, []), old_means.get(metric, []), analysis, alpha, then[_RATE], now[_RATE])
        for name, metric in LATENCIES.items()
    ]
    return Compared(tuple(found))


def with_before(held: Verdict, compared: Compared) -> Verdict:
    """What the SLO and the allowed errors say, and what the values before the roll say, as one verdict."""
    worse = [metric.reason for metric in compared.metrics if metric.outcome is Outcome.FAIL]
    outcome = Outcome.FAIL if worse else held.outcome
    reason = held.reason
    if worse:
        reason = "; ".join([*worse, *([held.reason] if held.outcome is Outcome.FAIL else [])])
    elif compared.unjudged:
        reason = f"{reason}; not compared with before the roll: {compared.unjudged}"
    return Verdict(outcome=outcome, reason=reason, at=held.at, metrics=(*held.metrics, *compared.metrics))


def _latency(
    name: str,
    after: Sequence[Block],
    before: Sequence[Block],
    analysis: Analysis,
    alpha: float,
    then: Reading,
    now: Reading,
) -> MetricVerdict:
    metric, query = f"{name} since the roll", f"increase({name}_sum) / increase({name}_count)"
    shown = [
        Reading(query=query, value=mean_of(side), samples=sum(b.count for b in side), start=of.start, end=of.end)
        for side, of in ((after, now), (before, then))
    ]
    ratio = ratio_of_other_times(after, before)
    if ratio is None:
        return verdict_of(metric, Outcome.INCONCLUSIVE, f"{metric}: too little to compare yet", shown)
    change = f"{name} mean {shown[0].value or 0.0:.3g} s against {shown[1].value or 0.0:.3g} s before the roll"
    if ratio.lower(alpha) > _allowed(analysis):
        return verdict_of(metric, Outcome.FAIL, f"{change}, surely worse", shown)
    return verdict_of(metric, Outcome.PASS, change, shown)


def _allowed(analysis: Analysis) -> float:
    return math.log(1 + max(analysis.tolerance, LEAST_TOLERANCE))
