"""A whole tuning on a real vLLM, as a person does it: `tunewright tune`, `approve`, and the answer in production."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import answers
from real_vllm import BINARY, MODEL, needs_vllm, shared_memory, until

from tunewright.clock import SystemClock
from tunewright.domain.state import ConfirmStatus, TrialOutcome, TuningRecord
from tunewright.platform.process import children, sockets
from tunewright.store.sqlite import SqliteStore

pytestmark = [*needs_vllm, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples/cpu.yaml"
NAME = "cpu"
LISTEN = 18555
URL = f"http://127.0.0.1:{LISTEN}"
RATE = 0.8
"""Requests per second of background traffic, all the time: light, and on a core that nothing is measured on."""

PROGRAM = str(Path(sys.executable).with_name("tunewright"))
END = 1500.0
"""Seconds for all of it."""


@pytest.fixture(autouse=True)
def on_core_0() -> Iterator[None]:
    """Agent, proxy, load generator and traffic share production's core: the spare has the other for itself."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    yield
    os.sched_setaffinity(0, allowed)


@contextmanager
def child(argv: list[str], folder: Path, name: str) -> Iterator[children.Child]:
    """A process for the time of the block; ended whole on every path."""
    started = children.spawn(
        argv, dict(os.environ), folder, folder / f"{name}.log", folder / f"{name}.log", folder / f"{name}.json"
    )
    try:
        yield started
    finally:
        children.end(started, grace=60.0)


def example(folder: Path) -> Path:
    """The user's file for the CPU, with the paths of this machine."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    target = document["spec"]["target"]
    paths = {"vllm": str(BINARY), "/srv/models/small": str(MODEL)}
    target["command"] = [paths.get(word, word) for word in target["command"]]
    target |= {"listen": f"127.0.0.1:{LISTEN}", "firstPort": 18560}
    file = folder / "cpu.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return file


def run(*words: str) -> str:
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_tuning_of_a_real_vllm_is_promoted_with_no_failed_request(tmp_path: Path) -> None:
    before = shared_memory()
    state, file = tmp_path / "state", example(tmp_path)
    print(run("check", str(file), "--state", str(state)))
    store = SqliteStore(state / "store.sqlite", SystemClock())
    log = tmp_path / "tune.log"

    def record() -> TuningRecord | None:
        return store.load(NAME)

    def told() -> str:
        return log.read_text(errors="replace")[-5000:]

    tune = [PROGRAM, "tune", str(file), "--state", str(state), "--plain"]
    stats = tmp_path / "traffic.stats"
    traffic = [sys.executable, "-m", "tunewright.demo.traffic", URL, str(stats)]
    try:
        with child(tune, tmp_path, "tune") as agent:
            until(lambda: answers(URL) or not children.alive(agent), 300, told)
            with child([*traffic, "--rate", str(RATE)], tmp_path, "traffic") as users:
                waiting = "AwaitingApproval"
                until(lambda: at(record(), waiting) or not children.alive(agent), END, told)
                assert at(record(), waiting), told()
                print(run("show", NAME, "--state", str(state)))
                print(run("trials", NAME, "--state", str(state)))
                run("approve", NAME, "--state", str(state), "--reason", "the test plays the person")
                until(lambda: not children.alive(agent), END, told)
                assert children.exit_code(agent) == 0, told()
                assert answers(URL)  # production goes on without the agent
                os.kill(users.pid, signal.SIGTERM)  # it waits for what runs
                until(lambda: not children.alive(users), 60, told)
        commands = production_commands(state)
    finally:
        run("stop", str(file), "--state", str(state))
    assert not answers(URL)
    assert children.find_marked(tmp_path) == []
    assert sockets.is_free(LISTEN)
    assert shared_memory() - before == set()

    sent = json.loads(stats.read_text())
    ended = record()
    assert ended is not None
    print(facts(ended, store, sent))
    assert sent["failures"] == {}
    assert sent["answered"] == sent["sent"] > 0
    judge(ended, store)
    assert commands
    assert all("--max-num-seqs\0" + "4\0" not in command for command in commands)


def at(record: TuningRecord | None, phase: str) -> bool:
    return record is not None and record.phase == phase


def production_commands(state: Path) -> list[str]:
    pids = children.find_marked(state / NAME / "production")
    commands = [Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids]
    return [command for command in commands if "\0serve\0" in command]


def judge(ended: TuningRecord, store: SqliteStore) -> None:
    """At least 1.5 times the baseline's capacity at 16 or more streams, confirmed from fresh starts, and promoted."""
    assert ended.phase == "Promoted"
    assert (ended.tuning.spec.load.concurrency or 0) >= 16
    assert ended.baseline is not None
    assert ended.baseline.values["max_num_seqs"] == 4
    winner = next(f for f in ended.finalists if f.candidate == ended.winner)
    assert winner.gain is not None
    assert winner.gain.status is ConfirmStatus.BETTER
    assert winner.gain.estimate.value >= 0.5
    assert winner.gain.rounds >= ended.tuning.spec.confirm.min_rounds
    for trial in store.trials(NAME):
        assert trial.outcome in (TrialOutcome.COMPLETE, TrialOutcome.INFEASIBLE), trial
        assert trial.failure is None, trial
        assert trial.measurement is not None
        assert trial.measurement.source == "CPU"
        assert trial.measurement.error_rate == 0
        asked = trial.candidate.values.get("max_num_seqs", "default")
        assert trial.effective["max_num_seqs"] == asked  # read back from the server itself


def facts(ended: TuningRecord, store: SqliteStore, sent: dict[str, Any]) -> str:
    """What is worth writing down."""
    trials = store.trials(NAME)
    winner = next((f for f in ended.finalists if f.candidate == ended.winner), None)
    minutes = (ended.history[-1].at - ended.history[0].at) / 60
    starts = [f"{t.start_seconds:.0f}" for t in trials if t.start_seconds is not None]
    rows = [
        f"{t.number} {t.purpose} {dict(t.candidate.values)}: {t.objective or 0:.0f} tokens/s, {t.outcome}, start "
        f"{t.start_seconds or 0:.0f} s, TTFT p95 {t.measurement.ttft.p95 if t.measurement else 0:.2f} s"
        for t in trials
    ]
    gain = winner.gain.reason if winner and winner.gain else "none"
    told = f"gain {gain}; {len(trials)} trials, starts {', '.join(starts)} s; {minutes:.1f} minutes; {sent}"
    return "\n".join([*rows, told, *(f"{h.phase}: {h.sentence}" for h in ended.history)])
