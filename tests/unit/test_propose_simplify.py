"""Simplifying a winner: only what the trials show to be worthless goes."""

import math
import random

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Failure, FailureKind, TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.propose.effects import NOISE, fit_effects
from tunewright.propose.proposer import OptunaProposer

FACTS = ModelFacts(family=Family.HYBRID, mtp_layers=1, experts=8, gpu_count=1, gpu_memory_gib=139.8, gpu_name="H200")
BASELINE = Candidate(values={"max_num_seqs": 64, "block_size": 32})
KNOBS = {"max_num_seqs": 256, "mamba_backend": "flashinfer", "stream_interval": 4, "max_num_batched_tokens": 16384}


def trial(number, candidate, objective, failure=None):
    return TrialRecord(
        id=f"{number}", number=number, purpose=TrialPurpose.SEARCH, candidate=candidate, objective=objective,
        outcome=TrialOutcome.INFEASIBLE if failure else TrialOutcome.COMPLETE, failure=failure,
    )  # fmt: skip


def history(effects, count=24, noise=0.02, seed=3, sign=1.0):
    """Trials of random subsets of the knobs, each worth its effect in log objective."""
    rng = random.Random(seed)
    trials = [trial(0, BASELINE, sign * 1000.0), trial(1, BASELINE, sign * 1010.0)]
    for number in range(2, count + 2):
        candidate = BASELINE
        for name, value in KNOBS.items():
            if rng.random() < 0.5:
                candidate = candidate.with_value(name, value)
        worth = sum(effects.get(name, 0.0) for name in candidate.values if candidate.values[name] == KNOBS.get(name))
        trials.append(trial(number, candidate, sign * 1000 * math.exp(sign * worth + rng.gauss(0, noise))))
    return trials


def winner():
    candidate = BASELINE
    for name, value in KNOBS.items():
        candidate = candidate.with_value(name, value)
    return candidate


PROPOSER = OptunaProposer(Search(), FACTS)
WORTH = {"max_num_seqs": 0.4, "mamba_backend": 0.25}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_worthless_knobs_go_and_the_others_stay(sign):
    simple = PROPOSER.simplify(winner(), BASELINE, history(WORTH, sign=sign))
    assert simple.values["max_num_seqs"] == 256
    assert simple.values["mamba_backend"] == "flashinfer"
    assert "stream_interval" not in simple.values or "max_num_batched_tokens" not in simple.values
    assert simple.values["block_size"] == 32


def test_what_the_trials_cant_tell_stays():
    trials = [trial(0, BASELINE, 1000.0), trial(1, winner(), 1500.0)]
    assert PROPOSER.simplify(winner(), BASELINE, trials) == winner()
    assert PROPOSER.simplify(winner(), BASELINE, []) == winner()


def test_knobs_that_only_help_together_are_not_torn_apart():
    one, two = (BASELINE.with_value(name, KNOBS[name]) for name in ("max_num_seqs", "mamba_backend"))
    both = one.with_value("mamba_backend", "flashinfer")
    trials = [trial(0, BASELINE, 1000.0), trial(1, one, 1005.0), trial(2, two, 998.0), trial(3, both, 1500.0)]
    assert PROPOSER.simplify(both, BASELINE, trials) == both


def test_a_simpler_candidate_that_did_worse_is_not_taken():
    trials = history(WORTH)
    rest = PROPOSER.simplify(winner(), BASELINE, trials)
    assert rest != winner()
    trials.append(trial(98, winner(), 2000.0))
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY_UNDER_LOAD, cause="CUDA out of memory")
    assert PROPOSER.simplify(winner(), BASELINE, [*trials, trial(99, rest, None, failure)]) != rest


def test_speculation_goes_or_stays_as_a_whole():
    spec = BASELINE.with_value("speculative_method", "mtp").with_value("num_speculative_tokens", 1)
    trials = [trial(n, c, v) for n, (c, v) in enumerate([(BASELINE, 1000.0), (spec, 1001.0)] * 8)]
    assert PROPOSER.simplify(spec, BASELINE, trials) == BASELINE


def test_noise_is_learned_from_repeated_runs():
    calm = [trial(n, BASELINE, 1000.0 + n) for n in range(12)]
    wild = [trial(n, BASELINE, 1000.0 * (1 + 0.4 * (n % 2))) for n in range(12)]
    assert fit_effects(BASELINE, calm).noise < NOISE < fit_effects(BASELINE, wild).noise


def test_objectives_without_a_log_are_left_alone():
    trials = [trial(0, BASELINE, 0.0), trial(1, winner(), 5.0)]
    assert fit_effects(BASELINE, trials) is None
    assert PROPOSER.simplify(winner(), BASELINE, trials) == winner()


def test_the_ladder_takes_the_largest_effect_first_and_units_whole():
    top = winner().with_value("speculative_method", "mtp").with_value("num_speculative_tokens", 1)
    effects = {"max_num_seqs": 0.4, "mamba_backend": 0.25, "max_num_batched_tokens": 0.1, "stream_interval": -0.1}
    rungs = PROPOSER.rungs(top, BASELINE, history(effects))
    changes = [set(rung.differences(before)) for before, rung in zip([BASELINE, *rungs], rungs, strict=False)]
    assert changes[:3] == [{"max_num_seqs"}, {"mamba_backend"}, {"max_num_batched_tokens"}]
    assert changes[3:] == [{"speculative_method", "num_speculative_tokens"}]  # never seen: before what was seen to harm
    assert set(top.differences(rungs[-1])) == {"stream_interval"}


def test_what_vllm_would_refuse_between_is_one_step_with_the_next():
    base = Candidate(values={"max_num_seqs": 64, "max_num_batched_tokens": 2048})
    top = Candidate(values={"max_num_seqs": 4096, "max_num_batched_tokens": 8192, "stream_interval": 4})
    runs = [trial(0, base, 1000.0), trial(1, base.with_value("max_num_seqs", 4096), 2000.0), trial(2, top, 2000.0)]
    rungs = PROPOSER.rungs(top, base, runs)
    assert [set(rung.differences(base)) for rung in rungs] == [{"max_num_seqs", "max_num_batched_tokens"}]


def test_one_change_has_no_rungs():
    assert PROPOSER.rungs(BASELINE.with_value("max_num_seqs", 128), BASELINE, history(WORTH)) == []
