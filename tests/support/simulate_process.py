"""Runs the simulator as a process for the tests: free port, deadline, and an end on every path."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def command(*arguments: str, speed: float = 500) -> list[str]:
    return [sys.executable, "-m", "tunewright.simulate", "serve", *arguments, "--sim-speed", str(speed)]


def fails(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TUNEWRIGHT_"))}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, env={**environment, **(env or {})}
    )


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def get(self, path: str) -> Any:
        status, body = self.request(path)
        assert status == 200, (path, status, body)
        return json.loads(body)

    def complete(self, **body: Any) -> Any:
        status, answer = self.request("/v1/completions", {"temperature": 0, **body})
        assert status == 200, (status, answer)
        return json.loads(answer)

    def metrics(self) -> str:
        return self.request("/metrics")[1].decode()

    def metric(self, start: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.metrics().splitlines() if line.startswith(start))

    def wait_metric(self, start: str, value: float) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.metric(start) != value:
            assert time.monotonic() < end, f"{start} did not become {value}, it is {self.metric(start)}"
            select.select([], [], [], 0.02)

    def wait_end(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")


@contextmanager
def serving(
    tmp_path: Path,
    *arguments: str,
    ready: bool = True,
    env: dict[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Running]:
    port = free_port()
    log = log or tmp_path / f"server-{port}.log"
    argv = command("m", "--host", "127.0.0.1", "--port", str(port), *arguments)
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **(env or {})}
        )
    server = Running(process, port, log)
    try:
        end = time.monotonic() + DEADLINE_S
        while ready:
            assert process.poll() is None, server.output()
            assert time.monotonic() < end, server.output()
            try:
                if server.request("/health")[0] == 200:
                    break
            except OSError:
                select.select([], [], [], 0.02)
        yield server
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    # The group, because the fault "leaves-engine" leaves a child in it; the id stays ours while one of it lives.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=DEADLINE_S)
