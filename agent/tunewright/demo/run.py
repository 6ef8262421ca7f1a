"""The demo: a whole tuning on simulated servers, with real processes, traffic, metrics and a real rollout."""

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from tunewright.controller.decisions import bound
from tunewright.demo.prometheus import binary, free_port, prometheus
from tunewright.domain.phases import Phase
from tunewright.domain.state import TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.exits import OF_PHASE, Exit, exit_of
from tunewright.local import LocalTuning
from tunewright.platform.process import children
from tunewright.platform.process.target import ProcessTarget
from tunewright.ports import Clock, Refused, Stop
from tunewright.telemetry.console import Console, LiveStatus

NAME = "demo"
RATE = 8.0
"""Requests per second of background traffic: enough to keep two badly configured servers rather busy."""

MARKER = ".tunewright-demo"
"""A file that says that a folder is the demo's own and may be emptied."""


def demo_tuning(python: str, proxy_port: int, first_port: int, prometheus_url: str | None) -> Tuning:
    """The tuning of the demo. Its times are short, since simulated servers have little to warm up."""
    simulator = [python, "-m", "tunewright.simulate", "serve", "demo-model", "--profile", "demo", "--sim-speed", "20"]
    bad = ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--no-async-scheduling"]
    metrics: dict[str, object] = {"window": "12s", "interval": "1s", "minRequests": 60}
    if prometheus_url is not None:
        metrics |= {"prometheus": prometheus_url, "selector": 'job="vllm"'}
    return Tuning.model_validate(
        {
            "apiVersion": "tunewright.dev/v1alpha1",
            "kind": "Tuning",
            "metadata": {"name": NAME},
            "spec": {
                "target": {
                    "command": [*simulator, *bad, "--host", "127.0.0.1", "--port", "{port}"],
                    "replicas": 2,
                    "listen": f"127.0.0.1:{proxy_port}",
                    "firstPort": first_port,
                    "startTimeout": "60s",
                    "drainTimeout": "30s",
                },
                "spare": {"startTimeout": "60s"},
                "metrics": metrics,
                "objective": {"maximize": "outputTokensPerSecond"},
                "slo": {"ttftP95": "2s", "errorRate": "1%"},
                "load": {"mode": "closedLoop", "concurrency": 16, "duration": "4s", "maxWarmup": "2s"},
                "budget": {"trials": 8, "wallTime": "5m"},
                "confirm": {"finalists": 1, "minRounds": 3, "maxRounds": 4, "minGain": "10%"},
                "promotion": {
                    "mode": "approve",
                    "canary": {"share": "50%", "warmup": "3s", "trafficTimeout": "30s"},
                    "analysis": {
                        "interval": "3s",
                        "minDuration": "15s",
                        "maxDuration": "60s",
                        "minRequests": 20,
                        "tolerance": "30%",
                    },
                    "watch": "8s",
                },
            },
        }
    )


def run_demo(folder: Path, clock: Clock, stop: Stop, *, plain: bool) -> Exit:
    """Run it in `folder`; `Exit.DONE` only when the end is Promoted, with a real gain and no failed request."""
    _empty(folder)
    proxy_port, first_port = free_port(), _range_of_ports()
    targets = folder / "state" / NAME / "production" / "prometheus-targets.json"
    with ExitStack() as exits:
        url = None
        if binary() is not None:
            url = exits.enter_context(prometheus(folder / "prometheus", targets, 1.0))
            print(f"Metrics go through a real Prometheus ({binary()}) at {url}.")
        else:
            print("There is no prometheus on the PATH: the servers are scraped directly.")
        tuning = demo_tuning(sys.executable, proxy_port, first_port, url)
        local = exits.enter_context(LocalTuning(folder / "state", tuning, clock))
        if not isinstance(local.target, ProcessTarget):
            raise Refused("the demo runs its own servers")
        exits.callback(local.target.stop_all)
        exits.callback(_sweep, local)
        print("Starting production: two simulated vLLM servers behind a proxy, badly configured.")
        if not local.start_production(stop):
            return Exit.INTERRUPTED
        url_of_proxy, stats = f"http://127.0.0.1:{proxy_port}", str(folder / "traffic.json")
        traffic = children.spawn(
            [sys.executable, "-m", "tunewright.demo.traffic", url_of_proxy, stats, "--rate", str(RATE)],
            {},
            folder,
            folder / "traffic.out",
            folder / "traffic.err",
            folder / "traffic.child",
        )
        exits.callback(children.end, traffic, 60.0)
        console = exits.enter_context(Console(plain=plain or None))

        def on_step(record: TuningRecord, live: LiveStatus) -> None:
            console.update(record, local.store.trials(record.name), live)
            if record.phase is Phase.AWAITING_APPROVAL and not local.store.decisions(record.name):
                # Here the demo plays the person; in earnest it is `tunewright approve`, or a POST.
                yes = bound(record, "approve", at=clock.now(), by="demo", reason="the demo plays the person")
                local.store.decide(record.name, yes)

        record = local.run(stop, on_step)
        console.close()
        children.end(traffic, grace=60.0)
        left = "" if record is None or stop.is_set() else _tell(record, local, folder)
    leftovers = children.find_marked(folder)
    if leftovers:
        print(f"Processes {leftovers} were left behind.")
        return Exit.WENT_WRONG
    if record is None or record.phase is not Phase.PROMOTED:
        if record is None:
            return Exit.WENT_WRONG
        return exit_of(record) if record.phase in OF_PHASE else Exit.INTERRUPTED
    return Exit.WENT_WRONG if left else Exit.DONE


def _tell(record: TuningRecord, local: LocalTuning, folder: Path) -> str:
    """The end in a few lines; what is not as it should be, or an empty text."""
    wrong = []
    traffic = json.loads((folder / "traffic.json").read_text())
    failed = sum(traffic["failures"].values())
    print(f"Background traffic: {traffic['answered']} of {traffic['sent']} requests answered, {failed} failed.")
    if failed:
        wrong.append(f"{failed} requests failed: {traffic['failures']}")
    winner = next((f for f in record.finalists if record.winner and f.candidate.hash == record.winner.hash), None)
    if winner is None or winner.gain is None or winner.gain.estimate.low <= 0:
        wrong.append("there is no gain that is settled")
    print(f"Report: {local.report_path}")
    for line in wrong:
        print(f"Not as it should be: {line}")
    return "; ".join(wrong)


def _sweep(local: LocalTuning) -> None:
    local.context.spare.sweep(keep=[])


def _empty(folder: Path) -> None:
    """Empty the demo's own folder; any other that has something in it is refused, not emptied."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise Refused(f"{folder} is not empty and not an earlier demo's; name another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def _range_of_ports() -> int:
    """A start for the servers' ports, away from those that the kernel gives to clients."""
    return 18100 + (free_port() % 50) * 100
