"""The raw data behind the report, without secrets."""

from collections.abc import Sequence
from typing import Any

from tunewright.domain.redact import HIDDEN, redact_all
from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.telemetry.facts import (
    baseline_objective,
    best_trial,
    leading_finalist,
    objective_name,
    shown_objective,
    spare_time_of_all,
)

FORMAT = "tunewright.dev/report/v1alpha1"


def report_data(
    record: TuningRecord, trials: Sequence[TrialRecord], *, decisions: Sequence[Decision] = ()
) -> dict[str, Any]:
    """Record, trials, decisions and what the page derives from them, as plain JSON values.

    Left out: values of environment variables and whatever looks like a credential, and the trials' answers (text of
    the quality gate, kept by the store).
    """
    spec = record.tuning.spec
    baseline, best, lead, time = (
        baseline_objective(trials),
        best_trial(trials),
        leading_finalist(record),
        spare_time_of_all(trials),
    )
    data = {
        "format": FORMAT,
        "summary": {
            "tuning": record.name,
            "phase": record.phase.value,
            "sentence": record.sentence,
            "objective": objective_name(spec.objective),
            "baselineObjective": None if baseline is None else shown_objective(spec.objective, baseline),
            "bestTrial": best.id if best else None,
            "gain": lead.gain.model_dump(mode="json", by_alias=True) if lead and lead.gain else None,
            "winner": record.winner.hash if record.winner else None,
            "spareSeconds": {
                "starting": time.starting,
                "warming": time.warming,
                "measuring": time.measuring,
                "other": time.other,
            },
        },
        "record": record.model_dump(mode="json", by_alias=True),
        "trials": [trial.model_dump(mode="json", by_alias=True, exclude={"answers"}) for trial in trials],
        "decisions": [decision.model_dump(mode="json", by_alias=True) for decision in all_decisions(record, decisions)],
    }
    for block in ("target", "spare"):
        environment = data["record"]["tuning"]["spec"][block]["environment"]  # type: ignore[index]
        environment.update(dict.fromkeys(environment, HIDDEN))
    cleaned: dict[str, Any] = redact_all(data)
    return cleaned


def all_decisions(record: TuningRecord, decisions: Sequence[Decision]) -> list[Decision]:
    """The store's decisions and the record's, each once, oldest first."""
    found = {decision.model_dump_json(): decision for decision in (*decisions, *record.decisions)}
    return sorted(found.values(), key=lambda decision: decision.at)
