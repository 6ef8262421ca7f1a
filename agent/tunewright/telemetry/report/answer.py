"""The report's first half: the answer, what changes, how to apply it and how to go back."""

from collections.abc import Sequence

import yaml

from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Source
from tunewright.domain.quality import judge_quality
from tunewright.domain.state import ConfirmStatus, Gain, TrialPhase, TrialRecord, TuningRecord
from tunewright.telemetry.facts import (
    baseline_objective,
    best_known,
    best_trial,
    difference_text,
    gain_over,
    knob_text,
    leading_finalist,
    objective_text,
    percent,
    runs,
    seconds,
    trials_of,
)
from tunewright.telemetry.report.charts import interval_chart
from tunewright.telemetry.report.markup import Raw, badge, el, join, table

_PHASE_KIND = {
    Phase.PROMOTED: "good",
    Phase.RECOMMENDED: "good",
    Phase.NO_IMPROVEMENT: "plain",
    Phase.INFEASIBLE: "warn",
    Phase.REJECTED: "warn",
    Phase.ROLLED_BACK: "warn",
    Phase.ROLLING_BACK: "warn",
    Phase.AWAITING_APPROVAL: "warn",
    Phase.FAILED: "bad",
}
_STATUS = {
    ConfirmStatus.BETTER: "settled: better",
    ConfirmStatus.NOT_BETTER: "settled: not better by what was asked for",
    ConfirmStatus.NOT_SETTLED: "not settled",
    ConfirmStatus.RUNNING: "still being confirmed",
}

_TAKEN_BACK = {Phase.CANARY, Phase.ROLLING, Phase.WATCHING, Phase.PROMOTED}
"""Where `rollback` has something to do."""


def compared(record: TuningRecord, trials: Sequence[TrialRecord]) -> tuple[str, Candidate] | None:
    """The candidate that the page sets beside the baseline, and what to call it; None while there is none."""
    best = best_trial(trials)
    if record.winner is not None:
        found = ("winner", record.winner)
    elif best is not None:
        found = ("best so far", best.candidate)
    else:
        return None
    same = record.baseline is not None and found[1].hash == record.baseline.hash
    return None if same else found


