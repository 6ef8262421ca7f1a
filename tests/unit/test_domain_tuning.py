import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import measurement, promoted, steady, trial, tuning

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import MACHINE_FAULTS, Failure, FailureKind, TrialRecord, TuningRecord
from tunewright.domain.tuning import Slo, Tuning

COMMAND = ["vllm", "serve", "m", "--port", "{port}"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"target": {}}, "name exactly one of command"),
        ({"target": {"command": COMMAND, "urls": ["http://a"]}}, "name exactly one of command"),
        ({"target": {"command": ["vllm", "serve"]}}, "command must contain {port}"),
        ({"target": {"urls": ["http://a"]}, "spare": {"command": COMMAND}}, "promotion.mode must be recommend"),
        ({"target": {"urls": ["http://a"]}, "promotion": {"mode": "recommend"}}, "needs spare.command"),
        ({"spare": {"command": ["vllm"]}}, "spare.command must contain {port}"),
        ({"objective": {}}, "exactly one of maximize and minimize"),
        ({"objective": {"maximize": "goodput", "minimize": "ttftP95"}}, "exactly one"),
        ({"objective": {"maximize": "tokensPerDollar"}}, "needs gpuPricePerHour"),
        ({"slo": {"ttftP50": "2s", "ttftP99": "1s"}}, "ttftP50 .2s. is above ttftP99 .1s."),
        ({"slo": {"ttftP95": "2s", "e2eP95": "1s"}}, "first token is part of the whole request"),
        ({"slo": {"itlP95": "0s"}}, "must be above 0"),
        ({"slo": {"errorRate": "100%"}}, "errorRate of 100%"),
        ({"load": {"mode": "closedLoop"}}, "closedLoop needs concurrency"),
        ({"load": {"mode": "openLoop"}}, "openLoop needs rate"),
        ({"load": {"rate": 1}}, "belong to mode openLoop"),
        ({"load": {"mode": "openLoop", "rate": 1, "concurrency": 1}}, "concurrency belongs to"),
        ({"search": {"include": ["a"], "exclude": ["a"]}}, "named in both include and exclude"),
        ({"search": {"pin": {"a": "1"}, "exclude": ["a"]}}, "named in both pin and exclude"),
        ({"confirm": {"minRounds": 5, "maxRounds": 3}}, "above maxRounds"),
        ({"promotion": {"analysis": {"minDuration": "2h"}}}, "minDuration is above maxDuration"),
        ({"metrics": {"prometheus": "localhost:9090"}}, "pattern"),
        ({"metrics": {"prometheus": "http://[::1"}}, "no URL that can be called"),
        ({"metrics": {"prometheus": "http://a:99999"}}, "no URL that can be called"),
        ({"target": {"urls": ["http://[::1"]}, "promotion": {"mode": "recommend"}}, "no URL that can be called"),
        ({"metrics": {"interval": "0s"}}, "interval must be above 0s"),
        ({"promotion": {"canary": {"share": "250%"}}}, "at most 100%, not 250%"),
        ({"promotion": {"canary": {"httpRoute": "chat"}}}, "httpRoute is for clusters"),
        ({"target": {"deployment": "d"}, "promotion": {"canary": {"httpRoute": "A_b"}}}, "pattern"),
        ({"quality": {"minAgreement": "101%"}}, "at most 100%, not 101%"),
        ({"load": {"mode": "closedLoop", "concurrency": 1, "prefixReuse": "150%"}}, "at most 100%, not 150%"),
        ({"budget": {"trials": 0}}, "greater than or equal to 1"),
        ({"unknown": 1}, "Extra inputs"),
    ],
)
def test_a_tuning_that_contradicts_itself_is_refused(spec, reason):
    with pytest.raises(ValueError, match=reason):
        tuning(**spec)


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a.b", "a" * 64, "ä"])
def test_a_name_that_could_not_name_things_is_refused(name):
    document = tuning().model_dump(mode="json", by_alias=True) | {"metadata": {"name": name}}
    with pytest.raises(ValueError, match="pattern"):
        Tuning.model_validate(document)


