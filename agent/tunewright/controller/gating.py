"""Who must pass the quality gate, and which confirming runs answer its prompts."""

from collections.abc import Sequence

from tunewright.controller.context import Context
from tunewright.domain.candidate import Candidate
from tunewright.domain.state import TrialPurpose, TrialRecord, TuningRecord
from tunewright.knobs.catalogue import new_speculation

ANSWERED = 3
"""Fresh starts of each side that answer: three give three comparisons of the baseline with itself, and nine across."""


def must_prove(record: TuningRecord, candidate: Candidate, lossy: Sequence[str]) -> str:
    """Why this candidate must prove that its answers stay the same; empty when it need not. `lossy` names its changes
    against the baseline that can change answers."""
    baseline = record.baseline or Candidate()
    if lossy:
        return f"it changes what can change answers ({', '.join(lossy)})"
    if method := new_speculation(candidate.values, baseline.values):
        return f"its speculation ({method}) is new"
    return "quality.always is set" if record.tuning.spec.quality.always else ""


def answers_wanted(record: TuningRecord, trial: TrialRecord, context: Context) -> bool:
    """Whether this run answers the prompts: it costs the spare's time, so only where something is to be proven."""
    if trial.purpose is not TrialPurpose.CONFIRM:
        return False
    baseline, lossy = record.baseline or Candidate(), context.proposer.lossy
    if not any(must_prove(record, f.candidate, lossy(f.candidate, baseline)) for f in record.finalists):
        return False
    return _answered(context.store.trials(record.name), trial.candidate) < ANSWERED


def _answered(trials: Sequence[TrialRecord], candidate: Candidate) -> int:
    return sum(bool(t.answers) and t.candidate.hash == candidate.hash for t in trials)
