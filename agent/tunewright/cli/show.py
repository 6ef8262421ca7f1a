"""`show` and `trials`: where a tuning is, and what it measured."""

import json
import sys
import time
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tunewright.cli.common import JsonOption, NameArgument, StateOption, opened, opened_at, told
from tunewright.domain.objective import objective_unit
from tunewright.domain.oneline import clean_lines
from tunewright.domain.phases import TERMINAL, Phase
from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.exits import exit_of
from tunewright.ports import Refused
from tunewright.store.lock import held

EVERY = 1.0
"""Seconds between two looks of `show --watch`."""

FILE_WIDTH = 240
"""Columns where there is no terminal to ask."""


def show(
    state: StateOption,
    name: Annotated[str | None, typer.Argument(help="Name of the tuning; all when left out.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Tell each change until the tuning has ended; exits as `tune` does.")
    ] = False,
) -> None:
    """Show where tunings are, and why.

    Examples:

        tunewright show

        tunewright show workstation --watch

        tunewright show workstation --json | jq -r .phase
    """
    with told():
        if watch:
            if name is None or as_json:
                raise Refused("--watch takes the name of one tuning, and no --json")
            raise typer.Exit(_watch(state, name))
        with opened(state) as store:
            if name is None:
                names = store.names() if store is not None else []
                records = [r for n in names if store is not None and (r := store.load(n)) is not None]
        if name is not None:
            with opened_at(state, name) as (_, record):
                records = [record]
    if as_json:
        rows = [r.model_dump(mode="json", by_alias=True) for r in records]
        print(json.dumps(rows[0] if name else rows, indent=2))
        return
    if not records:
        print(f"No tunings in {state}. Start one with: tunewright tune FILE")
    driven = held(state / "store.sqlite")
    for record in records:
        print("\n".join(_lines(record, driven)))


def _watch(state: StateOption, name: str) -> int:
    """Until it has ended, or Ctrl-C: a person watches, so there is no other bound."""
    before: list[str] = []
    with opened_at(state, name) as (store, record):
        while True:
            lines = _lines(record, held(state / "store.sqlite"))
            if lines != before:
                print("\n".join(lines), flush=True)
                before = lines
            if record.phase in TERMINAL:
                return int(exit_of(record))
            time.sleep(EVERY)
            found = store.load(name)
            if found is None:
                raise Refused(f"the tuning {name!r} was deleted meanwhile")
            record = found


def _lines(record: TuningRecord, driven: bool) -> list[str]:
    more = " (suspended)" if record.suspended_since is not None else ""
    more = f" ({record.stopped_by} asked for it)" if record.stopped_by else more
    lines = [f"{record.name}: {record.phase}{more}", f"  {record.sentence}"]
    if not driven and record.phase not in TERMINAL:
        lines.append("  nobody works on it: `tunewright tune` with its file goes on")
    if (production := _production(record)) is not None:
        lines.append(f"  production is to run: {production}")
    if record.profile is not None:
        source = "" if record.profile.given else f" ({record.profile.source})"
        lines.append(f"  traffic: {record.profile.summary()}{source}")
    for finalist in record.finalists:
        gain = finalist.gain.reason if finalist.gain else "not measured yet"
        lines.append(f"  finalist {finalist.candidate.hash}: {gain}")
    if record.winner is not None and record.baseline is not None:
        for knob, (old, new) in record.baseline.differences(record.winner).items():
            lines.append(f"  {knob}: {_value(old)} -> {_value(new)}")
    lines += [f"  note: {note}" for note in record.notes]
    for decision in record.decisions:
        lines.append(f"  {decision.action} by {decision.by} {decision.reason}".rstrip())
    return clean_lines(lines)


def _production(record: TuningRecord) -> str | None:
    """What production is configured to run, and how to go back; None where it is others' business or not known."""
    spec, promotion = record.tuning.spec, record.promotion
    if record.baseline is None or spec.offline or spec.target.urls:
        return None
    if promotion is None:
        return f"the baseline {record.baseline.hash}, as before"
    new, old, back = promotion.candidate.hash, promotion.baseline.hash, f"back: tunewright rollback {record.name}"
    if record.phase is Phase.CANARY:
        return f"the baseline {old}, and a canary of the winner {new}; {back}"
    if record.phase in (Phase.ROLLING, Phase.WATCHING):
        return (
            f"the winner {new} on {promotion.updated} of {promotion.replicas}, the baseline {old} on the rest; {back}"
        )
    if record.phase is Phase.PROMOTED:
        return f"the winner {new}; {back}"
    return f"the baseline {old}" if record.phase in (Phase.ROLLING_BACK, Phase.ROLLED_BACK) else None


def _value(value: object) -> str:
    return "vLLM's default" if value is None else str(value)


def trials(name: NameArgument, state: StateOption, as_json: JsonOption = False) -> None:
    """List a tuning's trials with what came of them.

    Examples:

        tunewright trials workstation

        tunewright trials workstation --json | jq '.[] | {id, outcome, objective}'
    """
    with told(), opened_at(state, name) as (store, record):
        rows = store.trials(name)
    if as_json:
        print(json.dumps([t.model_dump(mode="json", by_alias=True) for t in rows], indent=2))
        return
    if not rows:
        print(f"{name} has no trials yet: it is {record.phase}.")
        return
    unit = objective_unit(record.tuning.spec.objective)
    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("trial", "outcome", unit, "TTFT p95", "start", "source"):
        table.add_column(title, no_wrap=True)
    table.add_column("candidate")
    table.add_column("why")
    for t in rows:
        table.add_row(*_cells(t))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def _cells(t: TrialRecord) -> list[str]:
    outcome = str(t.outcome or t.phase)
    if t.failure is not None:
        outcome = f"{outcome}: {t.failure.kind}"
    value = f"{abs(t.objective):,.4g}" if t.objective is not None else ""
    ttft = f"{t.measurement.ttft.p95 * 1e3:.0f} ms" if t.measurement else ""
    start = f"{t.start_seconds:.1f}s" if t.start_seconds is not None else ""
    source = str(t.measurement.source) if t.measurement else ""
    knobs = ", ".join(f"{k}={v}" for k, v in t.candidate.values.items()) or "vLLM's defaults"
    return [t.id, outcome, value, ttft, start, source, knobs, t.reason]
