"""The memory model: what starts logged is what the next candidates are judged by."""

import numpy as np
import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Failure, FailureKind, StartMemory, TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.propose.encoding import Encoding
from tunewright.propose.memory import MemoryModel
from tunewright.propose.proposer import OptunaProposer
from tunewright.propose.space import build_space

FACTS = ModelFacts(family=Family.DENSE, experts=0, mtp_layers=0, gpu_count=1, gpu_memory_gib=24.0)
BASELINE = Candidate(values={"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192})
TOKENS_PER_GIB = 8192.0


def true_gib(candidate):
    """A machine of 24 GiB: weights of 15, half a GiB per 1024 batched tokens, a quarter per 256 sequences."""
    values = candidate.values
    share = values.get("gpu_memory_utilization", 0.92)
    return (
        24 * share
        - 15
        - 0.5 * values.get("max_num_batched_tokens", 2048) / 1024
        - values.get("max_num_seqs", 1024) / 1024
    )


def trial(number, candidate):
    gib = true_gib(candidate)
    common = {
        "id": str(number), "number": number, "purpose": TrialPurpose.SEARCH, "candidate": candidate,
    }  # fmt: skip
    if gib <= 1.0:
        cause = "To serve at least one request with the model's max seq len (8192), (1.00 GiB KV cache is needed, "
        cause += f"which is larger than the available KV cache memory ({gib:.2f} GiB)."
        if gib <= 0:
            cause = "No available memory for the cache blocks."
        return TrialRecord(outcome=TrialOutcome.INFEASIBLE, failure=Failure(kind=FailureKind.KV_TOO_SMALL, cause=cause),
                           **common)  # fmt: skip
    memory = StartMemory(
        available_kv_gib=gib, kv_cache_tokens=int(gib * TOKENS_PER_GIB), max_concurrency=gib * TOKENS_PER_GIB / 8192
    )
    return TrialRecord(outcome=TrialOutcome.COMPLETE, objective=1000.0, slo_margin=1.0, memory=memory, **common)


def model(*candidates):
    trials = [trial(number, candidate) for number, candidate in enumerate(candidates)]
    encoding = Encoding(build_space(Search(allow_lossy=True), FACTS, BASELINE, trials))
    return MemoryModel(trials, encoding, FACTS), encoding


def test_nothing_is_ruled_out_before_anything_is_known():
    told, _ = model()
    assert told.chance(BASELINE.with_value("max_num_batched_tokens", 32768)) == 1.0


def test_one_start_tells_the_rest_of_the_line():
    told, encoding = model(BASELINE)
    rows = encoding.rows([BASELINE, BASELINE.with_value("gpu_memory_utilization", 0.85)])
    mean, sd = told.available(rows)
    assert mean[0] == pytest.approx(true_gib(BASELINE), abs=0.1)
    assert mean[1] == pytest.approx(mean[0] - 24 * 0.07, abs=0.1)
    assert np.all(sd < 0.2)
    assert told.chance(BASELINE) > 0.99
    assert told.chance(BASELINE.with_value("max_num_batched_tokens", 32768)) < 0.3  # as little as the priors allow


def test_slopes_are_learned_and_then_used():
    more = BASELINE.with_value("max_num_batched_tokens", 4096)
    told, encoding = model(BASELINE, more)
    most = BASELINE.with_value("max_num_batched_tokens", 8192)
    assert told.available(encoding.rows([most]))[0][0] == pytest.approx(true_gib(most), abs=0.4)


def test_a_failure_that_names_its_memory_is_a_point_too():
    tight = BASELINE.with_value("max_num_batched_tokens", 8192).with_value("gpu_memory_utilization", 0.82)
    assert 0 < true_gib(tight) <= 1.0
    told, encoding = model(BASELINE, tight)
    assert told.available(encoding.rows([tight]))[0][0] == pytest.approx(true_gib(tight), abs=0.1)
    assert told.chance(tight) < 0.5


def test_half_the_width_holds_twice_the_tokens():
    told, encoding = model(BASELINE)
    plain, half = told.tokens(encoding.rows([BASELINE, BASELINE.with_value("kv_cache_dtype", "fp8")]))
    assert plain == pytest.approx(true_gib(BASELINE) * TOKENS_PER_GIB, rel=0.05)
    assert half == pytest.approx(2 * plain)


def test_what_would_not_start_is_lowered_not_thrown_away():
    told, _ = model(BASELINE)
    hungry = BASELINE.with_value("max_num_batched_tokens", 32768)
    lowered = told.lowered(hungry, ["max_num_batched_tokens", "max_num_seqs"], 0.5)
    assert told.chance(lowered) >= 0.5
    assert 2048 < lowered.values["max_num_batched_tokens"] < 32768
    assert told.lowered(hungry, [], 0.5) == hungry  # nothing that it may change


def test_the_search_spends_hardly_a_start_on_what_can_not_hold_a_request():
    trials = [trial(0, BASELINE)]
    proposer = OptunaProposer(
        Search(include=("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")), FACTS
    )
    for number in range(1, 16):
        proposal = proposer.propose(BASELINE, trials, None)
        trials.append(trial(number, proposal.candidate))
    assert sum(one.failure is not None for one in trials) <= 1
