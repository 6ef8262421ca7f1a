"""Several trials at a time on as many spares: faster, as fair, within the same budgets, and nothing left over."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from tunings import tuning
from world import BASELINE, BEST, Behaviour, FakeLoad, FakeSpare, World, oom, port_in_use

from tunewright.controller import spares
from tunewright.controller.decisions import bound
from tunewright.controller.reconcile import reconcile
from tunewright.controller.searching import TROUBLE_WAIT
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.ports import LoadStatus, PortError

MANY = [Candidate(values={"max_num_seqs": n}) for n in (8, 12, 16, 24, 32, 48, 64, 96, 128)]


def waits(record: TuningRecord) -> bool:
    return record.phase is Phase.AWAITING_APPROVAL


def measuring(world: World) -> int:
    return sum(t.phase is TrialPhase.MEASURING for t in world.store.trials("demo"))


def world_with(count: int, **spec: object) -> World:
    made = World(proposals=list(MANY), spares=count)
    made.create(tuning(**{"budget": {"trials": 9}, "spare": {"parallelism": count}, **spec}))
    return made


def decide(world: World, action: str) -> None:
    world.store.decide("demo", bound(world.record(), action, at=world.clock.now(), by="ana"))  # type: ignore[arg-type]


def edit(world: World, **spec: object) -> None:
    world.store.save(world.record().model_copy(update={"tuning": tuning(**spec)}))


def alone_on_its_spare(trials: list[TrialRecord]) -> bool:
    """Whether no two trials held one spare at one time."""
    held = sorted((t.slot, t.created_at, t.finished_at or 0.0) for t in trials)
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(held))


def test_three_spares_find_the_same_winner_in_less_time_and_leave_nothing() -> None:
    took, winners = {}, {}
    for count in (1, 3):
        world = world_with(count)
        for number, candidate in enumerate(MANY):  # so that one is launched while another is measured
            world.behaviours[candidate.hash] = replace(world.behaviour(candidate), start=2.0 + number % 4)
        world.run(until=waits)
        searched = [t for t in world.store.trials("demo") if t.purpose == "search"]
        took[count] = max(t.finished_at or 0.0 for t in searched) - min(t.created_at for t in searched)
        winners[count] = world.record().winner
        assert sorted(t.candidate.hash for t in searched) == sorted(c.hash for c in MANY), "each once"
        assert alone_on_its_spare(world.store.trials("demo"))
        assert {(t.attempt, t.machine_faults) for t in world.store.trials("demo")} == {(1, 0)}, (
            "nobody disturbs another"
        )
        assert world.most_servers == count
        assert world.leftovers() == []
    assert winners == {1: BEST, 3: BEST}
    assert took[3] < took[1] / 2.5


def test_the_baseline_is_measured_alone() -> None:
    world = world_with(3)
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    assert world.most_servers == 1


def test_a_slower_gpu_favours_nobody() -> None:
    world = world_with(2)
    world.speed = lambda slot: 1.0 - 0.05 * slot
    world.proposals = [BEST]
    record = world.run(until=waits)
    rounds = [t for t in world.store.trials("demo") if t.purpose == "confirm"]
    for one in (t for t in rounds if t.round > 1):
        before = next(t for t in rounds if t.round == one.round - 1 and t.candidate == one.candidate)
        assert one.slot != before.slot
    assert {t.slot for t in rounds if t.round == 1} == {0, 1}, "side by side, each on its own"
    (finalist,) = record.finalists
    assert finalist.gain is not None
    assert finalist.gain.estimate.low < 2.0 < finalist.gain.estimate.high
    assert finalist.gain.estimate.value == pytest.approx(2.0, abs=0.06)


def test_on_unequal_gpus_an_equal_candidate_does_not_win() -> None:
    world = world_with(2)
    world.speed = lambda slot: 1.0 - 0.2 * slot
    world.proposals = [Candidate(values={"max_num_seqs": 5})]
    world.behaviours[world.proposals[0].hash] = Behaviour(tokens=404.0)
    record = world.run()
    assert record.phase is Phase.NO_IMPROVEMENT
    assert world.leftovers() == []


def test_a_round_of_more_members_than_spares_waits_for_a_free_one() -> None:
    world = world_with(2, confirm={"finalists": 3, "minRounds": 4, "maxRounds": 5, "minGain": "5%"})
    for number, candidate in enumerate(MANY):
        world.behaviours.setdefault(candidate.hash, Behaviour(tokens=1000.0 + number))
    world.run(until=waits)
    rounds = [t for t in world.store.trials("demo") if t.purpose == "confirm"]
    assert {t.round: sum(o.round == t.round for o in rounds) for t in rounds} == dict.fromkeys((1, 2, 3, 4), 4)
    by_member = {t.candidate.hash: [] for t in rounds}
    for one in rounds:
        by_member[one.candidate.hash].append(one.slot)
    assert all(sorted(slots) == [0, 0, 1, 1] for slots in by_member.values())
    for later in (2, 3, 4):  # a round is whole before the next begins
        assert max(t.finished_at for t in rounds if t.round < later) <= min(
            t.created_at for t in rounds if t.round == later
        )
    assert alone_on_its_spare(rounds)


@pytest.mark.parametrize(
    ("budget", "trials"),
    [({"trials": 4}, 4), ({"trials": 9, "gpuMinutes": 1.7}, 5), ({"trials": 9, "wallTime": "40s"}, 6)],
)
def test_budgets_hold_with_what_runs_counted(budget: dict[str, object], trials: int) -> None:
    """A trial takes some 15 s here; the baseline's counts to the GPU minutes too."""
    world = world_with(3, budget=budget)
    world.run(until=lambda r: r.phase is Phase.CONFIRMING)
    ran = world.store.trials("demo")
    searched = [t for t in ran if t.purpose is TrialPurpose.SEARCH]
    assert len(searched) == trials
    assert sum(t.gpu_seconds for t in ran) <= 1.7 * 60 or "gpuMinutes" not in budget
    assert max(t.finished_at or 0.0 for t in searched) - (world.record().search_since or 0.0) <= 40


