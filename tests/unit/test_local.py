"""One tuning on one machine: stopped half-way, in trouble, started anew, and stopped for good."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from restapi import WINNER, Clock, trials
from tunings import tuning

from tunewright import local as module
from tunewright.controller.context import Context
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialPhase, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Tuning
from tunewright.local import TROUBLE_LIMIT, TROUBLE_WAIT, LocalTuning, stop_servers
from tunewright.ports import LoadPhase, LoadStatus, PortError, Refused, ServerPhase, ServerStatus
from tunewright.store.lock import agent_lock
from tunewright.store.sqlite import SqliteStore


class Steps:
    """A stop event on a clock that stands still but for the waits; set after so many of them."""

    def __init__(self, clock: Clock, stop_after: int = 1000) -> None:
        self.clock, self.left, self.waits = clock, stop_after, 0

    def is_set(self) -> bool:
        return self.left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.time += timeout or 0.0
        self.left -= 1
        self.waits += 1
        return self.is_set()


def mine(**spec: Any) -> Tuning:
    target = {"command": ["vllm", "serve", "m", "--max-num-seqs", "4", "--port", "{port}"], "listen": "127.0.0.1:1"}
    return tuning(target=target, metrics={"interval": "1h"}, **spec)


def stored(state: Path, phase: Phase, trial_phase: TrialPhase | None = None) -> Tuning:
    """A tuning in that phase, with one trial in that phase of its own."""
    made = mine()
    store = SqliteStore(state / "store.sqlite", Clock())
    store.save(TuningRecord(tuning=made, spec_hash=made.spec.spec_hash, phase=phase, phase_since=0.0))
    if trial_phase is not None:
        store.save_trial("demo", update(trials()[0], phase=trial_phase, candidate=WINNER))
    store.close()
    return made


@contextmanager
def opened(state: Path, made: Tuning, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTuning]:
    """Production is left alone: starting it is tested end to end."""
    monkeypatch.setattr(LocalTuning, "_supervise", lambda self, record: None)
    with LocalTuning(state, made, clock) as local:
        yield local


def test_stopped_half_way_the_running_trial_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(), stored(tmp_path, Phase.SEARCHING, TrialPhase.MEASURING)
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(module, "run", lambda name, context, *_, **__: context.store.load(name))
    with opened(tmp_path, made, clock, monkeypatch) as local:
        record = local.run(stop, lambda record, live: None)
        (trial,) = local.store.trials("demo")
    assert record is not None
    assert record.phase is Phase.SEARCHING
    assert (trial.phase, trial.attempt) == (TrialPhase.PENDING, 2)
    assert trial.machine_faults == 0, "that a person stops it is no fault of the machine"


def test_several_running_trials_are_shown_published_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, made = Clock(), mine(spare={"parallelism": 3})
    store = SqliteStore(tmp_path / "store.sqlite", clock)
    store.save(TuningRecord(tuning=made, spec_hash=made.spec.spec_hash, phase=Phase.SEARCHING, phase_since=0.0))
    phases = (TrialPhase.MEASURING, TrialPhase.STARTING, TrialPhase.MEASURING)
    for number, phase in enumerate(phases):
        own = WINNER.with_value("max_num_seqs", 100 + number)
        one = update(trials()[0], id=f"t{number}", number=number, phase=phase, slot=number, candidate=own)
        store.save_trial("demo", one)
    store.close()

    class Servers:
        def poll(self, trial_id: str) -> ServerStatus:
            return ServerStatus(ServerPhase.READY, url=f"http://{trial_id}:1")

        def cancel(self, trial_id: str) -> None:
            ended.append(trial_id)

        def sweep(self, keep: Sequence[str]) -> list[str]:
            return []

    class Loads:
        def poll(self, run_id: str) -> LoadStatus:
            return LoadStatus(LoadPhase.RUNNING, f"warming {run_id}", progress=0.5)

        def cancel(self, run_id: str) -> None:
            return None

    ended: list[str] = []
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(module, "run", lambda name, context, *_, **__: context.store.load(name))
    with opened(tmp_path, made, clock, monkeypatch) as local:
        local.context = replace(local.context, spare=Servers(), load=Loads())  # type: ignore[arg-type]
        live = local.live(local.record)
        assert {name: str(doing) for name, doing in live.trials.items()} == {
            "t0": "warming t0-1 50%",
            "t1": "Starting",
            "t2": "warming t2-1 50%",
        }
        targets = [group["targets"] for group in json.loads(local.spare_targets.read_text())]
        assert targets == [["t0-1:1"], ["t2-1:1"]]
        local.run(stop, lambda record, live: None)
        left = local.store.trials("demo")
    assert ended == ["t0-1", "t1-1", "t2-1"]
    assert {(t.phase, t.attempt) for t in left} == {(TrialPhase.PENDING, 2)}
    assert [t.slot for t in left] == [0, 1, 2], "each goes on where it was"


def test_trouble_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, made = Clock(), stored(tmp_path, Phase.REJECTED)
    failures = [PortError("disk is full")] * 3

    def run(name: str, context: Context, *_: Any, **__: Any) -> TuningRecord | None:
        if failures:
            raise failures.pop()
        return context.store.load(name)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(LocalTuning, "start_production", lambda self, stop: True)
    stop = Steps(clock)
    with opened(tmp_path, made, clock, monkeypatch) as local:
        record = local.run(stop, lambda record, live: None)
    assert record is not None
    assert stop.waits == 3
    assert capsys.readouterr().err.count(f"Trying again in {TROUBLE_WAIT:.0f} s: disk is full") == 3


def test_trouble_that_does_not_pass_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(), stored(tmp_path, Phase.SEARCHING)

    def run(*_: Any, **__: Any) -> None:
        raise PortError("disk is full")

    monkeypatch.setattr(module, "run", run)
    stop = Steps(clock)
    with opened(tmp_path, made, clock, monkeypatch) as local, pytest.raises(PortError, match="disk is full"):
        local.run(stop, lambda record, live: None)
    assert abs(stop.waits * TROUBLE_WAIT - TROUBLE_LIMIT) <= 2 * TROUBLE_WAIT


def test_a_report_that_can_not_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(), stored(tmp_path, Phase.REJECTED)
    with opened(tmp_path, made, clock, monkeypatch) as local:
        local.report_path.mkdir()  # nothing can be written over a folder
        local._write_report(local.record)
        local.report_path.rmdir()
        local._write_report(local.record)
        assert local.report_path.is_file()


def test_what_has_ended_can_begin_anew_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stored(tmp_path / "ended", Phase.REJECTED)
    with opened(tmp_path / "ended", made, Clock(), monkeypatch) as local:
        local.start_anew()
        found = local.store.load("demo")
        assert found is not None
        assert found.phase is Phase.PENDING
        assert found.history[-1].sentence == "Started anew by hand."
        local.start_anew()  # nothing to do: it is at its beginning
    made = stored(tmp_path / "running", Phase.SEARCHING)
    with (
        opened(tmp_path / "running", made, Clock(), monkeypatch) as local,
        pytest.raises(Refused, match="demo is Searching; only one that has ended"),
    ):
        local.start_anew()


def test_stopping_is_refused_while_an_agent_runs_and_makes_nothing_where_nothing_was(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert not stop_servers(state, mine(), Clock())
    assert not state.exists()
    (state / "demo").mkdir(parents=True)
    with agent_lock(state / "store.sqlite"), pytest.raises(Refused, match="is held by process"):
        stop_servers(state, mine(), Clock())
    assert stop_servers(state, mine(), Clock()), "nothing runs, so that it is stopped already"
