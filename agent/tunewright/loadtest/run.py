"""The command `tunewright load`: for the service by files, for people by arguments."""

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from tunewright.domain.measurement import Measurement
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import MOST_RUNS
from tunewright.loadtest import arguments
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
from tunewright.ports import PortError
from tunewright.tokenfile import read_token
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
    parser = arguments.parser()
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
        job = arguments.job(given)
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


def _read_key(job: LoadJob) -> str | None:
    if job.api_key_file is None:
        return None
    try:
        return read_token(Path(job.api_key_file), "the API key file")
    except PortError as error:
        raise LoadFailure(str(error)) from error
