"""Candidates that people asked for, in the file or by the API: they are tried before the search's own."""

from collections.abc import Iterator, Sequence

from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.domain.candidate import Candidate
from tunewright.domain.state import (
    Failure,
    FailureKind,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.step import update
from tunewright.ports import Refused
from tunewright.propose.asked import laid_over, read_asked


def next_wish(
    record: TuningRecord, trials: Sequence[TrialRecord], context: Context, *, slot: int
) -> TrialRecord | None:
    """The trial of the next candidate that was asked for and not tried; None when there is none left.

    What can't run is a trial that ended before it was launched, with the reason: it costs nothing, and is asked for
    no more.
    """
    baseline, search = record.baseline or Candidate(), record.tuning.spec.search
    tried = {t.candidate.hash for t in trials if t.purpose is not TrialPurpose.CONFIRM}
    for values, by in _all(record):
        try:
            candidate = laid_over(baseline, search, read_asked(search, values, by))
        except Refused:  # of a file it was refused before; of a person, before another edit of the spec
            continue
        if candidate.hash in tried:
            continue
        new = trial.new_trial(trials, candidate, TrialPurpose.SEARCH, f"asked for by {by}", slot=slot)
        why_not = context.proposer.objection(candidate, baseline, trials)
        return new if why_not is None else _refused(new, why_not, context.clock.now())
    return None


def launched(trial_: TrialRecord) -> bool:
    """Whether it held the spare at all: what was refused before costs none of the budget."""
    return trial_.finished_at is None or trial_.finished_at > trial_.created_at


def _all(record: TuningRecord) -> Iterator[tuple[dict[str, str], str]]:
    for index, values in enumerate(record.tuning.spec.search.candidates):
        yield dict(values), f"spec.search.candidates[{index}]"
    for wish in record.proposed:
        yield dict(wish.values), wish.by


def _refused(new: TrialRecord, why_not: str, now: float) -> TrialRecord:
    failure = Failure(kind=FailureKind.INVALID_COMBINATION, cause=why_not, advice="Correct it and ask for it again.")
    ended: dict[str, object] = {"phase_since": now, "created_at": now, "finished_at": now}
    return update(new, phase=TrialPhase.DONE, outcome=TrialOutcome.INFEASIBLE, failure=failure, **ended)
