"""One load test from the first request to the last: warm-up, steady window, drain. Gathers; judges nothing."""

import asyncio
import contextlib
import gc
import resource
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tunewright.domain.measurement import Interim
from tunewright.domain.units import format_duration
from tunewright.loadtest import machine, statistics
from tunewright.loadtest.client import Client
from tunewright.loadtest.counters import Observer, Scrape, ServerFacts, trust
from tunewright.loadtest.job import LoadFailure, LoadJob, Overloaded, Progress
from tunewright.loadtest.pacing import Pacing
from tunewright.loadtest.protocol import Server, error_kind, kernel_stamps
from tunewright.loadtest.recording import NANO, Record, Recorder
from tunewright.loadtest.sending import sender

Tell = Callable[[Progress], None]
Gate = Callable[[], int | None]
"""Asked again and again once the warm-up is over: when the window begins, or None while that is not known yet."""


class TooBusy(Exception):
    """The generator takes so much of its core that several processes must share the load."""


DRAIN = 10.0
"""Seconds that running requests get to end after the window; then they are cut off."""
_SILENCE = 120.0  # seconds without one event, with requests in flight
_REFUSED = 5  # connections refused in a row: the server is gone
_MOST_IN_FLIGHT = 20_000  # of an open loop: memory and file descriptors end somewhere
_CLOCK_JUMP_NS = 5_000_000
_TICK = 0.25
_BUSY = 0.8
"""Share of a core that a generator may use in its warm-up, where there are cores for more processes."""
_GATE_LIMIT = 60.0
LOOKS = (0.35, 0.5, 0.7)
"""Shares of the window after which an estimate is told, where one is wanted."""


@dataclass
class Raw:
    """What a run gathered. Times in nanoseconds since the epoch."""

    records: list[Record]
    start_ns: int = 0
    end_ns: int = 0
    load_started_ns: int = 0
    settled: bool = False
    moved: float | None = None
    """By what share the window's second half was faster than its first; None: no more than chance tells."""
    cpu_seconds: float = 0.0
    steal: float | None = None
    unstamped_reads: int = 0
    built_late: int = 0
    clock_jumps: int = 0
    before: Scrape | None = None
    window: list[Scrape] = field(default_factory=list)
    after: Scrape | None = None
    reachable_reuse: float = 0.0
    pauses: list[tuple[int, int]] = field(default_factory=list)
    cut_short: int = 0
    asked_rate: float | None = None
    """Requests/s that an open loop was to send in the window; None in a closed loop."""
    remarks: tuple[str, ...] = ()


Judge = Callable[[Raw], Interim | None]


