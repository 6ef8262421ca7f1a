"""What each change of the winner contributes, measured: a ladder of trials from the baseline to the winner."""

from collections.abc import Sequence

from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.domain.candidate import Candidate
from tunewright.domain.state import TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.step import Step, say, update


def begin(record: TuningRecord, winner: Candidate, trials: Sequence[TrialRecord], context: Context) -> Step | None:
    """Fix the rungs between baseline and winner; None where none are wanted, or none are left to measure."""
    if not record.tuning.spec.confirm.ladder or record.ladder:
        return None
    rungs = tuple(context.proposer.rungs(winner, record.baseline or Candidate(), trials))
    if not rungs:
        return None
    sentence = f"{winner.hash} is confirmed; measuring what each of its changes is worth, {len(rungs)} steps."
    return Step(say(update(record, winner=winner, ladder=rungs), sentence), 0.0)


def climb(record: TuningRecord, trials: Sequence[TrialRecord], free: Sequence[int], context: Context) -> Step | None:
    """Measure the next rung, each once from a fresh start on a free spare; None when all were begun."""
    tried = {t.candidate.hash for t in trials if t.purpose is TrialPurpose.LADDER}
    for number, rung in enumerate(record.ladder, 1):
        if rung.hash not in tried and free:
            what = f"step {number} of {len(record.ladder)} from the baseline to the winner"
            new = trial.new_trial(trials, rung, TrialPurpose.LADDER, what, number, free[0])
            context.store.save_trial(record.name, new)
            return Step(say(record, f"Measuring what each change is worth: {what}."), 0.0)
    return None
