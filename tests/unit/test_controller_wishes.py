"""Candidates that people ask for are tried first, refused with the reason, and kept over a crash."""

import pytest
from tunings import tuning
from world import BASELINE, BEST, Behaviour, Killed, World

from tunewright.controller.decisions import bound, take_up
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import FailureKind, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.facts import ModelFacts
from tunewright.ports import Refused
from tunewright.propose.proposer import OptunaProposer

QUICK = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "promotion": {"mode": "recommend"},
}
ASKED = Candidate(values={"max_num_seqs": 96, "enable_prefix_caching": True})


def made(candidates: list[dict] | None = None, **more) -> World:
    world = World(behaviours={ASKED.hash: Behaviour(tokens=1500.0, ttft=0.2, start=0.5)}, **more)
    world.create(tuning(**QUICK, search={"candidates": candidates or []}))
    return world


def ask(world: World, by: str = "ana", **values: str) -> None:
    record = world.record()
    world.store.decide("demo", bound(record, "propose", at=world.clock.now(), by=by, values=values))


def searched(world: World) -> list[TrialRecord]:
    return [t for t in world.trials_now("demo") if t.purpose is TrialPurpose.SEARCH]


def at_work(record: TuningRecord) -> bool:
    return record.phase is Phase.SEARCHING


def test_those_of_the_file_are_tried_first_laid_over_production() -> None:
    world = made([{"max_num_seqs": 96, "enable_prefix_caching": True}])
    record = world.run()
    first = searched(world)[0]
    assert (first.candidate, first.reason) == (ASKED, "asked for by spec.search.candidates[0]")
    assert record.winner == ASKED  # and it may win as any other
    assert len(searched(world)) == 3


def test_one_asked_for_while_it_searches_is_next() -> None:
    world = made(proposals=[Candidate(values={"max_num_seqs": n}) for n in (8, 16, 64)])
    world.run(until=lambda record: len(searched(world)) == 1)
    ask(world, max_num_seqs="96", enable_prefix_caching="true")
    world.run()
    assert [t.candidate.values["max_num_seqs"] for t in searched(world)] == [8, 96, 16, 64]
    assert searched(world)[1].reason == "asked for by ana"


def test_what_was_tried_already_or_runs_in_production_is_not_tried_again() -> None:
    world = made([dict(BASELINE.values), {"max_num_seqs": 64}, {"max_num_seqs": 64}])
    world.run()
    assert [t.candidate.values["max_num_seqs"] for t in searched(world)] == [64, 8]


def test_what_can_t_run_here_is_told_and_costs_nothing() -> None:
    world = made([{"max_num_seqs": 96, "enable_prefix_caching": True}])
    world.objections[ASKED.hash] = "tensor_parallel_size 3 does not divide 32 heads"
    world.run()
    refused = searched(world)[0]
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.cause) == (
        FailureKind.INVALID_COMBINATION,
        "tensor_parallel_size 3 does not divide 32 heads",
    )
    assert refused.gpu_seconds == 0
    assert not [call for call in world.runs if call == ASKED.hash]
    assert len(searched(world)) == 3  # once: it is not asked for again
    assert world.record().winner == BEST


def test_a_refused_one_takes_nothing_of_the_budget() -> None:
    asked = {"candidates": [{"max_num_seqs": 96, "enable_prefix_caching": True}]}
    world = World()
    world.objections[ASKED.hash] = "no"
    world.create(tuning(**QUICK, search=asked, budget={"trials": 1}))
    world.run()
    assert [bool(t.failure) for t in searched(world)] == [True, False]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_num_seq": "64"}, "did you mean max_num_seqs"),
        ({"max_num_seqs": "many"}, "is not a number"),
        ({"kv_cache_dtype": "fp8"}, "allowLossy"),
        ({"max_num_batched_tokens": "1024"}, "is fixed to 2048"),
        ({}, "names no knob"),
    ],
)
def test_what_makes_no_sense_is_refused_wherever_it_comes_from(values, told) -> None:
    pins = {"max_num_batched_tokens": "2048"}
    with pytest.raises(Refused, match=told):
        OptunaProposer(Search(candidates=[values], pin=pins), ModelFacts())
    world = made()
    world.store.save(world.record().model_copy(update={"tuning": tuning(**QUICK, search={"pin": pins})}))
    world.run(until=at_work)
    before = world.record().proposed
    ask(world, **values)
    record = take_up(world.record(), world.context())
    assert record.proposed == before == ()
    assert told in record.sentence


def test_after_the_search_it_is_too_late() -> None:
    world = made()
    world.run(until=lambda record: record.phase is Phase.CONFIRMING)
    ask(world, max_num_seqs="96")
    record = take_up(world.record(), world.context())
    assert "the search is over" in record.sentence
    assert record.proposed == ()


def test_the_list_of_the_file_can_be_edited_without_starting_anew() -> None:
    assert tuning().spec.spec_hash == tuning(search={"candidates": [{"max_num_seqs": 64}]}).spec.spec_hash
    assert tuning().spec.spec_hash != tuning(search={"seed": 5}).spec.spec_hash


def test_numbers_and_switches_of_a_file_are_taken_as_they_are() -> None:
    spec = tuning(search={"candidates": [{"max_num_seqs": 64, "enable_prefix_caching": True,
                                          "gpu_memory_utilization": 0.9}]}).spec  # fmt: skip
    assert spec.search.candidates == (
        {"max_num_seqs": "64", "enable_prefix_caching": "true", "gpu_memory_utilization": "0.9"},
    )


def test_objections_are_those_of_the_static_rules() -> None:
    proposer = OptunaProposer(Search(), ModelFacts(attention_heads=32, gpu_count=4))
    wrong = Candidate(values={"max_num_seqs": 4096, "max_num_batched_tokens": 1024})
    assert "max_num_batched_tokens" in (proposer.objection(wrong, BASELINE, []) or "")
    assert proposer.objection(ASKED, BASELINE, []) is None
    assert proposer.objection(BASELINE, BASELINE, []) == "it is what production runs"


def test_killed_at_any_call_it_is_tried_once_and_not_lost() -> None:
    def drive(kill_at: int | None, after: bool = False) -> World:
        world = made(proposals=[BEST])
        world.run(until=at_work)
        ask(world, max_num_seqs="96", enable_prefix_caching="true")
        start = len(world.calls)
        world.kill_at, world.kill_after_effect = (start + kill_at if kill_at else None), after
        while True:
            try:
                world.run(until=lambda record: record.phase is Phase.CONFIRMING)
                return world
            except Killed:
                world.clock.advance(2)
                world.kill_at = None

    calls = len(drive(None).calls)
    for kill_at in range(1, min(40, calls)):
        for after in (False, True):
            world = drive(kill_at, after)
            mine = [t for t in searched(world) if t.candidate == ASKED]
            assert [t.reason for t in mine] == ["asked for by ana"], (kill_at, after)
            assert world.record().proposed[0].values == {"max_num_seqs": "96", "enable_prefix_caching": "true"}
