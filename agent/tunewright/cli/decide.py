"""`approve`, `reject`, `suspend`, `resume`, `abort`, `rollback`: what people decide."""

import getpass
from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import StateOption, fail, told
from tunewright.clock import SystemClock
from tunewright.controller.decisions import Action, bound, refusal
from tunewright.domain.state import TuningRecord
from tunewright.exits import Exit
from tunewright.ports import Store
from tunewright.store.sqlite import SqliteStore

NameArgument = Annotated[str, typer.Argument(help="Name of the tuning.")]
ReasonOption = Annotated[str, typer.Option("--reason", "-r", help="Kept with the decision.")]
CandidateOption = Annotated[
    str | None,
    typer.Option("--candidate", help="Hash of the candidate you looked at; another one by now is refused."),
]


def decide(state: Path, name: str, action: Action, reason: str, candidate: str | None = None) -> None:
    """Keep a decision for the loop to take up; refused when it could have no effect."""
    with told():
        clock = SystemClock()
        store = SqliteStore(state / "store.sqlite", clock)
        record = found(store, name)
        decision = bound(record, action, at=clock.now(), by=getpass.getuser(), reason=reason)
        if candidate is not None and candidate != decision.candidate:
            changed = f"the candidate is {decision.candidate or 'not known yet'}, not {candidate}"
            fail(f"{name}: {action} refused: {changed}", Exit.REFUSED)
        why_not = refusal(record, decision)
        if why_not is not None:
            fail(f"{name}: {action} refused: {why_not}", Exit.REFUSED)
        store.decide(name, decision)
    about = f" of {decision.candidate}" if decision.candidate else ""
    print(f"{name}: {action}{about} is noted, by {decision.by}; the running `tunewright tune` takes it up.")


def found(store: Store, name: str) -> TuningRecord:
    """The record, or an end that says which names there are."""
    record = store.load(name)
    if record is None:
        names = ", ".join(store.names()) or "none"
        fail(f"There is no tuning {name!r} here; there are: {names}", Exit.USAGE)
    return record


def approve(
    name: NameArgument, state: StateOption, reason: ReasonOption = "", candidate: CandidateOption = None
) -> None:
    """Let the confirmed candidate go to production, behind a canary."""
    decide(state, name, "approve", reason, candidate)


def reject(
    name: NameArgument, state: StateOption, reason: ReasonOption = "", candidate: CandidateOption = None
) -> None:
    """Turn the confirmed candidate down; production stays as it is."""
    decide(state, name, "reject", reason, candidate)


def suspend(name: NameArgument, state: StateOption, reason: ReasonOption = "") -> None:
    """Hold the tuning where it is; the spare is freed, production is left as it is."""
    decide(state, name, "suspend", reason)


def resume(name: NameArgument, state: StateOption, reason: ReasonOption = "") -> None:
    """Go on with a suspended tuning."""
    decide(state, name, "resume", reason)


def abort(name: NameArgument, state: StateOption, reason: ReasonOption = "") -> None:
    """End the tuning; production goes back to the baseline where it was touched."""
    decide(state, name, "abort", reason)


def rollback(name: NameArgument, state: StateOption, reason: ReasonOption = "") -> None:
    """Bring production back to the baseline, also after the promotion."""
    decide(state, name, "rollback", reason)
