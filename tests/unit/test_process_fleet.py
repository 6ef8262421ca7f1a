"""The decision on the fleet, driven step by step through plans, deaths and slow drains, without a single process."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.domain.candidate import Candidate
from tunewright.platform.process.fleet import (
    CANARY,
    PATIENCE,
    SURGE,
    Action,
    Do,
    View,
    decide,
    known_good,
    replica_slot,
    settled,
    wanted_servers,
    weights,
)
from tunewright.ports import ServerPhase, TargetPlan

OLD = Candidate(values={"max_num_seqs": 1})
NEW = Candidate(values={"max_num_seqs": 2})


def plan(updated: int = 0, canary: bool = False) -> TargetPlan:
    return TargetPlan(OLD, NEW, updated, canary, 0.2)


@dataclass
class World:
    """Servers as they would be: each event is one step."""

    replicas: int
    servers: list[View]
    serial: int = 0

    @classmethod
    def running(cls, replicas: int, candidate: Candidate = OLD) -> "World":
        made = cls(replicas, [])
        made.servers = [made._view(replica_slot(i), candidate, ServerPhase.READY) for i in range(replicas)]
        return made

    def _view(self, slot: str, candidate: Candidate, phase: ServerPhase) -> View:
        self.serial += 1
        return View(f"{slot}.{self.serial}", slot, candidate.hash, True, phase)

    def step(self, wanted: TargetPlan) -> list[Action]:
        actions = decide(self.servers, wanted, self.replicas, lambda slot, candidate: True)
        for action in actions:
            if action.do is Do.START:
                assert action.candidate is not None
                assert all(view.slot != action.name for view in self.servers), "what was there is gone"
                self.servers.append(self._view(action.name, action.candidate, ServerPhase.STARTING))
            elif action.do is Do.RETIRE:
                self.change(action.name, retiring=True)
            elif action.do is Do.KEEP:
                self.change(action.name, retiring=False, drained=False)
            else:
                self.change(action.name, phase=ServerPhase.STOPPING, retiring=False)
        return actions

    def change(self, name: str, **fields: object) -> None:
        self.servers = [replace(v, **fields) if v.name == name else v for v in self.servers]  # type: ignore[arg-type]

    def advance(self) -> None:
        """Everything that is under way comes to its end."""
        self.servers = [view for view in self.servers if view.phase is not ServerPhase.STOPPING]
        for view in self.servers:
            if view.phase is ServerPhase.STARTING:
                self.change(view.name, phase=ServerPhase.READY)
            elif view.retiring:
                self.change(view.name, drained=True)

    def settle(self, wanted: TargetPlan, steps: int = 60) -> int:
        """The steps it took, while at least one server served at every moment."""
        for number in range(steps):
            if settled(self.servers, wanted, self.replicas):
                return number
            self.step(wanted)
            assert any(view.serving for view in self.servers)
            self.advance()
        raise AssertionError(f"not settled: {self.servers}")


def test_a_whole_promotion_and_back() -> None:
    for replicas in (1, 2, 3):
        world = World.running(replicas)
        world.settle(plan(canary=True))
        for updated in range(1, replicas + 1):
            world.settle(plan(updated, canary=True))
        world.settle(plan(replicas))
        assert {view.candidate for view in world.servers} == {NEW.hash}
        world.settle(plan(0))
        assert {view.candidate for view in world.servers} == {OLD.hash}
        assert len(world.servers) == replicas


def test_a_fleet_starts_from_nothing_all_at_once() -> None:
    world = World(3, [])
    assert [action.do for action in world.step(TargetPlan(OLD, OLD))] == [Do.START] * 3


def test_one_replica_at_a_time() -> None:
    world = World.running(3)
    for _ in range(40):
        world.step(plan(3))
        assert sum(not view.serving or view.phase is not ServerPhase.READY for view in world.servers) <= 1
        world.advance()
    assert settled(world.servers, plan(3), 3)


def test_a_single_replica_is_replaced_only_once_another_carries_its_traffic() -> None:
    world = World.running(1)
    assert [(a.do, a.name) for a in world.step(plan(1))] == [(Do.START, SURGE)]
    assert world.step(plan(1)) == [], "it waits for the surge server"
    world.advance()
    assert [a.do for a in world.step(plan(1))] == [Do.RETIRE]
    world.settle(plan(1))
    assert [view.slot for view in world.servers] == [replica_slot(0)]


def test_the_canary_carries_the_traffic_of_a_single_replica() -> None:
    world = World.running(1)
    world.settle(plan(canary=True))
    for _ in range(10):
        world.step(plan(1, canary=True))
        assert all(view.slot != SURGE for view in world.servers)
        world.advance()
    assert settled(world.servers, plan(1, canary=True), 1)


def test_the_last_known_good_server_stays_though_the_canary_is_ready() -> None:
    """Not all are to run the candidate: it is not known to be good yet."""
    world = World.running(2)
    world.settle(plan(1, canary=True))
    old = next(view.name for view in world.servers if view.candidate == OLD.hash)
    world.change(old, current=False)  # it is to be replaced, as after a change of the command
    for _ in range(5):
        assert world.step(plan(1, canary=True)) == []
        world.advance()


def test_a_retired_server_is_given_requests_again_when_the_others_die() -> None:
    world = World.running(2)
    retired = next(a.name for a in world.step(plan(2)) if a.do is Do.RETIRE)
    other = next(view.name for view in world.servers if view.name != retired)
    world.change(retired, drained=True)
    world.change(other, phase=ServerPhase.FAILED)
    actions = world.step(plan(2))
    assert (Do.KEEP, retired) in [(a.do, a.name) for a in actions]
    assert (Do.STOP, retired) not in [(a.do, a.name) for a in actions]


def test_going_back_in_mid_drain_keeps_the_server() -> None:
    world = World.running(2)
    retired = next(a.name for a in world.step(plan(1)) if a.do is Do.RETIRE)
    assert [(a.do, a.name) for a in world.step(plan(0))] == [(Do.KEEP, retired)]


def test_a_candidate_still_starting_is_ended_at_once_when_it_is_not_wanted_any_more() -> None:
    world = World.running(2)
    world.step(plan(canary=True))
    assert [a.do for a in world.step(plan(0))] == [Do.STOP]


def test_a_changed_command_is_rolled_over_as_well() -> None:
    world = World.running(2)
    world.servers = [replace(view, current=False) for view in world.servers]
    world.settle(TargetPlan(OLD, OLD))
    assert all(view.current for view in world.servers)


def test_fewer_replicas_end_the_ones_above() -> None:
    world = World.running(3)
    world.replicas = 2
    world.settle(TargetPlan(OLD, OLD))
    assert {view.slot for view in world.servers} == {"replica-0", "replica-1"}


def test_a_server_that_does_not_answer_gets_no_requests_while_another_does() -> None:
    world = World.running(2)
    world.settle(plan(canary=True))
    first, second, canary = (view.name for view in world.servers)
    assert weights(world.servers, 0.2) == {first: 0.4, second: 0.4, canary: 0.2}
    world.change(first, silent_seconds=PATIENCE)
    assert weights(world.servers, 0.2) == {first: 0.4, second: 0.4, canary: 0.2}, "a busy one is slow to answer"
    world.change(first, silent_seconds=PATIENCE + 1)
    assert weights(world.servers, 0.2) == {first: 0.0, second: 0.8, canary: 0.2}
    world.change(second, silent_seconds=PATIENCE + 1)
    assert weights(world.servers, 0.2) == {first: 0.0, second: 0.0, canary: 1.0}
    world.change(canary, silent_seconds=PATIENCE + 1)
    assert weights(world.servers, 0.2) == {first: 0.4, second: 0.4, canary: 0.2}, "nothing better is there"
    world.change(first, silent_seconds=0.0)
    assert weights(world.servers, 0.2) == {first: 1.0, second: 0.0, canary: 0.0}


def test_nothing_goes_because_of_a_server_that_does_not_answer() -> None:
    world = World.running(2)
    world.change(world.servers[0].name, silent_seconds=PATIENCE + 1)
    for _ in range(3):
        assert world.step(plan(2)) == []
        world.advance()
    assert not settled(world.servers, plan(), 2)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "fail", "die", "gone", "drained", "silent", "answers", "plan", "nothing"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(replicas=st.integers(1, 3), events=EVENTS)
def test_no_step_of_ours_takes_away_the_last_server(replicas: int, events: list[tuple[str, int, int, bool]]) -> None:
    """Whatever happens outside, and however plans change in between: then, left alone, it settles."""
    world, wanted = World.running(replicas), plan()
    for event, pick, updated, canary in events:
        if event == "plan":
            wanted = plan(min(updated, replicas), canary)
        _happen(world, event, pick)
        before = list(world.servers)
        world.step(wanted)
        _check(before, world, wanted)
    world.advance()
    world.servers = [replace(view, silent_seconds=0.0) for view in world.servers]
    serving = any(view.serving for view in world.servers)
    for _ in range(80):
        if settled(world.servers, wanted, replicas):
            break
        before = list(world.servers)
        world.step(wanted)
        _check(before, world, wanted)
        world.advance()
    assert settled(world.servers, wanted, replicas), (serving, world.servers)


def _happen(world: World, event: str, pick: int) -> None:
    if not world.servers:
        return
    view = world.servers[pick % len(world.servers)]
    if event == "ready" and view.phase is ServerPhase.STARTING:
        world.change(view.name, phase=ServerPhase.READY)
    elif (event == "fail" and view.phase is ServerPhase.STARTING) or (
        event == "die" and view.phase is ServerPhase.READY
    ):
        world.change(view.name, phase=ServerPhase.FAILED)
    elif event == "gone" and view.phase is ServerPhase.STOPPING:
        world.servers = [other for other in world.servers if other.name != view.name]
    elif event in ("silent", "answers") and view.phase is ServerPhase.READY:
        world.change(view.name, silent_seconds=PATIENCE + 1 if event == "silent" else 0.0)
    elif event == "drained" and view.retiring:
        world.change(view.name, drained=True)


def _check(before: list[View], world: World, wanted: TargetPlan) -> None:
    good = known_good(wanted, world.replicas)
    assert any(v.serving for v in world.servers) or not any(v.serving for v in before)
    if any(v.serving and v.candidate in good for v in before):
        assert any(v.serving and v.candidate in good for v in world.servers)
    assert len({v.slot for v in world.servers} & {CANARY, SURGE}) <= 1
    slots = [v.slot for v in world.servers]
    assert len(slots) == len(set(slots)), "one server per place"
    assert {v.slot for v in world.servers} <= {*wanted_servers(wanted, world.replicas), CANARY, SURGE}
