"""What every target must do. An adapter inherits `TargetContract` and gives it `make_target`."""

import http.client
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import (
    Killed,
    ShiftedClock,
    SystemClock,
    fake_target,
    first_port,
    killed_at_writes,
    nothing_left,
    wait_for,
)

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.domain.tuning import Spare as SpareSpec
from tunewright.domain.tuning import Target as TargetSpec
from tunewright.platform.process import attempts, children, fleet, probe, sockets
from tunewright.platform.process.adopted import AdoptedTarget
from tunewright.platform.process.target import ProcessTarget
from tunewright.ports import PortError, Refused, Target, TargetPlan, TargetStatus

NEW = Candidate(values={"max_num_seqs": 64})
OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 661})
UNKNOWN = Candidate(values={"no_such_knob": 1})


class Traffic:
    """Clients that ask all the time, streaming and not; what went wrong, and who answered."""

    def __init__(self, address: str, streams: tuple[bool, ...] = (False, False, True)) -> None:
        self._address = address
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.answered: Counter[Any] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(stream,)) for stream in streams]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, stream: bool) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        while not self._stop.wait(0.005):
            try:
                connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 3, "stream": stream}))
                response = connection.getresponse()
                body = response.read()
                if response.status != 200 or (stream and b"[DONE]" not in body):
                    self.failures.append(f"{response.status} {body[:200]!r}")
                elif not stream:
                    self.answered[json.loads(body)["seqs"]] += 1
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
        connection.close()


class TargetContract:
    """`make_target()` gives an adapter on the same production each time, as after a kill -9 of the agent."""

    replicas = 2
    notes: Sequence[str] = ()
    """What is to be known of this production before NEW is approved."""

    @pytest.fixture
    def make_target(self) -> Iterator[Callable[[], Target]]:
        raise NotImplementedError

    @pytest.fixture
    def traffic(self) -> Callable[[], Traffic]:
        raise NotImplementedError

    @staticmethod
    def until_settled(make_target: Callable[[], Target], plan: TargetPlan) -> TargetStatus:
        """Every step by an agent of its own."""
        last: list[TargetStatus] = []

        def step() -> TargetStatus | None:
            status = make_target().apply(plan)
            last[:] = [status]
            return status if status.settled else None

        return wait_for(step, f"settled: {plan}")

    def plan(self, target: Target, updated: int = 0, *, canary: bool = False, candidate: Candidate = NEW) -> TargetPlan:
        return TargetPlan(Candidate(), candidate, updated, canary, 0.25 if canary else 0.0)

    def test_it_is_whole_and_runs_the_baseline(self, make_target: Callable[[], Target]) -> None:
        target = make_target()
        status = target.observe()
        assert status.settled, status.detail
        assert status.desired == self.replicas
        assert [replica.ready for replica in status.replicas] == [True] * self.replicas
        assert {replica.candidate_hash for replica in status.replicas} == {target.baseline().hash}
        assert all(replica.labels["instance"] for replica in status.replicas)
        assert status.failure is None
        assert status.foreign is None
        assert target.preflight(NEW) == []
        assert target.describe()

    def test_applying_what_is_there_changes_nothing(self, make_target: Callable[[], Target]) -> None:
        before = make_target().observe()
        after = self.until_settled(make_target, self.plan(make_target()))
        assert [replica.name for replica in after.replicas] == [replica.name for replica in before.replicas]

    def test_a_promotion_and_its_rollback_cost_no_request(
        self, make_target: Callable[[], Target], traffic: Callable[[], Traffic]
    ) -> None:
        target = make_target()
        with traffic() as clients:
            status = self.until_settled(make_target, self.plan(target, canary=True))
            assert [replica.candidate_hash for replica in status.replicas if replica.canary] == [NEW.hash]
            clients.answered.clear()
            wait_for(lambda: clients.answered.total() >= 200, f"traffic flows: {clients.failures}")
            assert 0.15 < clients.answered["64"] / clients.answered.total() < 0.35, "the canary's share"
            for updated in range(1, self.replicas + 1):
                self.until_settled(make_target, self.plan(target, updated, canary=True))
            status = self.until_settled(make_target, self.plan(target, self.replicas))
            assert {replica.candidate_hash for replica in status.replicas} == {NEW.hash}
            assert len(status.replicas) == self.replicas
            assert make_target().baseline() == NEW
            status = self.until_settled(make_target, self.plan(target, 0))
            assert {replica.candidate_hash for replica in status.replicas} == {Candidate().hash}
            assert make_target().baseline() == Candidate()
            seen = clients.answered.total()
            wait_for(lambda: clients.answered.total() > seen + 20)
        assert clients.failures == []

    def test_a_candidate_that_can_not_start_is_told_and_production_stays(
        self, make_target: Callable[[], Target], traffic: Callable[[], Traffic]
    ) -> None:
        plan = self.plan(make_target(), canary=True, candidate=OUT_OF_MEMORY)
        with traffic() as clients:
            status = wait_for(lambda: s if (s := make_target().apply(plan)).failure else None)
            assert status.failure is not None
            assert status.failure.kind is FailureKind.OUT_OF_MEMORY
            assert sum(replica.ready and not replica.canary for replica in status.replicas) == self.replicas
            back = self.until_settled(make_target, self.plan(make_target(), candidate=OUT_OF_MEMORY))
            assert back.failure is None, "it is not wanted any more"
            assert make_target().baseline() == Candidate()
        assert clients.failures == []

    def test_preflight_tells_what_would_stop_it(self, make_target: Callable[[], Target]) -> None:
        assert "no_such_knob" in " ".join(make_target().preflight(UNKNOWN))

    def test_notes_are_sentences_and_change_nothing(self, make_target: Callable[[], Target]) -> None:
        before = make_target().observe()
        notes = make_target().notes(NEW)
        assert all(isinstance(note, str) and note.strip() for note in notes)
        assert list(notes) == list(self.notes)
        after = make_target().observe()
        assert [replica.name for replica in after.replicas] == [replica.name for replica in before.replicas]
        assert make_target().baseline() == Candidate()

    def test_a_plan_for_more_replicas_than_there_are_is_refused(self, make_target: Callable[[], Target]) -> None:
        with pytest.raises(Refused):
            make_target().apply(self.plan(make_target(), self.replicas + 1))

    def test_the_recommendation_names_the_change(self, make_target: Callable[[], Target]) -> None:
        text = make_target().recommend(NEW)
        assert "max_num_seqs: default → 64" in text