@pytest.mark.parametrize("outages", [0, 2])
@pytest.mark.parametrize("how", ["abort", "suspend", "spec", "deadline"])
@pytest.mark.parametrize("phase", [Phase.SEARCHING, Phase.CONFIRMING])
def test_whatever_ends_a_search_ends_every_trial(how: str, phase: Phase, outages: int) -> None:
    world = world_with(3)
    world.run(until=lambda r: r.phase is phase and measuring(world) == 3)
    attempts = {t.id for t in world.store.trials("demo") if t.phase is TrialPhase.MEASURING}
    if how == "spec":
        edit(world, budget={"trials": 9}, spare={"parallelism": 3}, slo={"ttftP95": "1s"})
    elif how == "deadline":
        world.clock.advance(1e6)
    else:
        decide(world, how)
    world.outages = {"spare.cancel": outages}
    context = world.context()
    for number in range(outages):
        assert (reconcile("demo", context), world.record().errors) == (0.5 * 2**number, number + 1)
        assert "spare.cancel does not answer" in world.record().sentence
    reconcile("demo", context)
    put_back = [t for t in world.store.trials("demo") if t.id in attempts]
    assert {(t.phase, t.attempt) for t in put_back} == {(TrialPhase.PENDING, 2)}
    assert not [name for name, held in world.servers.items() if not held[2]], "none may go on"
    for _ in range(8):
        world.clock.advance(reconcile("demo", context) or 1.0)
    assert not {f"{name}-1" for name in attempts} & set(world.leftovers())
    assert world.leftovers() == [] or how == "spec", "anew, the baseline may run already"
    if how == "suspend":
        decide(world, "resume")
        world.run(until=waits)
        assert world.leftovers() == []


def test_a_spare_that_can_not_be_used_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(fake: FakeSpare, trial_id: str, candidate: Candidate, slot: int = 0) -> None:
        if slot == 1:
            raise PortError("GPU 1 has 60000 of 80000 MiB in use")
        honest(fake, trial_id, candidate, slot)

    honest = FakeSpare.start
    world = world_with(3)
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    monkeypatch.setattr(FakeSpare, "start", start)
    told: set[str] = set()
    world.run(until=lambda r: told.add(r.sentence) or waits(r))  # type: ignore[func-returns-value]
    trials = world.store.trials("demo")
    assert sum(t.outcome is TrialOutcome.COMPLETE and t.purpose == "search" for t in trials) == 9
    assert {t.slot for t in trials} == {0, 2}, "what could not start moved on"
    assert {t.machine_faults for t in trials} == {0}
    assert any("while other trials go on: GPU 1 has 60000 of 80000 MiB in use" in sentence for sentence in told)
    assert world.record().winner == BEST
    assert world.leftovers() == []


def test_while_others_run_trouble_is_looked_at_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(2)
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    world.run(until=lambda r: measuring(world) == 2)
    broken = world.store.trials("demo")[-1]
    honest = FakeLoad.poll

    def poll(fake: FakeLoad, run_id: str) -> LoadStatus:
        if run_id.startswith(broken.id):
            raise PortError("its node does not answer")
        return honest(fake, run_id)

    monkeypatch.setattr(FakeLoad, "poll", poll)
    context = world.context()
    waited = []
    for _ in range(12):
        waited.append(reconcile("demo", context))
        world.clock.advance(0.1)
    assert all(again is not None and again <= TROUBLE_WAIT for again in waited)
    assert world.record().errors >= 10


