"""The whole way on a fake clock, told in steps a person would follow."""

from dataclasses import replace

import pytest
from tunings import tuning
from world import BASELINE, BEST, THEIRS, Behaviour, FakeLoad, FakeSpare, World, oom, port_in_use

from tunewright.controller.decisions import bound
from tunewright.controller.reconcile import reconcile
from tunewright.domain.answers import Answer, QualityPrompt
from tunewright.domain.candidate import Candidate
from tunewright.domain.load import LoadFile
from tunewright.domain.phases import TOUCHES_PRODUCTION, Phase
from tunewright.domain.profile import Source
from tunewright.domain.state import Decision, TrialPhase, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Tuning
from tunewright.ports import LoadRequest, LoadStatus, PortError, Refused


def waits(record: TuningRecord) -> bool:
    return record.phase is Phase.AWAITING_APPROVAL


def approve(world: World, by: str = "ana") -> Decision:
    decision = bound(world.record(), "approve", at=world.clock.now(), by=by)
    world.store.decide("demo", decision)
    return decision


def decide(world: World, action: str, **fields: str) -> None:
    decision = bound(world.record(), action, at=world.clock.now(), by="ana")  # type: ignore[arg-type]
    world.store.decide("demo", decision.model_copy(update=fields))


def reseed(world: World) -> None:
    """A person edits the spec in what results depend on."""
    record = world.record()
    edited = record.tuning.model_dump(mode="json", by_alias=True)
    edited["spec"]["load"]["seed"] = 9
    world.store.save(update(record, tuning=Tuning.model_validate(edited)))


@pytest.fixture
def world() -> World:
    world = World()
    world.create(tuning())
    return world


def test_goes_from_watched_to_promoted(world: World) -> None:
    world.run(until=waits)
    assert not [c for c in world.calls if c == "target.apply"], "production was touched before the approval"
    approve(world)
    record = world.run()
    assert record.phase is Phase.PROMOTED
    assert world.stable.hash == BEST.hash
    assert [s.candidate.hash for s in world.fleet] == [BEST.hash] * 2
    assert world.canary is None
    assert world.leftovers() == []
    phases = [change.phase for change in record.history]
    assert phases == [
        Phase.PROFILING,
        Phase.BASELINING,
        Phase.SEARCHING,
        Phase.CONFIRMING,
        Phase.AWAITING_APPROVAL,
        Phase.CANARY,
        Phase.ROLLING,
        Phase.WATCHING,
        Phase.PROMOTED,
    ]


def test_the_gain_comes_from_the_confirming_runs_alone(world: World) -> None:
    # the first run of BEST (the search's) is three times too lucky
    world.noise = lambda name, run: 3.0 if (name, run) == (BEST.hash, 1) else 1.0 + 0.01 * (run % 3)
    record = world.run(until=waits)
    winner = next(f for f in record.finalists if f.candidate.hash == BEST.hash)
    assert winner.gain is not None
    assert winner.gain.rounds >= 3
    assert winner.gain.estimate.value == pytest.approx(2.0, abs=0.1)