def answer(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """What changes, how much better, how sure, at what risk, and where the numbers come from."""
    parts: list[object] = [badge(*_where(record))]
    if record.suspended_since is not None:
        parts += [Raw(" "), badge("suspended", "warn")]
    parts.append(el("p", _headline(record, trials), cls="headline"))
    if record.sentence:
        parts.append(el("p", record.sentence))
    parts.append(_tiles(record, trials))
    lead = leading_finalist(record)
    if lead is not None and lead.gain is not None:
        if lead.gain.bounded:
            parts.append(interval_chart(lead.gain.estimate, record.tuning.spec.confirm.min_gain))
        if _by_slo(lead.gain):
            parts.append(el("p", f"Better, though the size of the gain is not settled: it {lead.gain.reason}."))
        parts.append(
            el(
                "p",
                f"The interval has a 5 % chance of error over all looks together. It rests on {lead.gain.rounds} fresh "
                "starts of each side, taken in turns; the search's own runs do not count.",
                cls="note",
            )
        )
    risks = _risks(record, trials)
    if risks:
        parts += [el("h3", "At what risk"), el("ul", join(el("li", risk) for risk in risks))]
    if record.notes:
        parts += [el("h3", "What else to know of production"), el("ul", join(el("li", note) for note in record.notes))]
    return join(parts)


def _by_slo(gain: Gain) -> bool:
    """Better because it meets the SLO that the baseline misses: the interval alone would not say so."""
    return gain.status is ConfirmStatus.BETTER and gain.estimate.low <= 0


def _where(record: TuningRecord) -> tuple[str, str]:
    """The phase as the badge tells it, and its kind: what a person stopped is no failure."""
    if record.stopped_by:
        return f"{record.phase}: {record.stopped_by} asked for it", "plain"
    return str(record.phase), _PHASE_KIND.get(record.phase, "plain")


def _headline(record: TuningRecord, trials: Sequence[TrialRecord]) -> str:
    against = compared(record, trials)
    if against is None:
        offline, stopped = record.tuning.spec.offline, f"Aborted by {record.stopped_by}" if record.stopped_by else ""
        ended = {
            Phase.NO_IMPROVEMENT: f"{'The command' if offline else 'The configuration in production'} stays: "
            "nothing better was found.",
            Phase.INFEASIBLE: "No configuration meets the SLO here.",
            Phase.FAILED: f"{stopped}; production is as it was."
            if stopped
            else f"The tuning could not be done{'' if offline else '; production is as it was'}.",
        }
        return ended.get(record.phase, "There is nothing to compare yet.")
    name, candidate = against
    change = difference_text(record.baseline, candidate)
    lead = leading_finalist(record)
    if lead is not None and lead.gain is not None and lead.candidate.hash == candidate.hash:
        return f"{percent(lead.gain.estimate.value)} with {change}"
    best = best_trial(trials)
    gain = gain_over(record.tuning.spec.objective, best.objective if best else None, baseline_objective(trials))
    if best is not None and best.candidate.hash == candidate.hash and gain is not None:
        return f"{percent(gain)} with {change}, in one run and not confirmed"
    return f"{name}: {change}"


def _tiles(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    objective, tiles = record.tuning.spec.objective, []

    def tile(name: str, value: str, small: str) -> None:
        tiles.append(el("div", el("dt", name), el("dd", value, el("small", small))))

    sides = [("baseline", record.baseline)] if record.baseline is not None else []
    against = compared(record, trials)
    for name, candidate in [*sides, *([against] if against is not None else [])]:
        measured = best_known(trials, candidate)
        values = [trial.objective for trial in measured if trial.objective is not None]
        if values and measured[-1].measurement is not None:
            source, count = measured[-1].measurement.source, len(values)
            rests = f"mean of {runs(count)}" if count > 1 else runs(count)
            tile(name.capitalize(), objective_text(objective, sum(values) / count), f"{source}, {rests}")
    lead = leading_finalist(record)
    if lead is not None and lead.gain is not None:
        estimate = lead.gain.estimate
        interval = f"{percent(estimate.low)} to {percent(estimate.high)}" if lead.gain.bounded else "not bounded yet"
        status = "settled by the SLO" if _by_slo(lead.gain) else _STATUS[lead.gain.status]
        tile("Gain, confirmed", percent(estimate.value), f"{interval}, {status}")
    done = [trial for trial in trials if trial.phase is TrialPhase.DONE]
    if done:
        held = sum(trial.gpu_seconds for trial in done)
        tile("Cost", seconds(held), f"of the spare, {len(done)} trials ended")
    return el("dl", *tiles, cls="tiles") if tiles else Raw("")


def _risks(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[str]:
    risks: list[str] = []
    against, lead = compared(record, trials), leading_finalist(record)
    if against is None:
        return risks
    measured = trials_of(trials, against[1])
    if lead is None or lead.gain is None or lead.candidate.hash != against[1].hash:
        risks.append("This candidate's gain was not confirmed in turns with the baseline.")
    elif lead.gain.status is not ConfirmStatus.BETTER:
        risks.append(f"The gain is {_STATUS[lead.gain.status]}: {lead.gain.reason}.")
    margins = [trial.slo_margin for trial in measured if trial.slo_margin is not None]
    if margins:
        held = f"holds with {min(margins):.0%} to spare" if min(margins) >= 0 else f"was missed by {-min(margins):.0%}"
        risks.append(f"At its tightest the SLO {held} ({runs(len(margins))}).")
    if any(trial.measurement and trial.measurement.source is Source.SIMULATED for trial in measured):
        risks.append("The numbers are simulated: they say nothing about a real GPU.")
    preempted = sum(t.measurement.server.preemptions for t in measured if t.measurement and t.measurement.server)
    if preempted:
        risks.append(f"The server preempted {preempted:,.0f} requests under the load of the tests: memory is tight.")
    surprises = sorted({surprise for trial in measured for surprise in trial.surprises})
    risks += [f"The server changed this silently: {surprise}" for surprise in surprises]
    if record.tuning.spec.search.allow_lossy:
        risks.append("Knobs that can change answers were allowed; the quality gate compares answers before promotion.")
    if record.baseline is not None and any(trial.answers for trial in measured):
        gate = judge_quality(record.baseline, against[1], trials, record.tuning.spec.quality)
        risks.append(f"Quality gate {'passed' if gate.passed else 'not passed'}: {gate.reason}.")
    if record.profile is not None and record.profile.saturated:
        risks.append("Production was saturated while its traffic was learned: the true demand may be larger.")
    if any(trial.measurement and not trial.measurement.warmup_settled for trial in measured):
        risks.append("In some runs the warm-up ended by its limit, before the rate was steady.")
    return risks


def configuration(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """Knob by knob, the baseline and the candidate set beside it."""
    against = compared(record, trials)
    if record.baseline is None:
        return el("p", "The baseline has not been read from production yet.", cls="soft")
    if against is None:
        rows = [(el("code", name), el("code", knob_text(value))) for name, value in record.baseline.values.items()]
        title = "What the command says" if record.tuning.spec.offline else "What production runs"
        return table(title, ("Knob", "Baseline"), rows) if rows else el("p", "All defaults.")
    changes = record.baseline.differences(against[1])
    rows3 = [
        (el("code", name), el("code", knob_text(old)), el("code", el("strong", knob_text(new))))
        for name, (old, new) in changes.items()
    ]
    same = [f"{k}: {knob_text(v)}" for k, v in against[1].values.items() if k not in changes]
    parts: list[object] = [
        table(
            f"Baseline {record.baseline.hash} against {against[0]} {against[1].hash}",
            ("Knob", "Baseline", against[0].capitalize()),
            rows3,
        )
    ]
    if same:
        parts.append(el("details", el("summary", f"{len(same)} unchanged"), el("pre", "\n".join(same))))
    return join(parts)


def apply_and_back(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """The lines to run by hand what is set beside the baseline, and the way back."""
    against = compared(record, trials)
    if against is None or record.baseline is None:
        return el("p", "Nothing is to be applied.", cls="soft")
    parts: list[object] = []
    if record.phase is Phase.AWAITING_APPROVAL:
        parts.append(
            el(
                "p",
                "Approve with ",
                el("code", f"tunewright approve {record.name}"),
                ", decline with ",
                el("code", f"tunewright reject {record.name}"),
                f". It stands for candidate {against[1].hash}, spec {record.spec_hash} and baseline "
                f"{record.baseline.hash}; if one of them changes, it is asked for again.",
            )
        )
    if record.phase in _TAKEN_BACK:
        words = ("Go back with ", el("code", f"tunewright rollback {record.name}"), "; in a cluster over REST.")
        parts.append(el("p", *words, " By hand only where Tunewright does not run:"))
    parts.append(
        el("div", _settings("To apply by hand", against[1]), _settings("To go back", record.baseline), cls="two")
    )
    parts.append(
        el(
            "p",
            "These are vLLM's settings as its ",
            el("code", "--config"),
            " file has them. A flag on the command line takes precedence over the file: take it out there. Restart one "
            "replica at a time, and wait for a real completion before the next.",
            cls="note",
        )
    )
    return join(parts)


def _settings(title: str, candidate: Candidate) -> Raw:
    flags = {name.replace("_", "-"): value for name, value in candidate.values.items() if not name.isupper()}
    environment = [f"{name}={knob_text(value)}" for name, value in candidate.values.items() if name.isupper()]
    text = yaml.safe_dump(flags, sort_keys=True, allow_unicode=True) if flags else "# all defaults\n"
    parts = [el("h3", title), el("pre", text.rstrip())]
    if environment:
        parts += [el("p", "and in the environment"), el("pre", "\n".join(environment))]
    return el("div", *parts)
