"""The ladder from the baseline to the winner, measured after the confirming rounds."""

import pytest
from tunings import tuning
from world import BASELINE, Behaviour, Killed, World, oom

from tunewright.controller.deadlines import deadline
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialOutcome, TrialPurpose, TrialRecord
from tunewright.telemetry.effects import measured_ladder
from tunewright.telemetry.report import render_report

QUICK = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "promotion": {"mode": "recommend"},
}
WINNER = Candidate(values={"max_num_seqs": 64, "enable_prefix_caching": True, "stream_interval": 4})
# The world's proposer takes the changes by name.
FIRST = Candidate(values={"max_num_seqs": 4, "enable_prefix_caching": True})
SECOND = Candidate(values={"max_num_seqs": 64, "enable_prefix_caching": True})


def run(kill_at: int | None = None, after: bool = False, *, ladder: bool = True, **behaviours: Behaviour) -> World:
    steps = {BASELINE.hash: 400.0, FIRST.hash: 480.0, SECOND.hash: 1200.0, WINNER.hash: 1320.0}
    known = {name: Behaviour(tokens=tokens, ttft=0.3, start=0.5) for name, tokens in steps.items()}
    world = World(behaviours=known | behaviours, proposals=[WINNER], kill_at=kill_at, kill_after_effect=after)
    world.create(tuning(**QUICK, confirm={"finalists": 1, "minRounds": 3, "maxRounds": 4, "ladder": ladder}))
    for _ in range(2):
        try:
            world.run()
            break
        except Killed:
            world.clock.advance(2)
            world.kill_at = None
    return world


def rungs(world: World) -> list[TrialRecord]:
    return [t for t in world.trials_now("demo") if t.purpose is TrialPurpose.LADDER]


def test_each_change_is_measured_once_between_baseline_and_winner() -> None:
    world = run()
    record = world.record()
    assert (record.phase, record.winner) == (Phase.RECOMMENDED, WINNER)
    assert [t.candidate for t in rungs(world)] == [FIRST, SECOND]
    assert [t.round for t in rungs(world)] == [1, 2]
    assert record.finalists[0].gain is not None
    assert record.finalists[0].gain.rounds == 3  # the gain rests on the confirming rounds alone
    assert world.leftovers() == []
    found = measured_ladder(record.tuning.spec.objective, BASELINE, record.ladder, WINNER, world.trials_now("demo"))
    assert [rung.changes for rung in found] == [("enable_prefix_caching",), ("max_num_seqs",), ("stream_interval",)]
    assert [rung.gain for rung in found] == pytest.approx([0.2, 1.5, 0.1])
    assert [rung.so_far for rung in found] == pytest.approx([0.2, 2.0, 2.3])
    assert all(rung.low < rung.gain < rung.high for rung in found)
    page = render_report(record, world.trials_now("demo"))
    assert "Contributions, measured" in page
    assert "max_num_seqs 4 → 64" in page


def test_without_being_asked_for_nothing_more_is_run() -> None:
    world = run(ladder=False)
    assert world.record().phase is Phase.RECOMMENDED
    assert rungs(world) == []
    assert "Contributions, measured" not in render_report(world.record(), world.trials_now("demo"))


def test_a_step_that_fails_is_one_with_the_next_and_stops_nothing() -> None:
    world = run(**{FIRST.hash: Behaviour(start=0.5, failure=oom())})
    record, trials = world.record(), world.trials_now("demo")
    assert record.phase is Phase.RECOMMENDED
    assert [t.outcome for t in rungs(world)] == [TrialOutcome.INFEASIBLE, TrialOutcome.COMPLETE]
    found = measured_ladder(record.tuning.spec.objective, BASELINE, record.ladder, WINNER, trials)
    assert [rung.changes for rung in found] == [("enable_prefix_caching", "max_num_seqs"), ("stream_interval",)]


def test_with_nothing_between_measured_the_model_s_ladder_is_shown() -> None:
    broken = Behaviour(start=0.5, failure=oom())
    world = run(**{FIRST.hash: broken, SECOND.hash: broken})
    record, trials = world.record(), world.trials_now("demo")
    assert measured_ladder(record.tuning.spec.objective, BASELINE, record.ladder, WINNER, trials) == []
    assert "An additive model of every trial" in render_report(record, trials)


def test_its_trials_are_neither_of_the_search_nor_of_the_rounds() -> None:
    world = run(**{SECOND.hash: Behaviour(tokens=9000.0, ttft=0.3, start=0.5)})
    record = world.record()
    assert record.winner == WINNER
    page = render_report(record, world.trials_now("demo"))
    assert "9,000" not in page.split('id="trials"')[1].split("</section>")[0]


def test_the_phase_has_the_time_for_it() -> None:
    world = run()
    record = world.record().model_copy(update={"phase": Phase.CONFIRMING})
    without = record.model_copy(update={"ladder": ()})
    assert (deadline(record, []) or 0) > (deadline(without, []) or 0)


def test_killed_at_any_call_each_step_is_measured_once() -> None:
    whole = run()
    calls = [i for i, call in enumerate(whole.calls) if call == "spare.start"]
    for kill_at in range(calls[-2] - 3, calls[-1] + 5):
        for after in (False, True):
            world = run(kill_at, after)
            assert world.record().phase is Phase.RECOMMENDED
            assert [t.candidate for t in rungs(world)] == [FIRST, SECOND], (kill_at, after)
            assert world.leftovers() == []


def test_with_another_finalist_still_open_no_round_is_added_for_it() -> None:
    """The best is settled first: the ladder is of it, and then the tuning goes on."""
    known = {c.hash: Behaviour(tokens=t, ttft=0.3, start=0.5)
             for c, t in ((BASELINE, 400.0), (FIRST, 480.0), (SECOND, 1200.0), (WINNER, 1320.0))}  # fmt: skip
    noise = {SECOND.hash: (0.5, 1.6, 0.6, 1.5)}  # never settled
    world = World(behaviours=known, proposals=[WINNER, SECOND],
                  noise=lambda name, run: noise[name][run % 4] if name in noise and run > 1 else 1.0)  # fmt: skip
    world.create(tuning(**QUICK, confirm={"finalists": 2, "minRounds": 3, "maxRounds": 4, "ladder": True}))
    world.run()
    assert world.record().winner == WINNER
    assert world.record().phase is Phase.RECOMMENDED
    confirmed = [t for t in world.trials_now("demo") if t.purpose is TrialPurpose.CONFIRM]
    assert max(t.number for t in confirmed) < min(t.number for t in rungs(world))
