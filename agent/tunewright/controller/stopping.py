"""Whether a running trial of the search is worth its time any longer; see `domain.stopping` for the rules."""

from tunewright.controller.context import Context
from tunewright.domain import stopping
from tunewright.domain.measurement import Interim
from tunewright.domain.state import Failure, FailureKind, TrialOutcome, TrialPurpose, TrialRecord, TuningRecord


def may_stop(trial: TrialRecord, record: TuningRecord) -> bool:
    """The search's own trials alone: baseline and finalists are measured whole, so that they can be compared."""
    return trial.purpose is TrialPurpose.SEARCH and record.tuning.spec.search.early_stop


def hopeless(trial: TrialRecord, interim: Interim, record: TuningRecord, context: Context) -> str | None:
    """Why its load test can be ended now; None while it is to go on."""
    if not may_stop(trial, record):
        return None
    done = [t for t in context.store.trials(record.name) if t.outcome is TrialOutcome.COMPLETE]
    best = max((t.objective for t in done if t.objective is not None), default=None)
    spec = record.tuning.spec
    return stopping.hopeless(spec.objective, spec.slo, best, interim)


def given_up(trial: TrialRecord, start_seconds: float | None, record: TuningRecord, context: Context) -> Failure | None:
    """The failure as which a start that takes too long ends; None while it may go on."""
    if start_seconds is None or start_seconds <= stopping.MORE_SECONDS or not may_stop(trial, record):
        return None
    starts = [t.start_seconds for t in context.store.trials(record.name) if t.start_seconds is not None]
    why = stopping.too_slow(start_seconds, starts)
    advice = "If such a start is worth waiting for: search.earlyStop: false."
    return None if why is None else Failure(kind=FailureKind.HUNG, cause=why, advice=advice)
