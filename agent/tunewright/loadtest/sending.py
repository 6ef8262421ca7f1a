"""Which requests a job sends, and by which loop."""

from collections.abc import Callable
from dataclasses import dataclass

from tunewright.loadtest.client import Client
from tunewright.loadtest.counters import Observer, ServerFacts
from tunewright.loadtest.job import LoadJob
from tunewright.loadtest.lengths import Paired
from tunewright.loadtest.pacing import ClosedLoop, OpenLoop, Pacing, ShortenedSource, Stock
from tunewright.loadtest.prompts import PromptSource
from tunewright.loadtest.recording import Recorder
from tunewright.loadtest.sessions import SessionLoop, SessionSource, tokens_per_word
from tunewright.loadtest.texts import TextSource
from tunewright.loadtest.trace import TraceLoop, TraceSource, read_trace


def _nothing() -> int:
    return 0


def _no_remarks(_sent: int) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Sender:
    """All that a run must know of its traffic."""

    pacing: Callable[[Client, Recorder], Pacing]
    reachable_reuse: float
    asked_rate: float | None = None
    remarks: Callable[[int], tuple[str, ...]] = _no_remarks
    """What a reader should know of the traffic, once so many requests were sent."""
    cut_short: Callable[[], int] = _nothing


def sender(job: LoadJob, facts: ServerFacts, observer: Observer, content_seed: int) -> Sender:
    """What `job` sends to the server of `facts`. Raises `LoadFailure` for what that server can't take."""
    if job.workload.sessions is not None:
        return _sessions(job, facts, observer, content_seed)
    if job.workload.trace is not None:
        return _trace(job, facts, content_seed)
    if job.workload.prompts_file is not None:
        texts = TextSource(job, facts.model, facts.max_model_len)
        return _loop(job, texts, 0.0, texts.remarks)
    pairs, remarks = _pairs(job, facts.max_model_len)
    source = PromptSource(job, facts.model, content_seed, facts.max_model_len, facts.block_size, pairs)
    return _loop(job, source, source.reachable_reuse, lambda _sent: remarks)


def _loop(
    job: LoadJob, source: ShortenedSource, reachable_reuse: float, remarks: Callable[[int], tuple[str, ...]]
) -> Sender:
    workload, seed = job.workload, job.seed

    def pacing(client: Client, _: Recorder) -> Pacing:
        stock = Stock(source, min(2 * (workload.concurrency or 64), 1024))
        if workload.concurrency is not None:
            return ClosedLoop(client, source, stock, workload.concurrency, seed)
        return OpenLoop(client, stock, workload.rate or 1.0, workload.burstiness, seed, workload.ramp)

    return Sender(pacing, reachable_reuse, asked_rate=workload.rate, remarks=remarks)


def _pairs(job: LoadJob, limit: int | None) -> tuple[Paired | None, tuple[str, ...]]:
    """The lengths that belong together, if they are given so, and where they are from."""
    if (trace := job.workload.pairs_of) is not None:
        recording = read_trace(trace, limit)
        pairs = [(arrival.prompt, max(1, arrival.output), 1.0) for arrival in recording.arrivals]
        return Paired(pairs, limit), tuple(recording.told(trace))
    given = [(pair.prompt_tokens, pair.output_tokens, pair.weight) for pair in job.workload.pairs]
    return (Paired(given, limit) if given else None), ()


def _sessions(job: LoadJob, facts: ServerFacts, observer: Observer, content_seed: int) -> Sender:
    source = SessionSource(job, facts.model, content_seed, facts.max_model_len, tokens_per_word(observer, facts.model))

    def pacing(client: Client, recorder: Recorder) -> Pacing:
        return SessionLoop(client, recorder, source)

    return Sender(pacing, job.workload.prefix_reuse, cut_short=lambda: source.cut_short)


def _trace(job: LoadJob, facts: ServerFacts, content_seed: int) -> Sender:
    trace = job.workload.trace
    if trace is None:
        raise AssertionError("a workload of a trace is wanted")
    recording = read_trace(trace, facts.max_model_len)

    def pacing(client: Client, _: Recorder) -> Pacing:
        # The warm-up's prompts are others than the window's, which would else be found in the cache.
        warmup, window = (TraceSource(job, facts.model, [content_seed, part], recording, part) for part in (0, 1))
        return TraceLoop(client, Stock(warmup, 256), Stock(window, 256), recording, trace.speed)

    asked = recording.arrivals_within(job.duration * trace.speed) / job.duration
    remarks = recording.remarks(trace, job.duration)
    return Sender(pacing, 0.0, asked_rate=asked, remarks=lambda _sent: remarks)
