"""One step of the loop: the next record, the sentence that says why, and when to look again."""

from dataclasses import dataclass
from typing import TypeVar

from tunewright.domain.model import Model
from tunewright.domain.phases import Phase, check_transition
from tunewright.domain.state import PhaseChange, TuningRecord

T = TypeVar("T", bound=Model)


@dataclass(frozen=True)
class Step:
    """What a pass of `reconcile` came to. `again` is in seconds; None: nothing more to do until something changes."""

    record: TuningRecord
    again: float | None


def update(model: T, **changes: object) -> T:
    """A copy of a frozen model with some fields changed, validated again: a record is never half right."""
    fields = {name: getattr(model, name) for name in type(model).model_fields}
    return type(model)(**(fields | changes))


def say(record: TuningRecord, sentence: str) -> TuningRecord:
    """The same phase, with a new sentence."""
    return record if record.sentence == sentence else update(record, sentence=sentence)


def enter(record: TuningRecord, phase: Phase, sentence: str, now: float, **changes: object) -> TuningRecord:
    """The record in its next phase: the change is told in the history, and the phase's clock starts."""
    check_transition(record.phase, phase)
    history = (*record.history, PhaseChange(at=now, phase=phase, sentence=sentence))
    return update(
        record,
        **({"phase": phase, "phase_since": now, "waited": 0.0, "sentence": sentence, "errors": 0} | changes),
        history=history,
    )


def asked_for(record: TuningRecord, by: str) -> TuningRecord:
    """The same, where the last change of phase was a person's abort or rollback."""
    *before, last = record.history
    return update(record, history=(*before, update(last, by=by)))


def age(record: TuningRecord, now: float) -> float:
    """Seconds in this phase that count for its deadline: time suspended does not."""
    held = now - record.suspended_since if record.suspended_since is not None else 0.0
    return max(0.0, now - record.phase_since - record.waited - held)


def start_anew(record: TuningRecord, sentence: str, now: float) -> TuningRecord:
    """Begin again from Pending with the spec as it is now; only history and decisions stay."""
    forgotten: dict[str, object] = {
        "spec_hash": record.tuning.spec.spec_hash,
        "load_file": None,
        "profile": None,
        "baseline": None,
        "beside_knobs": "",
        "search_since": None,
        "inputs": None,
        "finalists": (),
        "winner": None,
        "recipe": None,
        "ladder": (),
        "promotion": None,
        "approval_since": None,
        "notes": (),
        "foreign": "",
        "foreign_since": None,
        "drift": None,
        "drift_at": None,
    }
    if record.phase is Phase.PENDING:
        return update(record, **forgotten, sentence=sentence)
    return enter(record, Phase.PENDING, sentence, now, **forgotten)
