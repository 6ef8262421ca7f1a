"""The search benchmark's harness: what it charges, what it counts as best, and its figures."""

import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import search, search_arms, search_plot, search_profiles, search_world  # noqa: E402

from tunewright.domain.candidate import Candidate  # noqa: E402
from tunewright.domain.state import FailureKind  # noqa: E402

TIGHT = next(case for case in search_world.CASES if case.profile == "tight-14b-24gib")
SLO = next(case for case in search_world.CASES if case.profile == "dense-32b-h100")


@pytest.fixture(scope="module")
def world():
    return search_world.World(TIGHT)


def run(world, seed=1):
    return search_world.Run(world, random.Random(seed))


def test_every_case_has_a_baseline_that_runs_and_room_above_it():
    for case in search_world.CASES:
        world = search_world.World(case)
        assert world.value(world.truth(world.baseline)) > 0
    assert len({case.profile for case in search_world.CASES}) == 5


def test_a_start_is_paid_for_and_a_second_compilation_is_cheaper(world):
    one = run(world)
    first, second = one.trial(world.baseline, ""), one.trial(world.baseline, "")
    assert first.start_seconds > second.start_seconds > 60
    assert one.seconds == pytest.approx(first.gpu_seconds + second.gpu_seconds)
    assert second.gpu_seconds == pytest.approx(second.start_seconds + 35 + 20 + 8)
    assert first.objective != second.objective  # noise between starts


def test_a_failed_start_costs_what_had_passed_and_is_read_as_in_production(world):
    one = run(world)
    hungry = one.trial(Candidate(values={"max_num_batched_tokens": 32768, "max_model_len": 8192}), "")
    refused = one.trial(Candidate(values={"max_num_seqs": 64, "max_num_batched_tokens": 32}), "")
    gamble = one.trial(world.baseline.with_value("gpu_memory_utilization", 0.99), "")
    assert [t.failure.kind for t in one.trials] == [
        FailureKind.KV_TOO_SMALL, FailureKind.INVALID_COMBINATION, FailureKind.OUT_OF_MEMORY_UNDER_LOAD,
    ]  # fmt: skip
    assert refused.gpu_seconds < hungry.gpu_seconds < gamble.gpu_seconds


def test_the_same_seed_is_the_same_run(world):
    runs = [search_arms.run("tunewright", world, 3, 1500.0) for _ in range(2)]
    assert runs[0].trials == runs[1].trials
    assert len(runs[0].trials) > 3
    assert runs[0].trials[-2].finished_at < 1501


def test_no_random_draw_is_above_the_optimum(world):
    _, optimum = world.optimum()
    rng = random.Random(5)
    axes = world.space.axes
    drawn = [world.space.candidate({a.name: rng.randrange(len(a.values)) for a in axes}) for _ in range(1500)]
    values = [world.value(truth) for truth in world.truths(drawn)]
    assert 0 < max(values) <= optimum * 1.002
    assert sum(value == 0 for value in values) > 500  # a large infeasible region


def test_an_slo_makes_the_fastest_worthless():
    world = search_world.World(SLO)
    crowded = world.truth(world.baseline.with_value("max_num_seqs", 192))
    assert crowded.failure is None
    assert world.value(crowded) == 0
    assert world.value(world.truth(world.baseline)) > 0


def test_perturbed_coefficients_differ_by_seed_and_not_by_run():
    profile = search_world.load(TIGHT.profile)
    one, again, other = (search_profiles.perturbed(profile, 0.2, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.cost != other.cost
    assert profile.cost.expert_share == one.cost.expert_share


def test_figures(world):
    row = search.measure(TIGHT, 0.0, 2, ["tunewright", "random"], 30.0, 1)
    assert set(row["goals"]) == {
        "failed starts < 5 %", "<= 0.5 of random", "bound of the ratio to random < 1",
    }  # fmt: skip
    for told in row["arms"].values():
        assert 0 <= told["reached"] <= 1
        assert told["gpu_minutes"] == sorted(told["gpu_minutes"])
    assert "tunewright" in search.table(row)
    svg = ET.fromstring(search_plot.plot([row]))
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2


def test_the_ratio_is_paired_and_bounded():
    def result(seed, minutes):
        return search.Result("x", seed, True, minutes, 1, 1, 0, {}, [])

    halves = search.ratio([result(i, 10.0 + i) for i in range(9)], [result(i, 20.0 + 2 * i) for i in range(9)])
    assert halves["median_of_pairs"] == halves["upper_95"] == 0.5
    mixed = search.ratio([result(i, 10.0) for i in range(9)], [result(i, 5.0 if i % 2 else 40.0) for i in range(9)])
    assert mixed["upper_95"] > 1


def test_a_profile_that_was_never_seen(tmp_path):
    text = (search_world.load.__globals__["PROFILES"] / "demo.yaml").read_text()
    path = tmp_path / "strange.yaml"
    path.write_text(text.replace("name: demo", "name: strange"))
    world = search_world.World(search_world.case_for(path))
    assert world.optimum()[1] >= world.value(world.truth(world.baseline)) > 0
