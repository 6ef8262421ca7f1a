"""An abort or a rollback by a person is no failure, wherever people and alerts look; what goes wrong still is."""

import pytest
from tunings import tuning
from world import World

from tunewright.controller.decisions import bound
from tunewright.controller.reconcile import reconcile
from tunewright.domain.phases import Phase
from tunewright.domain.state import TuningRecord
from tunewright.exits import Exit, exit_of
from tunewright.store.kubernetes_status import conditions
from tunewright.telemetry import catalog
from tunewright.telemetry.report import render_report
from tunewright.telemetry.samples import tuning_samples


@pytest.fixture
def world() -> World:
    found = World()
    found.create(tuning())
    return found


def decide(world: World, action: str) -> None:
    world.store.decide("demo", bound(world.record(), action, at=world.clock.now(), by="ana"))  # type: ignore[arg-type]


def in_canary(world: World) -> None:
    world.run(until=lambda r: r.phase is Phase.AWAITING_APPROVAL)
    decide(world, "approve")
    world.run(until=lambda r: r.phase is Phase.CANARY)


def shown(record: TuningRecord) -> dict[str, tuple[str, str]]:
    found = conditions(record, (), generation=1, before=[], now=0.0)
    return {each["type"]: (each["status"], each["reason"]) for each in found}


def rollbacks(record: TuningRecord) -> dict[str, float]:
    found = tuning_samples(record, ())
    return {labels[-1]: value for metric, labels, value in found if metric is catalog.ROLLBACKS}


def test_an_abort_before_production_was_touched(world: World) -> None:
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    decide(world, "abort")
    ended = world.run()
    assert (ended.phase, ended.stopped_by) == (Phase.FAILED, "ana")
    assert exit_of(ended) is Exit.NO_CHANGE
    found = shown(ended)
    assert (found["Ready"], found["Stalled"]) == (("True", "Aborted"), ("False", "Aborted"))
    assert rollbacks(ended) == {"guard": 0, "person": 0}
    page = render_report(ended, world.trials_now("demo"))
    assert "Failed: ana asked for it" in page
    assert "could not be done" not in page


@pytest.mark.parametrize("action", ["abort", "rollback"])
def test_production_taken_back_by_a_person(world: World, action: str) -> None:
    in_canary(world)
    decide(world, action)
    back = world.run(until=lambda r: r.phase is Phase.ROLLING_BACK)
    assert back.stopped_by == "ana"
    assert shown(back)["Ready"] == ("False", "RollingBack"), "it is under way"
    ended = world.run()
    assert (ended.phase, ended.stopped_by) == (Phase.ROLLED_BACK, "ana")
    assert exit_of(ended) is Exit.NO_CHANGE
    assert shown(ended)["Ready"] == ("True", "RolledBack")
    assert rollbacks(ended) == {"guard": 0, "person": 1}


def test_production_taken_back_by_the_guard(world: World) -> None:
    in_canary(world)
    world.outages = {"metrics.fetch": 10**6}
    world.run(until=lambda r: r.phase is Phase.ROLLING_BACK)
    decide(world, "abort")
    ended = world.run()
    assert (ended.phase, ended.stopped_by) == (Phase.ROLLED_BACK, "")
    assert exit_of(ended) is Exit.WENT_WRONG
    assert shown(ended)["Ready"] == ("False", "RolledBack")
    assert rollbacks(ended) == {"guard": 1, "person": 0}


def test_an_abort_that_could_not_be_carried_out_is_a_failure(world: World) -> None:
    in_canary(world)
    world.target_is_gone = True
    decide(world, "abort")
    ended = world.run(until=lambda r: r.phase is Phase.FAILED)
    assert ended.stopped_by == ""
    assert exit_of(ended) is Exit.WENT_WRONG
    assert shown(ended)["Stalled"] == ("True", "Failed")


def test_what_begins_anew_was_stopped_by_nobody(world: World) -> None:
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    decide(world, "abort")
    world.run()
    world.store.save(world.record().model_copy(update={"tuning": tuning(slo={"ttftP95": "9s"})}))
    reconcile("demo", world.context())
    assert world.record().phase is Phase.PENDING
    assert world.record().stopped_by == ""
