"""For the end-to-end tests: `tunewright` as a person runs it, production on the simulator, and clients that count."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from processes import SystemClock, nothing_left

from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.platform.process import children, environ, sockets
from tunewright.store.sqlite import SqliteStore

NAME = "quick"
TUNEWRIGHT = str(Path(sys.executable).with_name("tunewright"))
PATIENCE = 240.0
"""Seconds for any one phase: machines of CI are slow, and nothing here is judged by its time."""

Result = TypeVar("Result")


def quick(proxy_port: int, first_port: int, **spec: Any) -> dict[str, Any]:
    """A tuning that takes a minute; keyword arguments replace whole blocks of the spec."""
    simulator = [sys.executable, "-m", "tunewright.simulate", "serve", "m", "--sim-speed", "200"]
    bad = ["--max-num-seqs", "4", "--host", "127.0.0.1", "--port", "{port}"]
    blocks: dict[str, Any] = {
        "target": {
            "command": [*simulator, *bad],
            "replicas": 2,
            "listen": f"127.0.0.1:{proxy_port}",
            "firstPort": first_port,
            "startTimeout": "60s",
            "drainTimeout": "30s",
        },
        "spare": {"startTimeout": "60s"},
        "metrics": {"window": "5s", "interval": "1s", "minRequests": 15},
        "objective": {"maximize": "outputTokensPerSecond"},
        "slo": {"ttftP95": "30s", "errorRate": "1%"},
        "load": {
            "mode": "closedLoop",
            "concurrency": 16,
            "promptTokens": 64,
            "outputTokens": 32,
            "duration": "2s",
            "maxWarmup": "1s",
        },
        "search": {"include": ["max_num_seqs"]},
        "budget": {"trials": 2, "wallTime": "10m"},
        "confirm": {"finalists": 1, "minRounds": 2, "maxRounds": 4, "minGain": "5%"},
        "promotion": {
            "mode": "approve",
            "canary": {"share": "50%", "warmup": "1s", "trafficTimeout": "60s"},
            "analysis": {
                "interval": "2s",
                "minDuration": "6s",
                "maxDuration": "2m",
                "minRequests": 8,
                "tolerance": "500%",  # two slow cores, shared with everything else: time is not what is tested here
            },
            "watch": "3s",
        },
    }
    return {
        "apiVersion": "tunewright.dev/v1alpha1",
        "kind": "Tuning",
        "metadata": {"name": NAME},
        "spec": blocks | spec,
    }


class Box:
    """A person's own box: a tuning file, a state folder, and the commands they would give."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.file = folder / "quick.yaml"
        self.proxy_port, self.first_port = _free_port(), sockets.free_port(20000 + os.getpid() % 100 * 100)
        self.write(**spec)
        self._agents: list[Agent] = []

    @property
    def url(self) -> str:
        """Where clients send their requests."""
        return f"http://127.0.0.1:{self.proxy_port}"

    def write(self, **spec: Any) -> None:
        """Write the tuning file (again)."""
        self.file.write_text(yaml.safe_dump(quick(self.proxy_port, self.first_port, **spec)))

    def tune(self, *more: str) -> "Agent":
        """`tunewright tune`, in the background."""
        log = self.folder / f"tune.{len(self._agents)}.log"
        self._agents.append(Agent(["tune", str(self.file), "--state", str(self.state), *more], log))
        return self._agents[-1]

    def kill_agents(self) -> None:
        """End those that still run, whatever happened."""
        for agent in self._agents:
            agent.kill()

    def command(self, *words: str, code: int | None = 0, state: Path | None = None) -> str:
        """Any other command to its end; what it printed. `code`: the exit code that is wanted, None for any."""
        done = subprocess.run(
            [TUNEWRIGHT, *words, "--state", str(state or self.state)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert code is None or done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def record(self) -> TuningRecord | None:
        """The tuning's record, read beside the agent."""
        return self._read(lambda store: store.load(NAME))

    def trials(self) -> list[TrialRecord]:
        """Its trials."""
        return self._read(lambda store: store.trials(NAME))

    def _read(self, what: Callable[[SqliteStore], Result]) -> Result:
        if not (self.state / "store.sqlite").exists():
            return what(_Nothing())  # type: ignore[arg-type]
        store = SqliteStore(self.state / "store.sqlite", SystemClock())
        try:
            return what(store)
        finally:
            store.close()

    def phase(self) -> str:
        """The phase, empty before there is a record."""
        record = self.record()
        return str(record.phase) if record else ""

    def processes(self) -> list[int]:
        """Everything that was started for this box and still lives."""
        return children.find_marked(self.folder)

    def marked(self) -> dict[int, str]:
        """What each of them is: the path of its record."""
        found = {pid: environ.variable(pid, children.MARK) for pid in self.processes()}
        return {pid: mark for pid, mark in found.items() if mark}

    def marks(self) -> list[str]:
        """The records of all of them; a server with two processes counts once."""
        return sorted(set(self.marked().values()))

    def listeners(self) -> list[int]:
        """Ports of this box on which somebody listens."""
        ports = [self.proxy_port, *range(self.first_port, self.first_port + 20)]
        return [port for port in ports if sockets.listening_sockets(port)]


class _Nothing:
    def load(self, name: str) -> None:
        return None

    def trials(self, name: str) -> list[TrialRecord]:
        return []


class Agent:
    """A running `tunewright`; its output goes to `log`."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [TUNEWRIGHT, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def until(self, what: Callable[[], Result | None], why: str) -> Result:
        """Wait for something true while the agent runs."""
        deadline = time.monotonic() + PATIENCE
        while not (result := what()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {why}: {self.output()}"
            assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {why}: {self.output()}"
            time.sleep(0.05)
        return result

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {PATIENCE:g} s: {self.output()}") from None

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait(timeout=30)

    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")


class Clients:
    """Requests at a steady rate through the proxy, counted one by one."""

    def __init__(self, box: Box, rate: float) -> None:
        self._stats = box.folder / "clients.json"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunewright.demo.traffic", box.url, str(self._stats), "--rate", str(rate)],
            stdin=subprocess.DEVNULL,
        )

    def end(self) -> dict[str, Any]:
        """Send no more, wait for what runs; what was sent, answered and failed."""
        self._process.terminate()
        self._process.wait(timeout=90)
        found: dict[str, Any] = json.loads(self._stats.read_text())
        return found

    def kill(self) -> None:
        """End it whatever happens."""
        self._process.kill()
        self._process.wait(timeout=30)


@contextmanager
def clients(box: Box, rate: float = 6.0) -> Iterator[Clients]:
    """Clients meanwhile; production must be up."""
    running = Clients(box, rate)
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def new_box(folder: Path, **spec: Any) -> Iterator[Box]:
    """A box, of which nothing is left in the end, also when the test fails."""
    with nothing_left(folder):
        box = Box(folder, **spec)
        try:
            yield box
        finally:
            box.kill_agents()


def answers(url: str) -> bool:
    """Whether production completes a request."""
    import httpx

    try:
        body = {"prompt": "hello", "max_tokens": 2}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=30.0).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
