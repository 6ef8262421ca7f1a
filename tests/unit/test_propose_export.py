"""The study as people's dashboards see it."""

import optuna
import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Failure, FailureKind, TrialOutcome, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.ports import Refused
from tunewright.propose.export import export_study

TUNING = Tuning.model_validate(
    {
        "apiVersion": "tunewright.dev/v1alpha1", "kind": "Tuning", "metadata": {"name": "t"},
        "spec": {"target": {"command": ["vllm", "serve", "m", "--port", "{port}"]},
                 "objective": {"maximize": "outputTokensPerSecond"}},
    }
)  # fmt: skip


def test_every_ended_trial_is_written_once(tmp_path):
    record = TuningRecord(tuning=TUNING, spec_hash="abc", phase_since=0.0)
    common = {"purpose": TrialPurpose.SEARCH}
    rows = [
        TrialRecord(id="0", number=0, candidate=Candidate(), objective=10.0, outcome=TrialOutcome.COMPLETE, **common),
        TrialRecord(id="1", number=1, candidate=Candidate(values={"max_num_seqs": 8}), outcome=TrialOutcome.INFEASIBLE,
                    failure=Failure(kind=FailureKind.CRASHED, cause="boom"), **common),
        TrialRecord(id="2", number=2, candidate=Candidate(values={"block_size": 16}), **common),
    ]  # fmt: skip
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    assert export_study(record, rows, storage=storage, study_name="t") == 2
    study = optuna.load_study(study_name="t", storage=storage)
    first, second = study.trials
    assert (first.value, first.params) == (10.0, {"max_num_seqs": "default"})
    assert second.state is optuna.trial.TrialState.FAIL
    assert second.params == {"max_num_seqs": "8"}
    assert second.user_attrs["failure"] == "boom"
    with pytest.raises(Refused, match="--study"):
        export_study(record, rows, storage=storage, study_name="t")
    study._storage._backend.engine.dispose()


def test_a_storage_that_is_none_is_refused():
    record = TuningRecord(tuning=TUNING, spec_hash="abc", phase_since=0.0)
    with pytest.raises(Refused, match="can't use the storage"):
        export_study(record, [], storage="nonsense://x", study_name="t")
