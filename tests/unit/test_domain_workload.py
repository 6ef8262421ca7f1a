import pytest
from telemetry_samples import profile

from tunewright.domain.load import Load
from tunewright.domain.profile import Histogram
from tunewright.domain.workload import Lengths, Workload, workload_for


def test_the_profile_becomes_a_closed_loop_at_the_busy_end_of_what_was_seen():
    workload = workload_for(Load(), profile())
    assert (workload.concurrency, workload.rate) == (64, None)
    assert workload.prompt_tokens.histogram == profile().prompt_tokens
    assert workload.prompt_tokens.mean == profile().prompt_tokens_mean
    assert workload.output_tokens.mean == profile().output_tokens_mean
    assert workload.prefix_reuse == 0.32


def test_what_the_file_says_goes_before_the_profile():
    load = Load(mode="closedLoop", concurrency=7, prompt_tokens=100, output_tokens=20, prefix_reuse="0%")
    workload = workload_for(load, profile())
    assert workload.concurrency == 7
    assert (workload.prompt_tokens.fixed, workload.output_tokens.fixed) == (100, 20)
    assert workload.prefix_reuse == 0.0


def test_answers_are_greedy_unless_the_file_says_how_clients_sample():
    assert workload_for(Load(), profile()).temperature == 0.0
    assert workload_for(Load(temperature=0.7), profile()).temperature == 0.7
    sessions = {"concurrency": 2, "turns": 2, "first_prompt": 10, "per_turn": 5, "output": 5, "pause": "1s"}
    assert workload_for(Load(mode="sessions", sessions=sessions, temperature=1), profile()).temperature == 1.0


def test_an_open_loop_has_a_rate_and_the_burstiness_that_was_seen():
    workload = workload_for(Load(mode="openLoop", rate=2.5), profile())
    assert (workload.rate, workload.concurrency, workload.burstiness) == (2.5, None, 1.4)
    assert workload_for(Load(mode="openLoop", rate=2.5, burstiness=3), profile()).burstiness == 3
    unknown = profile().model_copy(update={"burstiness": None})
    assert workload_for(Load(mode="openLoop", rate=2.5), unknown).burstiness == 1.0


def test_no_prefix_cache_in_production_is_no_reuse_and_no_traffic_is_one_stream():
    quiet = profile().model_copy(update={"prefix_reuse": None, "concurrency_p95": 0.0})
    workload = workload_for(Load(), quiet)
    assert (workload.prefix_reuse, workload.concurrency) == (0.0, 1)


@pytest.mark.parametrize("fields", [{}, {"concurrency": 1, "rate": 1.0}])
def test_a_workload_is_one_loop(fields):
    with pytest.raises(ValueError, match="exactly one of concurrency and rate"):
        Workload(prompt_tokens=Lengths(fixed=1), output_tokens=Lengths(fixed=1), **fields)


@pytest.mark.parametrize("fields", [{}, {"fixed": 1, "histogram": Histogram(edges=(1,), counts=(1,))}])
def test_lengths_are_one_thing(fields):
    with pytest.raises(ValueError, match="exactly one of fixed and histogram"):
        Lengths(**fields)
    with pytest.raises(ValueError, match="mean belongs to histogram"):
        Lengths(fixed=1, mean=1.0)
