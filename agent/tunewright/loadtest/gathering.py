"""A load put on a server and gathered, by one process or, past what a core can do, by several that share it."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import uvloop

from tunewright.loadtest import statistics
from tunewright.loadtest.counters import Observer, ServerFacts
from tunewright.loadtest.job import LoadFailure, LoadJob, Overloaded, Progress
from tunewright.loadtest.recording import NANO
from tunewright.loadtest.session import Gate, Judge, Raw, Session, Tell, TooBusy

_MOST = 8  # processes
_LEAD = 0.3  # seconds from the decision to the common start of the window
_OTHER_SEEDS = 7919
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def gather(
    job: LoadJob,
    facts: ServerFacts,
    observer: Observer,
    content_seed: int,
    api_key: str | None,
    tell: Tell,
    judge: Judge | None = None,
) -> Raw:
    """Put the load on the server and gather what came back, unjudged. Raises `LoadFailure`.

    Where one process fills its core, the load is begun again with twice as many, up to the cores that there are.
    Only a single process has estimates of `judge` told before its window is over: none of several sees the whole load.
    """
    processes = 1
    while True:
        may_split = _can_split(job, 2 * processes)
        try:
            if processes == 1:
                session = Session(job, facts, observer, content_seed, api_key, tell, may_split=may_split, judge=judge)
                return _alone(session)
            return _together(job, processes, facts, observer, content_seed, api_key, tell, may_split)
        except TooBusy as busy:
            processes *= 2
            tell(Progress(share=0.0, detail=f"one generator used {busy}: {processes} processes share the load"))


def _alone(session: Session) -> Raw:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(session.run())


def _can_split(job: LoadJob, processes: int) -> bool:
    enough = job.workload.concurrency is None or job.workload.concurrency >= processes
    shared = job.workload.trace is None and job.workload.prompts_file is None  # a file is not sent twice
    return processes <= min(_MOST, len(os.sched_getaffinity(0))) and shared and enough


def share(job: LoadJob, index: int, processes: int) -> LoadJob:
    """The part of the load that one of several processes sends. Together they send what was asked for."""
    workload = job.workload
    changes: dict[str, Any] = {}
    if workload.concurrency is not None:
        part = workload.concurrency // processes + (index < workload.concurrency % processes)
        changes["concurrency"] = part
        if workload.sessions is not None:
            changes["sessions"] = workload.sessions.model_copy(update={"concurrency": part})
    if workload.rate is not None:  # the variance over the mean of several streams together is that of each
        changes["rate"] = workload.rate / processes
        if (ramp := workload.ramp) is not None:
            changes["ramp"] = ramp.model_copy(update={"start_rate": ramp.start_rate / processes})
    own = {"workload": workload.model_copy(update=changes), "seed": job.seed + index * _OTHER_SEEDS}
    return job.model_copy(update=own)


def _together(
    job: LoadJob,
    processes: int,
    facts: ServerFacts,
    observer: Observer,
    content_seed: int,
    api_key: str | None,
    tell: Tell,
    may_split: bool,
) -> Raw:
    before = observer.scrape()
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    children = []
    try:
        for index in range(processes):
            mine, theirs = context.Pipe()
            part = share(job, index, processes).model_dump_json()
            arguments = (part, facts, content_seed + index, api_key, index == 0, may_split, theirs)
            child = context.Process(target=_child, args=arguments, daemon=True)
            child.start()
            theirs.close()
            ends.append(mine)
            children.append(child)
        parts = _conduct(ends, tell, time.monotonic() + job.hard_limit)
    finally:
        for child in children:
            child.kill()
            child.join(10)
        for end in ends:
            end.close()
    return _merged(job, parts, before, observer)


def _conduct(ends: list[Connection], tell: Tell, deadline: float) -> list[Raw]:
    """Start the window once every process is ready for it, and collect what each gathered."""
    ready: set[Connection] = set()
    parts: dict[Connection, Raw] = {}
    while len(parts) < len(ends):
        heard = wait([end for end in ends if end not in parts], max(0.0, deadline - time.monotonic()))
        if not heard:
            raise LoadFailure("the processes of the load test did not end in time")
        for end in heard:
            if not isinstance(end, Connection):
                continue
            try:
                kind, news = end.recv()
            except EOFError:
                raise LoadFailure("a process of the load test ended without a word: was it killed?") from None
            match kind:
                case "raw":
                    parts[end] = news
                case "progress":
                    tell(news)
                case "failed":
                    raise news
                case "ready":
                    ready.add(end)
                    if len(ready) == len(ends):
                        at = time.time_ns() + round(_LEAD * NANO)
                        for other in ends:
                            other.send(at)
    return [parts[end] for end in ends]


def _merged(job: LoadJob, parts: list[Raw], before: Any, observer: Observer) -> Raw:
    first = parts[0]
    merged = Raw(
        records=[record for part in parts for record in part.records],
        start_ns=first.start_ns,
        end_ns=first.end_ns,
        load_started_ns=min(part.load_started_ns for part in parts),
        settled=all(part.settled for part in parts),
        moved=statistics.moved_together([part.moved for part in parts]),
        cpu_seconds=max(part.cpu_seconds for part in parts),
        steal=first.steal,
        unstamped_reads=sum(part.unstamped_reads for part in parts),
        built_late=sum(part.built_late for part in parts),
        clock_jumps=sum(part.clock_jumps for part in parts),
        before=before,
        window=first.window,
        after=observer.scrape() if before is not None else None,
        reachable_reuse=min(part.reachable_reuse for part in parts),
        pauses=[pause for part in parts for pause in part.pauses],
        cut_short=sum(part.cut_short for part in parts),
        asked_rate=job.workload.rate,
    )
    merged.remarks = (
        *first.remarks,
        f"{len(parts)} processes shared the load; the share of a core is the busiest one's",
    )
    return merged


def _child(
    part: str,
    facts: ServerFacts,
    content_seed: int,
    api_key: str | None,
    first: bool,
    may_split: bool,
    end: Connection,
) -> None:
    """One process of several: its part of the load, begun and measured when the others are."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    job = LoadJob.model_validate_json(part)
    observer = Observer(job, api_key)
    tell: Tell = (lambda news: end.send(("progress", news))) if first else (lambda _: None)
    try:
        session = Session(
            *(job, facts, observer, content_seed, api_key, tell),
            gate=_gate(end),
            scraping=first,
            may_split=may_split,
        )
        raw = _alone(session)
        raw.before = raw.after = None
        end.send(("raw", raw))
    except (LoadFailure, TooBusy) as failure:
        kind = next(kind for kind in (TooBusy, Overloaded, LoadFailure) if isinstance(failure, kind))
        end.send(("failed", kind(str(failure))))
    finally:
        observer.close()


def _gate(end: Connection) -> Gate:
    told: list[bool] = []

    def gate() -> int | None:
        if not told:
            end.send(("ready", None))
            told.append(True)
        return int(end.recv()) if end.poll() else None

    return gate
