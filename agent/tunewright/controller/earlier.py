"""What earlier tunings of the same target measured: a prior for the search, never a result of this one."""

from collections.abc import Sequence

from tunewright.controller.context import Context
from tunewright.domain.objective import judge
from tunewright.domain.state import Earlier, TrialOutcome, TrialRecord, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Target, TuningSpec
from tunewright.knobs.commandline import model_of

MOST, MOST_TUNINGS = 120, 20
"""Earlier trials that are kept in a record, and other tunings that are looked at."""


def target_key(target: Target) -> str:
    """Names what is tuned, beside its version and GPU, which the trials tell: the Deployment, or the model's path."""
    if target.deployment is not None:
        return f"deployment/{target.deployment}/{target.container or ''}"
    named = model_of(target.command)
    return f"model/{named}" if named is not None else f"servers/{' '.join(target.urls)}"


def with_own(record: TuningRecord, trials: Sequence[TrialRecord]) -> TuningRecord:
    """The record with the trials of its run before, which are about to be forgotten; equal when it has them already."""
    if record.target_key != target_key(record.tuning.spec.target):
        return update(record, earlier=())
    return _with(record, [(record.name, trials)])


def with_others(record: TuningRecord, context: Context) -> TuningRecord:
    """The record with what other tunings in the store measured of the same target, at the beginning of a run."""
    key, found, store = target_key(record.tuning.spec.target), [], context.others or context.store
    for name in [name for name in store.names() if name != record.name][-MOST_TUNINGS:]:
        other = store.load(name)
        if other is not None and other.target_key == key:
            found.append((name, store.trials(name)))
    return update(_with(record, found), target_key=key)


def _with(record: TuningRecord, runs: Sequence[tuple[str, Sequence[TrialRecord]]]) -> TuningRecord:
    spec = record.tuning.spec
    found = list(record.earlier) if record.earlier_by == _judged_by(spec) else []
    known = {(one.tuning, one.trial) for one in found}
    for name, trials in runs:
        found += _of(name, trials, spec, known)
    kept = tuple(sorted(found, key=lambda one: one.at)[-MOST:])
    return update(record, earlier=kept, earlier_by=_judged_by(spec))


def _judged_by(spec: TuningSpec) -> str:
    return f"{spec.objective.model_dump_json()}{spec.slo.model_dump_json()}"


def _of(name: str, trials: Sequence[TrialRecord], spec: TuningSpec, known: set[tuple[str, str]]) -> list[Earlier]:
    # One run of one tuning: measured under one load, so that its trials compare with each other.
    run = f"{name}/{min((trial.created_at for trial in trials), default=0.0):.0f}"
    found = []
    for trial in trials:
        ended = trial.finished_at is not None and trial.outcome is not TrialOutcome.FAILED
        # Goodput counts what met the SLO of that time; it can't be judged anew.
        stale = spec.objective.maximize == "goodput" or (run, trial.id) in known
        if not ended or stale or (trial.failure is not None and trial.failure.machine_fault):
            continue
        measured = trial.measurement if trial.failure is None else None
        told = judge(spec.objective, spec.slo, measured) if measured is not None and not measured.void else None
        if told is None and trial.failure is None:
            continue
        found.append(
            Earlier(
                tuning=run,
                trial=trial.id,
                at=trial.finished_at or 0.0,
                candidate=trial.candidate,
                version=measured.vllm_version if measured is not None else None,
                objective=told.value if told is not None else None,
                slo_margin=told.margin if told is not None else None,
                failed=trial.failure is not None,
                memory=trial.memory,
            )
        )
    return found
