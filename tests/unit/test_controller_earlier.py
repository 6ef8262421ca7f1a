"""What earlier tunings of the same target measured seeds the search, and is no result of it."""

import pytest
from tunings import tuning
from world import BASELINE, BEST, Behaviour, Killed, World

from tunewright.controller.earlier import MOST, target_key, with_own
from tunewright.controller.reconcile import reconcile
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TERMINAL, Phase
from tunewright.domain.state import TrialOutcome, TrialPurpose, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Target, Tuning

QUICK = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "promotion": {"mode": "recommend"},
}


def named(name: str, **spec) -> Tuning:
    made = tuning(**(QUICK | spec))
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"name": name})})


def edited(world: World, **spec) -> None:
    record = world.record()
    world.store.save(update(record, tuning=tuning(**(QUICK | spec))))


def searching(record: TuningRecord) -> bool:
    return record.phase is Phase.SEARCHING and record.spec_hash == record.tuning.spec.spec_hash


def test_a_changed_spec_starts_anew_with_what_was_measured_as_a_prior_judged_by_the_new_one() -> None:
    world = World()
    world.create(named("demo"))
    world.run()
    before = world.trials_now("demo")
    edited(world, objective={"minimize": "ttftP95"}, slo={"ttftP95": "500ms"})
    record = world.run(until=searching)
    seen = {one.candidate.hash: one for one in record.earlier}
    assert set(seen) == {t.candidate.hash for t in before}
    assert {one.trial for one in record.earlier} == {t.id for t in before}
    assert (seen[BEST.hash].objective, seen[BASELINE.hash].objective) == (-0.3, -0.8)
    assert seen[BASELINE.hash].slo_margin == pytest.approx(-0.6)
    # Never as a result: the trials of this run are its own alone.
    assert [t.purpose for t in world.trials_now("demo")] == [TrialPurpose.BASELINE]
    assert world.run().phase in TERMINAL
    searched = [t.candidate for t in world.trials_now("demo") if t.purpose is TrialPurpose.SEARCH]
    assert BEST in searched  # measured anew before it may be chosen
    edited(world, objective={"minimize": "ttftP95"}, slo={"ttftP95": "600ms"})
    third = world.run(until=searching)
    assert len({one.tuning for one in third.earlier}) == 1  # the first run can't be judged by this SLO any more
    edited(world, objective={"minimize": "ttftP95"}, slo={"ttftP95": "600ms"}, search={"seed": 2})
    fourth = world.run(until=searching)
    assert len({one.tuning for one in fourth.earlier}) == 2


def test_other_tunings_of_the_same_model_are_found_and_of_others_not() -> None:
    world = World()
    for name, model in (("other", "m"), ("foreign", "another-model")):
        command = ["vllm", "serve", model, "--max-num-seqs", "4", "--port", "{port}"]
        world.create(named(name, target={"command": command, "replicas": 2}))
        world.run(name)
    world.create(named("demo"))
    record = world.run(until=searching)
    assert {one.tuning.split("/")[0] for one in record.earlier} == {"other"}
    assert {one.version for one in record.earlier} == {"0.32.0+simulated.demo"}


def test_what_the_machine_spoilt_is_no_prior_and_what_failed_by_itself_is() -> None:
    world = World()
    world.create(named("demo"))
    record = world.run()
    trials = world.trials_now("demo")
    spoilt = [update(t, outcome=TrialOutcome.FAILED) for t in trials]
    assert with_own(record, spoilt).earlier == ()
    running = [update(t, finished_at=None) for t in trials]
    assert with_own(record, running).earlier == ()
    many = [update(trials[0], id=f"{n:03d}-x", finished_at=float(n + 1)) for n in range(MOST + 20)]
    kept = with_own(record, many).earlier
    assert [one.at for one in kept] == [float(n + 1) for n in range(20, MOST + 20)]  # the latest


def test_another_model_starts_from_nothing() -> None:
    world = World()
    world.create(named("demo"))
    world.run()
    command = ["vllm", "serve", "another", "--max-num-seqs", "4", "--port", "{port}"]
    edited(world, target={"command": command, "replicas": 2})
    assert world.run(until=searching).earlier == ()


def test_what_is_tuned_is_named_by_deployment_or_model() -> None:
    def of(**target) -> str:
        return target_key(Target.model_validate(target))

    serve = ["vllm", "serve", "m", "--port", "{port}"]
    assert of(command=serve) == of(command=[*serve, "--max-num-seqs", "8"])
    assert of(command=serve) != of(command=["vllm", "serve", "n", "--port", "{port}"])
    assert of(deployment="a") != of(deployment="b")


def test_killed_while_it_is_kept_nothing_is_lost() -> None:
    def anew(kill_at: int | None, after: bool) -> tuple[World, set[str]]:
        world = World(behaviours={BEST.hash: Behaviour(tokens=1200.0, ttft=0.3, start=0.5)}, proposals=[BEST])
        world.create(named("demo"))
        world.run()
        ids = {t.id for t in world.trials_now("demo")}
        edited(world, search={"seed": 7})
        world.kill_at = None if kill_at is None else len(world.calls) + kill_at
        world.kill_after_effect = after
        for _ in range(2):
            try:
                world.run(until=searching)
                return world, ids
            except Killed:
                world.kill_at = None
        raise AssertionError("killed twice")

    for kill_at in range(1, 25):
        for after in (False, True):
            world, ids = anew(kill_at, after)
            assert {one.trial for one in world.record().earlier} == ids, (kill_at, after)


def test_the_proposer_is_told_of_them() -> None:
    world = World()
    world.create(named("demo"))
    world.run()
    edited(world, search={"seed": 3})
    world.run(until=searching)
    context, told = world.context(), []
    propose = context.proposer.propose

    def seen(baseline, trials, profile, earlier=()):
        told.append(earlier)
        return propose(baseline, trials, profile)

    context.proposer.propose = seen  # type: ignore[method-assign]
    reconcile("demo", context)
    assert told == [world.record().earlier]
    assert Candidate(values={"max_num_seqs": 8}).hash in {one.candidate.hash for one in told[0]}
