"""Earlier tunings as a prior of the proposer: used where they fit, harmless where their level has shifted."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_propose_proposer import BASELINE, HYBRID, trial
from world import Behaviour, measured

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Earlier, StartMemory
from tunewright.domain.tuning import Search
from tunewright.propose.beliefs import Beliefs
from tunewright.propose.encoding import Encoding
from tunewright.propose.memory import MemoryModel
from tunewright.propose.prior import Prior
from tunewright.propose.proposer import OptunaProposer
from tunewright.propose.space import build_space
from tunewright.propose.surrogate import Elsewhere, Surrogate

VERSION = "0.32.0+simulated.demo"
FACTS = replace(HYBRID, vllm_version=None)
SPECULATES = Candidate(values={**BASELINE.values, "speculative_method": "mtp", "num_speculative_tokens": 2})


def earlier(candidate: Candidate, objective: float | None = 1000.0, *, run: str = "a/1", number: int = 0, **more):
    given = {"version": VERSION, "slo_margin": 0.1, "failed": objective is None, "at": float(number), **more}
    return Earlier(
        tuning=run, trial=f"{number:03d}-{candidate.hash}", candidate=candidate, objective=objective, **given
    )


def first_trial(objective: float = 1000.0, gib: float | None = None):
    memory = StartMemory(available_kv_gib=60.0, device_gib=gib)
    return trial(0, BASELINE, objective).model_copy(
        update={"measurement": measured(Behaviour(tokens=objective)), "memory": memory}
    )


def proposal(prior, trials=None, **search):
    return OptunaProposer(Search(**search), FACTS).propose(BASELINE, trials or [first_trial()], None, prior)


def test_the_best_of_the_latest_run_that_met_the_slo_is_first():
    other = Candidate(values={**BASELINE.values, "max_num_seqs": 256})
    missed = Candidate(values={**BASELINE.values, "max_num_seqs": 512})
    prior = [
        earlier(other, 9000.0, run="old/1", number=0),
        earlier(BASELINE, 1000.0, number=1),
        earlier(SPECULATES, 1500.0, number=2),
        earlier(missed, 2000.0, number=3, slo_margin=-0.1),
    ]
    told = proposal(prior)
    assert told is not None
    assert (told.candidate, told.reason) == (SPECULATES, "the best of an earlier tuning")


@pytest.mark.parametrize(
    ("change", "gib"),
    [
        ({"version": "0.33.0+simulated.demo"}, None),
        ({"memory": StartMemory(device_gib=80.0)}, 139.8),
    ],
)
def test_another_vllm_or_another_gpu_tells_nothing(change, gib):
    trials = [first_trial(gib=gib)]
    assert proposal([earlier(SPECULATES, 9000.0, **change)], trials) == proposal([], trials)


def test_a_candidate_that_did_not_run_is_not_tried_again_but_others_are():
    told = proposal([])
    assert told is not None
    prior = [earlier(BASELINE, 1000.0), earlier(told.candidate, None, number=1, version=None, slo_margin=None)]
    other = proposal(prior)
    assert other is not None
    assert other.candidate != told.candidate
    ran = [*prior, earlier(told.candidate, 1000.0, number=2)]  # it did run at another time
    assert Prior.of(ran, [first_trial()]).failed == frozenset()


def test_nothing_is_ever_taken_for_measured():
    """Of a prior alone nothing is proposed as done: every candidate of it may be tried, and is, in the space's walk."""
    prior = [earlier(Candidate(values={**BASELINE.values, "max_num_seqs": n}), 900.0, number=n) for n in (8, 16, 32)]
    trials = [first_trial()]
    while (told := proposal(prior, trials, include=["max_num_seqs"])) is not None:
        trials.append(trial(len(trials), told.candidate, 900.0))
    assert {t.candidate.hash for t in trials} >= {one.candidate.hash for one in prior}


def surrogate(shift: float, own: float = 0.0):
    """Trained elsewhere on an effect of +30 % of one value; here on the baseline alone."""
    space = build_space(Search(include=["mamba_backend"]), HYBRID, BASELINE)
    encoding = Encoding(space)
    beliefs = Beliefs(encoding, MemoryModel([], encoding, HYBRID), None, HYBRID, latency=False)
    rows = encoding.rows([BASELINE, BASELINE.with_value("mamba_backend", "flashinfer")])
    elsewhere = Elsewhere(
        np.repeat(rows, 4, axis=0), np.repeat([shift, shift + math.log(1.3)], 4), np.zeros(8, dtype=int)
    )
    return surrogate_at(beliefs, rows, own, elsewhere), surrogate_at(beliefs, rows, own, None)


def surrogate_at(beliefs, rows, own, elsewhere):
    told = Surrogate(beliefs, rows[:1], np.array([own]), elsewhere=elsewhere).at(rows)
    return told.mean[1] - told.mean[0], told.sd[1], told.mean[0]


@pytest.mark.parametrize("shift", [0.0, 1.0, -2.0])
def test_effects_carry_over_whatever_the_level_was(shift):
    (effect, sd, level), (alone, sd_alone, _) = surrogate(shift, own=7.0)
    assert effect > alone + 0.05
    assert sd < sd_alone
    assert level == pytest.approx(7.0, abs=0.02)


def test_what_is_measured_here_outweighs_what_was_elsewhere():
    space = build_space(Search(include=["mamba_backend"]), HYBRID, BASELINE)
    encoding = Encoding(space)
    beliefs = Beliefs(encoding, MemoryModel([], encoding, HYBRID), None, HYBRID, latency=False)
    rows = encoding.rows([BASELINE, BASELINE.with_value("mamba_backend", "flashinfer")])
    wrong = Elsewhere(rows, np.array([0.0, 0.5]), np.zeros(2, dtype=int))
    here = np.vstack([rows, rows])
    told = Surrogate(beliefs, here, np.array([7.0, 6.9, 7.0, 6.9]), elsewhere=wrong).at(rows)
    assert told.mean[1] - told.mean[0] == pytest.approx(-0.1, abs=0.05)


def test_memory_of_earlier_starts_is_known_before_the_first_one_here():
    encoding = Encoding(build_space(Search(), HYBRID, BASELINE))
    rows = encoding.rows([BASELINE])
    blind = MemoryModel([], encoding, HYBRID)
    told = MemoryModel([], encoding, HYBRID, [(BASELINE, 41.0)])
    assert told.available(rows)[0][0] == pytest.approx(41.0, abs=0.5)
    assert told.available(rows)[1][0] < blind.available(rows)[1][0] / 4
    assert not told.known  # what was elsewhere discards nothing by itself


def test_with_much_known_the_chosen_first_steps_are_left_out():
    values = [{"max_num_seqs": n} for n in (8, 16, 32, 96, 128, 192, 256, 384)]
    prior = [earlier(Candidate(values={**BASELINE.values, **v}), 900.0, number=i) for i, v in enumerate(values)]
    reasons = []
    for known in (prior[:3], prior):
        trials = [first_trial()]
        for _ in range(2):
            told = proposal(known, trials)
            assert told is not None
            reasons.append(told.reason)
            trials.append(trial(len(trials), told.candidate, 900.0))
    assert reasons[0] == reasons[2] == "the best of an earlier tuning"
    assert reasons[1] == "vLLM's defaults"
    assert reasons[3].startswith("expected to give")
