"""The command `tunewright load`: for the service by files, for people by arguments."""

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from tunewright.bounded import read_key
from tunewright.domain.measurement import Measurement
from tunewright.domain.traffic import Sessions, Trace, TraceFormat
from tunewright.domain.tuning import Slo
from tunewright.domain.units import parse_duration, parse_share
from tunewright.domain.workload import MOST_RUNS, Lengths, Workload
from tunewright.loadtest.counters import Observer, ServerFacts
from tunewright.loadtest.files import write_atomic
from tunewright.loadtest.gathering import gather
from tunewright.loadtest.highest import highest_rate
from tunewright.loadtest.job import LoadFailure, LoadJob, LoadResult, Progress
from tunewright.loadtest.judge import interim, measurement, notes
from tunewright.loadtest.measure import Answer, answers
from tunewright.loadtest.quality import quality_answers
from tunewright.loadtest.report import table
from tunewright.loadtest.session import Tell
from tunewright.tuningfile import explain_validation

OK, FAILED, USAGE, VOID = 0, 1, 2, 3


def execute(job: LoadJob, tell: Tell) -> LoadResult:
    """Run one load test in this process. Never raises for what the server does: the result has the reason."""
    content_seed = job.content_seed if job.content_seed is not None else secrets.randbits(53)
    deadline = time.monotonic() + job.hard_limit - 10.0
    try:
        api_key = _read_key(job)
        observer = Observer(job, api_key)
        try:
            facts = observer.facts()
            measured, remarks = _measured(job, facts, observer, content_seed, api_key, tell)
            quality, refused = quality_answers(job, observer, facts.model, facts.max_model_len, deadline)
        finally:
            observer.close()
    except LoadFailure as failure:
        return LoadResult(failure=str(failure), content_seed=content_seed)
    told = (*remarks, *([refused] if refused else []))
    return LoadResult(measurement=measured, answers=quality, content_seed=content_seed, notes=told)


