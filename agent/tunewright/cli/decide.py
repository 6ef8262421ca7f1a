"""`approve`, `reject`, `suspend`, `resume`, `abort`, `rollback`, `propose`: what people decide."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tunewright.api.auth import own_name
from tunewright.cli.common import JsonOption, NameArgument, StateOption, fail, opened_at, told
from tunewright.clock import SystemClock
from tunewright.controller.decisions import Action, bound, decided_before, refusal
from tunewright.domain.oneline import MOST_REASON, MOST_VALUE, ONE_LINE
from tunewright.exits import Exit
from tunewright.ports import Objected

ReasonOption = Annotated[str, typer.Option("--reason", "-r", help="Kept with the decision.")]
CandidateOption = Annotated[
    str | None,
    typer.Option("--candidate", help="Hash of the candidate you looked at; another one by now is refused."),
]


def decide(
    state: Path,
    name: str,
    action: Action,
    reason: str,
    as_json: bool,
    candidate: str | None = None,
    values: dict[str, str] | None = None,
) -> None:
    """Keep a decision for the loop to take up; ends with `Exit.REFUSED` when it could have no effect."""
    _check_line("--reason", reason, MOST_REASON)
    for knob, text in (values or {}).items():
        _check_line(f"the value of {knob}", text, MOST_VALUE)
    with told(), opened_at(state, name) as (store, record):
        decision = bound(record, action, at=SystemClock().now(), by=own_name(), reason=reason, values=values)
        if candidate is not None and candidate != decision.candidate:
            changed = f"the candidate is {decision.candidate or 'not known yet'}, not {candidate}"
            fail(f"{name}: {action} refused: {changed}", Exit.REFUSED)
        why_not = refusal(record, decision)
        if why_not is not None:
            fail(f"{name}: {action} refused: {why_not}", Exit.REFUSED)
        try:
            store.decide(name, decision, partial(decided_before, record, decision))
        except Objected as objection:
            fail(f"{name}: {action} refused: {objection}", Exit.REFUSED)
    if as_json:
        print(json.dumps({"tuning": name, **decision.model_dump(mode="json", by_alias=True)}, indent=2))
        return
    about = f" of {decision.candidate}" if action in ("approve", "reject") else ""
    about = f" of {', '.join(f'{knob} {text}' for knob, text in values.items())}" if values else about
    print(
        f"{name}: {action}{about} is noted, by {decision.by}. `tunewright tune` takes it up: at once, or when it runs."
    )


def _check_line(what: str, text: str, most: int) -> None:
    """As the REST API takes it: what is kept is shown on other people's terminals, and sent as JSON."""
    whole = text.isascii() or text.encode(errors="replace").decode() == text  # bytes that are no UTF-8 are not
    if text and not (whole and len(text) <= most and re.fullmatch(ONE_LINE, text)):
        wanted = f"one line of at most {most} characters is wanted, without control characters"
        fail(f"{what}: {wanted}, beginning with a visible one", Exit.USAGE)


def approve(
    name: NameArgument,
    state: StateOption,
    reason: ReasonOption = "",
    candidate: CandidateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the confirmed candidate go to production, behind a canary.

    The approval is for the candidate, the spec and the baseline as they are now, and for nothing else.

    Examples:

        tunewright approve workstation

        tunewright approve workstation --candidate 67a30d3f94 --reason "+31%, looked at the report"
    """
    decide(state, name, "approve", reason, as_json, candidate)


def reject(
    name: NameArgument,
    state: StateOption,
    reason: ReasonOption = "",
    candidate: CandidateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn the confirmed candidate down; production stays as it is, and the tuning ends.

    Example:

        tunewright reject workstation --reason "wait for the release"
    """
    decide(state, name, "reject", reason, as_json, candidate)


def suspend(name: NameArgument, state: StateOption, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """Hold the tuning where it is; the spare is freed, production is left as it is.

    Example:

        tunewright suspend workstation --reason "I need the GPU until noon"
    """
    decide(state, name, "suspend", reason, as_json)


def resume(name: NameArgument, state: StateOption, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """Go on with a suspended tuning.

    Example:

        tunewright resume workstation
    """
    decide(state, name, "resume", reason, as_json)


def abort(name: NameArgument, state: StateOption, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """End the tuning; production goes back to the baseline where it was touched.

    Example:

        tunewright abort workstation --reason "wrong model"
    """
    decide(state, name, "abort", reason, as_json)


def rollback(name: NameArgument, state: StateOption, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """Bring production back to the baseline: during the rollout, and also after the promotion.

    It is done by `tunewright tune`: where that has ended, start it again, and it goes back first.

    Example:

        tunewright rollback workstation --reason "clients complain"
    """
    decide(state, name, "rollback", reason, as_json)


def propose(
    name: NameArgument,
    knobs: Annotated[list[str], typer.Argument(metavar="KNOB=VALUE...", help="Laid over what production runs.")],
    state: StateOption,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask for a candidate to be tried, before the search's own. It is part of the budget.

    Knobs are named as in docs/knobs.md. What can't run is refused, or told as the trial's failure.

    Examples:

        tunewright propose workstation max_num_seqs=64

        tunewright propose workstation speculative_method=mtp num_speculative_tokens=2 --reason "as the article has it"
    """
    values: dict[str, str] = {}
    for each in knobs:
        knob, equals, text = each.partition("=")
        if not equals or not knob or knob in values:
            fail(f"{each!r}: write each knob once, as max_num_seqs=64", Exit.USAGE)
        values[knob] = text
    decide(state, name, "propose", reason, as_json, values=values)
