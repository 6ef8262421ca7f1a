"""What the changes are worth: the ladder from the baseline to the candidate, and speed against latency."""

from collections.abc import Sequence

from tunewright.domain.candidate import Candidate
from tunewright.domain.pareto import RATES, measure, pareto_front
from tunewright.domain.state import TrialOutcome, TrialPurpose, TrialRecord, TuningRecord
from tunewright.telemetry.effects import MeasuredRung, Rung, knob_effects, ladder, measured_ladder, together
from tunewright.telemetry.facts import (
    difference_text,
    is_judged,
    knob_text,
    leading_finalist,
    number,
    percent,
    runs,
    seconds,
)
from tunewright.telemetry.report.answer import compared
from tunewright.telemetry.report.charts import Mark, Step, ladder_chart, pareto_chart
from tunewright.telemetry.report.markup import Raw, el, join, table

_CAN_BE_DRAWN = 100.0
"""A gain of more than 100 times the baseline is told, not drawn: it says that an objective was next to nothing."""


def ladder_section(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """Change by change from the baseline to the candidate, as far as the trials tell."""
    against, objective = compared(record, trials), record.tuning.spec.objective
    if against is None or record.baseline is None:
        return el("p", "There is no candidate to take apart yet.", cls="soft")
    measured = measured_ladder(objective, record.baseline, record.ladder, against[1], trials)
    if measured:
        return _measured(record, against[1], measured)
    rungs = ladder(objective, record.baseline, against[1], trials)
    if not rungs:
        return el("p", "Too little was measured to tell the changes apart.", cls="soft")
    lead = leading_finalist(record)
    confirmed = lead.gain.estimate if lead and lead.gain and lead.candidate.hash == against[1].hash else None
    starts = [0.0, *(rung.gain for rung in rungs)]
    steps = [
        Step(
            label=_name(record, rung),
            worth=rung.effect.gain,
            start=start,
            end=rung.gain,
            low=together(objective, start, rung.effect.low),
            high=together(objective, start, rung.effect.high),
        )
        for start, rung in zip(starts, rungs, strict=False)
    ]
    drawn = all(abs(value) < _CAN_BE_DRAWN for step in steps for value in (step.start, step.end))
    chart = (
        ladder_chart(steps, confirmed)
        if drawn and (confirmed is None or abs(confirmed.value) < _CAN_BE_DRAWN)
        else Raw("")
    )
    rows = [
        (
            _name(record, rung),
            percent(rung.effect.gain),
            f"{percent(rung.effect.low)} to {percent(rung.effect.high)}",
            rung.effect.seen,
            percent(rung.gain),
            "not run" if rung.measured is None else percent(rung.measured),
        )
        for rung in rungs
    ]
    heads = ("Change", "Worth by itself", "90 % interval", "Trials with it", "All up to here", "Measured so")
    total = f" The model adds up to {percent(rungs[-1].gain)}"
    total += f"; the confirming rounds measured {percent(confirmed.value)}." if confirmed is not None else "."
    others = [
        f"{each.knob} → {knob_text(each.value)}: {percent(each.gain)} ({percent(each.low)} to {percent(each.high)})"
        for each in knob_effects(objective, record.baseline, trials)
        if against[1].values.get(each.knob) != each.value
    ]
    return join(
        (
            el(
                "p",
                "An additive model of every trial, the change worth most first. What was always changed together "
                "can't be told apart, and then shares its worth." + total,
                cls="note",
            ),
            chart,
            table("Contributions", heads, rows, (1, 2, 3, 4, 5)),
            el("details", el("summary", f"{len(others)} other changes that were tried"),
               el("ul", join(el("li", other) for other in others))) if others else Raw(""),
        )
    )  # fmt: skip


def _measured(record: TuningRecord, winner: Candidate, rungs: Sequence[MeasuredRung]) -> Raw:
    """The ladder as it was measured, change by change."""
    objective, baseline = record.tuning.spec.objective, record.baseline or Candidate()
    lead = leading_finalist(record)
    confirmed = lead.gain.estimate if lead and lead.gain and lead.candidate.hash == winner.hash else None

    def name(rung: MeasuredRung) -> str:
        return ", ".join(
            f"{knob} {knob_text(baseline.values.get(knob))} → {knob_text(winner.values.get(knob))}"
            for knob in rung.changes
        )

    starts = [0.0, *(rung.so_far for rung in rungs)]
    steps = [
        Step(
            label=name(rung),
            worth=rung.gain,
            start=start,
            end=rung.so_far,
            low=together(objective, start, rung.low),
            high=together(objective, start, rung.high),
        )
        for start, rung in zip(starts, rungs, strict=False)
    ]
    drawn = all(abs(value) < _CAN_BE_DRAWN for step in steps for value in (step.start, step.end))
    rows = [
        (
            name(rung),
            percent(rung.gain),
            f"{percent(rung.low)} to {percent(rung.high)}",
            percent(rung.so_far),
            rung.runs,
        )
        for rung in rungs
    ]
    heads = ("Change", "Worth on top of those before", "90 % interval", "All up to here", "Fresh starts")
    note = (
        "Measured after the confirming rounds, each step from a fresh start; first what seemed worth most. "
        "A change is worth what it adds to those before it: in another order it may be worth more or less."
    )
    return join(
        (
            el("p", note, cls="note"),
            ladder_chart(steps, confirmed) if drawn else Raw(""),
            table("Contributions, measured", heads, rows, (1, 2, 3, 4)),
        )
    )


def _name(record: TuningRecord, rung: Rung) -> str:
    old = record.baseline.values.get(rung.effect.knob) if record.baseline is not None else None
    return f"{rung.effect.knob} {knob_text(old)} → {knob_text(rung.effect.value)}"


def tradeoff_section(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """Output tokens/s of each trial against a latency, and which trials no other one beats in both."""
    shown = [trial for trial in trials if trial.of_search and is_judged(trial)]
    if not shown:
        return el("p", "Nothing has been measured yet.", cls="soft")
    names = record.tuning.spec.objective.pareto or ("outputTokensPerSecond", latency_of(record))
    front = pareto_front(shown, names)
    rate, latency = (next((n for n in names if (n in RATES) is kind), None) for kind in (True, False))
    parts: list[object] = []
    if rate is not None and latency is not None:
        parts.append(_front_chart(record, shown, front, rate, latency))
    if front:
        rows = [
            (trial.number, difference_text(record.baseline, trial.candidate), *(_told(name, trial) for name in names))
            for trial in front
        ]
        parts.append(
            el("p", f"Of {runs(len(shown))} before the confirming rounds, no other one that meets the SLO is as good "
               "in every one of these and better in one (one run each).", cls="note")
        )  # fmt: skip
        heads = ("#", "Against the baseline", *(_title(name) for name in names))
        parts.append(table("The Pareto front", heads, rows, tuple(range(2, 2 + len(names)))))
    elif not parts:
        parts.append(el("p", "No trial meets the SLO.", cls="soft"))
    return join(parts)


def _front_chart(
    record: TuningRecord, shown: Sequence[TrialRecord], front: Sequence[TrialRecord], rate: str, latency: str
) -> Raw:
    marks = [
        Mark(
            x=measure(latency, trial.measurement),
            y=measure(rate, trial.measurement),
            feasible=trial.outcome is TrialOutcome.COMPLETE,
            front=trial in front,
            css="old" if trial.purpose is TrialPurpose.BASELINE else "new",
            label=f"trial {trial.number}, {difference_text(record.baseline, trial.candidate)}: "
            f"{_told(rate, trial)}, {_told(latency, trial)}",
        )
        for trial in shown
        if trial.measurement is not None
    ]
    return pareto_chart(marks, _title(latency), _title(rate))


def _title(name: str) -> str:
    unit = RATES.get(name)
    return unit.capitalize() if unit else f"{name[:-3].upper()} {name[-3:].lower()}"


def _told(name: str, trial: TrialRecord) -> str:
    if trial.measurement is None:
        return "–"
    value = measure(name, trial.measurement)
    return f"{number(value)} {RATES[name]}" if name in RATES else seconds(value)


def latency_of(record: TuningRecord) -> str:
    """The latency to hold against the speed: the one that is minimized, else the SLO's first, else TTFT p95."""
    spec = record.tuning.spec
    bounds = [f"{latency}{percentile.upper()}" for latency, percentile, _ in spec.slo.bounds()]
    return spec.objective.minimize or next(iter(bounds), "ttftP95")
