"""A command tuned on the spare alone (`target.replicas: 0`): no production is started, watched or promoted to."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from restapi import Clock
from test_cli_tune import findings, run, write
from tunings import tuning
from world import BASELINE, BEST, Killed, World

from tunewright.controller.reconcile import reconcile
from tunewright.domain.load import Load
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Source
from tunewright.domain.state import TrialPurpose, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Spare, Target, Tuning
from tunewright.domain.workload import given_profile, workload_for
from tunewright.exits import Exit
from tunewright.local import LocalTuning, stop_servers
from tunewright.platform.process.offline import OfflineTarget
from tunewright.platform.process.separate import shared_gpus
from tunewright.ports import Refused, TargetPlan
from tunewright.telemetry.report import render_report
from tunewright.telemetry.samples import tuning_samples

LOAD = {"mode": "closedLoop", "concurrency": 16, "promptTokens": 512, "outputTokens": 64, "duration": "1s"}
GIVEN = {"mode": "closedLoop", "concurrency": 16}
COMMAND = ["vllm", "serve", "m", "--max-num-seqs", "4", "--port", "{port}"]


def offline(**spec: Any) -> Tuning:
    blocks = {"target": {"command": COMMAND, "replicas": 0}, "load": LOAD, "promotion": {"mode": "recommend"}}
    blocks |= {"budget": {"trials": 2}, "confirm": {"finalists": 1, "minRounds": 2, "maxRounds": 2}}
    return tuning(**(blocks | spec))


# --- the file ---


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"promotion": {"mode": "approve"}}, "promotion.mode must be recommend"),
        ({"load": {}}, "load must give it"),
        ({"load": {k: v for k, v in LOAD.items() if k != "outputTokens"}}, "load must give it"),
        ({"load": {"mode": "openLoop", "rate": 1, "promptTokens": 5, "outputTokens": 5}}, "load must give it"),
        ({"load": {**GIVEN, "lengths": {"trace": {"file": "t"}}}}, "load must give it"),
        ({"load": {**GIVEN, "promptsFile": "p", "outputTokens": 5}}, "load must give it"),
        ({"metrics": {"prometheus": "http://p"}}, "leave metrics.prometheus and retune.mode out"),
        ({"retune": {"mode": "onDrift"}}, "leave metrics.prometheus and retune.mode out"),
        ({"target": {"deployment": "llm", "replicas": 0}}, "belongs to target.command"),
        ({"target": {"command": COMMAND, "replicas": -1}}, "greater than or equal to 0"),
    ],
)
def test_what_only_production_could_tell_must_be_in_the_file(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        offline(**spec)


def test_the_given_traffic_is_what_is_sent_and_nothing_is_made_up() -> None:
    profile = given_profile(offline().spec.load, 5.0)
    workload = workload_for(offline().spec.load, profile)
    assert (workload.concurrency, workload.prompt_tokens.fixed, workload.output_tokens.fixed) == (16, 512, 64)
    assert profile.summary() == "16 requests at a time, 512 tokens in, 64 out, as the tuning file says"
    assert profile.prompt_tokens.quantile(0.5) == pytest.approx(512, abs=1)
    assert given_profile(Load(**{**LOAD, "outputTokens": 1}), 5.0).output_tokens.mean == pytest.approx(0.5)
    with pytest.raises(ValueError, match="outputTokens are wanted"):
        given_profile(Load(mode="closedLoop", concurrency=1, prompt_tokens=4), 0.0)


def test_lengths_that_are_not_fixed_are_traffic_too() -> None:
    normal = {"mean": 500, "standardDeviation": 50, "least": 400, "most": 600}
    lengths = {"prompt": normal, "output": {**normal, "mean": 450}}
    profile = given_profile(offline(load={**GIVEN, "lengths": lengths}).spec.load, 5.0)
    assert profile.prompt_tokens_mean == pytest.approx(500)
    assert 450 < profile.output_tokens_mean < 470, "the lower tail is cut"
    assert profile.prompt_tokens.quantile(0.5) == pytest.approx(500, abs=3)
    pairs = {"pairs": [{"promptTokens": 100, "outputTokens": 10}, {"promptTokens": 300, "outputTokens": 1}]}
    assert given_profile(offline(load={**GIVEN, "lengths": pairs}).spec.load, 5.0).prompt_tokens_mean == 200


# --- the way of it, on a fake clock ---


@pytest.fixture
def world() -> World:
    return made()


def made(**kill: Any) -> World:
    """A world without production, with short starts: few passes."""
    world = World(replicas=0, **kill)
    for behaviour in (BASELINE, BEST, world.proposals[0]):
        world.behaviours[behaviour.hash] = replace(world.behaviour(behaviour), start=0.5)
    world.create(offline())
    return world


def test_goes_from_the_command_to_a_recommendation_without_production(world: World) -> None:
    record = world.run()
    world.clock.advance(3600)
    assert reconcile("demo", world.context()) is None, "there is no traffic whose drift could be watched"
    assert record.phase is Phase.RECOMMENDED
    assert record.winner == BEST
    assert record.baseline == BASELINE
    assert record.source is Source.SIMULATED, "told by the servers on the spare"
    assert not [call for call in world.calls if call in ("target.apply", "metrics.fetch", "metrics.describe")]
    assert world.leftovers() == []
    first = world.store.trials("demo")[0]
    assert (first.purpose, first.reason) == (TrialPurpose.BASELINE, "the command as it stands")
    told = " ".join(change.sentence for change in record.history)
    assert "16 requests at a time, 512 tokens in, 64 out" in told
    assert "Production" not in told


def test_killed_at_every_call_it_comes_to_the_same_recommendation(world: World) -> None:
    world.run()
    for at in range(1, len(world.calls) + 1):
        if world.places[at - 1] in world.places[: at - 1]:
            continue  # each call in each phase once
        killed = made(kill_at=at, kill_after_effect=at % 2 == 0)
        with pytest.raises(Killed):
            killed.run()
        killed.kill_at = None
        record = killed.run()
        assert (record.phase, record.winner) == (Phase.RECOMMENDED, BEST)
        assert killed.leftovers() == []
        searched = [t.candidate.hash for t in killed.store.trials("demo") if t.purpose == "search"]
        assert len(searched) == len(set(searched)), "a finished trial was repeated"


def test_without_anything_better_no_production_is_spoken_of(world: World) -> None:
    world.behaviours[BEST.hash] = world.behaviours[BASELINE.hash]
    world.proposals = [BEST]
    world.noise = lambda name, _: 0.9 if name == BEST.hash else 1.0
    record = world.run()
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "roduction" not in record.sentence


def test_the_report_and_the_metrics_do_not_show_traffic_that_nobody_watched(world: World) -> None:
    record = world.run()
    trials = list(world.store.trials("demo"))
    page = render_report(record, trials)
    assert "was not watched" in page
    assert "Seen in production" not in page
    assert not [name for name in _metrics(record, trials) if "demand" in name or "saturated" in name]
    watched = update(record, profile=update(record.profile, given=False))  # type: ignore[type-var]
    assert "Seen in production" in render_report(watched, trials)
    assert [name for name in _metrics(watched, trials) if "demand" in name]


def _metrics(record: TuningRecord, trials: list[Any]) -> list[str]:
    return [metric.name for metric, _, _ in tuning_samples(record, trials, 0.0)]


# --- on one machine ---


def test_its_target_is_nothing_and_its_baseline_the_command() -> None:
    spec = offline().spec
    target = OfflineTarget(spec.target, spec.spare)
    assert target.baseline() == BASELINE
    assert target.observe().settled
    assert list(target.observe().replicas) == []
    assert "max_num_seqs: 4 → 64" in target.recommend(BEST)
    assert "only be recommended" in target.preflight(BEST)[0]
    assert list(target.notes(BEST)) == []
    with pytest.raises(Refused, match="no production"):
        target.apply(TargetPlan(BASELINE, BEST, 1))


def test_the_spare_may_have_the_only_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    own = {"command": COMMAND, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}
    assert shared_gpus(Target.model_validate(own), Spare())
    assert shared_gpus(Target.model_validate({**own, "replicas": 0}), Spare()) == ""


def test_nothing_of_production_is_started_or_stopped(tmp_path: Path) -> None:
    made, stop = offline(), threading.Event()
    stop.set()
    with LocalTuning(tmp_path, made, Clock()) as local:
        assert local.start_production(stop)
        assert local.target.describe() == "none; the command is tuned on the spare alone"
        assert local.run(stop, lambda record, live: None) is not None
        assert not (tmp_path / "demo" / "production").exists()
    assert stop_servers(tmp_path, made, Clock())
    assert not (tmp_path / "demo" / "production").exists()


def test_check_says_that_there_is_none(tmp_path: Path) -> None:
    file = write(tmp_path, target={"replicas": 0}, load=LOAD, promotion={"mode": "recommend"})
    assert findings(file, tmp_path / "state", Exit.DONE)["production"] == (
        True,
        "none: the command is tuned on the spare alone",
    )
    assert "nothing of it" in run("stop", file, tmp_path / "state", code=Exit.DONE)
