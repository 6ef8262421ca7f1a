"""What every spare must do. An adapter inherits `SpareContract` and gives it `make_spare`."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import ShiftedClock, fake_target, nothing_left, wait_for

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.domain.tuning import Spare as SpareSpec
from tunewright.platform.process import children, environ, gpu, http
from tunewright.platform.process.server import STOP_GRACE
from tunewright.platform.process.spare import ProcessSpare
from tunewright.ports import PortError, ServerPhase, ServerStatus, Spare

GOOD = Candidate(values={"max_num_seqs": 32})
OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 661})
HANGS = Candidate(values={"max_num_seqs": 662})
DIES_UNDER_LOAD = Candidate(values={"max_num_seqs": 665})


class SpareContract:
    """`make_spare()` gives an adapter of two spares on the same state each time, as after a restart of the agent."""

    @pytest.fixture
    def make_spare(self) -> Iterator[Callable[[], Spare]]:
        raise NotImplementedError

    def pass_time(self) -> None:
        """Let the grace of a stop pass."""

    @staticmethod
    def until(spare: Spare, trial: str, phase: ServerPhase) -> ServerStatus:
        def reached() -> ServerStatus | None:
            status = spare.poll(trial)
            return status if status.phase is phase else None

        return wait_for(reached, f"{trial} {phase}; its log: {spare.log_tail(trial)}")

    def test_what_was_never_started_is_absent(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        assert spare.poll("1-x").phase is ServerPhase.ABSENT
        assert spare.log_tail("1-x") == ""
        spare.cancel("1-x")
        assert spare.sweep([]) == []

    def test_a_good_candidate_gets_ready_and_is_read_back(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", GOOD)
        assert spare.poll("1-x").phase in (ServerPhase.STARTING, ServerPhase.READY)
        status = self.until(spare, "1-x", ServerPhase.READY)
        assert status.effective["max_num_seqs"] == 32
        assert status.url is not None
        assert status.version
        assert status.start_seconds is not None
        assert status.start_seconds >= 0
        assert status.failure is None

    def test_start_is_idempotent_also_for_another_agent(self, make_spare: Callable[[], Spare]) -> None:
        make_spare().start("1-x", GOOD)
        first = self.until(make_spare(), "1-x", ServerPhase.READY)
        make_spare().start("1-x", GOOD)
        assert make_spare().poll("1-x").url == first.url

    def test_one_at_a_time_until_the_other_is_proven_gone(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", GOOD)
        with pytest.raises(PortError, match="1-x"):
            spare.start("2-y", GOOD)
        self.until(spare, "1-x", ServerPhase.READY)
        spare.cancel("1-x")
        self.pass_time()
        self.until(spare, "1-x", ServerPhase.ABSENT)
        spare.start("2-y", GOOD)
        assert spare.log_tail("1-x"), "the log of the first is kept"

    def test_each_spare_takes_one(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", GOOD, 0)
        spare.start("2-y", GOOD, 1)
        urls = {self.until(make_spare(), trial, ServerPhase.READY).url for trial in ("1-x", "2-y")}
        assert len(urls) == 2
        for slot, trial in enumerate(("1-x", "2-y")):
            with pytest.raises(PortError, match=trial):
                make_spare().start("3-z", GOOD, slot)
        with pytest.raises(PortError, match="there is no spare 2"):
            spare.start("3-z", GOOD, 2)
        spare.cancel("2-y")
        self.pass_time()
        self.until(spare, "2-y", ServerPhase.ABSENT)
        spare.start("3-z", GOOD, 1)
        assert self.until(spare, "1-x", ServerPhase.READY).url in urls, "it went on beside"

    def test_a_sweep_reaches_every_spare_and_leaves_what_is_kept(self, make_spare: Callable[[], Spare]) -> None:
        make_spare().start("1-x", HANGS, 0)
        make_spare().start("2-y", HANGS, 1)
        assert make_spare().sweep(["1-x", "2-y"]) == []
        assert make_spare().sweep(["2-y"]) == ["1-x"]
        self.pass_time()
        spare = make_spare()
        wait_for(lambda: spare.sweep(["2-y"]) == [])
        assert spare.poll("2-y").phase is ServerPhase.STARTING
        spare.start("3-z", GOOD, 0)
        assert make_spare().sweep([]) == ["2-y", "3-z"]

    def test_a_failed_start_is_explained_and_leaves_nothing(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", OUT_OF_MEMORY)
        failure = self.until(spare, "1-x", ServerPhase.FAILED).failure
        assert failure is not None
        assert failure.kind is FailureKind.OUT_OF_MEMORY
        assert make_spare().poll("1-x").failure == failure
        spare.cancel("1-x")
        self.pass_time()
        self.until(spare, "1-x", ServerPhase.ABSENT)
        spare.start("2-y", GOOD)

    def test_a_death_under_load_is_noticed(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", DIES_UNDER_LOAD)
        url = self.until(spare, "1-x", ServerPhase.READY).url
        with pytest.raises(http.Unreachable):
            http.call("POST", f"{url}/v1/completions", 5.0, json={"max_tokens": 9})
        assert self.until(spare, "1-x", ServerPhase.FAILED).failure is not None

    def test_a_candidate_still_starting_can_be_cancelled(self, make_spare: Callable[[], Spare]) -> None:
        spare = make_spare()
        spare.start("1-x", HANGS)
        assert spare.poll("1-x").phase is ServerPhase.STARTING
        spare.cancel("1-x")
        spare.cancel("1-x")
        self.pass_time()
        self.until(make_spare(), "1-x", ServerPhase.ABSENT)

    def test_a_sweep_ends_the_others_and_leaves_what_is_kept(self, make_spare: Callable[[], Spare]) -> None:
        make_spare().start("1-x", HANGS)
        assert make_spare().sweep(["1-x"]) == []
        assert make_spare().poll("1-x").phase is ServerPhase.STARTING
        assert make_spare().sweep(["2-y"]) == ["1-x"]
        self.pass_time()
        spare = make_spare()
        wait_for(lambda: spare.sweep(["2-y"]) == [])
        assert spare.poll("1-x").phase is ServerPhase.ABSENT
        spare.start("2-y", GOOD)


class TestProcessSpare(SpareContract):
    """Processes on this machine."""

    clock: ShiftedClock

    @pytest.fixture
    def make_spare(self, tmp_path: Path) -> Iterator[Callable[[], Spare]]:
        self.clock = ShiftedClock()
        environment = {"MY_GPU": "{replica}"}
        target = fake_target("--fake-engine", environment=environment, replicas=3)
        spares = SpareSpec(parallelism=2)
        with nothing_left(tmp_path):
            yield lambda: ProcessSpare(tmp_path / "spare", target, spares, self.clock)

    def pass_time(self) -> None:
        self.clock.ahead += STOP_GRACE + 1

    def test_the_replica_numbers_of_spares_follow_production_s(
        self, make_spare: Callable[[], Spare], tmp_path: Path
    ) -> None:
        for slot, trial in enumerate(("1-x", "2-y")):
            make_spare().start(trial, HANGS, slot)
            child = children.load(tmp_path / "spare" / trial / "child.json")
            assert child is not None
            assert environ.variable(child.pid, "MY_GPU") == str(3 + slot)

    def test_what_an_engine_left_behind_keeps_the_next_one_out(
        self, make_spare: Callable[[], Spare], tmp_path: Path
    ) -> None:
        spare = make_spare()
        spare.start("1-x", GOOD)
        self.until(spare, "1-x", ServerPhase.READY)
        child = children.load(tmp_path / "spare" / "1-x" / "child.json")
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        self.until(spare, "1-x", ServerPhase.FAILED)
        spare.cancel("1-x")
        with pytest.raises(PortError, match="1-x"):
            spare.start("2-y", GOOD)
        self.pass_time()
        self.until(spare, "1-x", ServerPhase.ABSENT)
        assert children.group_members(child) == []
        spare.start("2-y", GOOD)

    def test_a_server_whose_folder_was_removed_is_found_and_ended(
        self, make_spare: Callable[[], Spare], tmp_path: Path
    ) -> None:
        spare = make_spare()
        spare.start("1-x", HANGS)
        folder = tmp_path / "spare" / "1-x"
        child = children.load(folder / "child.json")
        assert child is not None
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        with pytest.raises(PortError, match="sweep"):
            make_spare().start("2-y", GOOD)
        assert make_spare().sweep([]) == ["1-x"]
        wait_for(lambda: make_spare().sweep([]) == [])
        assert children.group_members(child) == []
        make_spare().start("2-y", GOOD)
        children.end(child, grace=0.0)

    def test_memory_that_is_still_held_keeps_the_next_one_out(
        self, make_spare: Callable[[], Spare], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = [gpu.GpuMemory("0", 10.0, 80000.0)]
        monkeypatch.setattr(gpu, "memory", lambda environment: held)
        spare = make_spare()
        spare.start("1-x", HANGS)
        spare.cancel("1-x")
        self.pass_time()
        self.until(spare, "1-x", ServerPhase.ABSENT)
        held[0] = gpu.GpuMemory("0", 60000.0, 80000.0)
        with pytest.raises(PortError, match="GPU 0 has 60000 of 80000 MiB in use"):
            spare.start("2-y", GOOD)
        held[0] = gpu.GpuMemory("0", 300.0, 80000.0)
        spare.start("2-y", GOOD)

    def test_memory_is_compared_with_what_that_very_spare_had(
        self, make_spare: Callable[[], Spare], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = {"3": 10.0, "4": 9000.0}
        monkeypatch.setattr(gpu, "memory", lambda env: [gpu.GpuMemory(env["MY_GPU"], held[env["MY_GPU"]], 80000.0)])
        spare = make_spare()
        spare.start("1-x", HANGS, 0)
        spare.start("2-y", HANGS, 1)
        for trial in ("1-x", "2-y"):
            spare.cancel(trial)
        self.pass_time()
        for trial in ("1-x", "2-y"):
            self.until(spare, trial, ServerPhase.ABSENT)
        held["3"] = 9000.0
        with pytest.raises(PortError, match="GPU 3 has 9000 of 80000 MiB in use"):
            spare.start("3-z", HANGS, 0)
        spare.start("3-z", HANGS, 1)