def test_numbers_are_labelled_by_what_the_spare_knows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load test sees `/version` alone, which does not tell a CPU; the spare has read the log."""
    poll = FakeSpare.poll
    monkeypatch.setattr(FakeSpare, "poll", lambda self, name: replace(poll(self, name), version="0.32.0+cpu"))
    world.run(until=waits)
    measured = [t.measurement for t in world.store.trials("demo") if t.measurement is not None]
    assert {(m.source, m.vllm_version) for m in measured} == {(Source.CPU, "0.32.0+cpu")}


def test_an_equal_candidate_is_no_improvement() -> None:
    world = World(proposals=[Candidate(values={"max_num_seqs": 5})])
    world.behaviours[world.proposals[0].hash] = Behaviour(tokens=404.0)
    world.noise = lambda _name, run: 1.0 + 0.02 * ((run * 7) % 5 - 2)
    world.create(tuning())
    record = world.run()
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "target.apply" not in world.calls


def test_nothing_better_names_what_was_tried() -> None:
    world = World(proposals=[Candidate(values={"max_num_seqs": n}) for n in (5, 6)])
    for candidate in world.proposals:
        world.behaviours[candidate.hash] = Behaviour(tokens=300.0)
    world.create(tuning())
    record = world.run()
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "None of 2 candidates" in record.sentence


def test_an_slo_that_nothing_meets_is_infeasible_with_the_nearest() -> None:
    world = World()
    world.create(tuning(slo={"ttftP95": "100ms"}))
    record = world.run()
    assert record.phase is Phase.INFEASIBLE
    assert world.proposals[0].hash in record.sentence
    assert "misses its worst bound by 100%" in record.sentence


def test_a_baseline_that_misses_the_slo_is_beaten_by_one_that_meets_it() -> None:
    world = World(proposals=[Candidate(values={"max_num_seqs": 5})])
    slower_but_in_time = Behaviour(tokens=390.0, ttft=0.3)
    world.behaviours[world.proposals[0].hash] = slower_but_in_time
    world.create(tuning(slo={"ttftP95": "500ms"}))
    record = world.run(until=waits)
    assert record.winner == world.proposals[0]
    assert "which the baseline missed" in record.sentence
    assert "not settled" not in record.sentence


def test_a_candidate_that_runs_out_of_memory_costs_one_start_and_is_told(world: World) -> None:
    world.behaviours[world.proposals[0].hash] = Behaviour(failure=oom())
    world.run(until=waits)
    first = next(t for t in world.store.trials("demo") if t.candidate == world.proposals[0])
    assert (first.attempt, first.outcome) == (1, "infeasible")
    assert first.failure is not None
    assert "out of memory" in first.failure.cause


def test_memory_is_judged_under_load_not_at_health(world: World) -> None:
    world.behaviours[world.proposals[0].hash] = Behaviour(failure=oom(), fails_under_load=True)
    world.run(until=waits)
    first = next(t for t in world.store.trials("demo") if t.candidate == world.proposals[0])
    assert first.outcome == "infeasible"
    assert first.load_started_at is not None


def test_a_fault_of_the_machine_is_tried_again_and_never_for_ever(world: World) -> None:
    world.behaviours[world.proposals[0].hash] = Behaviour(failure=port_in_use())
    world.run(until=waits)
    first = next(t for t in world.store.trials("demo") if t.candidate == world.proposals[0])
    assert (first.machine_faults, first.outcome) == (3, "failed")


def void_from(world: World, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    """From that phase on, whatever the load test measures is void."""

    def poll(fake: FakeLoad, run_id: str) -> LoadStatus:
        status = honest(fake, run_id)
        if world.record().phase is not phase or status.measurement is None:
            return status
        return replace(status, measurement=status.measurement.model_copy(update={"void": ("the generator was late",)}))

    honest = FakeLoad.poll
    monkeypatch.setattr(FakeLoad, "poll", poll)


def test_void_measurements_of_a_finalist_are_not_called_a_missed_slo(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    void_from(world, Phase.CONFIRMING, monkeypatch)
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "could not be measured" in record.sentence
    assert "by the machine's fault (the measurement is void: the generator was late)" in record.sentence
    assert "SLO" not in record.sentence
    assert world.leftovers() == []


def test_one_spoilt_round_is_run_again_and_the_finalist_wins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(fake: FakeLoad, run_id: str) -> LoadStatus:
        status = honest(fake, run_id)
        confirming = world.record().phase is Phase.CONFIRMING
        first = [t for t in world.store.trials("demo") if t.purpose == "confirm"][:1]
        if confirming and status.measurement and first and run_id.startswith(first[0].id):
            return replace(status, measurement=status.measurement.model_copy(update={"void": ("late",)}))
        return status

    honest = FakeLoad.poll
    monkeypatch.setattr(FakeLoad, "poll", poll)
    record = world.run(until=waits)
    spoilt = [t for t in world.store.trials("demo") if t.outcome == "failed"]
    assert [t.round for t in spoilt] == [1]
    assert record.winner == BEST


def test_a_search_spoilt_by_the_machine_is_not_called_infeasible(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    void_from(world, Phase.SEARCHING, monkeypatch)
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "None of 2 candidates could be measured, by the machine's fault" in record.sentence


def test_no_completions_are_a_failure_not_a_number(world: World) -> None:
    world.behaviours[world.proposals[0].hash] = Behaviour(tokens=0.0)
    world.run(until=waits)
    first = next(t for t in world.store.trials("demo") if t.candidate == world.proposals[0])
    assert first.outcome == "infeasible"


def test_mode_recommend_never_touches_production() -> None:
    world = World()
    world.create(tuning(promotion={"mode": "recommend"}))
    record = world.run()
    assert record.phase is Phase.RECOMMENDED
    assert record.winner == BEST
    assert "target.apply" not in world.calls


def test_without_an_slo_a_regression_after_the_roll_goes_back_by_itself() -> None:
    """Nothing but the values before the roll says that it became worse."""
    world = World()
    world.create(tuning(slo={}, promotion=tuning().spec.promotion.model_dump(mode="json") | {"mode": "auto"}))
    record = world.run(until=lambda r: r.phase is Phase.WATCHING)
    assert record.promotion is not None
    assert record.promotion.before
    world.behaviours[BEST.hash] = replace(world.behaviour(BEST), ttft=2.0)
    record = world.run()
    assert record.phase is Phase.ROLLED_BACK
    assert "ttft mean 2 s against 0.8 s before the roll, surely worse" in record.sentence


def held_by_others(world: World) -> TuningRecord:
    """Somebody else changed production in the middle of the roll, and it is to go back."""
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is Phase.ROLLING)
    world.intrude(THEIRS)
    decide(world, "abort")
    return world.run(until=lambda r: "is held" in r.sentence)


def test_going_back_that_somebody_else_holds_for_ever_comes_to_an_end(world: World) -> None:
    held = held_by_others(world)
    assert held.phase is Phase.ROLLING_BACK
    assert held.foreign_since is not None
    record = world.run(until=lambda r: r.phase is not Phase.ROLLING_BACK)
    assert record.phase is Phase.FAILED
    assert record.phase_since - held.foreign_since >= 3600
    assert "argocd changed the arguments to {'max_num_seqs': 17}" in record.sentence
    assert "runs 2 × neither" in record.sentence
    assert (world.let_go, world.canary) == (1, None)
    applied = len(world.plans)
    world.run()
    assert len(world.plans) == applied, "what is theirs is left alone"
    assert {server.candidate.hash for server in world.fleet} == {THEIRS.hash}


def test_somebody_who_gives_production_back_in_time_costs_nothing(world: World) -> None:
    held = held_by_others(world)
    world.clock.advance(3000)
    world.run(until=lambda r: r.foreign_since is not None)
    world.intrude(None)
    assert world.run().phase is Phase.ROLLED_BACK
    assert world.record().foreign_since is None
    assert held.foreign_since is not None
    assert world.let_go == 0


STAYS = "the share by HTTPRoute chat needs more rights"


def test_a_canary_that_can_not_be_taken_away_holds_the_way_back_to_its_end_and_goes_when_it_can(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.promotion is not None and r.promotion.canary_since is not None)
    world.canary_stays = STAYS
    decide(world, "abort")
    held = world.run(until=lambda r: f"is held at 2 of 2 replicas: {STAYS}" in r.sentence)
    assert held.phase is Phase.ROLLING_BACK
    record = world.run(until=lambda r: r.phase is not Phase.ROLLING_BACK)
    assert record.phase is Phase.FAILED
    assert f"{STAYS}. All replicas run the baseline; the canary is taken away when that has changed" in record.sentence
    context = world.context()
    for _ in range(3):
        assert reconcile("demo", context), "it is looked at again"
        assert world.canary is not None
    world.canary_stays = ""
    reconcile("demo", context)
    assert world.canary is None
    assert reconcile("demo", context) is None
    assert world.record().sentence == record.sentence


def test_a_new_spec_starts_once_the_canary_of_the_rollout_before_is_gone(world: World) -> None:
    """It was forgotten, and after the whole search the next rollout stumbled over it."""
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.promotion is not None and r.promotion.canary_since is not None)
    world.canary_stays = STAYS
    decide(world, "abort")
    failed = world.run(until=lambda r: r.phase is Phase.FAILED)
    reseed(world)
    context = world.context()
    for _ in range(3):
        assert reconcile("demo", context), "it is looked at again"
    held = world.record()
    assert held.phase is Phase.FAILED
    assert (
        held.sentence
        == f"The spec changed: starts anew once the canary of the rollout before is gone. {failed.sentence}"
    )
    world.canary_stays = ""
    record = world.run(until=lambda r: r.phase is Phase.PENDING)
    assert world.canary is None
    assert record.promotion is None


def test_a_new_spec_starts_without_a_target_too_and_says_so(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.promotion is not None and r.promotion.canary_since is not None)
    world.target_is_gone = True
    world.run(until=lambda r: r.phase is Phase.FAILED)
    reseed(world)
    world.run(until=lambda r: r.spec_hash == r.tuning.spec.spec_hash)
    assert world.record().phase is Phase.PENDING


def test_a_canary_that_can_be_taken_away_in_time_costs_nothing(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.promotion is not None and r.promotion.canary_since is not None)
    world.canary_stays = STAYS
    decide(world, "abort")
    world.run(until=lambda r: "is held" in r.sentence)
    world.clock.advance(3000)
    world.canary_stays = ""
    assert world.run().phase is Phase.ROLLED_BACK
    assert world.canary is None
    assert world.record().foreign == ""


@pytest.mark.parametrize("phase", [Phase.CANARY, Phase.ROLLING, Phase.WATCHING, Phase.ROLLING_BACK])
def test_a_target_that_is_deleted_in_the_middle_is_named_and_comes_to_an_end(world: World, phase: Phase) -> None:
    """Going back spun without a pause and without an end."""
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is (phase if phase is not Phase.ROLLING_BACK else Phase.ROLLING))
    if phase is Phase.ROLLING_BACK:
        decide(world, "abort")
        world.run(until=lambda r: r.phase is phase)
    world.target_is_gone = True
    before = len(world.calls)
    record = world.run(until=lambda r: r.phase is Phase.FAILED)
    assert 600 < world.calls[before:].count("target.apply") < 800, "each five seconds, not all the time"
    assert "Gave up going back" in record.sentence
    assert "there is no Deployment vllm" in record.sentence


@pytest.mark.parametrize("end", [Phase.PROMOTED, Phase.ROLLED_BACK])
def test_a_target_that_is_deleted_afterwards_is_nobodys_alarm(world: World, end: Phase) -> None:
    """A promotion turned into a rollback for it, and what was rolled back spun."""
    world.run(until=waits)
    approve(world)
    if end is Phase.ROLLED_BACK:
        world.run(until=lambda r: r.phase is Phase.CANARY)
        decide(world, "abort")
    assert world.run().phase is end
    world.target_is_gone = True
    context = world.context()
    for _ in range(3):
        assert reconcile("demo", context) is None
    record = world.record()
    assert record.phase is end
    assert "there is no Deployment vllm" in record.foreign
    decide(world, "suspend")
    reconcile("demo", context)


def test_nothing_is_promoted_that_somebody_else_changed_meanwhile(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is Phase.WATCHING)
    world.intrude(THEIRS)
    held = world.run(until=lambda r: "Not promoted while" in r.sentence)
    assert held.phase is Phase.WATCHING
    assert world.run().phase is Phase.FAILED
    assert Phase.PROMOTED not in [change.phase for change in world.record().history]


def test_mode_auto_asks_nobody() -> None:
    world = World()
    promotion = tuning().spec.promotion.model_dump(mode="json") | {"mode": "auto"}
    world.create(tuning(promotion=promotion))
    assert world.run().phase is Phase.PROMOTED


def test_a_lossy_winner_must_pass_the_quality_gate(world: World) -> None:
    world.lossy = ("kv_cache_dtype",)
    assert world.run(until=lambda r: waits(r) or r.phase is Phase.NO_IMPROVEMENT).phase is Phase.AWAITING_APPROVAL


def other_answers(candidate: Candidate, _run: int, count: int) -> list[Answer]:
    """What a server says whose answers change with the knobs."""
    words = ("the", "same" if candidate == BASELINE else "other", "answer")
    return [Answer(prompt=f"p{n}", text=" ".join(words), tokens=words) for n in range(count)]


def ended_or_waits(record: TuningRecord) -> bool:
    return waits(record) or record.phase is Phase.NO_IMPROVEMENT


def test_a_lossy_winner_that_changes_answers_is_turned_down(world: World) -> None:
    world.lossy, world.answers = ("kv_cache_dtype",), other_answers
    record = world.run(until=ended_or_waits)
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "does not keep the answers: 33.3% of answer tokens agree" in record.sentence
    assert "it changes what can change answers (kv_cache_dtype)" in record.sentence


def test_a_lossless_winner_is_not_asked(world: World) -> None:
    world.answers = other_answers
    assert world.run(until=ended_or_waits).phase is Phase.AWAITING_APPROVAL
    assert not any(trial.answers for trial in world.trials_now("demo"))


def test_new_speculation_has_to_prove_that_it_is_lossless() -> None:
    drafts = Candidate(values={"speculative_method": "ngram", "num_speculative_tokens": 2})
    for answers, phase in ((other_answers, Phase.NO_IMPROVEMENT), (None, Phase.AWAITING_APPROVAL)):
        world = World(behaviours={drafts.hash: Behaviour(tokens=1500.0, ttft=0.3)}, proposals=[drafts])
        world.answers = answers or world.answers
        world.create(tuning())
        record = world.run(until=ended_or_waits)
        assert record.phase is phase, record.sentence
        assert answers is None or "its speculation (ngram) is new" in record.sentence


def test_every_candidate_is_checked_where_the_tuning_says_so() -> None:
    world = World()
    world.answers = other_answers
    world.create(tuning(quality={"always": True}))
    record = world.run(until=ended_or_waits)
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "quality.always is set" in record.sentence


def test_three_starts_of_each_side_answer_and_no_more() -> None:
    world = World(noise=lambda _hash, run: 1.0 + 0.4 * (run % 2))
    world.lossy = ("kv_cache_dtype",)
    world.create(tuning(confirm={"finalists": 1, "minRounds": 5, "maxRounds": 6, "minGain": "5%"}))
    world.run(until=ended_or_waits)
    answered = [t.candidate.hash for t in world.trials_now("demo") if t.answers]
    assert (answered.count(BASELINE.hash), answered.count(BEST.hash)) == (3, 3)
    assert len([t for t in world.trials_now("demo") if t.purpose == "confirm"]) >= 10


def test_a_start_that_is_held_after_it_answered_answers_again() -> None:
    world = World()
    world.lossy = ("kv_cache_dtype",)
    world.create(tuning(confirm={"finalists": 1, "minRounds": 3, "maxRounds": 4, "minGain": "5%"}))

    def third_answered(_record: TuningRecord) -> bool:
        given = [t for t in world.trials_now("demo") if t.answers]
        return len(given) == 6 and given[-1].phase is TrialPhase.STOPPING

    assert third_answered(world.run(until=third_answered))
    decide(world, "suspend")
    world.run(until=lambda r: r.suspended_since is not None)
    decide(world, "resume")
    assert world.run(until=ended_or_waits).phase is Phase.AWAITING_APPROVAL
    assert len([t for t in world.trials_now("demo") if t.answers]) == 6


def test_the_user_s_prompts_are_sent(world: World) -> None:
    world.lossy, world.prompts = ("kv_cache_dtype",), (QualityPrompt(prompt="a"), QualityPrompt(prompt="b"))
    world.run(until=waits)
    assert {len(t.answers) for t in world.trials_now("demo") if t.answers} == {2}


def test_bad_prompts_end_it_before_anything_is_started(world: World) -> None:
    world.prompts = Refused("quality.promptsFile: line 1: is no JSON")
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "line 1: is no JSON" in record.sentence
    assert not {"spare.start", "target.apply", "load.start"} & set(world.calls)


OF_TEXTS = tuning(
    target={"deployment": "chat"}, metrics={"prometheus": "http://p:9090"}, load={"promptsConfigMap": "mine"}
)
KEPT = LoadFile(config_map="mine", key="prompts.jsonl", digest="a" * 64, path="/there/prompts.jsonl", told="2 prompts")


def test_what_a_config_map_held_at_the_beginning_is_what_every_load_test_reads() -> None:
    world = World()
    world.load_file = KEPT
    world.create(OF_TEXTS)
    world.run(until=lambda r: r.load_file is not None)
    world.load_file = KEPT.model_copy(update={"digest": "b" * 64})  # an edit in mid-tuning
    sent: list[LoadRequest] = []
    world.run(until=lambda r: waits(r) or bool(sent.extend(request for request, _ in world.loads.values())))
    assert {(request.file, request.workload.prompts_file) for request in sent} == {(KEPT, KEPT.path)}
    assert world.calls.count("loadFile.keep") == 1
    reseed(world)
    record = world.run(until=lambda r: r.load_file not in (None, KEPT))
    assert record.phase is Phase.PENDING, "a tuning that starts anew takes what is there then"


def test_a_config_map_that_is_not_there_is_waited_for_until_the_deadline() -> None:
    world = World()
    world.load_file = PortError("load.promptsConfigMap: there is no ConfigMap mine in namespace team")
    world.create(OF_TEXTS)
    record = world.run(until=lambda r: r.errors > 3)
    assert "there is no ConfigMap mine" in record.sentence
    world.load_file = KEPT
    assert world.run(until=lambda r: r.phase is Phase.PROFILING).load_file == KEPT
    world = World()
    world.load_file = PortError("there is no ConfigMap mine")
    world.create(OF_TEXTS)
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "there is no ConfigMap mine" in record.sentence
    assert not {"spare.start", "target.apply", "load.start"} & set(world.calls)


def test_a_config_map_of_no_use_ends_it_before_anything_is_started(world: World) -> None:
    world.load_file = Refused("load.trace.configMap: mine/trace.jsonl:4: this is no JSON")
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "trace.jsonl:4: this is no JSON" in record.sentence
    assert not {"spare.start", "target.apply", "load.start"} & set(world.calls)


@pytest.mark.parametrize("field", ["candidate", "spec", "baseline"])
def test_an_approval_of_something_else_has_no_effect(world: World, field: str) -> None:
    world.run(until=waits)
    decide(world, "approve", **{field: "0000000000"})
    record = world.run(until=lambda r: "no effect" in r.sentence)
    assert record.phase is Phase.AWAITING_APPROVAL
    assert f"{field} is" in record.sentence
    assert "target.apply" not in world.calls


def test_an_approval_before_the_winner_is_known_does_not_count(world: World) -> None:
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    decide(world, "approve", candidate=BEST.hash)
    record = world.run(until=waits)
    for _ in range(20):
        world.run(until=lambda r: True)
    assert record.phase is Phase.AWAITING_APPROVAL


def test_an_approval_that_never_comes_expires_and_production_stays(world: World) -> None:
    world.run(until=waits)
    world.clock.advance(3601)
    record = world.run()
    assert record.phase is Phase.REJECTED
    assert "expired" in record.sentence
    assert "target.apply" not in world.calls


def test_reject_ends_it(world: World) -> None:
    world.run(until=waits)
    decide(world, "reject")
    assert world.run().phase is Phase.REJECTED


def test_a_change_of_production_while_waiting_starts_anew(world: World) -> None:
    world.run(until=waits)
    world.stable = Candidate(values={"max_num_seqs": 32})
    record = world.run(until=lambda r: r.phase is Phase.PROFILING)
    assert any("changed" in change.sentence for change in record.history)


def test_an_obstacle_found_before_the_roll_changes_nothing(world: World) -> None:
    world.run(until=waits)
    world.problems = ("no room for the canary",)
    approve(world)
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "no room for the canary" in record.sentence
    assert "target.apply" not in world.calls


def test_a_canary_that_is_slower_goes_back(world: World) -> None:
    world.run(until=waits)
    world.canary_behaviour = Behaviour(tokens=1200.0, ttft=4.0)
    approve(world)
    record = world.run()
    assert record.phase is Phase.ROLLED_BACK
    assert world.stable.hash == BASELINE.hash
    assert world.canary is None
    assert "canary is worse" in record.sentence


def test_a_canary_that_dies_goes_back(world: World) -> None:
    world.run(until=waits)
    world.canary_behaviour = Behaviour(failure=oom())
    approve(world)
    assert world.run().phase is Phase.ROLLED_BACK


def test_a_canary_with_errors_goes_back(world: World) -> None:
    world.run(until=waits)
    world.canary_behaviour = Behaviour(tokens=1200.0, ttft=0.3, errors=20)
    approve(world)
    record = world.run()
    assert record.phase is Phase.ROLLED_BACK


@pytest.mark.parametrize("phase", sorted(TOUCHES_PRODUCTION - {Phase.ROLLING_BACK}))
def test_abort_is_safe_wherever_production_is_touched(world: World, phase: Phase) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is phase)
    decide(world, "abort")
    record = world.run()
    assert record.phase is Phase.ROLLED_BACK
    assert [s.candidate.hash for s in world.fleet] == [BASELINE.hash] * 2


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.PROFILING, Phase.BASELINING, Phase.SEARCHING, Phase.CONFIRMING])
def test_abort_before_that_frees_the_spare(world: World, phase: Phase) -> None:
    world.run(until=lambda r: r.phase is phase)
    decide(world, "abort")
    record = world.run()
    assert record.phase is Phase.FAILED
    world.run(until=lambda r: True)
    assert "target.apply" not in world.calls


def test_rollback_after_the_promotion(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run()
    decide(world, "rollback")
    record = world.run(until=lambda r: r.phase is Phase.ROLLED_BACK)
    assert [s.candidate.hash for s in world.fleet] == [BASELINE.hash] * 2
    assert "rollback by ana" in record.sentence


def test_suspended_it_holds_and_goes_on_where_it_was(world: World) -> None:
    world.run(until=lambda r: r.phase is Phase.SEARCHING)
    decide(world, "suspend")
    world.run(until=lambda r: r.suspended_since is not None)
    context = world.context()
    for _ in range(50):
        reconcile("demo", context)
        world.clock.advance(3600)
    assert world.record().phase is Phase.SEARCHING
    assert not [name for name in world.servers if not world.servers[name][2]], "the spare is held while suspended"
    decide(world, "resume")
    world.run(until=waits)


def test_what_is_cancelled_by_a_suspend_is_seen_to_its_end(world: World) -> None:
    world.run(until=lambda r: any(t.phase == "Measuring" for t in world.store.trials("demo")))
    decide(world, "suspend")
    context = world.context()
    for _ in range(10):  # ending takes looks: no other trial comes that would take them
        reconcile("demo", context)
        world.clock.advance(1.0)
    assert world.record().suspended_since is not None
    assert world.leftovers() == []


def test_a_spec_change_while_rolling_goes_back_first_then_anew(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is Phase.ROLLING)
    changed = tuning(slo={"ttftP95": "1s"})
    world.store.save(world.record().model_copy(update={"tuning": changed}))
    record = world.run(until=lambda r: r.phase is Phase.PENDING)
    assert [s.candidate.hash for s in world.fleet] == [BASELINE.hash] * 2
    assert record.spec_hash == changed.spec.spec_hash
    assert record.winner is None


def test_what_an_approver_should_know_is_written_down_once_when_they_are_asked(world: World) -> None:
    world.notes = ("helm owns the arguments; its next apply will set them back",)
    asked = world.run(until=waits)
    assert asked.notes == world.notes
    known, world.notes = world.notes, ("an autoscaler appeared",)
    approve(world)
    record = world.run()
    assert (record.phase, record.notes) == (Phase.PROMOTED, known), "as it was when it was decided on"
    assert world.calls.count("target.notes") == 1


def test_notes_that_can_not_be_had_at_once_are_asked_for_again(world: World) -> None:
    world.outages = {"target.notes": 3}
    assert world.run(until=waits).notes == world.notes
    assert world.calls.count("target.notes") == 4
    trials = [t.id for t in world.trials_now("demo")]
    assert len(trials) == len(set(trials))


def test_notes_go_when_it_starts_anew(world: World) -> None:
    world.run(until=waits)
    world.stable = Candidate(values={"max_num_seqs": 5})
    assert world.run(until=lambda record: record.phase is Phase.PENDING).notes == ()


def test_an_outage_is_told_and_survived(world: World) -> None:
    world.outages = {"metrics.fetch": 3, "spare.start": 2, "target.observe": 2}
    world.run(until=waits)


def test_metrics_gone_during_the_canary_hold_and_go_on(world: World) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is Phase.CANARY and r.promotion is not None and bool(r.promotion.canary_since))
    world.outages = {"metrics.fetch": 4}
    assert world.run().phase is Phase.PROMOTED


def test_a_phase_that_never_ends_is_ended_by_its_deadline() -> None:
    world = World()
    world.behaviours[BASELINE.hash] = Behaviour(start=10_000.0)
    world.create(tuning(spare={"startTimeout": "30s"}))
    record = world.run()
    assert record.phase is Phase.FAILED
    assert "took longer" in record.sentence


def test_the_budget_in_gpu_minutes_is_kept() -> None:
    world = World(proposals=[Candidate(values={"max_num_seqs": n}) for n in range(8, 40)])
    world.create(tuning(budget={"trials": 30, "gpuMinutes": 1.5}))
    world.run(until=lambda r: r.phase is Phase.CONFIRMING)
    used = sum(t.gpu_seconds for t in world.store.trials("demo"))
    assert 60 < used <= 90


@pytest.mark.parametrize("phase", [Phase.CANARY, Phase.ROLLING, Phase.WATCHING])
@pytest.mark.parametrize("servers", [1, 3])
def test_an_autoscaler_that_scales_during_the_rollout_is_no_obstacle(world: World, phase: Phase, servers: int) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is phase)
    world.scale(servers)
    record = world.run()
    assert record.phase is Phase.PROMOTED, record.sentence
    assert [s.candidate.hash for s in world.fleet] == [BEST.hash] * servers


@pytest.mark.parametrize("servers", [1, 3])
def test_an_autoscaler_that_scales_while_it_goes_back_is_no_obstacle(world: World, servers: int) -> None:
    world.run(until=waits)
    approve(world)
    world.run(until=lambda r: r.phase is Phase.ROLLING and r.promotion is not None and r.promotion.updated == 2)
    decide(world, "abort")
    world.run(until=lambda r: r.phase is Phase.ROLLING_BACK)
    world.scale(servers)
    assert world.run().phase is Phase.ROLLED_BACK
    assert [s.candidate.hash for s in world.fleet] == [BASELINE.hash] * servers
