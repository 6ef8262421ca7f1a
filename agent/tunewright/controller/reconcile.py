"""One pass over one tuning: read afresh, take one idempotent step, write, and say when to look again."""

from collections.abc import Callable

from tunewright.controller import confirming, decisions, profiling, promoting, searching
from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.controller.deadlines import deadline
from tunewright.domain.phases import TERMINAL, TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import TrialPhase, TuningRecord
from tunewright.domain.step import Step, age, say, start_anew, update
from tunewright.ports import PortError, Refused

MAX_BACKOFF = 60.0
"""Seconds between two tries of a step that keeps failing."""


def reconcile(name: str, context: Context) -> float | None:
    """Take one step of the tuning called `name`; seconds until the next, None when there is nothing to do.

    Raises `Conflict` when somebody else wrote the record meanwhile: the next pass reads afresh.
    """
    record = context.store.load(name)
    if record is None:
        return None
    step = decide(record, context)
    if step.record != record:
        context.store.save(step.record)
    return step.again


def decide(record: TuningRecord, context: Context) -> Step:
    """What to do next, and why."""
    try:
        return _decide(record, context)
    except PortError as error:  # nothing was decided, as a trial could not be ended
        return _try_again(record, error)


def _decide(record: TuningRecord, context: Context) -> Step:
    """Reads from top to bottom: people, the spec, suspension, deadlines, the phase."""
    now = context.clock.now()

    taken = decisions.take_up(record, context)
    if taken.phase is not record.phase:
        _release_spare(taken, context)
        return Step(taken, 0.0)
    record = taken

    if record.spec_hash != record.tuning.spec.spec_hash:
        return _safely(_start_anew, record, context)

    record = _follow_suspend_field(record, now)
    if record.suspended_since is not None and record.phase not in TERMINAL:
        return _hold(record, context)

    limit = deadline(record, context.store.trials(record.name))
    if limit is not None and age(record, now) > limit:
        return _too_late(record, limit, context)

    return _safely(_work, record, context)


def _safely(work: Callable[[TuningRecord, Context], Step], record: TuningRecord, context: Context) -> Step:
    now = context.clock.now()
    try:
        return work(record, context)
    except PortError as error:
        return _try_again(record, error)
    except Refused as refusal:
        ended = decisions.go_back(record, str(refusal).rstrip("."), now)
        if ended.phase is record.phase:  # it has ended, or goes back already: said, and looked at again in time
            return Step(say(record, f"Held: {refusal}"), promoting.HELD)
        _release_spare(ended, context)
        return Step(ended, 0.0)


def _try_again(record: TuningRecord, error: PortError) -> Step:
    again = min(MAX_BACKOFF, 0.5 * 2 ** min(record.errors, 10))
    return Step(update(record, errors=record.errors + 1, sentence=f"Trying again in {again:g}s: {error}"), again)


def _work(record: TuningRecord, context: Context) -> Step:
    handler = {
        Phase.PENDING: profiling.pending,
        Phase.PROFILING: profiling.profiling,
        Phase.BASELINING: searching.baselining,
        Phase.SEARCHING: searching.searching,
        Phase.CONFIRMING: confirming.confirming,
        Phase.AWAITING_APPROVAL: promoting.awaiting_approval,
        Phase.CANARY: promoting.canary,
        Phase.ROLLING: promoting.rolling,
        Phase.WATCHING: promoting.watching,
        Phase.ROLLING_BACK: promoting.rolling_back,
    }.get(record.phase, promoting.ended)
    step = handler(record, context)
    calm = step.record.errors and step.record.errors == record.errors
    return Step(update(step.record, errors=0), step.again) if calm else step


def _start_anew(record: TuningRecord, context: Context) -> Step:
    """The spec changed in what results depend on: begin again, out of production first."""
    now = context.clock.now()
    if record.phase in TOUCHES_PRODUCTION and record.phase is not Phase.ROLLING_BACK:
        return Step(decisions.go_back(record, "the spec changed", now), 0.0)
    if record.phase is Phase.ROLLING_BACK:
        return promoting.rolling_back(record, context)
    if record.phase is Phase.FAILED and record.promotion is not None and not _cleared(context):
        why = "The spec changed: starts anew once the canary of the rollout before is gone"
        return Step(say(record, f"{why}. {record.sentence.removeprefix(f'{why}. ')}"), promoting.HELD)
    _release_spare(record, context)
    sentence = "The spec changed in what results depend on: starting anew."
    return Step(start_anew(update(record, suspended_since=None), sentence, now), 0.0)


def _cleared(context: Context) -> bool:
    """Whether no canary is left that the next rollout would stumble over; without a target there is none."""
    try:
        return promoting.clear(context)
    except Refused:
        return True


def _follow_suspend_field(record: TuningRecord, now: float) -> TuningRecord:
    """`suspend: true` in the spec holds the tuning; taking it out does not undo a person's suspend."""
    if record.tuning.spec.suspend and record.suspended_since is None:
        return update(record, suspended_since=now, sentence="Suspended: spec.suspend is set.")
    by_person = next((d.action for d in reversed(record.decisions) if d.action in ("suspend", "resume")), None)
    if not record.tuning.spec.suspend and record.suspended_since is not None and by_person != "suspend":
        held = now - record.suspended_since
        sentence = "Resumed: spec.suspend is no longer set."
        return update(record, suspended_since=None, waited=record.waited + held, sentence=sentence)
    return record


def _hold(record: TuningRecord, context: Context) -> Step:
    """Suspended: the spare is freed; production is kept as it is, half rolled if it was."""
    if record.phase in TOUCHES_PRODUCTION:
        try:
            record, settled = promoting.keep(record, context)
        except PortError as error:
            return Step(say(record, f"Suspended, and production could not be looked at: {error}"), 5.0)
        return Step(record, promoting.REST if settled else 2.0)
    _release_spare(record, context)
    try:
        free = trial.spare_is_free(context.store.trials(record.name), context)
    except PortError as error:
        return Step(say(record, f"Suspended, and the spare could not be looked at: {error}"), 5.0)
    return Step(update(record, errors=0), promoting.REST if free else 1.0)


def _too_late(record: TuningRecord, limit: float, context: Context) -> Step:
    now = context.clock.now()
    why = f"{record.phase} took longer than its {limit / 60:.0f} minutes; last: {record.sentence.rstrip('.')}"
    ended = decisions.go_back(record, why, now)
    _release_spare(ended, context)
    return Step(ended, 0.0)


def _release_spare(record: TuningRecord, context: Context) -> None:
    """End every running trial so that nothing holds a spare; they can be taken up again later."""
    for current in trial.running(context.store.trials(record.name)):
        if current.phase is not TrialPhase.PENDING:
            context.store.save_trial(record.name, trial.put_back(current, context))
