"""How wrong the load generator is, against a server that logs the true send time of every token.

`python -m benchmarks.load --truth-server PATH --json FILE`; PATH is the truth server's executable. Builds nothing.
Errors are what a client would report minus what the server did, request by request and token by token.
"""

import argparse
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.counters import Observer
from tunewright.loadtest.job import LoadJob
from tunewright.loadtest.judge import measurement
from tunewright.loadtest.measure import answers
from tunewright.loadtest.run import gather
from tunewright.loadtest.session import Raw

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TTFT, ITL = 0.100, 0.020  # seconds, as the truth server is told
OUTPUT_TOKENS = 256


@contextmanager
def truth_server(binary: Path, dump: Path, burst: bool) -> Iterator[str]:
    """Run the truth server on a free port; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "--port", str(port), "--dump", str(dump)]
    command += ["--ttft-us", str(round(TTFT * 1e6)), "--itl-us", str(round(ITL * 1e6)), *(["--burst"] if burst else [])]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                fetch(f"{url}/health")
                break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait(timeout=10)


def fetch(url: str) -> bytes:
    """GET with a time-out."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def read_truth(dump: Path) -> dict[str, tuple[int, Ints]]:
    """Request id to (when the server had read it, when it sent each token), monotonic nanoseconds."""
    data, at = dump.read_bytes(), 0
    found: dict[str, tuple[int, Ints]] = {}
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + length].decode()
        _, received, _, _, count = struct.unpack_from("<QQQII", data, at + 4 + length)
        at += 4 + length + 32
        found[name] = (received, np.frombuffer(data, "<u8", count, at).astype(np.int64))
        at += 8 * count
    return found


def measure(binary: Path, streams: int, seconds: float, burst: bool) -> dict[str, Any]:
    """One run at `streams` streams: errors in milliseconds, CPU, and load delivered against the ideal."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "truth.bin"
        with truth_server(binary, dump, burst) as url:
            job = LoadJob(
                url=url,
                workload=Workload(
                    concurrency=streams,
                    prompt_tokens=Lengths(fixed=512),
                    output_tokens=Lengths(fixed=OUTPUT_TOKENS),
                ),
                duration=seconds,
                max_warmup=30.0,
                seed=1,
                content_seed=1,
            )
            offset = time.time_ns() - time.monotonic_ns()
            observer = Observer(job, None)
            facts = observer.facts()
            raw = gather(job, facts, observer, 1, None, lambda _: None)
            observer.close()
            fetch(f"{url}/dump")
            stats = json.loads(fetch(f"{url}/stats"))
        errors = compare(raw, read_truth(dump), offset)
    measured = measurement(job, facts, raw)
    ideal = streams * OUTPUT_TOKENS / (TTFT + (OUTPUT_TOKENS - 1) * ITL)
    return {
        "streams": streams,
        "burst": burst,
        **errors,
        "cpu_share": measured.generator.cpu_share,
        "cpu_us_per_token": measured.generator.cpu_share / measured.output_tokens_per_second.value * 1e6,
        "tokens_per_second": measured.output_tokens_per_second.value,
        "delivered": measured.output_tokens_per_second.value / ideal,
        "concurrency": measured.generator.achieved,
        "merged_reads": measured.generator.merged_reads,
        "unstamped_reads": raw.unstamped_reads,
        "server_late_mean_us": stats["late_mean_us"],
        "server_late_max_us": stats["late_max_us"],
        "void": list(measured.void),
    }


def compare(raw: Raw, truth: dict[str, tuple[int, Ints]], offset_ns: int) -> dict[str, Any]:
    """Client minus server, over the requests that ended in the window."""
    by_number = {int(name.rpartition("-")[2]): times for name, times in truth.items() if "-" in name}
    ttft: list[float] = []
    e2e: list[float] = []
    true_ttft: list[float] = []
    seen_ttft: list[float] = []
    itl: list[Floats] = []
    receive: list[Floats] = []
    true_itl: list[Floats] = []
    seen_itl: list[Floats] = []
    found = answers(raw.records, "completions", 0, from_intended=False)
    for record, answer in zip(raw.records, found, strict=True):
        if answer.error or not raw.start_ns <= record.finished_ns < raw.end_ns or record.number not in by_number:
            continue
        received, sent = by_number[record.number]
        true = (sent + offset_ns) / 1e9
        asked = (received + offset_ns) / 1e9
        seen = np.repeat(answer.times, answer.events)
        true_ttft.append(true[0] - asked)
        seen_ttft.append(seen[0] - answer.sent)
        ttft.append(seen_ttft[-1] - true_ttft[-1])
        e2e.append((seen[-1] - answer.sent) - (true[-1] - asked))
        true_itl.append(np.diff(true))
        seen_itl.append(answer.gaps)
        if len(seen) == len(true):
            receive.append(seen - true)
            alone = (answer.events[1:] == 1) & (answer.events[:-1] == 1)
            last = np.cumsum(answer.events) - 1  # a merged read is only compared where its neighbours were seen alone
            itl.append((answer.gaps - np.diff(true[last]))[alone])
    return {
        "requests": len(ttft),
        # A token's receive time against its send time: the generator's clock alone. TTFT and E2E hold, beside it, how
        # long the server took to read the request, which a client can't see and a user waits for.
        "receive_error_ms": spread(np.concatenate(receive)),
        "ttft_error_ms": spread(np.array(ttft)),
        "e2e_error_ms": spread(np.array(e2e)),
        "itl_error_ms": spread(np.concatenate(itl)),
        "ttft_p99_error_ms": percentile_error(np.array(seen_ttft), np.array(true_ttft)),
        "itl_p99_error_ms": percentile_error(np.concatenate(seen_itl), np.concatenate(true_itl)),
    }


def spread(values: Floats) -> dict[str, float]:
    """Mean, and the 1st and 99th percentile, in milliseconds."""
    low, high = np.percentile(values, [1, 99])
    return {"mean": float(values.mean()) * 1e3, "p1": float(low) * 1e3, "p99": float(high) * 1e3}


def percentile_error(seen: Floats, true: Floats) -> float:
    """The reported 99th percentile minus the true one, in milliseconds."""
    return float(np.percentile(seen, 99) - np.percentile(true, 99)) * 1e3


def line(case: dict[str, Any]) -> str:
    """One case for people."""
    return (
        f"{case['streams']:>5} streams{' in burst' if case['burst'] else '':<9}  {case['tokens_per_second']:>8.0f} "
        f"tokens/s ({case['delivered']:.1%} of ideal)  receive error p99 {case['receive_error_ms']['p99']:.3f} ms  "
        f"TTFT error mean {case['ttft_error_ms']['mean']:.3f}, of p99 {case['ttft_p99_error_ms']:.3f} ms  "
        f"ITL error of p99 {case['itl_p99_error_ms']:.4f} ms  CPU {case['cpu_share']:.0%} of a core, "
        f"{case['cpu_us_per_token']:.1f} us a token, {case['merged_reads']:.2%} merged"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.add_argument("--truth-server", type=Path, required=True, help="the truth server's executable")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each window")
    given = parser.parse_args(argv)
    cases = []
    for streams in given.streams:
        for burst in (False, True):
            case = measure(given.truth_server, streams, given.seconds, burst)
            cases.append(case)
            print(line(case), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"cases": cases}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
