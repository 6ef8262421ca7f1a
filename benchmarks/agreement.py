"""Our load test and `vllm bench serve` at the same time on one real vLLM server on the CPU.

`python -m benchmarks.agreement --json FILE [--vllm FOLDER] [--rounds N]`. A machine whose speed swings by a third
within minutes can't compare two runs, one after the other, to 2 %. So both run together, with 8 streams each and texts
of 64 to 192 tokens for 32 to 96 tokens, and one window is counted three times: by us, by the tool's own record of every
token, and by vLLM's counters, which must be the sum. The engine gives every stream the same, so the two rates compare
as well. Our own run is void by its rules, as it should be: somebody else's requests are in the counters.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load import VLLM
from benchmarks.truth_server import fetch, start

STREAMS, REQUESTS = 8, 400
PROMPT, OUTPUT, RANGE = 128, 64, 0.5
OUTPUTS = "64:18.5:32:96"
"""A truncated normal with the mean of that even distribution, and nearly its spread."""
TEXTS = 4000
AHEAD, WARMUP, WINDOW = 15, 20, 30  # seconds
PORT = 18990
SERVER_CORE, CLIENT_CORE = 0, 1
URL = f"http://127.0.0.1:{PORT}"


class Failed(Exception):
    """What could not be measured, and why."""


@contextmanager
def server(vllm: Path, folder: Path) -> Iterator[None]:
    """Real vLLM on the first core. Raises `Failed` when it does not start within ten minutes."""
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    argv = [str(vllm / "venv/bin/vllm"), "serve", str(vllm / "model"), "--port", str(PORT)]
    if _healthy():
        raise Failed(f"something answers on {URL} already: end it first, or it would be measured")
    log = folder / "server.log"
    with log.open("wb") as out:
        process = start(
            [*argv, "--max-num-seqs", "32", "--no-enable-prefix-caching"], SERVER_CORE,
            env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while not _healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"vLLM is not up: {log.read_text()[-2000:]}")
            time.sleep(1)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _healthy() -> bool:
    try:
        fetch(f"{URL}/health")
    except OSError:
        return False
    return True


def begin_theirs(vllm: Path, saved: Path, seed: int) -> subprocess.Popen[bytes]:
    """Start one run of `vllm bench serve`."""
    return start(
        [
            str(vllm / "venv/bin/vllm"), "bench", "serve", "--backend", "vllm",
            "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(PORT), "--model", str(vllm / "model"),
            "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
            "--random-range-ratio", str(RANGE), "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS),
            "--temperature", "0", "--ignore-eos", "--seed", str(seed), "--disable-tqdm",
            "--save-result", "--save-detailed", "--result-dir", str(saved.parent), "--result-filename", saved.name,
        ],
        CLIENT_CORE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def texts(vllm: Path, folder: Path) -> Path:
    """Texts as that tool makes them: tokens that follow each other in the vocabulary, from a random one on."""
    made = """
import json, random, sys
from transformers import AutoTokenizer
words, rng = AutoTokenizer.from_pretrained(sys.argv[1]), random.Random(1)
for _ in range(int(sys.argv[2])):
    first, length = rng.randrange(words.vocab_size), rng.randint(int(sys.argv[3]), int(sys.argv[4]))
    text = words.decode([(first + i) % words.vocab_size for i in range(length)])
    print(json.dumps({"prompt": words.decode(words.encode(text, add_special_tokens=False)[:length])}))
