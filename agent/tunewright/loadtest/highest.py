"""The highest rate that keeps the SLO, on one running server: bracketed, each level judged to its interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tunewright.domain.measurement import Estimate, Measurement
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import LEVEL_WARMUP, MOST_RUNS
from tunewright.loadtest import statistics
from tunewright.loadtest.job import LoadJob, Overloaded
from tunewright.loadtest.judge import SATURATED
from tunewright.loadtest.measure import Answer, Floats

RATIO = 1.05
"""The search ends when a rate that misses is so near above one that holds."""
_STEP = 2.0
_LOWEST = 1e-3  # of the first rate


class Verdict(StrEnum):
    """Of one level."""

    HOLDS = "holds the SLO"
    MISSES = "misses the SLO"
    OPEN = "is not settled"


@dataclass(frozen=True)
class Level:
    """One rate, measured once."""

    rate: float
    measurement: Measurement | None
    """None: the server kept up so badly that nothing completed."""
    verdict: Verdict
    reason: str
    likely: bool
    """Whether it holds by its estimates alone."""


Run = Callable[[LoadJob], tuple[Sequence[Answer], Measurement]]
"""One load test at a fixed rate on the running server: what was answered (times from the window's start), and its
measurement. Raises `LoadFailure`."""


def highest_rate(job: LoadJob, run: Run) -> tuple[Measurement, list[str]]:
    """The measurement of the highest rate that keeps the SLO, and a note on each level.

    Where none does, that of the lowest rate that was tried, which misses it. Raises `LoadFailure`.
    """
    if job.workload.rate is None:
        raise AssertionError("a workload with a rate to begin with is wanted")
    first = rate = job.workload.rate
    held: Level | None = None
    missed: Level | None = None
    lowest: Measurement | None = None
    """Of the lowest rate that missed and could be measured."""
    notes: list[str] = []
    runs = 0
    while runs < MOST_RUNS and not (held and missed and missed.rate / held.rate <= RATIO) and rate > first * _LOWEST:
        level = _level(job, rate, 1, first=runs == 0, run=run)
        runs += 1
        if level.verdict is Verdict.OPEN and runs < MOST_RUNS:
            level = _level(job, rate, 2, first=False, run=run)
            runs += 1
        if level.measurement is not None and level.measurement.void and level.verdict is not Verdict.MISSES:
            return level.measurement, [*notes, f"{rate:.4g} requests/s could not be judged, and the search ended"]
        holds = level.verdict is Verdict.HOLDS or (level.verdict is Verdict.OPEN and level.likely)
        by = f" (taken as {'held' if holds else 'missed'} by its estimates)" if level.verdict is Verdict.OPEN else ""
        notes.append(f"{rate:.4g} requests/s {level.verdict.value}{by}: {level.reason}")
        held, missed = (level, missed) if holds else (held, level)
        lowest = lowest if holds else level.measurement or lowest
        rate = math.sqrt(held.rate * missed.rate) if held and missed else rate * (_STEP if holds else 1 / _STEP)
    best = lowest if held is None else held.measurement
    if best is None:
        raise Overloaded(f"at no rate from {first:.4g} requests/s down could anything be measured: {notes[-1]}")
    if held is not None and (missed is None or missed.rate / held.rate > RATIO):
        notes.append(f"the highest rate was not bracketed in {runs} runs: it may be above {held.rate:.4g} requests/s")
    return best, notes


def _level(job: LoadJob, rate: float, times: int, first: bool, run: Run) -> Level:
    """Measure one rate. One whose requests pile up misses, also where nothing can be measured of it."""
    workload = job.workload.model_copy(update={"rate": rate, "highest": False})
    warmup = job.max_warmup if first else min(job.max_warmup, LEVEL_WARMUP)
    asked = job.model_copy(update={"workload": workload, "duration": job.duration * times, "max_warmup": warmup})
    try:
        found, measured = run(asked)
    except Overloaded as failure:
        return Level(rate, None, Verdict.MISSES, str(failure), likely=False)
    saturated = [reason for reason in measured.void if reason.startswith(SATURATED)]
    if saturated:
        return Level(rate, measured, Verdict.MISSES, saturated[0], likely=False)
    return Level(rate, measured, *judge_level(job.slo, found, measured))


def judge_level(slo: Slo, found: Sequence[Answer], measured: Measurement) -> tuple[Verdict, str, bool]:
    """Whether a level keeps the SLO, by the share of samples beyond each bound and its interval; and why."""
    if measured.error_rate > slo.error_rate:
        return Verdict.MISSES, f"error rate {measured.error_rate:.1%}", False
    verdict, reason, likely = Verdict.HOLDS, "", True
    for name, percentile, bound in slo.bounds():
        allowed = 1 - int(percentile[1:]) / 100
        times, values = _samples(name, found, measured.duration)
        over = statistics.share(times, (values > bound).astype(np.float64), 0.0, measured.duration)
        told = _told(name, over, bound, allowed)
        likely = likely and measured.latency(name, percentile) <= bound
        if over.low > allowed:
            return Verdict.MISSES, told, False
        if over.high > allowed:
            verdict, reason = Verdict.OPEN, told
        elif verdict is Verdict.HOLDS:
            reason = told
    return verdict, reason, likely


def _told(name: str, over: Estimate, bound: float, allowed: float) -> str:
    return (
        f"{over.value:.1%} of {name.upper()} above {bound * 1e3:.4g} ms ({over.low:.1%} to {over.high:.1%}), "
        f"where {allowed:.0%} may be"
    )


def _samples(name: str, found: Sequence[Answer], end: float) -> tuple[Floats, Floats]:
    """When each sample of a latency came within the window, and its value, as `measure.samples` counts them."""
    good = [answer for answer in found if answer.error is None]
    if name == "itl":
        times = np.concatenate([answer.times[1:] for answer in good] or [np.empty(0)])
        values = np.concatenate([answer.gaps for answer in good] or [np.empty(0)])
    elif name == "ttft":
        times = np.array([answer.first for answer in good if answer.first is not None])
        values = np.array([answer.ttft for answer in good if answer.first is not None])
    else:
        ended = [answer for answer in good if answer.finished is not None]
        kept = [(a.finished, a.tpot if name == "tpot" else a.e2e) for a in ended]
        pairs = [(at, value) for at, value in kept if value is not None]
        times, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    inside = (times >= 0) & (times < end)
    return times[inside], values[inside]