class Session:
    """Runs one job against one server. `judge` estimates from what was gathered so far."""

    def __init__(
        self,
        job: LoadJob,
        facts: ServerFacts,
        observer: Observer,
        content_seed: int,
        api_key: str | None,
        tell: Tell,
        *,
        gate: Gate | None = None,
        scraping: bool = True,
        may_split: bool = False,
        judge: Judge | None = None,
    ) -> None:
        """`gate` holds the window back for other processes of the same load; without `scraping` another one reads the
        server's metrics. Where it `may_split`, `run` raises `TooBusy` instead of measuring with a core that is full."""
        self._gate, self._scraping, self._may_split = gate, scraping, may_split
        self._job = job
        self._judge = judge
        self._interim: Interim | None = None
        self._observer = observer
        self._tell = tell
        self._told = 0.0
        self._recorder = Recorder()
        self._raw = Raw(records=self._recorder.records)
        self._offset_ns = 0
        self._last_events = (0, time.monotonic())
        path = "/v1/chat/completions" if job.endpoint == "chat" else "/v1/completions"
        try:
            self._server = Server.of(job.url, path, api_key, trust(job))
        except OSError as error:
            raise LoadFailure(f"can't use {job.url}: {error}; check its host name") from error
        self._sender = sender(job, facts, observer, content_seed)
        self._raw.reachable_reuse = self._sender.reachable_reuse
        self._raw.asked_rate = self._sender.asked_rate

    async def run(self) -> Raw:
        """Run it. Raises `LoadFailure` as soon as it is clear that there will be no result."""
        raw, concurrency = self._raw, self._job.workload.concurrency
        _allow_many_files(2 * (concurrency or 1000) + 200)
        sys.setswitchinterval(0.0005)  # so that the thread that reads /metrics never holds the streams up for long
        holder = kernel_stamps()
        client = Client(self._server, self._recorder, f"tunewright-{secrets.token_hex(4)}")
        pacing: Pacing | None = None
        try:
            await self._open(client, concurrency or 16)
            pacing = self._sender.pacing(client, self._recorder)
            client.ended = pacing.ended
            pacing.prepare()
            if self._scraping:
                raw.before = await asyncio.to_thread(self._observer.scrape)
            with _NoGarbageCollection():
                raw.load_started_ns = time.time_ns()
                self._offset_ns = _clock_offset() or 0
                pacing.start()
                try:
                    await self._warm_up()
                    again = raw.settled and self._gate is None
                    await self._measure(pacing, await self._begin(), again)
                    if again and raw.moved is not None:  # the test was wrong: it was warming up still
                        await self._measure(pacing, time.time_ns(), again=False)
                finally:
                    pacing.stop()
                await self._drain()
            if self._scraping:
                raw.after = await asyncio.to_thread(self._final_scrape)
        finally:
            if pacing is not None:
                pacing.close()
            client.close()
            if holder is not None:
                holder.close()
        raw.unstamped_reads = self._recorder.unstamped_reads
        raw.built_late = pacing.built_late
        raw.pauses = self._recorder.pauses
        raw.cut_short = self._sender.cut_short()
        raw.remarks = self._sender.remarks(len(raw.records))
        return raw

    async def _open(self, client: Client, count: int) -> None:
        try:
            await client.open(count)
        except (OSError, TimeoutError) as error:
            raise LoadFailure(f"can't connect to {self._job.url}: {error_kind(error)}; is the server up?") from error

    async def _warm_up(self) -> None:
        job, recorder = self._job, self._recorder
        width = statistics.warmup_span(job.duration) / (2 * statistics.HALF)
        started = time.monotonic()
        if job.workload.ramp is not None:
            await self._ticks(job.workload.ramp.duration, "the rate is rising")
        limit = job.max_warmup - (time.monotonic() - started)
        rates: list[float] = []
        ttfts: list[list[float]] = []
        busy = 0.0
        while (elapsed := time.monotonic() - started) < job.max_warmup:
            events, since, cpu = recorder.events, time.monotonic(), time.process_time()
            recorder.first_tokens.clear()
            await self._ticks(min(width, job.max_warmup - elapsed), f"warming up for {elapsed:.0f} s")
            rates.append((recorder.events - events) / (time.monotonic() - since))
            ttfts.append([seconds for _, seconds in recorder.first_tokens])
            busy = (time.process_time() - cpu) / (time.monotonic() - since)
            if recorder.ramp_pending == 0 and recorder.lives:
                life = sum(recorder.lives) / len(recorder.lives)
                spans = {"width": width, "life": life, "window": job.duration, "limit": limit}
                if statistics.settled(rates, ttfts, **spans):
                    self._raw.settled = True
                    break
        if self._may_split and busy > _BUSY:
            raise TooBusy(f"{busy:.0%} of a core")

    async def _begin(self) -> int:
        """When the window begins: now, or when all processes are ready."""
        deadline = time.monotonic() + self._job.max_warmup + _GATE_LIMIT
        while self._gate is not None and time.monotonic() < deadline:
            at = self._gate()
            if at is not None:
                await asyncio.sleep(max(0.0, (at - time.time_ns()) / NANO))
                return at
            await self._ticks(0.05, "waiting for the other processes")
        if self._gate is not None:
            raise LoadFailure("the processes of the load test did not come to a common start")
        return time.time_ns()

    async def _measure(self, pacing: Pacing, start_ns: int, again: bool) -> None:
        """One window; where its rate moves and there may be one `again`, the load goes on."""
        raw, duration = self._raw, self._job.duration
        raw.start_ns, raw.window = start_ns, []
        pacing.window()
        raw.end_ns = raw.start_ns + round(duration * NANO)
        cpu, before = time.process_time(), machine.cpu_times()
        scrapes = asyncio.create_task(self._scrape_window(duration))
        looks = asyncio.create_task(self._look_ahead(duration))
        began = time.monotonic()
        times, events = [began], [self._recorder.events]
        try:
            for part in range(1, statistics.PARTS + 1):
                await self._ticks(began + duration * part / statistics.PARTS - time.monotonic(), "measuring")
                times.append(time.monotonic())
                events.append(self._recorder.events)
            late = max(1.0, (time.time_ns() - raw.start_ns) / NANO / duration)  # the last sleep may have ended late
            raw.cpu_seconds = (time.process_time() - cpu) / late
            raw.steal = machine.stolen(before, machine.cpu_times())
            if self._job.workload.concurrency is not None:  # an open loop is as fast as its arrivals
                raw.moved = statistics.moved(statistics.part_rates(times, events))
            if not again or raw.moved is None:
                pacing.stop()
            await scrapes
        finally:
            scrapes.cancel()
            looks.cancel()

    async def _look_ahead(self, duration: float) -> None:
        """Estimates from what has come so far; in a thread, as they take some ten milliseconds."""
        began = time.monotonic()
        if self._judge is None:
            return
        for share in LOOKS:
            await asyncio.sleep(began + share * duration - time.monotonic())
            raw = self._raw
            now = replace(
                raw,
                records=[record.snapshot() for record in raw.records],
                end_ns=time.time_ns(),
                before=None,  # the server's counts are checked at the end
                window=[],
            )
            self._interim = await asyncio.to_thread(self._judge, now)

    async def _scrape_window(self, duration: float) -> None:
        """The first and last give the server's side of the window, those between the highest use of its cache."""
        end = time.monotonic() + duration
        pause = max(1.0, duration / 10)
        while self._scraping:
            scrape = await asyncio.to_thread(self._observer.scrape)
            if scrape is not None:
                self._raw.window.append(scrape)
            left = end - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left if left < 2 * pause else pause)

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN
        while self._recorder.in_flight and time.monotonic() < deadline:
            await self._ticks(0.05, f"waiting for {self._recorder.in_flight} running requests")

    def _final_scrape(self) -> Scrape | None:
        """Once the server has counted what it sent: its gauges are at zero, or two seconds have passed."""
        deadline = time.monotonic() + 2.0
        while True:
            scrape = self._observer.scrape()
            if scrape is None or time.monotonic() > deadline:
                return scrape
            sums = scrape.sums()
            if not sums.get("vllm:num_requests_running", 0.0) + sums.get("vllm:num_requests_waiting", 0.0):
                return scrape
            time.sleep(0.1)

    async def _ticks(self, seconds: float, doing: str) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _TICK))
            self._check()
            self._say(doing)

    def _check(self) -> None:
        recorder, url = self._recorder, self._job.url
        if recorder.refused_in_a_row >= _REFUSED:
            raise LoadFailure(
                f"the server at {url} is gone: connection refused {recorder.refused_in_a_row} times in a row, "
                f"after {recorder.completed} completed requests; read its log"
            )
        limit = max(50 if recorder.completed else 8, 2 * (self._job.workload.concurrency or 0))
        if recorder.failed_in_a_row >= limit:
            raise LoadFailure(
                f"the last {recorder.failed_in_a_row} requests to {url} all failed: {recorder.last_error}; read its log"
            )
        if recorder.in_flight > _MOST_IN_FLIGHT:
            raise Overloaded(
                f"{recorder.in_flight} requests are in flight at {url}: it can't keep up with the rate; lower it"
            )
        events, since = self._last_events
        if recorder.events != events or not recorder.in_flight:
            self._last_events = (recorder.events, time.monotonic())
        elif time.monotonic() - since > max(_SILENCE, self._job.max_warmup):
            raise LoadFailure(
                f"{url} has sent nothing for {format_duration(round(time.monotonic() - since))}, with "
                f"{recorder.in_flight} requests in flight: it hangs; read its log"
            )
        offset = _clock_offset()
        if offset is not None:
            self._raw.clock_jumps += abs(offset - self._offset_ns) > _CLOCK_JUMP_NS
            self._offset_ns = offset

    def _say(self, doing: str) -> None:
        now = time.monotonic()
        if now - self._told < 1.0:
            return
        self._told = now
        raw, job = self._raw, self._job
        elapsed = (time.time_ns() - (raw.start_ns or raw.load_started_ns)) / NANO
        share = 0.5 + 0.45 * elapsed / job.duration if raw.start_ns else 0.5 * elapsed / max(job.max_warmup, 1.0)
        detail = f"{doing}: {self._recorder.completed} requests completed, {self._recorder.in_flight} in flight"
        self._tell(Progress(share=min(max(share, 0.0), 0.95), detail=detail, interim=self._interim))


def _clock_offset() -> int | None:
    """Wall clock minus monotonic clock; None when we were held up while reading them."""
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        if time.monotonic_ns() - before < 1_000_000:
            return wall - before
    return None


class _NoGarbageCollection(contextlib.AbstractContextManager[None]):
    """A collection stops the streams for milliseconds; what a run allocates has no cycles."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()


def _allow_many_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if wanted > ceiling:
        raise LoadFailure(f"{wanted} open files are needed and {ceiling} allowed: raise the limit (ulimit -Hn)")
    if soft < ceiling:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(ceiling, max(soft, 65_536)), hard))