def test_a_spare_that_spoils_trials_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(3)
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    spoil(monkeypatch, lambda world, slot: slot == 1)
    told: set[str] = set()
    world.run(until=lambda r: told.add(r.sentence) or waits(r))  # type: ignore[func-returns-value]
    failed = [t for t in world.store.trials("demo") if t.outcome is TrialOutcome.FAILED]
    assert [t.slot for t in failed] == [1], "one candidate, not one after the other"
    assert any("Spare 1 is left out for a while: the measurement is void: late." in sentence for sentence in told)
    assert world.record().winner == BEST
    assert {t.slot for t in world.store.trials("demo") if t.purpose == "confirm"} == {0, 2}


def test_a_machine_that_bears_one_load_test_alone_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(3)
    spoil(monkeypatch, lambda world, slot: len(world.loads) > 1)
    record = world.run(until=lambda r: waits(r) or r.phase is Phase.FAILED)
    assert record.phase is Phase.AWAITING_APPROVAL, record.sentence


def spoil(monkeypatch: pytest.MonkeyPatch, when: Callable[[World, int], bool]) -> None:
    """Measurements are void when so."""

    def poll(fake: FakeLoad, run_id: str) -> LoadStatus:
        status, held = honest(fake, run_id), fake.world.servers.get(run_id)
        if status.measurement is None or held is None or not when(fake.world, held[3]):
            return status
        return replace(status, measurement=status.measurement.model_copy(update={"void": ("late",)}))

    honest = FakeLoad.poll
    monkeypatch.setattr(FakeLoad, "poll", poll)


def test_one_candidate_s_fault_leaves_its_spare_in_use() -> None:
    world = world_with(3)
    world.behaviours[MANY[1].hash] = Behaviour(failure=oom())
    world.behaviours[MANY[2].hash] = Behaviour(failure=port_in_use())
    world.run(until=waits)
    trials = world.store.trials("demo")
    assert {t.outcome for t in trials if t.candidate == MANY[1]} == {TrialOutcome.INFEASIBLE}
    assert {t.machine_faults for t in trials if t.candidate == MANY[2]} == {3}
    assert sum(t.slot == 1 and t.purpose == "search" for t in trials) > 1


def test_a_rested_spare_is_used_again() -> None:
    def ended(number: int, slot: int, outcome: TrialOutcome, at: float) -> TrialRecord:
        return TrialRecord(
            id=str(number), number=number, purpose=TrialPurpose.SEARCH, candidate=BASELINE, slot=slot,
            phase=TrialPhase.DONE, outcome=outcome, finished_at=at,
        )  # fmt: skip

    good, bad = TrialOutcome.COMPLETE, TrialOutcome.FAILED
    trials = [ended(0, 0, good, 10.0), ended(1, 1, bad, 20.0)]
    assert spares.sound(trials, 2, 30.0) == [0]
    assert spares.sound(trials, 2, 20.0 + spares.RESTS) == [0, 1]
    assert spares.sound([*trials, ended(2, 1, good, 40.0)], 2, 50.0) == [0, 1]
    assert spares.sound([*trials, ended(2, 0, bad, 40.0)], 2, 50.0) == [1], "who failed first, alone"
    assert spares.sound([ended(0, 0, bad, 1.0)], 1, 2.0) == [0]
    assert spares.sound(trials, 1, 30.0) == [0], "what ran on a spare that is no more does not matter"


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_spares_by_an_edit_take_their_trials_over_and_nothing_starts_anew(count: int) -> None:
    world = world_with(3)
    world.run(until=lambda r: r.phase is Phase.SEARCHING and measuring(world) == 3)
    before = [t.id for t in world.store.trials("demo")]
    edit(world, budget={"trials": 9}, spare={"parallelism": count})
    world.spares = count
    context = world.context()
    for _ in range(3):
        reconcile("demo", context)
        world.clock.advance(0.1)
    assert {slot for _, _, ended, slot in world.servers.values() if not ended} <= set(range(count))
    told: set[str] = set()
    world.run(until=lambda r: told.add(r.sentence) or waits(r))  # type: ignore[func-returns-value]
    assert not [sentence for sentence in told if "Trying again" in sentence], "they take their turns"
    trials = world.store.trials("demo")
    assert [t.id for t in trials][: len(before)] == before
    assert Phase.PENDING not in [change.phase for change in world.record().history]
    assert {t.slot for t in trials if t.purpose == "confirm"} == set(range(count))
    assert alone_on_its_spare([t for t in trials if t.id not in before])
    assert world.record().winner == BEST
    assert world.leftovers() == []


def test_more_spares_by_an_edit_are_used_at_once() -> None:
    world = world_with(1)
    world.run(until=lambda r: r.phase is Phase.SEARCHING and measuring(world) == 1)
    edit(world, budget={"trials": 9}, spare={"parallelism": 3})
    world.spares = 3
    world.run(until=lambda r: measuring(world) == 3)
    world.run(until=waits)
    assert world.leftovers() == []
