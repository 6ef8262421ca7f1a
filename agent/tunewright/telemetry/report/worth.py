"""What the changes are worth: the ladder from the baseline to the candidate, and speed against latency."""

from collections.abc import Sequence

from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import LatencyName, PercentileName
from tunewright.domain.state import TrialOutcome, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import LATENCIES, PERCENTILES
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
    latency, percentile = latency_of(record)
    front = pareto_front(shown, latency, percentile)
    marks = [
        Mark(
            x=_point(trial, latency, percentile)[0],
            y=_point(trial, latency, percentile)[1],
            feasible=trial.outcome is TrialOutcome.COMPLETE,
            front=trial in front,
            css="old" if trial.purpose is TrialPurpose.BASELINE else "new",
            label=f"trial {trial.number}, {difference_text(record.baseline, trial.candidate)}: "
            f"{number(_point(trial, latency, percentile)[1])} tokens/s, "
            f"{seconds(_point(trial, latency, percentile)[0])}",
        )
        for trial in shown
    ]
    rows = [
        (
            trial.number,
            difference_text(record.baseline, trial.candidate),
            number(_point(trial, latency, percentile)[1]),
            seconds(_point(trial, latency, percentile)[0]),
        )
        for trial in front
    ]
    name = f"{latency.upper()} {percentile}"
    parts: list[object] = [pareto_chart(marks, name, "Output tokens/s")]
    if rows:
        parts.append(
            el("p", f"Of {runs(len(shown))} before the confirming rounds, no other one that meets the SLO is both "
               "faster and quicker than these (one run each).", cls="note")
        )  # fmt: skip
        heads = ("#", "Against the baseline", "Output tokens/s", name)
        parts.append(table("The Pareto front", heads, rows, (2, 3)))
    return join(parts)


def latency_of(record: TuningRecord) -> tuple[LatencyName, PercentileName]:
    """The latency to hold against the speed: the one that is minimized, else the SLO's first, else TTFT p95."""
    objective = record.tuning.spec.objective
    for latency in LATENCIES:
        for percentile in PERCENTILES:
            if objective.minimize == f"{latency}{percentile.upper()}":
                return latency, percentile
    bounds = record.tuning.spec.slo.bounds()
    return (bounds[0][0], bounds[0][1]) if bounds else ("ttft", "p95")


def pareto_front(trials: Sequence[TrialRecord], latency: LatencyName, percentile: PercentileName) -> list[TrialRecord]:
    """The feasible trials that no other feasible one beats in both, the quickest first."""
    feasible = [trial for trial in trials if trial.outcome is TrialOutcome.COMPLETE and is_judged(trial)]
    ordered = sorted(feasible, key=lambda t: (_point(t, latency, percentile)[0], -_point(t, latency, percentile)[1]))
    front: list[TrialRecord] = []
    for trial in ordered:
        if not front or _point(trial, latency, percentile)[1] > _point(front[-1], latency, percentile)[1]:
            front.append(trial)
    return front


def _point(trial: TrialRecord, latency: LatencyName, percentile: PercentileName) -> tuple[float, float]:
    """Latency in seconds, and output tokens/s, of a trial that was measured."""
    if trial.measurement is None:
        raise ValueError(f"trial {trial.id} was not measured")
    return trial.measurement.latency(latency, percentile), trial.measurement.output_tokens_per_second.value
