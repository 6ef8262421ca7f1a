"""One server from launch to proven gone: on real processes, with a stand-in for vLLM."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ShiftedClock, fake_command, first_port, nothing_left, wait_for

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.platform.process import children, http, probe, records, sockets
from tunewright.platform.process.command import Command
from tunewright.platform.process.records import Launch
from tunewright.platform.process.server import STOP_GRACE, Server
from tunewright.ports import PortError, ServerPhase, ServerStatus


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with nothing_left(tmp_path):
        yield tmp_path / "server"


def make(folder: Path, clock: ShiftedClock, *more: str) -> Server:
    return Server(folder, Command(fake_command(*more), {}), clock, None)


def begin(server: Server, port: int | None = None, **values: int) -> None:
    server.start(Candidate(values=values), first_port=port or first_port(), start_timeout=60.0)


def until(server: Server, phase: ServerPhase) -> ServerStatus:
    def reached() -> ServerStatus | None:
        status = server.poll()
        return status if status.phase is phase else None

    return wait_for(reached, f"{phase}; the log: {server.log_tail(20)}")


def child_of(server: Server) -> children.Child:
    child = children.load(server.folder / "child.json")
    assert child is not None
    return child


def test_ready_means_that_it_completed_a_token_and_runs_what_was_asked(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=48)
    status = until(server, ServerPhase.READY)
    assert status.version == "0.32.0"
    assert status.effective["max_num_seqs"] == 48
    assert status.effective["block_size"] == 16  # from the metrics
    assert status.start_seconds is not None
    assert status.url is not None
    assert http.call("GET", f"{status.url}/health", 2.0).status == 200


def test_healthy_but_completing_nothing_is_not_ready_and_is_given_up(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=664)
    wait_for(lambda: "HTTP 500" in server.poll().detail, "the refused completion shows in the detail")
    assert server.poll().phase is ServerPhase.STARTING
    clock.ahead = 61.0
    status = until(server, ServerPhase.FAILED)
    assert status.failure is not None
    assert status.failure.kind is FailureKind.HUNG


def test_a_death_at_start_is_told_with_its_cause(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=661)
    status = until(server, ServerPhase.FAILED)
    assert status.failure is not None
    assert status.failure.kind is FailureKind.OUT_OF_MEMORY
    assert status.failure.exit_code == 1
    assert "OutOfMemoryError" in server.log_tail(5)


def test_a_server_that_never_listens_is_ended_at_its_deadline(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=662)
    child = child_of(server)
    assert server.poll().phase is ServerPhase.STARTING
    clock.ahead = 61.0
    status = server.poll()
    assert status.phase is ServerPhase.FAILED
    assert status.failure is not None
    assert status.failure.kind is FailureKind.HUNG
    wait_for(lambda: not children.alive(child))


def test_another_configuration_than_asked_for_is_a_failure(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=663)
    status = until(server, ServerPhase.FAILED)
    assert status.failure is not None
    assert status.failure.kind is FailureKind.NOT_AS_LAUNCHED
    assert "663" in status.failure.cause


def test_in_production_the_same_is_a_remark(folder: Path, clock: ShiftedClock) -> None:
    server = Server(folder, Command(fake_command(), {}), clock, None, strict=False)
    begin(server, max_num_seqs=663)
    assert "663" in until(server, ServerPhase.READY).surprises[0]


def test_a_kill_of_a_ready_server_is_noticed_by_the_next_poll(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock, "--fake-engine")
    begin(server)
    until(server, ServerPhase.READY)
    child = child_of(server)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: not children.alive(child))
    status = server.poll()
    assert status.phase is ServerPhase.FAILED
    assert status.failure is not None
    assert status.failure.kind is FailureKind.KILLED
    assert children.group_members(child), "the engine is still there"
    server.stop()
    clock.ahead = STOP_GRACE + 1
    until(server, ServerPhase.ABSENT)
    assert children.group_members(child) == []


def test_a_kill_is_told_though_the_port_closed_before_the_process_was_gone(
    folder: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real vLLM with its gigabytes takes a moment to die, in which its port refuses already."""
    server = make(folder, clock)
    begin(server)
    until(server, ServerPhase.READY)
    child = child_of(server)

    def killed_just_now(_url: str) -> probe.Health:
        os.kill(child.pid, signal.SIGKILL)
        return probe.Health.REFUSED

    monkeypatch.setattr(probe, "health", killed_just_now)
    failure = server.poll().failure
    assert failure is not None
    assert failure.kind is FailureKind.KILLED
    assert failure.exit_code == -signal.SIGKILL
    assert "SIGKILL" in failure.cause


def test_the_exit_code_is_waited_for_while_the_threads_of_a_dead_server_end(folder: Path, clock: ShiftedClock) -> None:
    """Its first thread is gone, and so it counts as dead; only the end of its last tells how it ended."""
    code = "import ctypes, os, threading; threading.Timer(1.0, lambda: os._exit(9)).start(); "
    code += "ctypes.CDLL(None).pthread_exit(0)"
    server = Server(folder, Command([sys.executable, "-c", code, "--port", "{port}"], {}), clock, None)
    begin(server)
    failure = until(server, ServerPhase.FAILED).failure
    assert failure is not None
    assert failure.exit_code == 9


def test_a_dead_engine_is_noticed_while_the_process_still_answers(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server)
    url = until(server, ServerPhase.READY).url
    http.call("POST", f"{url}/fake/engine-dies", 2.0, json={})
    assert server.poll().phase is ServerPhase.FAILED


