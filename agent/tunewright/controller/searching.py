"""Baselining and Searching: trials until the budget ends, then the finalists."""

from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.domain.candidate import Candidate
from tunewright.domain.objective import gain, objective_unit
from tunewright.domain.phases import Phase
from tunewright.domain.state import (
    Finalist,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.step import Step, enter, say


def baselining(record: TuningRecord, context: Context) -> Step:
    """Measure on the spare what production runs now."""
    now, trials = context.clock.now(), context.store.trials(record.name)
    baseline = record.baseline or Candidate()
    mine = [t for t in trials if t.purpose is TrialPurpose.BASELINE]
    if not mine:
        what = "the command as it stands" if record.tuning.spec.offline else "what production runs now"
        first = trial.new_trial(trials, baseline, TrialPurpose.BASELINE, what)
        context.store.save_trial(record.name, first)
        return Step(say(record, "Measuring the baseline on the spare."), 0.0)
    if (step := advance_trial(record, mine[-1], context)) is not None:
        return step
    done = mine[-1]
    if done.outcome is TrialOutcome.FAILED or done.objective is None:
        sentence = f"The baseline could not be measured on the spare, so nothing can be compared: {fault_of(done)}"
        return Step(enter(record, Phase.FAILED, sentence, now), None)
    sentence = f"The baseline gives {_value(record, done)} on the spare; searching for better."
    source = done.measurement.source if record.source is None and done.measurement else record.source
    return Step(enter(record, Phase.SEARCHING, sentence, now, search_since=now, source=source), 0.0)


def searching(record: TuningRecord, context: Context) -> Step:
    """Run proposals one by one until the budget ends or there is nothing left to try."""
    trials = context.store.trials(record.name)
    current = trial.running(trials)
    if current is not None:
        step = advance_trial(record, current, context)
        if step is not None:
            return step
    ended = _budget_ended(record, trials, context.clock.now())
    if ended is None:
        proposal = context.proposer.propose(record.baseline or Candidate(), trials, record.profile)
        if proposal is not None:
            new = trial.new_trial(trials, proposal.candidate, TrialPurpose.SEARCH, proposal.reason)
            context.store.save_trial(record.name, new)
            return Step(say(record, f"Trial {new.number}: {proposal.reason}."), 0.0)
        ended = "there is nothing left to try"
    return _choose_finalists(record, trials, ended, context)


def advance_trial(record: TuningRecord, current: TrialRecord, context: Context) -> Step | None:
    """Take the running trial one step further and write it down; None once it is done."""
    if current.phase is TrialPhase.DONE:
        return None
    after = trial.advance(record, current, context)
    if after != current:
        context.store.save_trial(record.name, after)
    moved = after.phase is not current.phase
    return Step(record, 0.0 if moved else trial.POLL)


def _budget_ended(record: TuningRecord, trials: list[TrialRecord], now: float) -> str | None:
    budget = record.tuning.spec.budget
    tried = [t for t in trials if t.purpose is TrialPurpose.SEARCH]
    if len(tried) >= budget.trials:
        return f"all {budget.trials} trials are done"
    lengths = sorted(t.gpu_seconds for t in trials if t.finished_at is not None)
    expected = lengths[len(lengths) // 2] if lengths else 0.0
    if budget.gpu_minutes is not None:
        used = sum(t.gpu_seconds for t in trials) / 60
        if used + expected / 60 > budget.gpu_minutes:
            return f"{used:.1f} of {budget.gpu_minutes:g} GPU minutes are used and another trial would not fit"
    if budget.wall_time is not None:
        passed = now - (record.search_since or now)
        if passed + expected > budget.wall_time:
            return f"{passed / 60:.1f} of {budget.wall_time / 60:g} minutes have passed and another trial would not fit"
    return None


def _choose_finalists(record: TuningRecord, trials: list[TrialRecord], ended: str, context: Context) -> Step:
    now, spec = context.clock.now(), record.tuning.spec
    baseline = next(t for t in trials if t.purpose is TrialPurpose.BASELINE)
    tried = [t for t in trials if t.purpose is TrialPurpose.SEARCH]
    feasible = [t for t in tried if t.outcome is TrialOutcome.COMPLETE and t.objective is not None]
    meets = baseline.outcome is TrialOutcome.COMPLETE
    if tried and all(t.outcome is TrialOutcome.FAILED for t in tried):
        sentence = (
            f"None of {len(tried)} candidates could be measured, by the machine's fault: {fault_of(tried[-1])}."
            f"{stays(record)}"
        )
        return Step(enter(record, Phase.FAILED, sentence, now), None)
    if not feasible and not meets:
        return Step(enter(record, Phase.INFEASIBLE, _nearest(trials, ended), now), None)
    reference = baseline.objective or 0.0
    better = [t for t in feasible if not meets or gain(spec.objective, t.objective or 0.0, reference) > 0]
    better.sort(key=lambda t: t.objective or 0.0, reverse=True)
    if not better:
        sentence = f"None of {len(tried)} candidates is better than the baseline ({_value(record, baseline)}): {ended}."
        return Step(enter(record, Phase.NO_IMPROVEMENT, sentence, now), None)
    chosen: dict[str, Candidate] = {}
    for t in better[: spec.confirm.finalists]:
        simple = context.proposer.simplify(t.candidate, baseline.candidate, trials)
        candidate = t.candidate if simple.hash == baseline.candidate.hash else simple
        chosen.setdefault(candidate.hash, candidate)
    finalists = tuple(Finalist(candidate=candidate) for candidate in chosen.values())
    promised = gain(spec.objective, better[0].objective or 0.0, reference)
    sentence = (
        f"The search is over: {ended}. The best of {len(tried)} candidates promises {promised:+.0%} on one run; "
        f"confirming {len(finalists)} in turns with the baseline."
    )
    return Step(enter(record, Phase.CONFIRMING, sentence, now, finalists=finalists), 0.0)


def _nearest(trials: list[TrialRecord], ended: str) -> str:
    measured = [t for t in trials if t.slo_margin is not None]
    if not measured:
        return f"No candidate could be measured at all, so none meets the SLO: {ended}."
    nearest = max(measured, key=lambda t: t.slo_margin or 0.0)
    return (
        f"No candidate meets the SLO: {ended}. The nearest is trial {nearest.number} "
        f"({nearest.candidate.hash}), which misses its worst bound by {-(nearest.slo_margin or 0.0):.0%}."
    )


def stays(record: TuningRecord) -> str:
    """What becomes of production where nothing is found, as the end of a sentence."""
    return "" if record.tuning.spec.offline else " Production stays as it is."


def fault_of(trial: TrialRecord) -> str:
    """Why a trial has no result."""
    return trial.failure.cause if trial.failure else "no result"


def _value(record: TuningRecord, done: TrialRecord) -> str:
    objective = record.tuning.spec.objective
    unit = objective_unit(objective)
    value = abs(done.objective or 0.0)
    source = f", {done.measurement.source}" if done.measurement else ""
    return f"{value:,.4g} {unit} (one run{source})"