class OnProcesses(TargetContract):
    """Processes on this machine behind our proxy."""

    spec: TargetSpec
    directory: Path

    @pytest.fixture
    def make_target(self, tmp_path: Path) -> Iterator[Callable[[], ProcessTarget]]:
        self.directory = tmp_path / "target"
        listen = f"127.0.0.1:{first_port()}"
        self.spec = fake_target("--fake-token-seconds", "0.002", replicas=self.replicas, listen=listen)
        with nothing_left(tmp_path):
            wait_for(lambda: self.make().ensure_started().settled)
            yield self.make

    def make(self) -> ProcessTarget:
        return ProcessTarget(self.directory, self.spec, SystemClock(), tuning="t")

    @pytest.fixture
    def traffic(self) -> Callable[[], Traffic]:
        return lambda: Traffic(self.spec.listen)

    def record(self, slot: str) -> children.Child:
        folder = next(p.parent for p in self.directory.glob(f"servers/{slot}.*/launch.json"))
        child = children.load(folder / "child.json")
        assert child is not None
        return child

    def generation(self, file: str) -> int:
        return int(json.loads((self.directory / "proxy" / f"{file}.json").read_bytes())["generation"])


class TestProcessTarget(OnProcesses):
    """Two replicas."""

    def test_a_replica_that_somebody_killed_is_named_and_comes_back(
        self, make_target: Callable[[], ProcessTarget], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempts, "_FIRST_WAIT", 0.0)
        child = self.record("replica-0")
        with Traffic(self.spec.listen, streams=(False, False, False)) as clients:
            wait_for(lambda: clients.answered.total() > 20)
            os.kill(child.pid, signal.SIGKILL)  # what it has not answered yet is asked of the other one
            wait_for(lambda: not children.alive(child))
            status = make_target().ensure_started()
            assert status.foreign is not None
            assert "replica-0" in status.foreign
            status = wait_for(lambda: s if (s := make_target().ensure_started()).settled else None)
            assert status.foreign is None
            assert status.failure is None
        assert clients.failures == []
        assert self.record("replica-0").pid != child.pid

    def test_a_server_that_hangs_gets_no_requests_until_it_answers_again(
        self, make_target: Callable[[], ProcessTarget], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(probe, "SHORT", 0.2)
        clock = ShiftedClock()
        target = ProcessTarget(self.directory, self.spec, clock, tuning="t")
        hangs = self.record("replica-0").pid
        os.kill(hangs, signal.SIGSTOP)  # its port still takes connections
        try:
            assert [r.ready for r in target.ensure_started().replicas] == [True, True], "it may only be busy"
            clock.ahead = fleet.PATIENCE + 1
            status = wait_for(lambda: s if not (s := target.ensure_started()).settled else None)
            assert [r.ready for r in status.replicas] == [False, True]
            assert "/health has not answered" in status.detail
            assert status.foreign is None
            wait_for(lambda: len({self.generation("routes"), self.generation("status")}) == 1)
            with Traffic(self.spec.listen) as clients:
                wait_for(lambda: clients.answered.total() > 20)
            assert clients.failures == []
        finally:
            os.kill(hangs, signal.SIGCONT)
        wait_for(lambda: target.ensure_started().settled)

    def test_routes_changed_by_somebody_else_are_named_and_put_right(
        self, make_target: Callable[[], ProcessTarget]
    ) -> None:
        routes = self.directory / "proxy" / "routes.json"
        changed = json.loads(routes.read_bytes())
        changed["backends"][0]["weight"] = 0.125
        routes.write_text(json.dumps(changed))
        assert "routes.json was changed" in str(make_target().observe().foreign)
        assert any("routes.json" in reason for reason in make_target().preflight(NEW))
        assert "routes.json was changed" in str(make_target().ensure_started().foreign)
        status = wait_for(lambda: s if (s := make_target().ensure_started()).settled else None)
        assert status.foreign is None
        assert {backend["weight"] for backend in json.loads(routes.read_bytes())["backends"]} == {1 / self.replicas}

    def test_a_proxy_that_died_is_started_again(self, make_target: Callable[[], ProcessTarget]) -> None:
        proxy = children.load(self.directory / "proxy" / "child.json")
        assert proxy is not None
        os.kill(proxy.pid, signal.SIGKILL)
        wait_for(lambda: not children.alive(proxy))
        assert "proxy does not run" in make_target().observe().detail
        assert "proxy does not run" in " ".join(make_target().preflight(NEW))
        wait_for(lambda: make_target().ensure_started().settled)

    def test_prometheus_is_told_of_every_server(self, make_target: Callable[[], ProcessTarget]) -> None:
        self.until_settled(make_target, self.plan(make_target(), canary=True))
        groups = json.loads((self.directory / "prometheus-targets.json").read_bytes())
        assert Counter(group["labels"]["role"] for group in groups) == {"stable": self.replicas, "canary": 1}
        assert {group["labels"]["tuning"] for group in groups} == {"t"}
        assert {group["targets"][0]: group["labels"] for group in groups} == make_target().scrape_targets()
        instances = {replica.labels["instance"] for replica in make_target().observe().replicas}
        assert instances == set(make_target().scrape_targets())

    def test_all_is_ended_and_the_ports_are_closed(self, make_target: Callable[[], ProcessTarget]) -> None:
        ports = [int(instance.rpartition(":")[2]) for instance in make_target().scrape_targets()]
        make_target().stop_all()
        assert children.find_marked(self.directory) == []
        assert [sockets.listening_sockets(port) for port in ports] == [set() for _ in ports]
        assert sockets.listening_sockets(int(self.spec.listen.rpartition(":")[2])) == set()
        assert not make_target().observe().settled
        assert any("not ready" in reason for reason in make_target().preflight(NEW))
        wait_for(lambda: make_target().ensure_started().settled)

    def test_a_server_whose_folder_was_removed_is_ended_with_the_rest(
        self, make_target: Callable[[], ProcessTarget]
    ) -> None:
        shutil.rmtree(next(self.directory.glob("servers/replica-0.*")))
        assert len(children.find_marked(self.directory)) == self.replicas + 1
        make_target().stop_all()
        assert children.find_marked(self.directory) == []

    def test_one_agent_at_a_time(self, make_target: Callable[[], ProcessTarget]) -> None:
        with make_target()._exclusive(), pytest.raises(PortError, match="another agent"):
            make_target().ensure_started()

    def test_a_command_that_a_person_changes_is_rolled_out_and_overrules_what_was_promoted(
        self, make_target: Callable[[], ProcessTarget], traffic: Callable[[], Traffic]
    ) -> None:
        self.until_settled(make_target, self.plan(make_target(), self.replicas))
        assert make_target().baseline() == NEW
        self.spec = self.spec.model_copy(update={"command": (*self.spec.command, "--max-num-seqs", "99")})
        assert make_target().baseline().values == {"max_num_seqs": 99}
        assert not make_target().observe().settled
        with traffic() as clients:
            status = wait_for(lambda: s if (s := make_target().ensure_started()).settled else None)
        assert {replica.candidate_hash for replica in status.replicas} == {make_target().baseline().hash}
        assert clients.failures == []

    def test_production_comes_back_whole_after_its_folder_was_removed(
        self, make_target: Callable[[], ProcessTarget]
    ) -> None:
        target = make_target()
        before = set(children.find_marked(self.directory / "servers"))
        assert len(before) >= self.replicas
        shutil.rmtree(self.directory)
        status = wait_for(lambda: s if (s := target.ensure_started()).settled else None)
        assert len(status.replicas) == self.replicas
        assert not before & set(children.find_marked(self.directory)), "what nobody knows any more holds GPUs"

    def test_the_canary_has_the_environment_of_the_spare(self, make_target: Callable[[], ProcessTarget]) -> None:
        beside = {"WHERE": "gpu-{replica}"}

        def make() -> ProcessTarget:
            return ProcessTarget(self.directory, self.spec, SystemClock(), canary_environment=beside)

        self.until_settled(make, self.plan(make(), canary=True))
        environment = Path(f"/proc/{self.record('canary').pid}/environ").read_bytes()
        assert f"WHERE=gpu-{self.replicas}\0".encode() in environment
        assert b"WHERE" not in Path(f"/proc/{self.record('replica-0').pid}/environ").read_bytes()

    def test_a_server_that_breaks_the_drain_is_stopped_at_its_deadline(
        self, make_target: Callable[[], ProcessTarget]
    ) -> None:
        self.spec = self.spec.model_copy(update={"drain_timeout": 0.5})
        connections = [http.client.HTTPConnection(self.spec.listen, timeout=60) for _ in range(self.replicas)]
        for connection in connections:
            connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 10_000}))
        status = self.until_settled(make_target, self.plan(make_target(), self.replicas))
        assert {replica.candidate_hash for replica in status.replicas} == {NEW.hash}
        for connection in connections:
            connection.close()

    @pytest.mark.parametrize("every", [1, 2, 3, 5])
    def test_killed_at_any_write_it_comes_to_the_same_end(
        self,
        make_target: Callable[[], ProcessTarget],
        traffic: Callable[[], Traffic],
        monkeypatch: pytest.MonkeyPatch,
        every: int,
    ) -> None:
        kills = 0

        def come_to(plan: TargetPlan) -> None:
            nonlocal kills
            with killed_at_writes(monkeypatch, every):
                for _ in range(60):
                    try:
                        if make_target().apply(plan).settled:
                            return
                    except Killed:
                        kills += 1
            self.until_settled(make_target, plan)

        with traffic() as clients:
            come_to(self.plan(make_target(), canary=True))
            come_to(self.plan(make_target(), 1, canary=True))
            come_to(self.plan(make_target(), 0))
        assert kills > 3
        assert clients.failures == []
        status = make_target().observe()
        assert [replica.candidate_hash for replica in status.replicas] == [Candidate().hash] * self.replicas
        alive = {pid for slot in ("replica-0", "replica-1") for pid in children.group_members(self.record(slot))}
        proxy = children.load(self.directory / "proxy" / "child.json")
        assert proxy is not None
        assert set(children.find_marked(self.directory)) == {*alive, proxy.pid}, "nothing else is left"


