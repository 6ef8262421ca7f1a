"""Rules for a canary's verdict: ours, and what others use, in the form their documentation shows.

A rule looks at both sides once a minute or as often as it wants, and says when it ended and how.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.streams import LATENCIES, SCRAPE, Case, Floats, Side, sides, ttft_p95
from scipy.stats import norm

from tunewright.domain.promotion import Analysis
from tunewright.domain.tuning import Slo
from tunewright.domain.verdict import Outcome
from tunewright.rollout.analysis import weigh

MINUTE = int(60 / SCRAPE)


@dataclass(frozen=True)
class End:
    """How one rollout ended, after how many seconds. Inconclusive goes back at the end of the analysis."""

    outcome: Outcome
    after: float


Rule = Callable[[Case, Side, Side], End]


def ours(case: Case, canary: Side, stable: Side) -> End:
    """The analysis of this project at its defaults."""
    analysis = Analysis()
    bound = ttft_p95(case.stable) * case.slo_over_stable if case.slo_over_stable else None
    slo = Slo(ttft_p95=f"{bound * 1e3:.3f}ms") if bound else Slo()
    step, last = int(analysis.interval / SCRAPE), int(analysis.max_duration / SCRAPE)
    for scrapes in range(step, last + 1, step):
        for side in (canary, stable):
            side.grow(scrapes)
        now = scrapes * SCRAPE
        sides = {"canary": canary.evidence(scrapes), "stable": stable.evidence(scrapes)}
        verdict = weigh(sides, 0.0, now, slo, analysis, at=now)
        if verdict.outcome is not Outcome.INCONCLUSIVE:
            return End(verdict.outcome, now)
    return End(Outcome.INCONCLUSIVE, analysis.max_duration)


def threshold(case: Case, canary: Side, stable: Side) -> End:
    """As Flagger: each minute the p99 of the last minute against a fixed bound, and 99 % without errors; 10 good checks
    promote, 5 bad ones roll back. The bound is 1.1 times what the stable servers' p99 truly is.
    """
    bounds = {name: 1.1 * _true_p99(case, name) for name in LATENCIES}
    good = bad = 0
    for minute in _minutes(canary, stable, 30):
        seen = canary.finished[minute].sum()
        if seen == 0:
            continue  # no traffic: Flagger waits by default
        fine = canary.errors[minute].sum() <= 0.01 * seen
        fine = fine and all(_p99(canary, name, minute) <= bound for name, bound in bounds.items())
        good, bad = (good + 1, bad) if fine else (good, bad + 1)
        after = float(minute.stop) * SCRAPE
        if bad >= 5:
            return End(Outcome.FAIL, after)
        if good >= 10:
            return End(Outcome.PASS, after)
    return End(Outcome.INCONCLUSIVE, 1800.0)


def mann_whitney(case: Case, canary: Side, stable: Side) -> End:
    """As Kayenta's judge: Mann-Whitney on the means of each minute, at 98 % confidence and with its tolerance of a
    quarter of the estimate; looked at every 5 minutes of 15. A score below 75 fails, 95 or more at the end passes.
    """
    del case
    series: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (*LATENCIES, "errors")}
    for number, minute in enumerate(_minutes(canary, stable, 15), start=1):
        for side, at in ((canary, 0), (stable, 1)):
            seen = max(1.0, float(side.finished[minute].sum()))
            series["errors"][at].append(float(side.errors[minute].sum()) / seen)
            for name in LATENCIES:
                series[name][at].append(_mean(side, name, minute))
        if number % 5:
            continue
        passed = sum(not _surely_higher(*map(np.asarray, both)) for both in series.values())
        score = 100 * passed / len(series)
        if score < 75:
            return End(Outcome.FAIL, number * 60.0)
        if number == 15:
            return End(Outcome.PASS if score >= 95 else Outcome.INCONCLUSIVE, 900.0)
    raise AssertionError("fifteen minutes have no end")


def comparison_of_means(case: Case, canary: Side, stable: Side) -> End:
    """As a hand-written AnalysisTemplate: each minute, fail where a mean is 1.1 times the stable servers' or 1 % are
    errors; more than 3 such minutes roll back, 10 measurements without promote.
    """
    del case
    failed = 0
    for number, minute in enumerate(_minutes(canary, stable, 10), start=1):
        seen = max(1.0, float(canary.finished[minute].sum()))
        worse = canary.errors[minute].sum() > 0.01 * seen
        worse = worse or any(_mean(canary, n, minute) > 1.1 * _mean(stable, n, minute) for n in LATENCIES)
        failed += bool(worse)
        if failed > 3:
            return End(Outcome.FAIL, number * 60.0)
    return End(Outcome.PASS, 600.0)


RULES: dict[str, Rule] = {
    "tunewright": ours,
    "threshold on p99 (as Flagger)": threshold,
    "Mann-Whitney (as Kayenta)": mann_whitney,
    "comparison of means": comparison_of_means,
}


def _minutes(canary: Side, stable: Side, count: int) -> Iterator[slice]:
    for number in range(count):
        for side in (canary, stable):
            side.grow((number + 1) * MINUTE)
        yield slice(number * MINUTE, (number + 1) * MINUTE)


def _mean(side: Side, name: str, minute: slice) -> float:
    count = float(side.buckets[name][minute].sum())
    return float(side.sums[name][minute].sum()) / count if count else 0.0


def _p99(side: Side, name: str, minute: slice) -> float:
    """histogram_quantile(0.99, ...): linear inside a bucket, the last edge beyond it."""
    counts = side.buckets[name][minute].sum(axis=0)
    edges = np.asarray(side.edges[name])
    cumulative = np.cumsum(counts)
    at = int(np.searchsorted(cumulative, 0.99 * cumulative[-1]))
    if at >= len(edges):
        return float(edges[-1])
    low, below = (edges[at - 1], cumulative[at - 1]) if at else (0.0, 0.0)
    return float(low + (edges[at] - low) * (0.99 * cumulative[-1] - below) / max(counts[at], 1e-9))


_KNOWN: dict[tuple[float, bool, str], float] = {}


def _true_p99(case: Case, name: str) -> float:
    """What the buckets would show of the stable servers in the long run."""
    key = (case.stable.spread, case.fine_buckets, name)
    if key not in _KNOWN:
        _, long = sides(case, 0)
        long.behaviour = replace(case.stable, rate=1000.0, swell=0.0)
        long.grow(20)
        _KNOWN[key] = _p99(long, name, slice(0, 20))
    return _KNOWN[key]


def _surely_higher(canary: Floats, stable: Floats, confidence: float = 0.98, tolerance: float = 0.25) -> bool:
    """Hodges and Lehmann's shift with its interval from the ranks of all differences."""
    shifts = np.sort((canary[:, None] - stable[None, :]).ravel())
    m, n = len(canary), len(stable)
    reach = norm.ppf((1 + confidence) / 2) * np.sqrt(m * n * (m + n + 1) / 12)
    lowest = shifts[max(0, int(np.floor(m * n / 2 - reach)))]
    return bool(lowest > tolerance * abs(np.median(shifts)))
