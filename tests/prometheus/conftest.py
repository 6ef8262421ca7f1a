"""A real Prometheus on a free port, which scrapes a pool of servers from its start.

Discovering targets later would take it five seconds each time; so each test takes the next pair of the pool.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from exposed import Exposed
from metricsites import Site, site

PAIRS = 16
READY_SECONDS = 60.0


@dataclass
class PrometheusServer:
    """A running Prometheus, and the pairs of servers that no test has taken yet."""

    url: str
    started: float
    pairs: list[tuple[Site, Site]] = field(default_factory=list)

    def query(self, promql: str) -> list[dict[str, object]]:
        """An instant query, to see what it knows by now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": promql}, timeout=5.0, trust_env=False)
        answer.raise_for_status()
        found: list[dict[str, object]] = answer.json()["data"]["result"]
        return found


@pytest.fixture(scope="session")
def prometheus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Scrapes every server of the pool once per second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("there is no prometheus on the PATH (see tests/install-prometheus)")
    home = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        fresh = Exposed().text().encode()
        sites = [stack.enter_context(site(lambda path: (200, fresh))) for _ in range(2 * PAIRS)]
        pairs = list(zip(sites[::2], sites[1::2], strict=True))
        url = stack.enter_context(_running(binary, home, pairs))
        yield PrometheusServer(url, time.time(), pairs)


@contextmanager
def _running(binary: str, home: Path, pairs: list[tuple[Site, Site]]) -> Iterator[str]:
    groups = [
        {"targets": [one.address], "labels": {"pod": name}}
        for pair in pairs
        for name, one in zip(("one", "two"), pair, strict=True)
    ]
    # JSON is YAML too.
    scrape = {"job_name": "vllm", "static_configs": groups}
    timing = {"scrape_interval": "1s", "scrape_timeout": "900ms"}
    (home / "prometheus.yml").write_text(json.dumps({"global": timing, "scrape_configs": [scrape]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={home / 'prometheus.yml'}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_ready(process, url, home / "log")
        yield url
    finally:
        process.kill()
        process.wait(30)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    pytest.fail(f"prometheus did not get ready: {log.read_text()[-2000:]}")
