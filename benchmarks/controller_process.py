"""A real `tunewright serve` as one local process, and what it costs: by /proc, and by its own /metrics."""

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

READY = 120.0
"""Seconds that it may take to lead and to be ready."""

Requests = Counter[tuple[str, str]]
"""Requests to the API server by verb and resource."""


@dataclass(frozen=True)
class Look:
    """What it had used and done at one moment."""

    at: float
    cpu_seconds: float
    rss_mib: float
    threads: int
    requests: Requests
    passes: float
    scrape_seconds: float


class Serving:
    """The process; `url` is its REST API."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, metrics_url: str) -> None:
        self._process, self.url, self._metrics_url = process, url, metrics_url
        self._client = httpx.Client(trust_env=False, timeout=120.0)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ready(self) -> bool:
        """Whether it says so."""
        try:
            return self._client.get(f"{self.url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def look(self) -> Look:
        """Scrape it once, and read /proc."""
        began = time.monotonic()
        text = self._client.get(f"{self._metrics_url}/metrics").text
        took = time.monotonic() - began
        requests: Requests = Counter()
        passes = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "tunewright_api_server_requests_total":
                    requests[sample.labels["verb"], sample.labels["resource"]] += int(sample.value)
                elif sample.name == "tunewright_reconcile_duration_seconds_count":
                    passes = sample.value
        pid = self._process.pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        rss = int(status["VmRSS"].split()[0]) / 1024
        return Look(time.monotonic(), cpu, rss, int(status["Threads"]), requests, passes, took)


@contextmanager
def serving(namespace: str, log: Path) -> Iterator[Serving]:
    """Start it, wait until it is ready, and end it with SIGTERM."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(Path(sys.executable).parent / "tunewright"), "serve", "--namespace", namespace]
    command += ["--image", "tunewright:bench", "--listen", f"127.0.0.1:{port}"]
    command += ["--metrics-listen", f"127.0.0.1:{metrics_port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        one = Serving(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}")
        deadline = time.monotonic() + READY
        while not one.ready():
            if not one.alive or time.monotonic() > deadline:
                raise RuntimeError(f"`{' '.join(command)}` is not ready: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield one
    finally:
        process.terminate()
        try:
            process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
