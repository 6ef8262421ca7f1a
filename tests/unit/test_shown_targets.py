"""Whatever form a target has, everything that shows a tuning can show it, in every phase."""

import io
from collections.abc import Mapping

import pytest
from rich.console import Console
from tunings import tuning
from world import World

from tunewright.api.promotion import promotion_view
from tunewright.api.views import trial_view, tuning_view
from tunewright.domain.phases import Phase
from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.store.kubernetes_status import conditions, trial_status, tuning_status
from tunewright.telemetry.console import LiveStatus, end_lines, progress_view, trial_line
from tunewright.telemetry.report.page import render_report
from tunewright.telemetry.samples import tuning_samples

TARGETS: Mapping[str, Mapping[str, object]] = {
    "command": {"command": ["vllm", "serve", "small", "--port", "{port}"], "replicas": 2},
    "python": {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "{port}"]},
    "offline": {"command": ["vllm", "serve", "small", "--port", "{port}"], "replicas": 0},
    "urls": {"urls": ["http://gpu-1:8000"]},
    "deployment": {"deployment": "llm"},
    "container": {"deployment": "llm", "container": "vllm", "model": "small"},
}


def story(target: Mapping[str, object]) -> list[tuple[TuningRecord, list[TrialRecord]]]:
    """The record and its trials as they were when each phase began; the world itself does not read the target."""
    world, seen = World(), []
    world.create(tuning(promotion={"mode": "auto", "watch": "30s"}))

    def look(record: TuningRecord) -> bool:
        if not seen or seen[-1][0].phase is not record.phase:
            seen.append((record, world.trials_now("demo")))
        return False

    with pytest.raises(AssertionError, match="not there after"):
        world.run(until=look, limit=3000)
    document = tuning().model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["target"] = dict(target)
    if "urls" in target or target.get("replicas") == 0:
        document["spec"]["promotion"] = {"mode": "recommend"}
    if target.get("replicas") == 0:
        document["spec"]["load"] |= {"promptTokens": 64, "outputTokens": 32}
    if "urls" in target:
        document["spec"]["spare"] = {"command": ["vllm", "serve", "small", "--port", "{port}"]}
    shown = Tuning.model_validate(document)
    return [(record.model_copy(update={"tuning": shown}), trials) for record, trials in seen]


@pytest.mark.parametrize("form", TARGETS)
def test_every_form_of_target_is_shown_in_every_phase(form: str) -> None:
    told = story(TARGETS[form])
    assert told[-1][0].phase is Phase.PROMOTED
    assert len(told) >= 8
    for record, trials in told:
        status = tuning_status(record, trials)
        assert status["target"] == {"command": "small", "offline": "small", "urls": "http://gpu-1:8000"}.get(
            form, {"deployment": "llm", "container": "small"}.get(form, "python3")
        )
        assert conditions(record, [], generation=1, before=[], now=0.0)
        assert all(trial_status(trial)["phase"] for trial in trials)
        assert record.name in render_report(record, trials)
        out = io.StringIO()
        Console(file=out, width=200).print(progress_view(record, trials, LiveStatus(), 0.0))
        assert record.phase in out.getvalue()
        assert all(trial_line(record, trials, trial) for trial in trials)
        assert bool(end_lines(record, trials, LiveStatus())) == bool(trials)
        assert tuning_view(record, len(trials)).phase is record.phase
        assert promotion_view(record, trials, list[Decision](), 0.0).phase is record.phase
        assert [trial_view(trial).id for trial in trials] == [trial.id for trial in trials]
        assert list(tuning_samples(record, trials, 0.0))
