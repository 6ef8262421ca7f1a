"""`show`, `trials`, `profile`, `report`, `export`: commands that only read."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tunewright.cli.common import JsonOption, StateOption, fail, told
from tunewright.cli.decide import NameArgument, found
from tunewright.clock import SystemClock
from tunewright.domain.objective import objective_unit
from tunewright.domain.profile import Source
from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.exits import Exit
from tunewright.store.sqlite import SqliteStore


def show(
    state: StateOption,
    name: Annotated[str | None, typer.Argument(help="Name of the tuning; all when left out.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where tunings are, and why."""
    with told():
        store = SqliteStore(state / "store.sqlite", SystemClock())
        records = [found(store, name)] if name else [r for n in store.names() if (r := store.load(n)) is not None]
    if as_json:
        rows = [r.model_dump(mode="json", by_alias=True) for r in records]
        print(json.dumps(rows[0] if name else rows, indent=2))
        return
    if not records:
        print(f"No tunings in {state}. Start one with: tunewright tune FILE")
    for record in records:
        _show(record)


def _show(record: TuningRecord) -> None:
    held = " (suspended)" if record.suspended_since is not None else ""
    print(f"{record.name}: {record.phase}{held}")
    print(f"  {record.sentence}")
    if record.profile is not None:
        print(f"  traffic: {record.profile.summary()} ({record.profile.source})")
    for finalist in record.finalists:
        gain = finalist.gain.reason if finalist.gain else "not measured yet"
        print(f"  finalist {finalist.candidate.hash}: {gain}")
    if record.winner is not None and record.baseline is not None:
        for knob, (old, new) in record.baseline.differences(record.winner).items():
            print(f"  {knob}: {_value(old)} -> {_value(new)}")
    for decision in record.decisions:
        print(f"  {decision.action} by {decision.by} {decision.reason}".rstrip())


def _value(value: object) -> str:
    return "vLLM's default" if value is None else str(value)


def trials(name: NameArgument, state: StateOption, as_json: JsonOption = False) -> None:
    """List a tuning's trials with what came of them."""
    with told():
        store = SqliteStore(state / "store.sqlite", SystemClock())
        record, rows = found(store, name), store.trials(name)
    if as_json:
        print(json.dumps([t.model_dump(mode="json", by_alias=True) for t in rows], indent=2))
        return
    unit = objective_unit(record.tuning.spec.objective)
    table = Table("trial", "candidate", "why", "outcome", unit, "TTFT p95", "start", "source")
    for t in rows:
        table.add_row(*_cells(t))
    Console().print(table)


def _cells(t: TrialRecord) -> list[str]:
    outcome = str(t.outcome or t.phase)
    if t.failure is not None:
        outcome = f"{outcome}: {t.failure.kind}"
    value = f"{abs(t.objective):,.4g}" if t.objective is not None else ""
    ttft = f"{t.measurement.ttft.p95 * 1e3:.0f} ms" if t.measurement else ""
    start = f"{t.start_seconds:.1f}s" if t.start_seconds is not None else ""
    source = str(t.measurement.source) if t.measurement else ""
    return [
        t.id,
        ", ".join(f"{k}={v}" for k, v in t.candidate.values.items()),
        t.reason,
        outcome,
        value,
        ttft,
        start,
        source,
    ]


def report(
    name: NameArgument,
    state: StateOption,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; printed when left out.")] = None,
) -> None:
    """Write the report of a tuning as one self-contained HTML page."""
    from tunewright.telemetry.report import render_report

    with told():
        store = SqliteStore(state / "store.sqlite", SystemClock())
        record, rows = found(store, name), store.trials(name)
        page = render_report(record, rows, decisions=store.decisions(name))
    if output is None:
        print(page)
        return
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"{output}: {error.strerror}", Exit.USAGE)
    print(f"Written: {output}")


def profile(
    prometheus: Annotated[str, typer.Argument(help="URL of Prometheus, as http://localhost:9090")],
    selector: Annotated[str, typer.Option(help='Label matchers that name your servers, as job="vllm".')] = "",
    window: Annotated[str, typer.Option(help="How far back to look.")] = "30m",
    interval: Annotated[str, typer.Option(help="Scrape interval of Prometheus.")] = "15s",
    min_requests: Annotated[int, typer.Option(help="A window with fewer finished requests is refused.")] = 100,
    source: Annotated[Source, typer.Option(help="What serves: GPU, CPU or simulated.")] = Source.GPU,
    bearer_token_file: Annotated[Path | None, typer.Option(help="File with Prometheus' bearer token.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what the traffic of running servers looks like, from their Prometheus."""
    from tunewright.domain.units import parse_duration
    from tunewright.observe.learn import PROFILE_METRICS, learn_profile
    from tunewright.observe.prometheus import PrometheusSource

    try:
        seconds, step = parse_duration(window), parse_duration(interval)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    with told():
        metrics = PrometheusSource(
            prometheus,
            selector,
            interval=step,
            bearer_token_file=bearer_token_file,
        )
        now = SystemClock().now()
        learned = learn_profile(
            metrics.fetch(PROFILE_METRICS, now - seconds, now),
            via=metrics.describe(),
            source=source,
            min_requests=min_requests,
        )
    if as_json:
        print(learned.model_dump_json(indent=2, by_alias=True))
        return
    rows: dict[str, Any] = {
        "traffic": learned.summary(),
        "window": f"{window}, {learned.finished_requests:.0f} requests, {learned.replicas} replicas",
        "saturated": "yes: demand is a lower bound" if learned.saturated else "no",
        "concurrency p95": f"{learned.concurrency_p95:.3g} per replica",
        "output tokens/s": f"{learned.output_tokens_per_second:.4g} per replica",
        "TTFT p95": "no data" if learned.ttft_p95 is None else f"{learned.ttft_p95 * 1e3:.0f} ms",
        "errors": f"{learned.error_rate:.2%}",
    }
    for key, value in rows.items():
        print(f"{key:16} {value}")
    for note in learned.notes:
        print(f"note             {note}")


def export(
    name: NameArgument,
    state: StateOption,
    storage: Annotated[str, typer.Option(help="Optuna storage URL, as sqlite:///study.db")],
    study: Annotated[str | None, typer.Option(help="Name of the study; the tuning's when left out.")] = None,
) -> None:
    """Write the trials to an Optuna storage, for the dashboards people know."""
    from tunewright.propose.export import export_study

    with told():
        store = SqliteStore(state / "store.sqlite", SystemClock())
        record, rows = found(store, name), store.trials(name)
        count = export_study(record, rows, storage=storage, study_name=study or name)
    print(f"{count} trials of {name} are in {storage}, study {study or name}.")
