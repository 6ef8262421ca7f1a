"""What metrics, terminal and report have in common: facts derived from a tuning's record and its trials."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.objective import gain as relative_gain
from tunewright.domain.objective import objective_unit
from tunewright.domain.state import (
    Finalist,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.tuning import Objective
from tunewright.knobs.catalogue import gpus_of


@dataclass(frozen=True)
class SpareTime:
    """Seconds that one finished trial, or several, held their spare, by use."""

    starting: float = 0.0
    warming: float = 0.0
    measuring: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.starting + self.warming + self.measuring + self.other

    def __add__(self, more: "SpareTime") -> "SpareTime":
        return SpareTime(
            self.starting + more.starting,
            self.warming + more.warming,
            self.measuring + more.measuring,
            self.other + more.other,
        )


def is_judged(trial: TrialRecord) -> bool:
    """It was measured soundly: void measurements and failures have no objective."""
    return trial.objective is not None and trial.measurement is not None


def baseline_trials(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The judged measurements of the baseline before the search."""
    return [trial for trial in trials if trial.purpose is TrialPurpose.BASELINE and is_judged(trial)]


def baseline_objective(trials: Sequence[TrialRecord]) -> float | None:
    """Mean objective of the baseline's measurements before the search (larger is better); None before the first."""
    values = [trial.objective for trial in baseline_trials(trials) if trial.objective is not None]
    return sum(values) / len(values) if values else None


def best_trial(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The feasible trial with the best objective, confirming runs apart; None when none is feasible yet."""
    feasible = [
        trial for trial in trials if trial.of_search and trial.outcome is TrialOutcome.COMPLETE and is_judged(trial)
    ]
    return max(feasible, key=lambda trial: trial.objective or -math.inf, default=None)


def leading_finalist(record: TuningRecord) -> Finalist | None:
    """The winner's confirming result, else that of the finalist that is ahead; None before two rounds were run."""
    known = [finalist for finalist in record.finalists if finalist.gain is not None and finalist.gain.rounds >= 2]
    if record.winner is not None:
        return next((finalist for finalist in known if finalist.candidate.hash == record.winner.hash), None)
    return max(known, key=lambda finalist: finalist.gain.estimate.value if finalist.gain else -math.inf, default=None)


def trials_of(trials: Sequence[TrialRecord], candidate: Candidate) -> list[TrialRecord]:
    """The judged trials of one candidate, whatever they were for."""
    return [trial for trial in trials if trial.candidate.hash == candidate.hash and is_judged(trial)]


def best_known(trials: Sequence[TrialRecord], candidate: Candidate) -> list[TrialRecord]:
    """The judged trials that say most of a candidate: its confirming runs, else all it has.

    The search's own run of a winner is left out where it can be: it was picked for having come out well.
    """
    mine = trials_of(trials, candidate)
    return [trial for trial in mine if trial.purpose is TrialPurpose.CONFIRM] or mine


def spare_time(trial: TrialRecord) -> SpareTime:
    """Where a finished trial's time on the spare went; nothing for one that is still running.

    What cannot be told apart (earlier attempts, stopping, a load test that came to nothing) is `other`.
    """
    total = max(0.0, trial.gpu_seconds)
    if trial.phase is not TrialPhase.DONE or not total:
        return SpareTime()
    left, parts = total, []
    measured = trial.measurement
    if trial.ready_at is None:
        starting = total
    elif trial.attempt > 1 and trial.start_seconds is not None:
        starting = trial.start_seconds
    else:
        starting = trial.ready_at - trial.created_at
    warming = measured.started_at - trial.load_started_at if measured and trial.load_started_at else 0.0
    for seconds in (starting, measured.duration if measured else 0.0, warming):
        parts.append(min(left, max(0.0, seconds)))
        left -= parts[-1]
    return SpareTime(starting=parts[0], warming=parts[2], measuring=parts[1], other=left)


def spare_time_of_all(trials: Sequence[TrialRecord]) -> SpareTime:
    """The sum over the finished trials."""
    return sum((spare_time(trial) for trial in trials), SpareTime())


def idle_seconds(trials: Sequence[TrialRecord]) -> float:
    """Seconds between the first and the last finished trial of each spare in which none held it, over all spares."""
    done = [trial for trial in trials if trial.phase is TrialPhase.DONE and trial.created_at and trial.finished_at]
    slots = sorted({trial.slot for trial in done})
    return sum((_idle([trial for trial in done if trial.slot == slot]) for slot in slots), 0.0)


def _idle(done: Sequence[TrialRecord]) -> float:
    span = max(trial.finished_at or 0.0 for trial in done) - min(trial.created_at for trial in done)
    return max(0.0, span - sum(max(0.0, trial.gpu_seconds) for trial in done))


def gpus(trial: TrialRecord) -> int:
    """GPUs of one server of this trial, as far as its configuration tells: the product of its parallel sizes."""
    return gpus_of({**trial.candidate.values, **trial.effective})


def shown_objective(objective: Objective, value: float) -> float:
    """An objective in its own unit: a latency that is minimized is kept negative, and is shown as it is."""
    return -value if objective.minimize is not None else value


def objective_interval(objective: Objective, trials: Sequence[TrialRecord]) -> tuple[float, float] | None:
    """The ends of the mean objective's 95 % interval, from those of its runs; None where it has none.

    Runs are independent, so half of the mean's interval is the root of the sum of squares over their number.
    """
    if objective.maximize not in ("outputTokensPerSecond", "tokensPerDollar"):
        return None
    known = [(trial.objective, trial.measurement) for trial in trials]
    halves, values = [], []
    for value, measured in known:
        if value is None or measured is None or not measured.output_tokens_per_second.value:
            continue
        tokens = measured.output_tokens_per_second
        values.append(value)
        halves.append(value * (tokens.high - tokens.low) / 2 / tokens.value)
    if not values:
        return None
    mean, half = sum(values) / len(values), math.hypot(*halves) / len(values)
    return mean - half, mean + half


def objective_name(objective: Objective) -> str:
    """The field of the tuning file that names it, as `outputTokensPerSecond` or `ttftP95`."""
    return objective.maximize or objective.minimize or ""


def objective_text(objective: Objective, value: float) -> str:
    """An objective with its unit, for people: `1,234 output tokens/s` or `210 ms`."""
    shown = shown_objective(objective, value)
    return seconds(shown) if objective.minimize is not None else f"{number(shown)} {objective_unit(objective)}"


def gain_over(objective: Objective, value: float | None, baseline: float | None) -> float | None:
    """The relative gain of one objective value over the baseline's; None while either is unknown."""
    return None if value is None or baseline is None else relative_gain(objective, value, baseline)


def knob_text(value: KnobValue | None) -> str:
    """A knob's value as vLLM's configuration file has it; `default` where it is not set."""
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)


