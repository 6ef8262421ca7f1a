"""Our load test beside `vllm bench serve`, on one real vLLM server on the CPU, in turns.

`python -m benchmarks.agreement --json FILE [--vllm FOLDER] [--pairs N]`. Both send the same lengths: vLLM's tool draws
them (64 to 192 tokens in, 32 to 96 out, so that streams fall out of step), and ours draws from what it drew. Both have
16 streams. The tool reports over its whole run, with the first wave and the draining last one in it. So its own record
of every token is also counted over the time in which all its streams were busy, which is what ours measures; and ours
is held against vLLM's counters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load import VLLM

STREAMS, REQUESTS = 16, 320
PROMPT, OUTPUT, RANGE = 128, 64, 0.5
WINDOW, WARMUP = 40, 40
PORT = 18990
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
    argv = ["taskset", "-c", "0", str(vllm / "venv/bin/vllm"), "serve", str(vllm / "model"), "--port", str(PORT)]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*argv, "--max-num-seqs", "32", "--no-enable-prefix-caching"],
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
        os.killpg(process.pid, 15)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(timeout=10)


def _healthy() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/health", timeout=2):
            return True
    except OSError:
        return False


def theirs(vllm: Path, folder: Path, seed: int) -> tuple[dict[str, Any], Path]:
    """One run of `vllm bench serve`, and its lengths as a file that ours reads."""
    saved = folder / f"bench-{seed}.json"
    _run(
        "taskset", "-c", "1", str(vllm / "venv/bin/vllm"), "bench", "serve", "--backend", "vllm",
        "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(PORT), "--model", str(vllm / "model"),
        "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
        "--random-range-ratio", str(RANGE), "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS),
        "--temperature", "0", "--ignore-eos", "--seed", str(seed), "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", saved.name,
    )  # fmt: skip
    found = json.loads(saved.read_text())
    lengths = folder / f"lengths-{seed}.jsonl"
    pairs = zip(found["input_lens"], found["output_lens"], strict=True)
    lengths.write_text(
        "".join(
            json.dumps({"timestamp": i, "input_length": prompt, "output_length": output, "hash_ids": []}) + "\n"
            for i, (prompt, output) in enumerate(pairs)
        )
    )
    return found, lengths


def ours(lengths: Path, seed: int) -> dict[str, Any]:
    """One run of `tunewright load`. Raises `Failed` when its measurement is void."""
    told = _run(
        "taskset", "-c", "1", str(Path(sys.executable).parent / "tunewright"), "load", URL, "--json",
        "--seed", str(seed), "--concurrency", str(STREAMS), "--lengths-of", str(lengths), "--trace-format", "mooncake",
        "--duration", f"{WINDOW}s", "--max-warmup", f"{WARMUP}s",
    )  # fmt: skip
    measured: dict[str, Any] = json.loads(told)["measurement"]
    if measured["void"]:
        raise Failed(f"our measurement is void: {measured['void']}")
    return measured


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise Failed(f"{argv[3]} ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def busy_rate(found: dict[str, Any]) -> float:
    """Output tokens/s of a run of `vllm bench serve` from its second wave until it has nothing left to send."""
    begins = np.array(found["start_times"])
    reads = [
        begin + ttft + np.concatenate([[0.0], np.cumsum(itls)])
        for begin, ttft, itls in zip(begins, found["ttfts"], found["itls"], strict=True)
    ]
    ends = sorted(float(times[-1]) for times in reads)
    begin, end = ends[STREAMS - 1], float(begins.max())
    tokens = sum(int(np.sum((times > begin) & (times <= end))) for times in reads)
    return tokens / (end - begin)


def compare(found: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """One pair: output tokens/s each way, and latencies in ms."""
    output = measured["outputTokensPerSecond"]["value"]
    return {
        "theirs": found["output_throughput"],
        "theirs_busy": busy_rate(found),
        "ours": output,
        "counters": measured["server"]["generationTokens"] / measured["duration"],
        **{f"theirs_{name}": found[f"mean_{name}_ms"] for name in ("ttft", "itl", "tpot")},
        **{f"ours_{name}": measured[name]["mean"] * 1e3 for name in ("ttft", "itl", "tpot")},
        "steal": measured["generator"].get("steal") or 0.0,
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="benchmarks.agreement", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--vllm", type=Path, default=VLLM, help=f"folder with venv and model ({VLLM})")
    parser.add_argument("--pairs", type=int, default=6, help="runs of each (6)")
    given = parser.parse_args()
    if not (given.vllm / "venv/bin/vllm").exists():
        parser.error(f"{given.vllm / 'venv/bin/vllm'} is missing; tests/install-vllm {given.vllm} installs it")
    pairs = []
    with tempfile.TemporaryDirectory() as name, server(given.vllm, Path(name)):
        folder = Path(name)
        _, lengths = theirs(given.vllm, folder, 0)  # warms the server up; not counted
        for seed in range(1, given.pairs + 1):
            if seed % 2:
                found, lengths = theirs(given.vllm, folder, seed)
                measured = ours(lengths, seed)
            else:
                measured = ours(lengths, seed)
                found, lengths = theirs(given.vllm, folder, seed)
            pairs.append(compare(found, measured))
            print(json.dumps({key: round(value, 3) for key, value in pairs[-1].items()}), flush=True)
    summary = {
        "ours over theirs, while its streams were busy": _ratio(pairs, "ours", "theirs_busy"),
        "ours over theirs, as it reports": _ratio(pairs, "ours", "theirs"),
        "ours over vLLM's counters": _ratio(pairs, "ours", "counters"),
    }
    for told, ratio in summary.items():
        print(f"{told}: {ratio['mean']:.4f} ± {ratio['standard_error']:.4f}")
    if given.json:
        given.json.write_text(json.dumps({"pairs": pairs, "ratios": summary}, indent=2) + "\n")
    return 0


def _ratio(pairs: list[dict[str, float]], above: str, below: str) -> dict[str, float]:
    ratios = [pair[above] / pair[below] for pair in pairs]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {"mean": statistics.fmean(ratios), "standard_error": spread}


if __name__ == "__main__":
    sys.exit(main())
