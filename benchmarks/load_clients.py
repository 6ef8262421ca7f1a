"""The load generators that are compared, each as a child on a core of its own whose CPU time is watched."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load_seen import Run, Seen, read
from benchmarks.truth_server import Missing, TruthServer, start

from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.job import LoadJob

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE = 0.1


@dataclass(frozen=True)
class Ask:
    """One load: `streams` at all times, or `rate` requests/s. Times in seconds; `request` is what one takes."""

    streams: int
    rate: float | None
    warmup: float
    window: float
    request: float


@dataclass(frozen=True)
class Watched:
    """A run with what it cost. Shares are of one core, over the run's own window."""

    run: Run
    cpu: "Cpu"
    load_before: float


class Cpu:
    """CPU seconds of client, server and the whole machine against time."""

    def __init__(self, client: int, server: int) -> None:
        self._pids = (client, server)
        self._samples: list[tuple[float, float, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join(10)

    def shares(self, window: tuple[float, float]) -> tuple[float, float, float]:
        """Client, server, and everybody else over `window`, as shares of one core."""
        samples = np.array(self._samples)
        begin, end = window
        spent = [
            float(np.interp(end, samples[:, 0], samples[:, i]) - np.interp(begin, samples[:, 0], samples[:, i]))
            for i in (1, 2, 3)
        ]
        client, server, machine = (value / (end - begin) for value in spent)
        return client, server, max(0.0, machine - client - server)

    def _sample(self) -> None:
        while not self._over.is_set():
            try:
                each = [_spent(pid) for pid in self._pids]
            except (FileNotFoundError, ProcessLookupError):
                return
            self._samples.append((time.monotonic(), *each, _machine()))
            self._over.wait(_SAMPLE)


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _machine() -> float:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS  # without idle and waiting for a disk


def run_client(kind: str, server: TruthServer, ask: Ask, folder: Path, core: int | None, vllm: Path | None) -> Watched:
    """Run the client `kind` (ours, httpx or vllm) to its end. Raises `Missing` when it gives no result."""
    out = folder / f"{kind}.npz"
    load = os.getloadavg()[0]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if kind == "vllm":
        if vllm is None:
            raise Missing("vllm bench serve is not here")
        out = folder / "vllm.json"
        argv = _vllm_command(vllm, server.url, ask, out)
    else:
        argv = [sys.executable, "-m", "benchmarks.load_child", kind, _job(server.url, ask).model_dump_json(), str(out)]
    with (folder / "client.log").open("wb") as log:
        process = start(argv, core, env=environment, stdout=log, stderr=subprocess.STDOUT)
        cpu = Cpu(process.pid, server.pid)
        try:
            status = process.wait(timeout=240)
        finally:
            process.kill()
            process.wait(timeout=10)
            cpu.end()
    if status or not out.exists():
        raise Missing(f"{kind} ended with status {status}: {(folder / 'client.log').read_text()[-2000:]}")
    run = _read_vllm(out) if kind == "vllm" else read(out)
    out.unlink()
    return Watched(run, cpu, load)


def _job(url: str, ask: Ask) -> LoadJob:
    lengths = {"prompt_tokens": Lengths(fixed=PROMPT_TOKENS), "output_tokens": Lengths(fixed=OUTPUT_TOKENS)}
    loop: Mapping[str, Any] = {"rate": ask.rate} if ask.rate is not None else {"concurrency": ask.streams}
    return LoadJob(
        url=url,
        workload=Workload(**loop, **lengths),
        duration=ask.window,
        max_warmup=ask.warmup,
        seed=1,
        content_seed=1,
    )


def _vllm_command(vllm: Path, url: str, ask: Ask, out: Path) -> list[str]:
    port = url.rpartition(":")[2]
    total = ask.warmup + ask.window
    count = round(ask.rate * total) if ask.rate is not None else ask.streams * max(2, round(total / ask.request))
    loop = ["--request-rate", str(ask.rate)] if ask.rate is not None else ["--max-concurrency", str(ask.streams)]
    return [
        *(str(vllm / "venv/bin/vllm"), "bench", "serve", "--backend", "vllm", "--endpoint", "/v1/completions"),
        *("--host", "127.0.0.1", "--port", port, "--model", "tiny", "--tokenizer", str(vllm / "model")),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)),
        *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(count), "--ignore-eos", *loop),
        *("--request-id-prefix", "bench-", "--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result"),
        *("--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def _read_vllm(path: Path) -> Run:
    saved = json.loads(path.read_text())
    seen = {}
    for number, (begin, ttft, itls, error) in enumerate(
        zip(saved["start_times"], saved["ttfts"], saved["itls"], saved["errors"], strict=True)
    ):
        if not error and ttft:
            reads = begin + ttft + np.concatenate([[0.0], np.cumsum(itls)])
            seen[str(number)] = Seen(begin, reads, np.ones(len(reads), dtype=np.int64))
    errors = sorted({str(error)[:200] for error in saved["errors"] if error})
    return Run(seen, None, {"void": errors})