class TestSingleReplica(OnProcesses):
    """One replica: the canary, or a surge server, carries its traffic."""

    replicas = 1

    def test_without_a_canary_a_surge_server_carries_the_traffic(
        self, make_target: Callable[[], ProcessTarget], traffic: Callable[[], Traffic]
    ) -> None:
        with traffic() as clients:
            status = self.until_settled(make_target, self.plan(make_target(), 1))
        assert [replica.candidate_hash for replica in status.replicas] == [NEW.hash]
        assert clients.failures == []

    def test_a_replica_that_somebody_killed_is_named_and_comes_back(
        self, make_target: Callable[[], ProcessTarget], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody is there to serve meanwhile; it comes back all the same."""
        monkeypatch.setattr(attempts, "_FIRST_WAIT", 0.0)
        os.kill(self.record("replica-0").pid, signal.SIGKILL)
        wait_for(lambda: "replica-0" in str(make_target().ensure_started().foreign))
        wait_for(lambda: make_target().ensure_started().settled)


class TestAdoptedTarget:
    """Production that somebody else runs."""

    @pytest.fixture
    def servers(self, tmp_path: Path) -> Iterator[ProcessTarget]:
        spec = fake_target(replicas=2, listen=f"127.0.0.1:{first_port()}")
        with nothing_left(tmp_path):
            theirs = ProcessTarget(tmp_path / "theirs", spec, SystemClock())
            wait_for(lambda: theirs.ensure_started().settled)
            yield theirs

    @staticmethod
    def adopt(servers: ProcessTarget, *more: str) -> AdoptedTarget:
        urls = [f"http://{instance}/" for instance in servers.scrape_targets()]
        spare = SpareSpec.model_validate({"command": ["vllm", "serve", "m", "--port", "{port}", *more]})
        return AdoptedTarget(TargetSpec.model_validate({"urls": urls}), spare, SystemClock())

    def test_it_is_observed_and_never_touched(self, servers: ProcessTarget) -> None:
        target = self.adopt(servers, "--max-num-seqs", "8")
        assert target.baseline().values == {"max_num_seqs": 8}
        status = target.observe()
        assert status.settled
        assert [(replica.ready, replica.version) for replica in status.replicas] == [(True, "0.32.0")] * 2
        assert "recommended" in target.preflight(NEW)[0]
        assert list(target.notes(NEW)) == []
        assert "max_num_seqs: 8 → 64" in target.recommend(NEW)
        with pytest.raises(Refused, match="somebody else"):
            target.apply(TargetPlan(Candidate(), NEW, 1))
        assert set(target.scrape_targets()) == set(servers.scrape_targets())

    def test_a_server_that_is_down_is_named(self, servers: ProcessTarget) -> None:
        target = self.adopt(servers)
        servers.stop_all()
        status = target.observe()
        assert not status.settled
        assert "not healthy" in status.detail
        with pytest.raises(PortError):
            target.baseline()

    def test_a_baseline_that_the_servers_contradict_is_refused(self, servers: ProcessTarget) -> None:
        with pytest.raises(Refused, match="gpu_memory_utilization"):
            self.adopt(servers, "--gpu-memory-utilization", "0.5").baseline()
