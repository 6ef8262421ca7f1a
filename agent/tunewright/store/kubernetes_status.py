"""What a custom resource's status shows of a record: for `kubectl get`, `describe` and `wait`. Pure functions."""

import base64
import binascii
import gzip
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tunewright.controller.decisions import live_approval
from tunewright.domain.objective import objective_unit
from tunewright.domain.phases import TERMINAL, Phase
from tunewright.domain.promotion import PromotionMode
from tunewright.domain.redact import redact
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import Objective, Tuning
from tunewright.domain.verdict import Outcome
from tunewright.kube.times import format_time
from tunewright.ports import Refused

Json = dict[str, Any]
_Model = TypeVar("_Model", bound=BaseModel)

_SENTENCE_LIMIT = 2000
"""Characters of a sentence in status; the record keeps it whole."""

_ANSWERED = frozenset({Phase.PROMOTED, Phase.RECOMMENDED, Phase.NO_IMPROVEMENT, Phase.REJECTED})
"""Ends that leave nothing for anybody to do."""

_STUCK = frozenset({Phase.FAILED, Phase.INFEASIBLE})
"""Ends that stay until somebody changes the spec or the cluster."""

_MAX_RECORD = 64 * 2**20
"""Bytes of an unpacked record; more was not written by us."""


def pack(record: BaseModel) -> str:
    """The record as JSON, gzip and base64; equal records give equal text."""
    return base64.b64encode(gzip.compress(record.model_dump_json().encode(), mtime=0)).decode()


def unpack(kind: type[_Model], text: str) -> _Model:
    """The record that was packed. Raises `ValueError`."""
    try:
        unzipper = zlib.decompressobj(wbits=31)
        document = unzipper.decompress(base64.b64decode(text, validate=True), _MAX_RECORD)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it is no gzip in base64: {error}") from error
    if not unzipper.eof:
        raise ValueError("it is cut off, or far too large")
    return kind.model_validate_json(document)


def read_record(kind: type[_Model], packed: str, what: str) -> _Model:
    """As `unpack`, of the object that `what` names. Raises `Refused`."""
    try:
        return unpack(kind, packed)
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise Refused(
            f"the record in the status of {what} can't be read by this Tunewright ({reason}); "
            "use the version that wrote it"
        ) from error


def tuning_status(record: TuningRecord, trials: Sequence[TrialRecord]) -> Json:
    """The fields of a Tuning's status that are for people; those with nothing to show are left out."""
    shown = {
        "phase": record.phase.value,
        "sentence": _short(record.sentence),
        "target": _target(record.tuning),
        "best": _best(record.tuning.spec.objective, trials),
        "gain": _gain(record),
        "trials": _progress(record, trials),
        "approval": _approval(record),
        "candidate": record.winner.hash if record.winner else "",
        "baseline": record.baseline.hash if record.baseline else "",
        "specHash": record.spec_hash,
    }
    # Some builds of 1.20 take an empty text for null, and refuse it.
    return {name: text for name, text in shown.items() if text}


def trial_status(trial: TrialRecord) -> Json:
    """The fields of a Trial's status that are for people; None where there is nothing to show."""
    return {
        "phase": trial.phase.value,
        "outcome": trial.outcome.value if trial.outcome else None,
        "objective": f"{trial.objective:.5g}" if trial.objective is not None else None,
        "failure": trial.failure.kind.value if trial.failure else None,
        "cause": _short(trial.failure.cause) if trial.failure else None,
    }


def conditions(
    record: TuningRecord | None, faults: Sequence[str], *, generation: int, before: Sequence[Json], now: float
) -> list[Json]:
    """The conditions of a tuning. `faults` are what is wrong with its spec; `before` are the conditions as they were.

    Without a record nothing but the faults is known.
    """
    found = _of_record(record) if record is not None else {}
    if faults:
        told = "; ".join(faults)
        going_on = f" The last valid spec is in force: {record.phase}." if record is not None else ""
        found["Stalled"] = ("True", "InvalidSpec", told + going_on)
        found.setdefault("Ready", ("False", "InvalidSpec", told))
        found.setdefault("Reconciling", ("False", "InvalidSpec", told))
    since = {each.get("type"): (each.get("status"), each.get("lastTransitionTime")) for each in before}
    result = []
    for kind, (status, reason, message) in found.items():
        old, changed = since.get(kind, (None, None))
        result.append(
            {
                "type": kind,
                "status": status,
                "observedGeneration": generation,
                "lastTransitionTime": changed if old == status and changed else format_time(now),
                "reason": reason,
                "message": _short(message) or "Nothing was said yet.",
            }
        )
    return result