def difference_text(baseline: Candidate | None, candidate: Candidate) -> str:
    """What a candidate changes against the baseline, in one line."""
    if baseline is None:
        return ", ".join(f"{name} {knob_text(value)}" for name, value in candidate.values.items()) or "all defaults"
    changes = baseline.differences(candidate)
    return ", ".join(f"{k} {knob_text(a)} → {knob_text(b)}" for k, (a, b) in changes.items()) or "as the baseline"


def number(value: float) -> str:
    """Three significant digits or more, with thousands marked: `12,345`, `98.8`, `0.0123`."""
    if not math.isfinite(value):
        return "unknown"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def percent(ratio: float) -> str:
    """A gain with its sign: `+12.3%`; bounds that say nothing are `unknown`."""
    return "unknown" if not math.isfinite(ratio) or abs(ratio) >= 1e6 else f"{ratio * 100:+,.1f}%"


def seconds(value: float) -> str:
    """A latency or a span: `210 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if not math.isfinite(value):
        return "unknown"
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms" if value else "0 s"
    if abs(value) < 59.95:
        return f"{value:.3g} s"
    sign, whole = "-" if value < 0 else "", round(abs(value))
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60} s"
    return f"{sign}{whole // 3600:,} h {whole % 3600 // 60} min"


def runs(count: int) -> str:
    """`1 run`, `3 runs`."""
    return f"{count} run" if count == 1 else f"{count} runs"