def _measured(
    job: LoadJob, facts: ServerFacts, observer: Observer, content_seed: int, api_key: str | None, tell: Tell
) -> tuple[Measurement, list[str]]:
    if not job.workload.highest:
        plain = job.workload.sessions is None and job.workload.trace is None
        judge = (lambda raw: interim(job, facts, raw)) if job.interim and plain else None
        raw = gather(job, facts, observer, content_seed, api_key, tell, judge)
        measured = measurement(job, facts, raw)
        return measured, notes(job, raw, measured)
    runs = itertools.count()

    def run(level: LoadJob) -> tuple[list[Answer], Measurement]:
        number = next(runs)

        def told(news: Progress) -> None:
            detail = f"{level.workload.rate:.4g} requests/s, {news.detail}"
            tell(Progress(share=min(0.95, (number + news.share) / MOST_RUNS), detail=detail))

        raw = gather(level, facts, observer, content_seed + number, api_key, told)  # or a cache would know the prompts
        return answers(raw.records, level.endpoint, raw.start_ns, from_intended=True), measurement(level, facts, raw)

    return highest_rate(job, run)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 no result, 2 wrong arguments, 3 measured but void (only without --result)."""
    parser = _parser()
    given = parser.parse_args(argv)
    if (given.request is None) == (given.url is None) or (given.request is None) != (given.result is None):
        parser.error("give either URL, or both --request and --result")
    if given.request:
        return _serve(given.request, given.result)
    try:
        return _for_people(parser, given)
    except KeyboardInterrupt:
        print("\ninterrupted: no result", file=sys.stderr)
        return FAILED


def progress_path(result: Path) -> Path:
    """Where the progress of a run is written, beside its result."""
    return result.with_name(f"{result.name}.progress")


def _serve(request: Path, result: Path) -> int:
    try:
        job = LoadJob.model_validate_json(request.read_bytes())
    except (OSError, ValidationError) as error:
        print(f"{request} is no load test: {error}", file=sys.stderr)
        return USAGE
    progress = progress_path(result)

    def tell(news: Progress) -> None:
        part = progress.with_name(f".{progress.name}.part")  # no fsync: it is news, and must not hold up the streams
        part.write_text(news.model_dump_json())
        part.replace(progress)

    outcome = execute(job, tell)
    write_atomic(result, outcome.model_dump_json().encode())
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
        return FAILED
    return OK


def _for_people(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    try:
        job = _job(given)
    except ValidationError as error:
        model = Slo if error.title == Slo.__name__ else LoadJob
        parser.error("; ".join(line.removeprefix("the file: ") for line in explain_validation(error, model=model)))
    except ValueError as error:
        parser.error(str(error))
    shown = sys.stderr.isatty()

    def tell(news: Progress) -> None:
        if shown:
            print(f"\r\x1b[K{news.detail}", end="", file=sys.stderr, flush=True)

    outcome = execute(job, tell)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr)
    if given.json:
        print(outcome.model_dump_json(indent=2))
    elif outcome.failure is None:
        print(table(job, outcome))
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
        return FAILED
    return VOID if outcome.measurement is not None and outcome.measurement.void else OK


def _workload(given: argparse.Namespace) -> Workload:
    if given.sessions is not None:
        sessions = Sessions(
            concurrency=given.sessions,
            turns=given.turns,
            first_prompt=given.prompt_tokens,
            shared_prompt=given.shared_prompt,
            per_turn=given.per_turn,
            output=given.output_tokens,
            pause=parse_duration(given.pause),
        )
        return Workload.of_sessions(sessions)
    trace = Trace(file=given.trace, format=given.trace_format, speed=given.speed) if given.trace else None
    return Workload(
        concurrency=given.concurrency if given.rate is None and trace is None else None,
        rate=given.rate,
        trace=trace,
        highest=given.highest_rate,
        burstiness=given.burstiness,
        prompt_tokens=Lengths(fixed=given.prompt_tokens),
        output_tokens=Lengths(fixed=given.output_tokens),
        prefix_reuse=parse_share(given.prefix_reuse),
    )


def _job(given: argparse.Namespace) -> LoadJob:
    return LoadJob(
        url=given.url.rstrip("/"),
        workload=_workload(given),
        model=given.model,
        duration=parse_duration(given.duration),
        max_warmup=parse_duration(given.max_warmup),
        seed=given.seed,
        api_key_file=given.api_key_file,
        ca_file=given.ca_file,
        slo=Slo.model_validate(dict(_bound(text) for text in given.slo)),
        endpoint="chat" if given.sessions is not None else given.endpoint,
    )


def _bound(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--slo wants NAME=BOUND, as ttftP95=2s, not {text!r}")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunewright load", description="Load-test one OpenAI-compatible server and say how far the numbers hold."
    )
    parser.add_argument("url", nargs="?", help="base URL of the server, as http://127.0.0.1:8000")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=32, help="closed loop: requests running at all times (32)")
    loop.add_argument("--rate", type=float, help="open loop: requests per second")
    loop.add_argument("--sessions", type=int, metavar="N", help="agent sessions: N conversations at all times")
    parser.add_argument(
        "--highest-rate", action="store_true", help="seek the highest rate that keeps the SLO, beginning with --rate"
    )
    parser.add_argument(
        "--slo", action="append", default=[], metavar="NAME=BOUND", help="as ttftP95=2s; may be repeated"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="variance over mean of arrivals, 1 is Poisson")
    loop.add_argument(
        "--trace", metavar="FILE", help="replay a recording: Mooncake's or vLLM's JSON lines, Azure's CSV"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="trace: times as fast as it was recorded (1)")
    parser.add_argument("--trace-format", choices=get_args(TraceFormat), default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of a request, or of a session's first turn")
    parser.add_argument("--output-tokens", type=int, default=128, help="of a request, or of each turn")
    parser.add_argument("--prefix-reuse", default="0%", metavar="SHARE", help="share of prompt tokens shared, as 50%%")
    parser.add_argument("--turns", type=int, default=12, help="sessions: turns of one conversation (12)")
    parser.add_argument("--per-turn", type=int, default=256, help="sessions: tokens that each further turn adds (256)")
    parser.add_argument("--shared-prompt", type=int, default=0, help="sessions: tokens that all begin with (0)")
    parser.add_argument("--pause", default="2s", help="sessions: from an answer to the next turn, on average (2s)")
    parser.add_argument("--duration", default="35s", help="length of the steady window (35s)")
    parser.add_argument("--max-warmup", default="120s", help="the warm-up is ended by then (120s)")
    parser.add_argument("--model", help="served model name; asked of the server when left out")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--seed", type=int, default=1, help="seed of lengths and arrivals (1)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the bearer token")
    parser.add_argument("--ca-file", metavar="FILE", help="authorities to trust for https, PEM")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--request", type=Path, metavar="FILE", help="a load test as JSON, instead of URL")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where its result goes")
    return parser


def _read_key(job: LoadJob) -> str | None:
    if job.api_key_file is None:
        return None
    try:
        return read_key(Path(job.api_key_file))
    except OSError as error:
        raise LoadFailure(f"the API key file {job.api_key_file} can't be read: {error.strerror or error}") from error