def test_it_ends_whole_though_its_engine_ignores_sigterm(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock, "--fake-engine")
    begin(server)
    until(server, ServerPhase.READY)
    child, launch = child_of(server), server.launch
    assert launch is not None
    server.stop()
    assert server.poll().phase is ServerPhase.STOPPING
    wait_for(lambda: not children.alive(child))
    assert server.poll().phase is ServerPhase.STOPPING, "the engine is left"
    clock.ahead = STOP_GRACE + 1
    until(server, ServerPhase.ABSENT)
    assert children.group_members(child) == []
    assert sockets.listening_sockets(launch.port) == set()
    assert "non-default args" in server.log_tail(50), "the log is kept"


def test_stop_and_start_may_be_repeated(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    server.stop()
    begin(server)
    pid = child_of(server).pid
    begin(server)
    assert child_of(server).pid == pid
    server.stop()
    server.stop()
    with pytest.raises(PortError, match="still being ended"):
        begin(server)
    until(server, ServerPhase.ABSENT)
    begin(server)
    assert child_of(server).pid != pid


def test_a_port_that_is_taken_is_passed_over(folder: Path, clock: ShiftedClock) -> None:
    port = first_port()
    with socket.create_server(("127.0.0.1", port)):
        server = make(folder, clock)
        begin(server, port)
        launch = server.launch
        assert launch is not None
        assert launch.port > port


def test_a_port_of_a_server_that_has_not_bound_it_yet_is_passed_over(tmp_path: Path, clock: ShiftedClock) -> None:
    port = first_port()
    with nothing_left(tmp_path):
        first, second = make(tmp_path / "a", clock), make(tmp_path / "b", clock)
        begin(first, port, max_num_seqs=662)
        begin(second, port)
        assert first.launch is not None
        assert second.launch is not None
        assert second.launch.port != first.launch.port


def test_a_stranger_on_the_port_is_never_measured(folder: Path, clock: ShiftedClock) -> None:
    """The server we launched hangs, and one that was left over answers on its port."""
    with nothing_left(folder.parent):
        left_over = make(folder.parent / "old", clock)
        begin(left_over)
        until(left_over, ServerPhase.READY)
        assert left_over.launch is not None
        server = make(folder, clock)
        begin(server, max_num_seqs=662)
        launch = server.launch
        assert launch is not None
        moved = launch.model_copy(update={"port": left_over.launch.port})
        records.write(folder / "launch.json", moved)
        status = until(server, ServerPhase.FAILED)
        assert status.failure is not None
        assert status.failure.kind is FailureKind.PORT_IN_USE


def test_another_agent_takes_over_at_every_step(folder: Path, clock: ShiftedClock) -> None:
    """Each call is made by an object of its own, as after a kill -9 of the agent."""
    begin(make(folder, clock))
    pid = child_of(make(folder, clock)).pid
    begin(make(folder, clock))
    wait_for(lambda: make(folder, clock).poll().phase is ServerPhase.READY)
    assert make(folder, clock).poll().effective["block_size"] == 16
    assert child_of(make(folder, clock)).pid == pid
    make(folder, clock).stop()
    wait_for(lambda: make(folder, clock).poll().phase is ServerPhase.ABSENT)


def test_killed_between_the_record_and_the_launch_nothing_is_left(folder: Path, clock: ShiftedClock) -> None:
    records.write(
        folder / "launch.json",
        Launch(name="x", candidate=Candidate(), base="", host="127.0.0.1", port=1, at=clock.now(), start_timeout=1.0),
    )
    assert make(folder, clock).look().phase is ServerPhase.ABSENT
    server = make(folder, clock)
    begin(server)
    until(server, ServerPhase.READY)


def test_killed_between_the_launch_and_its_record_it_is_found(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server)
    pid = child_of(server).pid
    (folder / "child.json").unlink()
    begin(make(folder, clock))
    wait_for(lambda: make(folder, clock).poll().phase is ServerPhase.READY)
    assert child_of(server).pid == pid


def test_a_clock_that_jumps_does_not_end_a_server(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=662)

    class Jumped(ShiftedClock):
        def now(self) -> float:
            return time.time() + 86400

    server._clock = Jumped()
    assert server.poll().phase is ServerPhase.STARTING


def test_looking_takes_no_step(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    assert server.look().phase is ServerPhase.ABSENT
    begin(server, max_num_seqs=661)
    wait_for(lambda: server.look().phase is ServerPhase.FAILED)
    assert not (folder / "failure.json").exists()
    server.stop()
    assert server.look().phase is ServerPhase.STOPPING


def test_the_log_of_an_earlier_attempt_explains_nothing(folder: Path, clock: ShiftedClock) -> None:
    server = make(folder, clock)
    begin(server, max_num_seqs=661)
    until(server, ServerPhase.FAILED)
    server.stop()
    until(server, ServerPhase.ABSENT)
    begin(server, max_num_seqs=662)
    assert "OutOfMemoryError" not in server.log_tail(50)


def test_the_log_does_not_fill_the_disk(folder: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make(folder, clock)
    begin(server)
    until(server, ServerPhase.READY)
    monkeypatch.setattr("tunewright.platform.process.server._LOG_KEPT", 10)
    server.poll()
    assert server.log.stat().st_size < 10
    assert "non-default args" in (folder / "server.previous.log").read_text()
