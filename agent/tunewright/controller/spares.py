"""Which spares the next trials run on. Read from the trials alone, so that a restart changes nothing."""

from collections.abc import Sequence

from tunewright.controller.trials import running
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialRecord

RESTS = 1800.0
"""Seconds for which a spare is left out whose last trial failed by the machine's fault, while others work."""


def sound(trials: Sequence[TrialRecord], spares: int, now: float) -> list[int]:
    """The spares to use.

    One whose last trial failed by the machine's fault rests for a while: it would spoil one candidate after the other.
    Where all have failed, the one that did so first is tried, alone: all at once may be more than the machine bears.
    """
    failed = _failed(trials, spares)
    in_use = [slot for slot in range(spares) if slot not in failed or now - _ended(failed[slot]) >= RESTS]
    return in_use or [min(failed, key=lambda slot: _ended(failed[slot]))]


def free(trials: Sequence[TrialRecord], spares: int, now: float) -> list[int]:
    """The spares that a trial can start on now."""
    present = running(trials)
    if len(present) >= spares:
        return []
    busy = {trial.slot for trial in present}
    return [slot for slot in sound(trials, spares, now) if slot not in busy]


def left_out(trials: Sequence[TrialRecord], spares: int, now: float) -> str:
    """Which spares rest, and why, as a sentence; empty when all are used."""
    used, failed = sound(trials, spares, now), _failed(trials, spares)
    causes = {slot: trial.failure.cause if trial.failure else "no result" for slot, trial in failed.items()}
    told = [f"Spare {slot} is left out for a while: {causes[slot]}." for slot in sorted(failed) if slot not in used]
    return " ".join(told)


def _failed(trials: Sequence[TrialRecord], spares: int) -> dict[int, TrialRecord]:
    """By spare, its last trial that has ended, where that failed by the machine's fault."""
    done = sorted((trial for trial in trials if trial.phase is TrialPhase.DONE), key=_ended)
    last = {trial.slot: trial for trial in done}
    return {slot: trial for slot, trial in last.items() if slot < spares and trial.outcome is TrialOutcome.FAILED}


def _ended(trial: TrialRecord) -> float:
    return trial.finished_at or 0.0
