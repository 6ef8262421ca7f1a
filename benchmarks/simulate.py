"""How fast and how exactly the simulator serves: `python -m benchmarks.simulate --json FILE`.

A server process and a counting client (uvloop, raw sockets) on this machine. For each profile: output tokens/s
as served, as the stepper gives in virtual time and as the steady state says, the server's own lateness (a run
late by over 2 % is void), and its CPU time for each token. Some 40 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from tunewright.simulate.config import resolve
from tunewright.simulate.profile import load
from tunewright.simulate.steady import capacity
from tunewright.simulate.virtual import Workload, run_closed

CASES: list[tuple[str, dict[str, Any], Workload]] = [
    ("demo", {}, Workload(200, 60, 24, shared_prefix_tokens=96)),
    ("demo", {"max-num-seqs": 4, "enable-prefix-caching": False}, Workload(200, 60, 16, shared_prefix_tokens=96)),
    ("dense-8b-h200", {}, Workload(128, 128, 256)),
]


class Client(asyncio.Protocol):
    """One stream of a closed loop: counts chunks, sends the next request when one has ended."""

    def __init__(self, make: Callable[[], bytes], counts: dict[str, int]) -> None:
        self._make, self._counts = make, counts
        self._tail = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.write(self._make())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self._counts["tokens"] += data.count(b"data: {")
        ended = data.count(b"[DONE]")
        cut = max(data.rfind(b"data: {") + 7, data.rfind(b"[DONE]") + 6, len(data) - 8)
        self._tail = data[cut:]
        if ended and self.transport is not None:
            self._counts["requests"] += ended
            self.transport.write(self._make())


def _requests(workload: Workload, seed: int) -> Callable[[], bytes]:
    source = random.Random(seed)
    shared = [source.randrange(2**17) for _ in range(workload.shared_prefix_tokens)]

    def make() -> bytes:
        rest = int(workload.prompt_tokens) - len(shared)
        prompt = shared + [source.randrange(2**17) for _ in range(rest)]
        output = max(1, round(source.lognormvariate(0, 0.47) * workload.output_tokens / 1.1168))
        settings = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True, "temperature": 0}
        body = json.dumps(settings).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    return make


async def _drive(port: int, workload: Workload, warmup: int, measure_s: float) -> tuple[float, int]:
    loop, counts, make = asyncio.get_running_loop(), {"tokens": 0, "requests": 0}, _requests(workload, 1)
    clients = []
    for _ in range(workload.concurrency):
        clients.append((await loop.create_connection(lambda: Client(make, counts), "127.0.0.1", port))[0])
    for _ in range(400):  # until kernels are "compiled" and the streams no longer end together; at most 40 s
        await asyncio.sleep(0.1)
        if counts["requests"] >= warmup:
            break
    before, began = counts["tokens"], loop.time()
    await asyncio.sleep(measure_s)
    rate = (counts["tokens"] - before) / (loop.time() - began)
    for client in clients:
        client.abort()
    return rate, counts["requests"]


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        body: bytes = answer.read()
    return body


def _wait(port: int, process: subprocess.Popen[bytes], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the simulator ended with exit code {process.returncode}")
        try:
            _get(port, "/health")
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the simulator was not ready after {deadline_s:.0f} s")


def _arguments(flags: dict[str, Any]) -> list[str]:
    out: list[str] = []
    for name, value in flags.items():
        out += [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return out


def _case(name: str, flags: dict[str, Any], workload: Workload, measure_s: float) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tunewright.simulate",
        "serve",
        "model",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--profile", name, "--sim-speed", "1000", "--sim-noise-between", "0", "--sim-noise-within", "0"]
    command += ["--disable-uvicorn-access-log", *_arguments(flags)]
    warmup = load(name).start.warmup_requests + 2 * workload.concurrency
    cpu_before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait(port, process)
        ready_s = time.monotonic() - began
        rate, requests = uvloop.run(_drive(port, workload, warmup, measure_s))
        state = json.loads(_get(port, "/sim/state"))
        generated = sum(
            float(line.rsplit(b" ", 1)[1])
            for line in _get(port, "/metrics").splitlines()
            if line.startswith(b"vllm:generation_tokens_total")
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime
    profile = load(name)
    virtual = run_closed(profile, resolve(profile, flags), workload).output_tokens_per_s
    steady = float(capacity(profile, [flags], workload).output_tokens_per_s[0])
    return {
        "profile": name,
        "flags": flags,
        "concurrency": workload.concurrency,
        "served_tokens_per_s": round(rate, 1),
        "virtual_tokens_per_s": round(virtual, 1),
        "steady_tokens_per_s": round(steady, 1),
        "served_over_virtual": round(rate / virtual, 4),
        "requests": requests,
        "late_ratio": round(state["late_ratio"], 5),
        "void": state["void"],
        "cpu_us_per_token": round(cpu_s / max(generated, 1) * 1e6, 1),
        "start_to_health_s": round(ready_s, 2),
    }


def main() -> int:
    """Runs every case, prints one line each and writes the figures; exit code 1 if a run was void."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to measure each case")
    options = parser.parse_args()
    results = []
    for name, flags, workload in CASES:
        results.append(_case(name, flags, workload, options.seconds))
        print(json.dumps(results[-1]))
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n", encoding="utf-8")
    return int(any(result["void"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
