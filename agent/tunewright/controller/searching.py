"""Baselining and Searching: trials until the budget ends, then the finalists."""

from collections.abc import Sequence
from typing import NamedTuple

from tunewright.controller import spares
from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.controller.wishes import launched, next_wish
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
from tunewright.domain.step import Step, enter, say, update
from tunewright.ports import PortError

TROUBLE_WAIT = 5.0
"""Seconds at most between two tries of a step of one of several trials: the ends of the others must be noticed."""

PATIENCE = 8
"""Failures in a row, half a minute of them, after which a trial that can't be launched moves to another spare."""


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
    if (step := advance_running(record, trials, context).step) is not None:
        return step
    done = mine[-1]
    if done.outcome is TrialOutcome.FAILED or done.objective is None:
        sentence = f"The baseline could not be measured on the spare, so nothing can be compared: {fault_of(done)}"
        return Step(enter(record, Phase.FAILED, sentence, now), None)
    sentence = f"The baseline gives {_value(record, done)} on the spare; searching for better."
    source = done.measurement.source if record.source is None and done.measurement else record.source
    inputs = context.proposer.inputs(baseline, trials)
    begun: dict[str, object] = {"search_since": now, "source": source, "inputs": inputs}
    return Step(enter(record, Phase.SEARCHING, sentence, now, **begun), 0.0)


def searching(record: TuningRecord, context: Context) -> Step:
    """Run proposals, one on each spare at a time, until the budget ends or there is nothing left to try."""
    now, count = context.clock.now(), record.tuning.spec.spare.parallelism
    step, trials, free = advance_running(record, context.store.trials(record.name), context)
    if step is not None and not free:
        return step
    ended = _budget_ended(record, trials, now)
    if ended is None and (wish := next_wish(record, trials, context, slot=free[0])) is not None:
        context.store.save_trial(record.name, wish)
        refused = f" can't run: {wish.failure.cause}" if wish.failure is not None else ""
        return Step(say(step.record if step else record, f"Trial {wish.number}, {wish.reason}{refused}."), 0.0)
    if ended is None:
        proposal = context.proposer.propose(record.baseline or Candidate(), trials, record.profile, record.earlier)
        if proposal is not None:
            new = trial.new_trial(trials, proposal.candidate, TrialPurpose.SEARCH, proposal.reason, slot=free[0])
            context.store.save_trial(record.name, new)
            sentence = f"Trial {new.number}: {proposal.reason}. {spares.left_out(trials, count, now)}"
            return Step(say(step.record if step else record, sentence.rstrip()), 0.0)
        ended = "there is nothing left to try"
    return step or _choose_finalists(record, trials, ended, context)


class Advanced(NamedTuple):
    """What became of the running trials in one pass."""

    step: Step | None  # None: there were none
    trials: list[TrialRecord]
    free: list[int]  # spares on which a trial can start in this pass


def advance_running(record: TuningRecord, trials: Sequence[TrialRecord], context: Context) -> Advanced:
    """Take every running trial one step further, and write each down.

    Trouble with one of several does not hold up the others; one that can't be launched moves to another spare.
    """
    now, count = context.clock.now(), record.tuning.spec.spare.parallelism
    before, running, after = spares.free(trials, count, now), trial.running(trials), {each.id: each for each in trials}
    troubles, again = [], trial.WAIT
    for current in running:
        beside = [other for other in running if other.id != current.id]
        try:
            after[current.id], due = trial.advance(record, current, beside, context)
            again = min(again, due)
        except PortError as error:
            if count == 1:
                raise
            troubles.append(error)
            elsewhere = spares.free(list(after.values()), count, now)
            if current.phase is TrialPhase.PENDING and record.errors >= PATIENCE and elsewhere:
                after[current.id] = update(trial.put_back(current, context), slot=elsewhere[0])
        if after[current.id] != current:
            context.store.save_trial(record.name, after[current.id])
    free = [slot for slot in spares.free(list(after.values()), count, now) if slot in before]
    if troubles:
        again = min(TROUBLE_WAIT, 0.5 * 2 ** min(record.errors, 10))
        meanwhile = ", while other trials go on" if len(troubles) < len(running) else ""
        sentence = f"Trying again in {again:g}s{meanwhile}: {troubles[0]}"
        told = update(record, errors=record.errors + 1, sentence=sentence)
        return Advanced(Step(told, again), list(after.values()), free)
    step = Step(record, again) if running else None
    return Advanced(step, list(after.values()), free)


def _budget_ended(record: TuningRecord, trials: Sequence[TrialRecord], now: float) -> str | None:
    """Why no other trial may start; those that run are reckoned to take what trials took so far."""
    budget = record.tuning.spec.budget
    tried = [t for t in trials if t.purpose is TrialPurpose.SEARCH and launched(t)]
    if len(tried) >= budget.trials:
        return f"all {budget.trials} trials are done"
    lengths = sorted(t.gpu_seconds for t in trials if t.finished_at is not None and launched(t))
    expected = lengths[len(lengths) // 2] if lengths else 0.0
    if budget.gpu_minutes is not None:
        held = [max(expected, now - t.created_at) if t.created_at else expected for t in trial.running(trials)]
        used = (sum(t.gpu_seconds for t in trials if t.phase is TrialPhase.DONE) + sum(held)) / 60
        if used + expected / 60 > budget.gpu_minutes:
            return f"{used:.1f} of {budget.gpu_minutes:g} GPU minutes are used and another trial would not fit"
    if budget.wall_time is not None:
        passed = now - (record.search_since or now)
        if passed + expected > budget.wall_time:
            return f"{passed / 60:.1f} of {budget.wall_time / 60:g} minutes have passed and another trial would not fit"
    return None


def _choose_finalists(record: TuningRecord, trials: Sequence[TrialRecord], ended: str, context: Context) -> Step:
    now, spec = context.clock.now(), record.tuning.spec
    baseline = next(t for t in trials if t.purpose is TrialPurpose.BASELINE)
    tried = [t for t in trials if t.purpose is TrialPurpose.SEARCH and launched(t)]
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


def _nearest(trials: Sequence[TrialRecord], ended: str) -> str:
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
