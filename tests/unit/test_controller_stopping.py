"""Trials that end early, in a whole tuning on the fake clock."""

import pytest
from tunings import tuning
from world import BASELINE, BEST, Behaviour, Killed, World

from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import FailureKind, TrialOutcome, TrialPurpose, TrialRecord
from tunewright.propose.model import observations

SLOW = Candidate(values={"max_num_seqs": 2})
GREEDY = Candidate(values={"max_num_seqs": 256})


def run(proposals: list[Candidate], behaviours: dict[str, Behaviour], **spec) -> tuple[World, list[TrialRecord]]:

    world = World(behaviours=behaviours, proposals=proposals)
    world.create(tuning(promotion={"mode": "recommend"}, **(QUICK | spec)))
    world.run()
    return world, world.trials_now("demo")


QUICK = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "4s", "maxWarmup": "1s"},
}


def of(trials: list[TrialRecord], candidate: Candidate) -> TrialRecord:
    return next(t for t in trials if t.candidate == candidate and t.purpose is TrialPurpose.SEARCH)


def test_what_can_t_win_is_ended_in_mid_window_and_is_never_chosen() -> None:
    world, trials = run([BEST, SLOW], {SLOW.hash: Behaviour(tokens=500.0, ttft=0.1)})
    slow, best = of(trials, SLOW), of(trials, BEST)
    assert slow.outcome is TrialOutcome.STOPPED
    assert slow.stopped
    assert "can't reach the best any more after 2s" in slow.stopped
    assert slow.objective == pytest.approx(500.0)  # its estimate is kept, for the model and the report
    assert slow.gpu_seconds < best.gpu_seconds - 1.5
    assert (best.outcome, best.stopped) == (TrialOutcome.COMPLETE, None)
    record = world.record()
    assert record.phase is Phase.RECOMMENDED
    assert [f.candidate for f in record.finalists] == [BEST]
    assert world.leftovers() == []
    assert any(o.candidate == SLOW and o.objective == pytest.approx(500.0) for o in observations(trials))


def test_baseline_and_finalists_are_always_measured_whole() -> None:
    """500 against a baseline of 400 in the confirming rounds: slower than the best of the search, and yet whole."""
    _, trials = run([BEST], {BASELINE.hash: Behaviour(tokens=400.0)})
    assert [t.purpose for t in trials if t.stopped] == []
    assert len([t for t in trials if t.purpose is TrialPurpose.CONFIRM]) >= 6


def test_what_misses_the_slo_is_ended_though_it_is_the_fastest() -> None:
    world, trials = run([BEST, GREEDY], {GREEDY.hash: Behaviour(tokens=5000.0, ttft=4.0)})
    greedy = of(trials, GREEDY)
    assert greedy.outcome is TrialOutcome.STOPPED
    assert greedy.slo_margin is not None
    assert greedy.slo_margin < 0
    assert [f.candidate for f in world.record().finalists] == [BEST]


def test_when_nothing_meets_the_slo_the_nearest_is_named_from_what_was_seen() -> None:
    missing = {c.hash: Behaviour(tokens=900.0, ttft=t) for c, t in ((BASELINE, 5.0), (BEST, 4.0), (SLOW, 3.0))}
    world, trials = run([BEST, SLOW], missing)
    assert {of(trials, c).outcome for c in (BEST, SLOW)} == {TrialOutcome.STOPPED}
    assert world.record().phase is Phase.INFEASIBLE
    assert SLOW.hash in world.record().sentence


def test_it_can_be_switched_off() -> None:
    _, trials = run([BEST, SLOW], {SLOW.hash: Behaviour(tokens=500.0, ttft=0.1)}, search={"earlyStop": False})
    assert of(trials, SLOW).outcome is TrialOutcome.COMPLETE


def test_a_start_far_slower_than_the_others_is_given_up_as_hung() -> None:
    quick = [Candidate(values={"max_num_seqs": n}) for n in (8, 16, 64)]
    world, trials = run([*quick, SLOW], {SLOW.hash: Behaviour(start=120.0)}, budget={"trials": 6})
    slow = of(trials, SLOW)
    assert slow.failure is not None
    assert slow.failure.kind is FailureKind.HUNG
    assert "half of 4 starts took at most 5 s" in slow.failure.cause
    assert slow.outcome is TrialOutcome.INFEASIBLE
    assert slow.gpu_seconds < 75
    assert world.record().phase is Phase.RECOMMENDED


def test_the_first_starts_are_waited_for() -> None:
    _, trials = run([BEST], {BEST.hash: Behaviour(tokens=1200.0, ttft=0.3, start=120.0)})
    assert of(trials, BEST).outcome is TrialOutcome.COMPLETE


def test_killed_while_it_is_ended_it_comes_to_the_same_end() -> None:
    """At each call around the end of its load test, before and after the call's effect."""
    behaviours = {
        SLOW.hash: Behaviour(tokens=500.0, ttft=0.1, start=0.5),
        BEST.hash: Behaviour(tokens=1200.0, ttft=0.3, start=0.5),
        BASELINE.hash: Behaviour(tokens=400.0, ttft=0.8, start=0.5),
    }

    def drive(kill_at: int | None, after: bool = False) -> World:
        world = World(behaviours=dict(behaviours), proposals=[BEST, SLOW], kill_at=kill_at, kill_after_effect=after)
        world.create(tuning(promotion={"mode": "recommend"}, **QUICK))
        try:
            return _run(world)
        except Killed:
            world.clock.advance(1)
            world.kill_at = None
            return _run(world)

    def _run(world: World) -> World:
        world.run()
        return world

    whole = drive(None)
    ended = [t for t in whole.trials_now("demo") if t.stopped]
    assert [t.candidate for t in ended] == [SLOW]
    cancels = [i for i, call in enumerate(whole.calls) if call == "load.cancel"]
    at = cancels[2]  # after those of baseline and best
    for kill_at in range(at - 6, at + 9):
        for after in (False, True):
            world = drive(kill_at, after)
            slow = of(world.trials_now("demo"), SLOW)
            assert (slow.outcome, bool(slow.stopped)) == (TrialOutcome.STOPPED, True), (kill_at, after)
            assert [f.candidate for f in world.record().finalists] == [BEST]
            assert world.leftovers() == []
