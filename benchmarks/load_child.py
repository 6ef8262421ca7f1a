"""A load generator in a process of its own: ours, or a plain client with httpx. What it saw goes into a file.

`python -m benchmarks.load_child ours|httpx JOB FILE`; JOB is a `LoadJob` as JSON. Started by `benchmarks.load`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.load_seen import Run, Seen, write

from tunewright.loadtest.counters import Observer
from tunewright.loadtest.gathering import gather
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.judge import measurement
from tunewright.loadtest.measure import answers
from tunewright.loadtest.prompts import Planned, PromptSource


def ours(job: LoadJob) -> Run:
    """The load test's own generator, as `tunewright load` runs it."""
    offset = (time.time_ns() - time.monotonic_ns()) / 1e9
    observer = Observer(job, None)
    try:
        facts = observer.facts()
        raw = gather(job, facts, observer, job.content_seed or 0, None, lambda _: None)
    finally:
        observer.close()
    window = (raw.start_ns / 1e9 - offset, raw.end_ns / 1e9 - offset)
    found = answers(raw.records, job.endpoint, 0, from_intended=job.workload.rate is not None)
    seen = {
        str(record.number): Seen(answer.base - offset, answer.times - offset, answer.events)
        for record, answer in zip(raw.records, found, strict=True)
        if answer.error is None and answer.finished is not None
    }
    try:
        measured = measurement(job, facts, raw)
        notes = {
            "void": list(measured.void),
            "merged_reads": measured.generator.merged_reads,
            "unstamped_reads": raw.unstamped_reads,
            "own_cpu_share": measured.generator.cpu_share,
        }
    except LoadFailure as failure:
        notes = {"void": [str(failure)]}
    return Run(seen, window, notes)


def plain(job: LoadJob) -> Run:
    """A client as one writes it first: one task a stream, httpx, each line parsed as it comes."""
    return asyncio.run(_plain(job))


async def _plain(job: LoadJob) -> Run:
    streams = job.workload.concurrency or 1
    source = PromptSource(job, "tiny", job.content_seed or 0)
    shares = np.random.default_rng([job.seed, 4]).uniform(0.05, 1.0, streams)
    first = [source.next(shorten=float(share)) for share in shares]
    seen: dict[str, Seen] = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=job.url, timeout=60.0, limits=limits, trust_env=False) as client:

        async def stream(planned: Planned) -> None:
            while True:
                seen[str(planned.number)] = await _request(client, planned)
                planned = source.next()

        began = time.monotonic()
        tasks = [asyncio.create_task(stream(planned)) for planned in first]
        try:
            await asyncio.wait(tasks, timeout=job.max_warmup + job.duration, return_when=asyncio.FIRST_EXCEPTION)
            over = time.monotonic()
            errors = [task.exception() for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Run(seen, (began + job.max_warmup, over), {"void": [repr(error) for error in errors]})


async def _request(client: httpx.AsyncClient, planned: Planned) -> Seen:
    times: list[float] = []
    base = time.monotonic()
    headers = {"content-type": "application/json", "x-request-id": f"bench-{planned.number}"}
    async with client.stream("POST", "/v1/completions", content=planned.body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk: dict[str, Any] = json.loads(line[6:])
                if chunk["choices"]:
                    times.append(time.monotonic())
    return Seen(base, np.array(times), np.ones(len(times), dtype=np.int64))


def main(argv: Sequence[str]) -> int:
    """Run one client."""
    kind, job, file = argv
    run = {"ours": ours, "httpx": plain}[kind](LoadJob.model_validate_json(job))
    write(Path(file), run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
