"""What only waits is looked at seldom: who decides, or what happens in the cluster, wakes the loop."""

from dataclasses import replace

import pytest
from tunings import tuning
from world import FakeMetrics, FakeSpare, FakeTarget, World

from tunewright.controller.decisions import bound
from tunewright.controller.promoting import REST
from tunewright.controller.reconcile import reconcile
from tunewright.controller.trials import POLL, WAIT
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialPhase, TuningRecord
from tunewright.domain.step import update
from tunewright.ports import SeriesWindow, ServerPhase, ServerStatus, TargetStatus


@pytest.fixture
def world() -> World:
    world = World()
    world.create(tuning())
    return world


def again(world: World) -> float:
    found = reconcile("demo", world.context())
    assert found is not None
    return found


def waits(record: TuningRecord) -> bool:
    return record.phase is Phase.AWAITING_APPROVAL


def decide(world: World, action: str) -> None:
    world.store.decide("demo", bound(world.record(), action, at=world.clock.now(), by="ana"))  # type: ignore[arg-type]


def test_a_person_is_waited_for_but_not_past_the_expiry(world: World) -> None:
    world.run(until=waits)
    assert again(world) == REST
    asked = world.record().tuning.spec.promotion.approval_expiry
    world.clock.advance(asked - 20.0)
    left = again(world)
    assert 20.0 < left <= 22.0
    world.clock.advance(left)
    again_ = reconcile("demo", world.context())
    assert (world.record().phase, again_) == (Phase.REJECTED, None)


@pytest.mark.parametrize("free", [True, False])
def test_a_suspended_tuning_is_looked_at_seldom_once_its_spare_is_free(
    world: World, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(until=lambda record: record.phase is Phase.SEARCHING and bool(world.servers))
    decide(world, "suspend")
    left = ServerStatus(ServerPhase.ABSENT if free else ServerPhase.STOPPING)
    monkeypatch.setattr(FakeSpare, "poll", lambda self, trial_id: left)
    assert again(world) == (REST if free else 1.0)


@pytest.mark.parametrize("settled", [True, False])
def test_suspended_half_way_production_is_kept(world: World, settled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(until=waits)
    decide(world, "approve")
    world.run(until=lambda record: record.phase is Phase.WATCHING)
    decide(world, "suspend")
    real = FakeTarget._status

    def status(self: FakeTarget, _settled: bool, detail: str, failure: object = None) -> TargetStatus:
        return real(self, settled, detail)

    monkeypatch.setattr(FakeTarget, "_status", status)
    assert again(world) == (REST if settled else 2.0)


def test_the_traffic_is_asked_for_when_enough_of_it_may_be_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(until=lambda record: record.phase is Phase.PROFILING)
    real, seen = FakeMetrics.fetch, [0.0]

    def only_the_latest(self: FakeMetrics, names: list[str], start: float, end: float, *_: object) -> SeriesWindow:
        return replace(real(self, names, end - seen[0], end), start=start, end=end)

    monkeypatch.setattr(FakeMetrics, "fetch", only_the_latest)
    found = []
    for seen[0] in (5.0, 40.0, 47.5):  # of 60 s, of which 48 s are enough
        found.append(again(world))
    assert found == [15.0, pytest.approx(8.0), 1.0]


def test_production_that_is_not_whole_is_waited_for_ever_more_patiently(world: World) -> None:
    world.fleet[0].ready_at = world.clock.now() + 10_000.0
    waited = []
    for _ in range(60):
        waited.append(again(world))
        world.clock.advance(waited[-1])
    assert waited[0] == 1.0
    assert waited == sorted(waited)
    assert waited[-1] == 15.0
    assert "store.clear_trials" not in world.calls, "there is nothing to clear"


def test_production_that_was_scaled_to_nothing_is_waited_for(world: World) -> None:
    world.fleet.clear()
    assert again(world) == 1.0
    assert world.record().phase is Phase.PENDING
    assert "0 of 0 servers are ready" in world.record().sentence


@pytest.mark.parametrize("waiting", [True, False])
def test_a_spare_without_a_place_is_looked_at_seldom(
    world: World, waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(until=lambda record: record.phase is Phase.SEARCHING)
    world.run(until=lambda _: any(t.phase is TrialPhase.STARTING for t in world.trials_now("demo")))
    status = ServerStatus(ServerPhase.STARTING, detail="no node takes the pod", waiting=waiting)
    monkeypatch.setattr(FakeSpare, "poll", lambda self, trial_id: status)
    assert again(world) == (WAIT if waiting else POLL)


def test_trials_of_an_earlier_search_are_cleared_once(world: World) -> None:
    record = world.run(until=waits)
    world.stable = Candidate(values={"max_num_seqs": 5})
    world.fleet[0].ready_at = world.clock.now() + 10_000.0
    again(world)
    assert world.record().phase is Phase.PENDING
    before = world.calls.count("store.clear_trials")
    for _ in range(5):
        world.clock.advance(again(world))
    assert world.calls.count("store.clear_trials") == before + 1
    assert world.trials_now(record.name) == []
    assert update(record, phase=Phase.PENDING).phase is world.record().phase