"""
    bounds = (round(PROMPT * (1 - RANGE)), round(PROMPT * (1 + RANGE)))
    python = str(vllm / "venv/bin/python")
    file = folder / "texts.jsonl"
    lines = _run(python, "-c", made, str(vllm / "model"), str(TEXTS), *map(str, bounds)).splitlines()
    file.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return file


def ours(file: Path, seed: int) -> dict[str, Any]:
    """One run of `tunewright load`."""
    told = _run(
        str(Path(sys.executable).parent / "tunewright"), "load", URL, "--json",
        "--prompts", str(file), "--seed", str(seed), "--concurrency", str(STREAMS), "--output-normal", OUTPUTS,
        "--duration", f"{WINDOW}s", "--max-warmup", f"{WARMUP}s", allowed=(0, 3),  # 3: void
    )  # fmt: skip
    measured: dict[str, Any] | None = json.loads(told)["measurement"]
    if measured is None:
        raise Failed(f"no measurement: {told[-1000:]}")
    return measured


def _run(*argv: str, allowed: tuple[int, ...] = (0,)) -> str:
    process = start(argv, CLIENT_CORE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    if process.returncode not in allowed:
        told = (errors or out).decode()[-1500:]
        raise Failed(f"{' '.join(argv[:3])[:200]} ended with {process.returncode}: {told}")
    return out.decode()


def one_round(vllm: Path, folder: Path, file: Path, seed: int) -> dict[str, Any]:
    """One window, counted three times: output tokens/s, and latencies in ms. Raises `Failed`."""
    saved = folder / f"bench-{seed}.json"
    other = begin_theirs(vllm, saved, seed)
    try:
        until = time.monotonic() + 120
        while _running() < STREAMS:
            if time.monotonic() > until or other.poll() is not None:
                raise Failed("vllm bench serve sends nothing")
            time.sleep(0.5)
        time.sleep(AHEAD)
        measured = ours(file, seed)
        if other.poll() is not None:
            raise Failed("vllm bench serve ended before our window did: more requests are wanted")
        other.wait(timeout=600)
    finally:
        other.kill()
        other.wait(timeout=10)
    found = json.loads(saved.read_text())
    begin = measured["startedAt"] - time.time() + time.monotonic()
    rate, ttft, itl = within(found, begin, begin + measured["duration"])
    return {
        "ours": measured["outputTokensPerSecond"]["value"],
        "theirs": rate,
        "counters": measured["server"]["generationTokens"] / measured["duration"],
        "void": measured["void"],
        **{f"ours_{name}": measured[name]["mean"] * 1e3 for name in ("ttft", "itl")},
        "theirs_ttft": ttft * 1e3,
        "theirs_itl": itl * 1e3,
    }


def _running() -> float:
    page = fetch(f"{URL}/metrics").decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_running"))


def within(found: dict[str, Any], begin: float, end: float) -> tuple[float, float, float]:
    """Of `vllm bench serve` between two monotonic times, by its record of every token: output tokens/s, and the means
    of TTFT and ITL in seconds over the requests that ended then."""
    tokens, first, between = 0, [], []
    for base, ttft, itls in zip(found["start_times"], found["ttfts"], found["itls"], strict=True):
        times = base + ttft + np.concatenate([[0.0], np.cumsum(itls)])
        tokens += int(np.sum((times > begin) & (times <= end)))
        if begin < times[-1] <= end:
            first.append(ttft)
            between += itls
    return tokens / (end - begin), statistics.fmean(first), statistics.fmean(between)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="benchmarks.agreement", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--vllm", type=Path, default=VLLM, help=f"folder with venv and model ({VLLM})")
    parser.add_argument("--rounds", type=int, default=3, help="windows (3)")
    given = parser.parse_args()
    if not (given.vllm / "venv/bin/vllm").exists():
        parser.error(f"{given.vllm / 'venv/bin/vllm'} is missing; tests/install-vllm {given.vllm} installs it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with it
    rounds = []
    with tempfile.TemporaryDirectory() as name, server(given.vllm, Path(name)):
        file = texts(given.vllm, Path(name))
        for seed in range(1, given.rounds + 1):
            rounds.append(one_round(given.vllm, Path(name), file, seed))
            print(json.dumps(rounds[-1]), flush=True)
    ratios = {
        "both over vLLM's counters": [(each["ours"] + each["theirs"]) / each["counters"] for each in rounds],
        "ours over theirs": [each["ours"] / each["theirs"] for each in rounds],
        "TTFT, ours over theirs": [each["ours_ttft"] / each["theirs_ttft"] for each in rounds],
        "ITL, ours over theirs": [each["ours_itl"] / each["theirs_itl"] for each in rounds],
    }
    for told, values in ratios.items():
        print(f"{told}: {statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
    if given.json:
        given.json.write_text(json.dumps({"rounds": rounds, "ratios": ratios}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