def test_a_tuning_survives_its_json_and_keeps_its_hash():
    whole = tuning(slo={"ttftP95": "250ms", "errorRate": "0.5%"}, budget={"wallTime": "1h30m", "gpuMinutes": 90})
    again = Tuning.model_validate_json(whole.model_dump_json())
    assert again == whole
    assert again.spec.spec_hash == whole.spec.spec_hash
    assert '"ttftP95":"250ms"' in whole.model_dump_json()


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({}, "eb072deb3e"),
        ({"load": {"mode": "trace", "trace": {"file": "a"}}}, "07a27a0fc1"),
        ({"load": {"lengths": {"trace": {"file": "a"}}}}, "d261f1f429"),
        ({"load": {"promptsFile": "a"}, "quality": {"promptsFile": "a"}}, "268b0959bc"),
    ],
)
def test_the_hash_in_kept_records_stays_that_of_the_same_spec(spec, kept):
    """Another one begins every tuning anew at an upgrade: what a field adds that is left out belongs into `_LATER`."""
    assert tuning(**spec).spec.spec_hash == kept


def test_what_may_be_left_out_of_the_hash_is_part_of_it_where_it_is_given():
    hashes = {tuning(load={"temperature": given}).spec.spec_hash for given in (None, 0, 0.5)}
    assert len(hashes) == 3


def test_the_spec_hash_covers_what_results_depend_on_and_nothing_else():
    base = tuning().spec.spec_hash
    for other in (
        {"slo": {"ttftP95": "1s"}},
        {"objective": {"maximize": "goodput"}},
        {"load": {"seed": 2}},
        {"metrics": {"window": "1h"}},
        {"search": {"allowLossy": True}},
        {"quality": {"prompts": 3}},
        {"spare": {"environment": {"A": "1"}}},
    ):
        assert tuning(**other).spec.spec_hash != base, other
    for same in (
        {"budget": {"trials": 3}},
        {"confirm": {"minRounds": 2}},
        {"promotion": {"mode": "auto"}},
        {"suspend": True},
        {"retune": {"mode": "onDrift"}},
        {"spare": {"parallelism": 3}},
    ):
        assert tuning(**same).spec.spec_hash == base, same


@steady
@given(st.dictionaries(st.sampled_from(["P50", "P90", "P95", "P99"]), st.integers(1, 10**6), min_size=1))
def test_bounds_are_accepted_exactly_when_they_rise(bounds):
    ordered = [bounds[p] for p in sorted(bounds)]
    fields = {f"itl{p}": f"{value}us" for p, value in bounds.items()}
    if ordered == sorted(ordered):
        found = {(p, round(value * 1e6)) for _, p, value in Slo.model_validate(fields).bounds()}
        assert found == {(p.lower(), value) for p, value in bounds.items()}
    else:
        with pytest.raises(ValueError, match="a lower percentile can't be the larger one"):
            Slo.model_validate(fields)


def test_records_survive_their_json():
    record, trials = promoted()
    assert TuningRecord.model_validate_json(record.model_dump_json()) == record
    for one in trials:
        assert TrialRecord.model_validate_json(one.model_dump_json()) == one


def test_a_trial_counts_the_time_it_held_the_spare():
    done = trial(3, Candidate())
    assert done.gpu_seconds == 110
    assert done.model_copy(update={"created_at": 0.0}).gpu_seconds == 0.0


def test_the_machines_faults_are_never_blamed_on_a_candidate():
    assert {kind for kind in FailureKind if Failure(kind=kind, cause="").machine_fault} == MACHINE_FAULTS
    assert FailureKind.OUT_OF_MEMORY not in MACHINE_FAULTS
    assert FailureKind.HUNG not in MACHINE_FAULTS


def test_a_records_fields_cannot_be_changed_or_misspelt():
    record, _ = promoted()
    with pytest.raises(ValueError, match="frozen"):
        record.phase = "Pending"
    with pytest.raises(ValueError, match="Extra inputs"):
        measurement(tttft=1)
