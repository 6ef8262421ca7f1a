"""The report's middle: what was measured on the spare."""

import math
from collections.abc import Sequence

from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Measurement
from tunewright.domain.objective import objective_unit
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import LATENCIES, PERCENTILES
from tunewright.telemetry.facts import (
    baseline_objective,
    difference_text,
    gain_over,
    gpus,
    idle_seconds,
    number,
    objective_text,
    percent,
    runs,
    seconds,
    shown_objective,
    spare_time_of_all,
    trials_of,
)
from tunewright.telemetry.report.answer import compared
from tunewright.telemetry.report.charts import Point, Spread, latency_chart, progress_chart, time_chart
from tunewright.telemetry.report.markup import Raw, badge, el, join, table

_LONG_NAMES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2e": "Whole request (E2E)",
}
_KINDS = {
    TrialOutcome.COMPLETE: "good",
    TrialOutcome.INFEASIBLE: "warn",
    TrialOutcome.STOPPED: "plain",
    TrialOutcome.FAILED: "bad",
}


def trials_section(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """The search: every trial in a chart over time and in a table."""
    objective, base = record.tuning.spec.objective, baseline_objective(trials)
    shown = sorted((t for t in trials if t.of_search), key=lambda trial: trial.number)
    if not shown:
        return el("p", "No trial has been started yet.", cls="soft")
    points = [
        Point(
            number=trial.number,
            value=None if trial.objective is None else shown_objective(objective, trial.objective),
            feasible=trial.outcome is TrialOutcome.COMPLETE,
            label=f"trial {trial.number}: {difference_text(record.baseline, trial.candidate)}: {_value(record, trial)}",
        )
        for trial in shown
        if trial.phase is TrialPhase.DONE
    ]
    rows = []
    for trial in shown:
        gain = gain_over(objective, trial.objective, base) if trial.purpose is TrialPurpose.SEARCH else None
        measured = trial.measurement
        rows.append(
            (
                trial.number,
                join((difference_text(record.baseline, trial.candidate), _why(trial))),
                _outcome(trial),
                _figure(record, trial),
                percent(gain) if gain is not None else "–",
                seconds(measured.ttft.p95) if measured else "–",
                f"{trial.slo_margin:+.0%}" if trial.slo_margin is not None else "–",
                seconds(trial.start_seconds) if trial.start_seconds is not None else "–",
                f"{measured.source}, 1 run" if measured else "–",
            )
        )
    heads = (
        "#",
        "Against the baseline",
        "Outcome",
        objective_unit(objective),
        "Gain",
        "TTFT p95",
        "SLO margin",
        "Start",
        "Source",
    )
    shown_base = None if base is None else shown_objective(objective, base)
    chart = progress_chart(points, shown_base, objective_unit(objective), objective.minimize is None)
    return join((chart, table("Trials, one run each", heads, rows, numeric=(3, 4, 5, 6, 7))))


def _why(trial: TrialRecord) -> Raw:
    told = [trial.reason, f"Ended early: {trial.stopped}" if trial.stopped else ""]
    return join(el("div", text, cls="note") for text in told if text)


def _outcome(trial: TrialRecord) -> Raw:
    if trial.outcome is None:
        return badge(str(trial.phase))
    text = str(trial.failure.kind) if trial.failure is not None else str(trial.outcome)
    return badge(text, _KINDS[trial.outcome])


def _figure(record: TuningRecord, trial: TrialRecord) -> str:
    """The objective without its unit (a latency's is in the text), with its 95 % interval where it has one."""
    objective = record.tuning.spec.objective
    if trial.objective is None or trial.measurement is None:
        return "–"
    if objective.maximize == "outputTokensPerSecond":
        rate = trial.measurement.output_tokens_per_second
        return f"{number(rate.value)} ± {number((rate.high - rate.low) / 2)}"
    return objective_text(objective, trial.objective).removesuffix(f" {objective_unit(objective)}")


def _on_its_spare(record: TuningRecord, trial: TrialRecord) -> str:
    """The same, and where there are several spares, on which it was measured."""
    figure = _figure(record, trial)
    return f"{figure} (spare {trial.slot})" if record.tuning.spec.spare.parallelism > 1 else figure


def _value(record: TuningRecord, trial: TrialRecord) -> str:
    """The same with its unit; what failed says how."""
    if trial.failure is not None:
        return str(trial.failure.kind)
    unit = objective_unit(record.tuning.spec.objective)
    figure = _figure(record, trial)
    return figure if figure == "–" or unit == "s" else f"{figure} {unit}"


def latencies(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """Every latency of the baseline and of the candidate beside it, against the SLO."""
    sides = _sides(record, trials)
    if not sides:
        return el("p", "Nothing has been measured yet.", cls="soft")
    bounds: dict[str, list[tuple[str, float]]] = {latency: [] for latency in LATENCIES}
    for latency, percentile, bound in record.tuning.spec.slo.bounds():
        bounds[latency].append((percentile, bound))
    charts, rows = [], []
    for latency in LATENCIES:
        spreads = []
        for label, css, measurements in sides:
            values = [(p, sum(m.latency(latency, p) for m in measurements) / len(measurements)) for p in PERCENTILES]
            spreads.append(Spread(label, css, values))
            rows.append((f"{latency.upper()}, {label}", *(seconds(value) for _, value in values)))
        charts.append(latency_chart(f"latency-{latency}", _LONG_NAMES[latency], spreads, bounds[latency]))
        if bounds[latency]:
            given = dict(bounds[latency])
            rows.append((f"{latency.upper()}, SLO", *(seconds(given[p]) if p in given else "–" for p in PERCENTILES)))
    rests = "; ".join(
        f"{label}: {measurements[0].source}, {runs(len(measurements))}" for label, _, measurements in sides
    )
    return join(
        (
            el("p", f"Percentiles of the load generator's own samples, averaged over the runs ({rests}).", cls="note"),
            el("div", *charts, cls="two"),
            table("Latency percentiles", ("Latency", *PERCENTILES), rows, numeric=(1, 2, 3, 4)),
        )
    )


def _sides(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[tuple[str, str, list[Measurement]]]:
    candidates: list[tuple[str, str, Candidate]] = []
    if record.baseline is not None:
        candidates.append(("baseline", "old", record.baseline))
    against = compared(record, trials)
    if against is not None:
        candidates.append((against[0], "new", against[1]))
    found = [
        (label, css, [t.measurement for t in trials_of(trials, candidate) if t.measurement is not None])
        for label, css, candidate in candidates
    ]
    return [side for side in found if side[2]]


def failures(trials: Sequence[TrialRecord]) -> Raw:
    """Failed starts and runs by kind, with the first line of the log that names the cause."""
    kinds: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.failure is not None:
            kinds.setdefault(str(trial.failure.kind), []).append(trial)
    if not kinds:
        return el("p", "No trial failed.", cls="soft")
    rows = []
    for kind, failed in sorted(kinds.items(), key=lambda item: -len(item[1])):
        last = failed[-1].failure
        if last is not None:
            numbers = ", ".join(str(trial.number) for trial in failed)
            rows.append((kind, len(failed), numbers, el("code", last.cause), last.advice or "–"))
    return table("Failures by kind", ("Kind", "Count", "Trials", "Cause (the last one's)", "What to do"), rows, (1,))


def noise(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """How far repeated measurements of the unchanged baseline lie apart."""
    objective = record.tuning.spec.objective
    if record.baseline is None:
        return el("p", "The baseline has not been measured yet.", cls="soft")
    same = trials_of(trials, record.baseline)
    values = [shown_objective(objective, trial.objective) for trial in same if trial.objective is not None]
    if not values:
        return el("p", "The baseline has not been measured yet.", cls="soft")
    rows = [
        (f"trial {trial.number}", str(trial.purpose), _value(record, trial), seconds(trial.measurement.ttft.p95))
        for trial in same
        if trial.measurement is not None
    ]
    parts: list[object] = []
    if len(values) > 1:
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        share = f"{spread / abs(mean):.1%}" if mean else "unknown"
        parts.append(
            el("p", f"Over {runs(len(values))}, each a fresh start, the standard deviation is {share} of the mean.")
        )
    else:
        parts.append(el("p", "One run so far: its noise is not known."))
    if record.baseline_noise is not None:
        parts.append(el("p", f"The search reckons with {math.expm1(record.baseline_noise):.1%} between fresh starts."))
    parts.append(table("Measurements of the baseline", ("Trial", "For", "Objective", "TTFT p95"), rows, (2, 3)))
    return join(parts)


def spare_use(trials: Sequence[TrialRecord]) -> Raw:
    """Where the spare's time went."""
    time = spare_time_of_all(trials)
    if not time.total > 0:
        return el("p", "No trial has ended yet.", cls="soft")
    done, idle = sum(trial.phase is TrialPhase.DONE for trial in trials), idle_seconds(trials)
    width = max(gpus(trial) for trial in trials)
    each = f", on {width} GPUs each" if width > 1 else ""
    return join(
        (
            el(
                "p",
                f"{seconds(time.total)} over {done} trials{each}: starting {seconds(time.starting)}, warming "
                f"{seconds(time.warming)}, measuring {seconds(time.measuring)}, other {seconds(time.other)} "
                f"(stopping, failed attempts, load tests that came to nothing). Between the first and the last trial "
                f"it was idle for {seconds(idle)} more.",
            ),
            time_chart(time),
        )
    )


def rounds(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """The confirming rounds: fresh starts of baseline and finalists, in turns."""
    confirming = [trial for trial in trials if trial.purpose is TrialPurpose.CONFIRM]
    if not confirming or record.baseline is None:
        return el("p", "There were no confirming rounds.", cls="soft")
    objective, base_hash = record.tuning.spec.objective, record.baseline.hash
    finalists = {t.candidate.hash: t.candidate for t in confirming if t.candidate.hash != base_hash}
    by_place = {(trial.round, trial.candidate.hash): trial for trial in confirming}
    heads = ["Round", f"Baseline, {objective_unit(objective)}"]
    for name in finalists:
        heads += [f"Finalist {name}", "Gain"]
    rows = []
    for round_ in sorted({trial.round for trial in confirming}):
        base = by_place.get((round_, base_hash))
        row: list[object] = [round_, _on_its_spare(record, base) if base else "–"]
        for name in finalists:
            trial = by_place.get((round_, name))
            gain = gain_over(objective, trial.objective if trial else None, base.objective if base else None)
            row += [_on_its_spare(record, trial) if trial else "–", percent(gain) if gain is not None else "–"]
        rows.append(row)
    results = [
        el(
            "li",
            el("code", finalist.candidate.hash),
            f" ({difference_text(record.baseline, finalist.candidate)}): ",
            finalist.gain.reason if finalist.gain else "not measured yet",
        )
        for finalist in record.finalists
    ]
    return join(
        (
            table(f"Confirming rounds in {objective_unit(objective)}", heads, rows, range(1, len(heads))),
            el("ul", *results) if results else "",
        )
    )
