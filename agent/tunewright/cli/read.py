"""`profile`, `report`, `export`: what was learned and measured, for other eyes and tools."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tunewright.cli.common import JsonOption, NameArgument, StateOption, fail, opened_at, told
from tunewright.clock import SystemClock
from tunewright.domain.profile import Source
from tunewright.exits import Exit


def report(
    name: NameArgument,
    state: StateOption,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; printed when left out.")] = None,
) -> None:
    """Write the report of a tuning as one self-contained HTML page.

    Example:

        tunewright report workstation --output report.html
    """
    from tunewright.telemetry.report import render_report

    with told(), opened_at(state, name) as (store, record):
        page = render_report(record, store.trials(name), decisions=store.decisions(name))
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
    """Print what the traffic of running servers looks like, from their Prometheus.

    Examples:

        tunewright profile http://localhost:9090 --selector 'job="vllm"' --window 1h

        tunewright profile http://localhost:9090 --json
    """
    from tunewright.domain.units import check_url, parse_duration
    from tunewright.observe.learn import PROFILE_METRICS, learn_profile
    from tunewright.observe.prometheus import PrometheusSource

    try:
        check_url(prometheus)
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
    """Write the trials to an Optuna storage, for the dashboards people know.

    Example:

        tunewright export workstation --storage sqlite:///study.db
    """
    from tunewright.propose.export import export_study

    with told(), opened_at(state, name) as (store, record):
        count = export_study(record, store.trials(name), storage=storage, study_name=study or name)
    print(f"{count} trials of {name} are in {storage}, study {study or name}.")