def _of_record(record: TuningRecord) -> dict[str, tuple[str, str, str]]:
    phase, sentence = record.phase, record.sentence
    suspended = record.suspended_since is not None
    at_work = phase not in TERMINAL and not suspended
    # What a person ended leaves nothing to do, and is no failure.
    ended, stopped = phase in TERMINAL, bool(record.stopped_by)
    stuck = phase in _STUCK and not stopped
    reason = "Aborted" if phase is Phase.FAILED and stopped else phase.value
    return {
        "Ready": (_is(phase in _ANSWERED or (ended and stopped)), reason, sentence),
        "Reconciling": (_is(at_work), "Suspended" if suspended else phase.value, sentence),
        "Stalled": (_is(stuck), reason, sentence if stuck else "Nothing holds it up."),
        "Suspended": (
            _is(suspended),
            "Suspended" if suspended else "NotSuspended",
            sentence if suspended else "It is at work.",
        ),
        "CanaryHealthy": _canary(record),
        "Approved": _approved(record),
        "Promoted": (
            _is(phase is Phase.PROMOTED),
            phase.value,
            sentence if phase is Phase.PROMOTED else f"The phase is {phase}.",
        ),
        "RolledBack": (
            _is(phase is Phase.ROLLED_BACK),
            phase.value,
            sentence if phase is Phase.ROLLED_BACK else f"The phase is {phase}.",
        ),
    }


def _canary(record: TuningRecord) -> tuple[str, str, str]:
    verdict = record.promotion.verdict if record.promotion is not None else None
    if verdict is None:
        return "Unknown", "NoVerdict", "No canary was judged."
    status = {Outcome.PASS: "True", Outcome.FAIL: "False"}.get(verdict.outcome, "Unknown")
    return status, verdict.outcome.value.capitalize(), verdict.reason


def _approved(record: TuningRecord) -> tuple[str, str, str]:
    approval = live_approval(record)
    if approval is not None:
        return "True", "Approved", f"Approved by {approval.by}{f': {approval.reason}' if approval.reason else ''}."
    if record.tuning.spec.promotion.mode is PromotionMode.AUTO:
        return "False", "NotNeeded", "spec.promotion.mode is auto: the winner is promoted without an approval."
    if record.phase is Phase.AWAITING_APPROVAL:
        return "False", "Waiting", record.sentence
    if record.phase is Phase.REJECTED:
        return "False", "Rejected", record.sentence
    return "False", "NotAsked", "Nothing was approved."


def _approval(record: TuningRecord) -> str:
    reason = _approved(record)[1]
    return "" if reason in ("NotAsked", "NotNeeded") else reason


def _best(objective: Objective, trials: Sequence[TrialRecord]) -> str:
    values = [t.objective for t in trials if t.outcome is TrialOutcome.COMPLETE and t.objective is not None]
    # A latency counts negative so that larger is better; people read it as it is.
    return f"{abs(max(values)):.4g} {objective_unit(objective)}" if values else ""


def _gain(record: TuningRecord) -> str:
    """Of the winner; while finalists are still measured, of the best of them. Never from the search."""
    gains = [
        (record.winner is not None and finalist.candidate.hash == record.winner.hash, finalist.gain.estimate.value)
        for finalist in record.finalists
        if finalist.gain is not None and finalist.gain.rounds >= 2
    ]
    return f"{max(gains)[1]:+.1%}" if gains else ""


def _progress(record: TuningRecord, trials: Sequence[TrialRecord]) -> str:
    done = sum(t.purpose is TrialPurpose.SEARCH and t.phase is TrialPhase.DONE for t in trials)
    return f"{done}/{record.tuning.spec.budget.trials}"


def _target(tuning: Tuning) -> str:
    target = tuning.spec.target
    if target.model:
        return target.model
    if target.deployment:
        return target.deployment
    if target.urls:
        return redact(target.urls[0])
    after = [word for before, word in zip(target.command, target.command[1:], strict=False) if before == "serve"]
    return redact((after or target.command)[0])


def known_conditions(status: Mapping[str, Any]) -> list[Json]:
    """The conditions in a status; none when there are none."""
    return [each for each in status.get("conditions") or [] if isinstance(each, dict)]


def _is(value: bool) -> str:
    return "True" if value else "False"


def _short(text: str) -> str:
    text = redact(text)
    return text if len(text) <= _SENTENCE_LIMIT else f"{text[: _SENTENCE_LIMIT - 4]} ..."
