"""Metrics scraped directly from the servers, for where there is no Prometheus."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tunewright.bounded import read_key
from tunewright.observe.names import ALL_METRICS
from tunewright.ports import Clock, PortError, Series, SeriesWindow

MAX_BYTES = 16 * 2**20
"""A larger answer is no server's metrics."""
MAX_THREADS = 32
STALE_INTERVALS = 3.0
"""A source that has not scraped for this many intervals is broken, and says so."""

_Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ScrapeTarget:
    """One server: its base URL, and labels to put on its series, as Prometheus' service discovery would."""

    url: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        """`host:port`, as Prometheus labels it."""
        parts = urlsplit(self.url)
        default = 443 if parts.scheme == "https" else 80
        host = parts.hostname or ""
        return f"[{host}]:{parts.port or default}" if ":" in host else f"{host}:{parts.port or default}"


class ScrapeSource:
    """Scrapes all targets every `interval` seconds and keeps `history` seconds of samples, in memory.

    A target that fails has no sample of that moment: nothing stale is ever shown. `poll` or `run` fill the history,
    `fetch` reads it; both may be used from any thread. `timeout` is for one target, in seconds.
    """

    def __init__(
        self,
        targets: Callable[[], Sequence[ScrapeTarget]],
        interval: float,
        clock: Clock,
        timeout: float = 5.0,
        *,
        history: float = 3600.0,
        names: Sequence[str] = ALL_METRICS,
        bearer_token_file: Path | None = None,
    ) -> None:
        self._targets = targets
        self._interval = interval
        self._clock = clock
        self._timeout = timeout
        self._history = history
        self._names = frozenset(names)
        self._token_file = bearer_token_file
        self._lock = threading.Lock()
        self._samples: dict[_Key, deque[tuple[float, float]]] = {}
        self._polled: deque[float] = deque()
        self._asked: tuple[str, ...] = ()
        self._errors: dict[str, str] = {}
        # Servers are spoken to directly, as Prometheus does: no proxy from the environment.
        self._client = httpx.Client(timeout=timeout, trust_env=False, follow_redirects=False)
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="scrape")

    def describe(self) -> str:
        """`direct scrape of N servers`."""
        count = len(self._asked)
        return f"direct scrape of {count} server{'' if count == 1 else 's'}"

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop` is set; a poll that takes longer than the interval delays the next, and is not repeated."""
        while not stop.is_set():
            began = self._clock.monotonic()
            self.poll()
            stop.wait(max(0.0, self._interval - (self._clock.monotonic() - began)))

    def poll(self) -> None:
        """Scrape every target once. What fails is remembered for `fetch` to tell; nothing is raised."""
        now = self._clock.now()
        try:
            targets = list(self._targets())
        except PortError as error:
            with self._lock:
                self._errors = {"the list of servers": str(error)}
            return
        results = list(self._pool.map(self._scrape, targets))
        with self._lock:
            self._asked = tuple(target.url for target in targets)
            self._errors = {}
            for target, result in zip(targets, results, strict=True):
                if isinstance(result, str):
                    self._errors[target.url] = result
                    continue
                for key, value in result.items():
                    self._samples.setdefault(key, deque()).append((now, value))
            self._polled.append(now)
            self._forget(now - self._history)

    def fetch(
        self, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
    ) -> SeriesWindow:
        """Samples of the series called one of `names`; raises `PortError` when no server answered in the window."""
        unknown = sorted(set(names) - self._names)
        if unknown:
            raise ValueError(f"these metrics are not kept by the scrape: {', '.join(unknown)}")
        wanted, equal = set(names), dict(matchers or {})
        with self._lock:
            found = [
                (dict(key), [sample for sample in samples if start <= sample[0] <= end])
                for key, samples in self._samples.items()
            ]
            polled, errors, asked = list(self._polled), dict(self._errors), self._asked
        told = [f"{url}: {error}" for url, error in errors.items()]
        self._refuse_blind(start, end, polled, any(samples for _, samples in found), told, asked)
        series = [
            Series(labels, samples)
            for labels, samples in found
            if samples and labels["__name__"] in wanted and all(labels.get(k, "") == v for k, v in equal.items())
        ]
        return SeriesWindow(start, end, series, [f"scrape {url}/metrics" for url in asked], told)

    def close(self) -> None:
        """End its connections and threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _refuse_blind(
        self, start: float, end: float, polled: Sequence[float], any_sample: bool, told: list[str], asked: Sequence[str]
    ) -> None:
        why = "; ".join(told) or "no error was seen"
        if not polled:
            raise PortError(f"nothing was scraped yet ({why}); wait one interval ({self._interval:g}s)")
        silent = min(end, self._clock.now()) - polled[-1]
        if silent > STALE_INTERVALS * self._interval + self._timeout:
            raise PortError(f"the last scrape was {silent:.0f}s before the end of the window ({why}); is it running?")
        if not asked:
            raise PortError("there is no server to scrape; check that production runs, and target.urls if given")
        if not any_sample and any(start <= at <= end for at in polled):
            raise PortError(f"no server gave metrics in the window ({why}); check that /metrics of {asked[0]} answers")

    def _scrape(self, target: ScrapeTarget) -> dict[_Key, float] | str:
        """The samples of one target, or why there are none."""
        deadline = self._clock.monotonic() + self._timeout
        chunks: list[bytes] = []
        size = 0
        try:
            headers = {}
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {read_key(self._token_file)}"
            with self._client.stream("GET", f"{target.url.rstrip('/')}/metrics", headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    return f"it answered {response.status_code} to /metrics"
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > MAX_BYTES:
                        return f"its /metrics is larger than {MAX_BYTES >> 20} MiB"
                    if self._clock.monotonic() > deadline:
                        return f"its /metrics took longer than {self._timeout:g}s"
            return self._parse(b"".join(chunks).decode(), target)
        except httpx.TimeoutException:
            return f"it did not answer within {self._timeout:g}s"
        except httpx.HTTPError as error:
            return f"no connection: {error or type(error).__name__}"
        except (OSError, ValueError) as error:
            return f"its metrics can't be read: {error}"

    def _parse(self, text: str, target: ScrapeTarget) -> dict[_Key, float] | str:
        # Only the lines that are wanted: the parser is slow, and most of /metrics is of no use here.
        lines = [line for line in text.splitlines() if _name_of(line) in self._names]
        if not lines:
            return "its /metrics has none of vLLM's metrics"
        added = {**target.labels, "instance": target.instance}
        found: dict[_Key, float] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                own = {f"exported_{k}" if k in added else k: v for k, v in sample.labels.items()}
                labels = {**own, **added, "__name__": sample.name}
                found[tuple(sorted(labels.items()))] = float(sample.value)
        return found

    def _forget(self, before: float) -> None:
        for key in list(self._samples):
            samples = self._samples[key]
            while samples and samples[0][0] < before:
                samples.popleft()
            if not samples:
                del self._samples[key]
        while self._polled and self._polled[0] < before:
            self._polled.popleft()


def _name_of(line: str) -> str:
    brace = line.find("{")
    return line[:brace] if brace > 0 else line.partition(" ")[0]
