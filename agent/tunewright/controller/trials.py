"""One trial, from launch to nothing left behind. Each step may be taken again after a crash."""

from collections.abc import Sequence

from tunewright.controller import stopping
from tunewright.controller.context import Context
from tunewright.controller.gating import answers_wanted
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Measurement
from tunewright.domain.objective import judge
from tunewright.domain.profile import Source
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
from tunewright.domain.workload import workload_for
from tunewright.ports import LoadPhase, LoadRequest, Refused, ServerPhase, ServerStatus

MAX_ATTEMPTS = 3
"""A trial that fails by the machine's fault is tried this often in all."""

POLL = 0.25
"""Seconds between two looks at a running trial: a death is noticed within a second."""
WAIT = 30.0
"""Seconds between two looks at a server that has no place yet: that it gets one wakes the loop."""


def run_id(trial: TrialRecord) -> str:
    """Names one attempt: what an earlier attempt left can't be taken for this one."""
    return f"{trial.id}-{trial.attempt}"


def new_trial(
    trials: Sequence[TrialRecord],
    candidate: Candidate,
    purpose: TrialPurpose,
    reason: str,
    round_: int = 0,
    slot: int = 0,
) -> TrialRecord:
    """The next trial of a tuning, with its deterministic id; `slot` is the spare that it runs on."""
    number = max((trial.number for trial in trials), default=-1) + 1
    return TrialRecord(
        id=f"{number:03d}-{candidate.hash}",
        number=number,
        purpose=purpose,
        candidate=candidate,
        round=round_,
        reason=reason,
        slot=slot,
    )


