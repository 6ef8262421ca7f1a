"""What the controller costs at rest and how soon it reacts, with 10, 100 and 500 Tunings on a real API server.

`python -m benchmarks.controller --json FILE [--tunings N ...] [--hanging N]` with KUBECONFIG set to a cluster where it
may do everything. It makes a namespace of its own and deletes it. What is real in it and what is not is said in
`benchmarks/controller_world.py`. Some five minutes for each size. Making 500 takes long: `--make NAME` only does that,
in the namespace NAME, and `--use NAME` measures with them and deletes them.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.controller_changes import LOST, Change, Changes
from benchmarks.controller_process import Look, Serving, serving
from benchmarks.controller_world import MIX, approver, install, names, own_namespace, populate

from tunewright.kube.client import Kube

SCRAPES = 15.0
"""Seconds between two scrapes of /metrics, as the shipped PodMonitor has it."""
SETTLE = 10.0
"""Seconds without anything between the first pass over every tuning and the time at rest."""
FIRST_PASSES = 60.0
"""Seconds that the first pass over every tuning is waited for."""


@contextmanager
def prometheus(port: int, *, hangs: bool) -> Iterator[str]:
    """Something that answers range queries with one series since it was started; or accepts them and never answers."""
    began, over = time.time(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if hangs:
                over.wait()
                return
            asked = {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}
            start, end = max(float(asked.get("start", "0")), began), float(asked.get("end", "0"))
            times = [start + 15 * n for n in range(max(0, int((end - start) / 15)) + 1)]
            metric = {"__name__": "vllm:num_requests_running", "pod": "p", "engine": "0"}
            data = {"resultType": "matrix", "result": [{"metric": metric, "values": [[t, "4"] for t in times]}]}
            body = json.dumps({"status": "success", "data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

        def handle_error(self, *_: object) -> None:
            pass  # one that gave up waiting

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def make(kube: Kube, namespace: str, kinds: Sequence[str], given: argparse.Namespace) -> None:
    """All tunings of one size."""
    began = time.monotonic()
    urls = {"": f"http://127.0.0.1:{given.port}", "hanging": f"http://127.0.0.1:{given.port + 1}"}
    populate(kube, namespace, kinds, urls, given.trials)
    print(f"{len(kinds)} tunings made in {time.monotonic() - began:.0f} s", flush=True)


def measure(kube: Kube, tunings: int, given: argparse.Namespace) -> dict[str, Any] | None:
    """One size: set up, start, rest, change."""
    kinds = ["hanging"] * given.hanging + [MIX[n % len(MIX)] for n in range(tunings - given.hanging)]
    if given.make:
        install(kube, given.make)
        make(kube, given.make, kinds, given)
        return None
    with (
        own_namespace(kube, given.use) as namespace,
        prometheus(given.port, hangs=False),
        prometheus(given.port + 1, hangs=True),
    ):
        if not given.use:
            make(kube, namespace, kinds, given)
        made, token = names(kinds), approver(kube, namespace)
        log = Path(tempfile.gettempdir()) / f"{namespace}.log"
        with serving(namespace, log) as process:
            first = _first_passes(process, tunings - given.hanging)
            print(f"all passed once after {first:.1f} s" if first else "not all were passed in time", flush=True)
            time.sleep(SETTLE)
            before, after, slowest_scrape = rest(process, given.rest)
            print(f"at rest: {line(at_rest(before, after, tunings, slowest_scrape))}", flush=True)
            changes = Changes(kube, namespace, process.url, token, made).run(given.samples, given.gap, given.changing)
            ended = process.look()
        if given.keep_log:
            given.keep_log.write_bytes(log.read_bytes())
        log.unlink()
    return {
        "tunings": tunings,
        "hanging": given.hanging,
        "trials_each": given.trials,
        "mix": dict(Counter(kinds)),
        "first_pass_seconds": first,
        "at_rest": at_rest(before, after, tunings, slowest_scrape),
        "reactions": reactions(changes),
        "rss_mib_at_the_end": round(ended.rss_mib, 1),
    }


def _first_passes(process: Serving, tunings: int) -> float | None:
    began = time.monotonic()
    while process.look().passes < tunings:
        if time.monotonic() - began > FIRST_PASSES:
            return None
        time.sleep(2.0)
    return time.monotonic() - began


def rest(process: Serving, seconds: float) -> tuple[Look, Look, float]:
    """Leave it alone for so long, but for the scrapes; the first and the last look, and the slowest scrape."""
    before = process.look()
    looks = [before]
    while looks[-1].at - before.at < seconds:
        time.sleep(max(0.1, SCRAPES - looks[-1].scrape_seconds))
        looks.append(process.look())
    return before, looks[-1], max(each.scrape_seconds for each in looks)


def at_rest(before: Look, after: Look, tunings: int, slowest_scrape: float) -> dict[str, Any]:
    """What the process used between two looks."""
    seconds = after.at - before.at
    sent = after.requests - before.requests
    each = {f"{verb} {what}": n / tunings / seconds * 60 for (verb, what), n in sorted(sent.items())}
    return {
        "seconds": round(seconds, 1),
        "requests_per_tuning_and_minute": round(sum(each.values()), 3),
        "by_verb_and_resource": {key: round(value, 3) for key, value in each.items()},
        "cpu_share": round((after.cpu_seconds - before.cpu_seconds) / seconds, 4),
        "rss_mib": round(after.rss_mib, 1),
        "threads": after.threads,
        "passes_per_tuning_and_minute": round((after.passes - before.passes) / tunings / seconds * 60, 2),
        "slowest_scrape_seconds": round(slowest_scrape, 3),
    }


def line(found: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{found['requests_per_tuning_and_minute']:.2f} requests and "
        f"{found['passes_per_tuning_and_minute']:.2f} passes per tuning and minute, "
        f"{found['cpu_share']:.1%} of a core, {found['rss_mib']:.0f} MiB, "
        f"{found['threads']} threads, slowest scrape {found['slowest_scrape_seconds']:.2f} s"
    )


def reactions(changes: Sequence[Change]) -> dict[str, Any]:
    """Percentiles in seconds, for each kind of change and in all."""
    by_kind: dict[str, list[float]] = {"all": [change.seconds for change in changes]}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change.seconds)
    return {
        kind: {
            "samples": len(seconds),
            "p50": round(statistics.median(seconds), 4),
            "p99": round(percentile(seconds, 0.99), 4),
            "max": round(max(seconds), 4),
            "lost": sum(each >= LOST for each in seconds),
        }
        for kind, seconds in by_kind.items()
        if seconds
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * q - 1e-9) - 1)]


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows for benchmarks/README.md."""
    rows = [
        "| tunings | reaction p50 | p99 | samples | requests per tuning and minute | RSS | CPU | slowest scrape |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        rest_, all_ = one["at_rest"], one["reactions"]["all"]
        name = f"{one['tunings']}" + (f", {one['hanging']} with a hanging Prometheus" if one["hanging"] else "")
        rows.append(
            f"| {name} | {all_['p50']:.2f} s | {all_['p99']:.2f} s | {all_['samples']} "
            f"| {rest_['requests_per_tuning_and_minute']:.1f} | {rest_['rss_mib']:.0f} MiB "
            f"| {rest_['cpu_share']:.1%} | {rest_['slowest_scrape_seconds']:.2f} s |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.controller", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go; those of other sizes that are there stay")
    parser.add_argument("--tunings", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--hanging", type=int, default=0, help="how many of them ask a Prometheus that never answers")
    parser.add_argument("--trials", type=int, default=5, help="measured trials of each tuning")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds at rest")
    parser.add_argument("--samples", type=int, default=200, help="changes at most")
    parser.add_argument("--gap", type=float, default=0.25, help="mean seconds between two changes")
    parser.add_argument("--changing", type=float, default=45.0, help="seconds in which changes are made")
    parser.add_argument("--port", type=int, default=19555, help="of what stands in for Prometheus; and the one above")
    parser.add_argument("--make", default="", help="only make the tunings, in this namespace, and leave them")
    parser.add_argument("--use", default="", help="use the tunings of this namespace, and delete it")
    parser.add_argument("--keep-log", type=Path, help="where the controller's log goes")
    given = parser.parse_args(argv)
    if not os.environ.get("KUBECONFIG"):
        print("KUBECONFIG must name a cluster in which everything is allowed; see benchmarks/README.md")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is deleted, also then
    kube = Kube.connect()
    found: list[dict[str, Any]] = []
    if given.json and given.json.exists():
        found = json.loads(given.json.read_text())["sizes"]
    for tunings in given.tunings:
        if given.hanging > tunings:
            parser.error(f"--hanging {given.hanging} is more than --tunings {tunings}")
        one = measure(kube, tunings, given)
        if one is None:
            continue
        found = [each for each in found if (each["tunings"], each["hanging"]) != (tunings, given.hanging)] + [one]
        found.sort(key=lambda each: (each["hanging"], each["tunings"]))
        if given.json:
            given.json.write_text(json.dumps({"sizes": found}, indent=2) + "\n")
        print(json.dumps(one["reactions"], indent=2), flush=True)
    kube.close()
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
