"""Killed at any call, before or after its effect, and started again: the same end state, nothing left over."""

import os
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tunings import tuning
from world import BASELINE, BEST, Behaviour, Killed, World

from tunewright.controller.decisions import bound
from tunewright.domain.load import LoadFile
from tunewright.domain.phases import TERMINAL, Phase

QUICK = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "budget": {"trials": 2},
    "promotion": {
        "canary": {"share": "30%", "warmup": "1s", "trafficTimeout": "60s"},
        "analysis": {
            "interval": "8s",
            "minDuration": "8s",
            "maxDuration": "48s",
            "minRequests": 30,
            "tolerance": "80%",
        },
        "watch": "4s",
    },
}
"""Few passes, so that hundreds of whole tunings take seconds."""

KEPT = LoadFile(config_map="mine", key="trace.csv", digest="a" * 64, path="/there/trace.csv", told="2 requests")


def drive(kills: list[tuple[int, bool]], spares: int = 1) -> World:
    """A whole tuning with mode approve, the agent killed at each of `kills` (calls after the last, after effect)."""
    world = World(spares=spares)
    for name in (BASELINE.hash, BEST.hash, world.proposals[0].hash):
        world.behaviours[name] = replace(world.behaviours.get(name, Behaviour()), start=0.5)
    world.load_file = KEPT
    world.create(tuning(**QUICK, spare={"parallelism": spares}))
    schedule = list(kills)

    def next_kill() -> None:
        if schedule:
            gap, after = schedule.pop(0)
            world.kill_at, world.kill_after_effect = len(world.calls) + gap, after
        else:
            world.kill_at = None

    next_kill()
    for _ in range(len(kills) + 1):
        try:
            world.run(until=lambda r: r.phase is Phase.AWAITING_APPROVAL or r.phase in TERMINAL)
            if world.record().phase is Phase.AWAITING_APPROVAL and not world.store.decisions("demo"):
                world.store.decide("demo", bound(world.record(), "approve", at=world.clock.now(), by="ana"))
            world.run()
            return world
        except Killed:
            world.clock.advance(7)
            next_kill()
    raise AssertionError("more kills than planned")


def check(world: World) -> None:
    record, trials = world.record(), world.store.trials("demo")
    assert record.phase is Phase.PROMOTED, record.sentence
    assert record.load_file == KEPT
    assert [s.candidate.hash for s in world.fleet] == [BEST.hash] * 2
    assert world.canary is None
    assert world.leftovers() == []
    assert len({t.id for t in trials}) == len(trials)
    searched = [t.candidate.hash for t in trials if t.purpose == "search"]
    assert len(searched) == len(set(searched)), "a finished trial was repeated"
    assert all(t.phase == "Done" for t in trials)
    assert confirmed(world) == usual(world.spares), "who runs on which spare must not depend on kills"


def confirmed(world: World) -> set[tuple[int, str, int]]:
    """Who ran in which round, on which spare."""
    return {(t.round, t.candidate.hash, t.slot) for t in world.store.trials("demo") if t.purpose == "confirm"}


@cache
def usual(spares: int) -> set[tuple[int, str, int]]:
    """The same when nobody is killed."""
    return confirmed(drive([], spares))


@pytest.mark.parametrize("spares", [1, 2])
def test_without_a_kill(spares: int) -> None:
    world = drive([], spares)
    check(world)
    assert world.most_servers == spares


SCHEDULES = int(os.environ.get("KILL_SCHEDULES", "100"))
PARTS = 4
"""The moments are dealt to so many tests, which can run side by side."""


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("after", [False, True], ids=["before the effect", "after the effect"])
def test_killed_once_at_every_single_call(after: bool, part: int, spares: int) -> None:
    places = drive([], spares).places
    # Each call in each phase of the tuning and of its trial, the first time it comes.
    first = {place: at for at, place in reversed(list(enumerate(places, start=1)))}
    assert len(first) > 50
    for at in sorted(first.values())[part::PARTS]:
        check(drive([(at, after)], spares))


@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=12), st.sampled_from([1, 2]))
def test_killed_at_random_moments(kills: list[tuple[int, bool]], spares: int) -> None:
    check(drive(kills, spares))