def running(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that are not done: at most one on each spare, but right after an edit to fewer spares."""
    return [trial for trial in trials if trial.phase is not TrialPhase.DONE]


def advance(
    record: TuningRecord, trial: TrialRecord, beside: Sequence[TrialRecord], context: Context
) -> tuple[TrialRecord, float]:
    """Take one step of a trial while those of `beside` run too; the caller writes what comes back.

    Also after how many seconds the next one is due.
    """
    spares = record.tuning.spec.spare.parallelism
    if trial.slot >= spares:  # the spec was edited to fewer spares: this one's GPU is ours no longer
        return update(put_back(trial, context), slot=trial.slot % spares), POLL
    match trial.phase:
        case TrialPhase.PENDING:
            after = trial if _waits(trial, beside) else _launch(trial, beside, context)
        case TrialPhase.STARTING:
            server = context.spare.poll(run_id(trial))
            after = _await_ready(record, trial, server, context)
            if after == trial and server.waiting:
                return trial, WAIT
        case TrialPhase.MEASURING:
            after = _await_measurement(record, trial, context)
        case TrialPhase.STOPPING:
            after = _stop(record, trial, context)
        case TrialPhase.DONE:
            after = trial
    return after, 0.0 if after.phase is not trial.phase else POLL


def put_back(trial: TrialRecord, context: Context) -> TrialRecord:
    """End a running trial so that it can be taken up again later; what was measured so far is lost."""
    context.load.cancel(run_id(trial))
    context.spare.cancel(run_id(trial))
    again: dict[str, object] = {"measurement": None, "answers": (), "failure": None, "stopped": None}
    return update(trial, phase=TrialPhase.PENDING, attempt=trial.attempt + 1, **again)


def spare_is_free(trials: Sequence[TrialRecord], context: Context) -> bool:
    """Whether trials that were put back are gone from their spares: ending takes looks, which nobody else takes."""
    halted = [t for t in trials if t.phase is TrialPhase.PENDING and t.attempt > 1]
    looks = [context.spare.poll(run_id(update(t, attempt=t.attempt - 1))) for t in halted]
    return all(look.phase is ServerPhase.ABSENT for look in looks)


def _waits(trial: TrialRecord, beside: Sequence[TrialRecord]) -> bool:
    """Whether another one is on its spare, or comes first: so it may be after an edit to fewer spares."""
    same = [other for other in beside if other.slot == trial.slot]
    return any(other.phase is not TrialPhase.PENDING or other.number < trial.number for other in same)


def _launch(trial: TrialRecord, beside: Sequence[TrialRecord], context: Context) -> TrialRecord:
    now = context.clock.now()
    context.spare.sweep(keep=[run_id(each) for each in (trial, *beside)])
    try:
        context.spare.start(run_id(trial), trial.candidate, trial.slot)
    except Refused as refusal:
        failure = Failure(kind=FailureKind.INVALID_COMBINATION, cause=str(refusal))
        return _to(trial, TrialPhase.STOPPING, now, created_at=now, failure=failure)
    return _to(trial, TrialPhase.STARTING, now, created_at=trial.created_at or now)


def _await_ready(record: TuningRecord, trial: TrialRecord, server: ServerStatus, context: Context) -> TrialRecord:
    now = context.clock.now()
    if server.phase is ServerPhase.ABSENT:
        context.spare.start(run_id(trial), trial.candidate, trial.slot)
        return trial
    if server.phase is ServerPhase.FAILED:
        return _to(trial, TrialPhase.STOPPING, now, failure=server.failure or _unknown(server.detail))
    if server.phase is not ServerPhase.READY or server.url is None:
        slow = stopping.given_up(trial, server.start_seconds, record, context)
        return trial if slow is None else _to(trial, TrialPhase.STOPPING, now, failure=slow)
    context.load.start(run_id(trial), _load_request(record, trial, server.url, context))
    return _to(
        trial,
        TrialPhase.MEASURING,
        now,
        ready_at=now,
        load_started_at=now,
        start_seconds=server.start_seconds,
        effective=dict(server.effective),
        surprises=tuple(server.surprises),
        memory=server.memory,
    )


def _await_measurement(record: TuningRecord, trial: TrialRecord, context: Context) -> TrialRecord:
    now, server, load = context.clock.now(), context.spare.poll(run_id(trial)), context.load.poll(run_id(trial))
    if server.phase is ServerPhase.FAILED:
        context.load.cancel(run_id(trial))
        return _to(trial, TrialPhase.STOPPING, now, failure=server.failure or _unknown(server.detail))
    if load.phase is LoadPhase.ABSENT:
        if server.phase is not ServerPhase.READY or server.url is None:
            lost = Failure(kind=FailureKind.KILLED, cause="the server and its load test are gone")
            return _to(trial, TrialPhase.STOPPING, now, failure=lost)
        context.load.start(run_id(trial), _load_request(record, trial, server.url, context))
        return trial
    if load.phase is LoadPhase.FAILED:
        failed = Failure(kind=FailureKind.LOAD_TEST, cause=load.detail or "the load test failed without a word")
        return _to(trial, TrialPhase.STOPPING, now, failure=failed)
    if load.phase is not LoadPhase.DONE:
        if load.interim is None or (why := stopping.hopeless(trial, load.interim, record, context)) is None:
            return trial
        measured = _labelled(load.interim.measurement, server)
        return _to(trial, TrialPhase.STOPPING, now, measurement=measured, stopped=why)
    if load.measurement is None or load.measurement.void:
        void = "; ".join(load.measurement.void) if load.measurement else "it ended without a measurement"
        unsound = Failure(kind=FailureKind.LOAD_TEST, cause=f"the measurement is void: {void}")
        return _to(trial, TrialPhase.STOPPING, now, failure=unsound, measurement=load.measurement)
    answers = tuple(load.answers)
    return _to(trial, TrialPhase.STOPPING, now, measurement=_labelled(load.measurement, server), answers=answers)


def _labelled(measured: Measurement, server: ServerStatus) -> Measurement:
    """By what the spare read in the log: it knows what `/version` does not tell, as the CPU."""
    if server.version is None:
        return measured
    return update(measured, source=Source.of_version(server.version), vllm_version=server.version)


def _stop(record: TuningRecord, trial: TrialRecord, context: Context) -> TrialRecord:
    context.load.cancel(run_id(trial))
    context.spare.cancel(run_id(trial))
    if context.spare.poll(run_id(trial)).phase is not ServerPhase.ABSENT:
        return trial
    now = context.clock.now()
    if trial.failure is not None:
        if not trial.failure.machine_fault:
            return _to(trial, TrialPhase.DONE, now, finished_at=now, outcome=TrialOutcome.INFEASIBLE)
        faults = trial.machine_faults + 1
        if faults >= MAX_ATTEMPTS:
            ended: dict[str, object] = {"finished_at": now, "outcome": TrialOutcome.FAILED}
            return _to(trial, TrialPhase.DONE, now, machine_faults=faults, **ended)
        again: dict[str, object] = {"attempt": trial.attempt + 1, "failure": None, "measurement": None}
        return _to(trial, TrialPhase.PENDING, now, machine_faults=faults, **again)
    if trial.measurement is None:
        lost = Failure(kind=FailureKind.UNKNOWN, cause="stopped with neither a measurement nor a failure")
        return _to(trial, TrialPhase.DONE, now, finished_at=now, outcome=TrialOutcome.FAILED, failure=lost)
    spec = record.tuning.spec
    judged = judge(spec.objective, spec.slo, trial.measurement)
    outcome = TrialOutcome.COMPLETE if judged.feasible else TrialOutcome.INFEASIBLE
    if trial.stopped is not None:
        outcome = TrialOutcome.STOPPED
    return _to(
        trial,
        TrialPhase.DONE,
        now,
        finished_at=now,
        outcome=outcome,
        objective=judged.value,
        slo_margin=judged.margin,
    )


def _load_request(record: TuningRecord, trial: TrialRecord, url: str, context: Context) -> LoadRequest:
    spec = record.tuning.spec
    if record.profile is None:
        raise AssertionError("a trial is only run once the traffic profile is known")
    asked = answers_wanted(record, trial, context)
    return LoadRequest(
        url=url,
        workload=workload_for(record.load, record.profile),
        model=spec.target.model,
        slo=spec.slo,
        duration=spec.load.duration,
        max_warmup=spec.load.max_warmup,
        seed=spec.load.seed + trial.number * 1000 + trial.attempt,
        quality_prompts=spec.quality.prompts if asked else 0,
        quality_max_tokens=spec.quality.max_tokens if asked else 0,
        prompts=context.prompts() if asked else (),
        api_key_file=spec.target.api_key_file,
        file=record.load_file,
        interim=stopping.may_stop(trial, record),
    )


def _to(trial: TrialRecord, phase: TrialPhase, now: float, **changes: object) -> TrialRecord:
    return update(trial, phase=phase, phase_since=now, **changes)


def _unknown(detail: str) -> Failure:
    return Failure(kind=FailureKind.UNKNOWN, cause=detail or "the server failed without a word")
