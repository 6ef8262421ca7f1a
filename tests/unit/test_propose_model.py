"""The model of the search: it believes, measures and corrects itself."""

import math

import numpy as np
import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.state import TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.propose.beliefs import Beliefs
from tunewright.propose.encoding import Encoding
from tunewright.propose.memory import MemoryModel
from tunewright.propose.model import draw
from tunewright.propose.space import build_space
from tunewright.propose.surrogate import Surrogate

FACTS = ModelFacts(family=Family.MOE, experts=64, mtp_layers=0, gpu_count=1, gpu_memory_gib=139.8)
BASELINE = Candidate(values={"max_num_seqs": 64})


def traffic(**changes):
    lengths = Histogram(edges=(512.0,), counts=(100.0,))
    values = {
        "start": 0.0, "end": 1800.0, "replicas": 1, "via": "test", "source": Source.SIMULATED,
        "finished_requests": 1000.0, "saturated": True, "demand": 1.0, "concurrency": 128.0,
        "concurrency_p95": 128.0, "running": 64.0, "waiting": 64.0, "prompt_tokens": lengths,
        "output_tokens": lengths, "prompt_tokens_mean": 512.0, "output_tokens_mean": 256.0, "prefix_reuse": 0.4,
        "error_rate": 0.0, "output_tokens_per_second": 1000.0,
    }  # fmt: skip
    return TrafficProfile(**{**values, **changes})


def beliefs(profile=None, latency=False, **search):
    space = build_space(Search(**search), FACTS, BASELINE)
    encoding = Encoding(space)
    return Beliefs(encoding, MemoryModel([], encoding, FACTS), profile, FACTS, latency=latency), encoding


def prior(told, encoding, **values):
    return float(told.mean(encoding.rows([Candidate(values={**BASELINE.values, **values})]))[0])


def trial(number, candidate, objective, margin=1.0):
    outcome = TrialOutcome.COMPLETE if margin >= 0 else TrialOutcome.INFEASIBLE
    return TrialRecord(id=str(number), number=number, purpose=TrialPurpose.SEARCH, candidate=candidate,
                       objective=objective, slo_margin=margin, outcome=outcome)  # fmt: skip


def test_room_for_the_clients_is_believed_in_and_no_more():
    told, encoding = beliefs(traffic())
    assert prior(told, encoding, max_num_seqs=128) > prior(told, encoding) + 0.2
    assert prior(told, encoding, max_num_seqs=512) == prior(told, encoding, max_num_seqs=128)


def test_graphs_are_worth_what_the_steps_with_prompts_in_them_lose_without():
    told, encoding = beliefs(traffic())
    half = {"max_num_seqs": 128}  # 128 decode, and one prompt of 512 rides along in every other step
    gain = prior(told, encoding, **half, max_cudagraph_capture_size=1024) - prior(told, encoding, **half)
    assert 0.04 < gain < math.log(1.2)
    assert prior(told, encoding, **half, max_cudagraph_capture_size=2048) > prior(told, encoding, **half) + gain
    decoding = {**half, "max_cudagraph_capture_size": 2048, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert prior(told, encoding, **decoding) < prior(told, encoding, **half, max_cudagraph_capture_size=2048) - 0.1
    alone, _ = beliefs()
    assert prior(alone, encoding, **half, max_cudagraph_capture_size=128) == prior(alone, encoding, **half)


def test_a_mamba_state_in_16_bits_is_worth_more_the_more_requests_run():
    hybrid = ModelFacts(family=Family.HYBRID, mtp_layers=0, gpu_count=1, gpu_memory_gib=139.8)
    space = build_space(Search(allow_lossy=True), hybrid, BASELINE)
    encoding = Encoding(space)

    def gain(streams):
        seen = traffic(concurrency_p95=streams)
        told = Beliefs(encoding, MemoryModel([], encoding, hybrid), seen, hybrid, latency=False)
        return prior(told, encoding, mamba_ssm_cache_dtype="float16") - prior(told, encoding)

    assert 0 < gain(4.0) < 0.02 < 0.08 < gain(256.0) < 0.2


def test_prefix_caching_is_worth_what_the_traffic_shares():
    reused, encoding = beliefs(traffic())
    never, _ = beliefs(traffic(prefix_reuse=0.0))
    with_cache = prior(reused, encoding) - prior(reused, encoding, enable_prefix_caching=False)
    assert with_cache > 0.02
    assert prior(never, encoding) - prior(never, encoding, enable_prefix_caching=False) < 0


def test_levels_of_speculation_are_one_where_there_is_none():
    told, encoding = beliefs(traffic())
    feature = next(f for f in told.features if len(f.columns) == 2)
    rows = encoding.rows([BASELINE, Candidate(values={"speculative_method": "ngram", "num_speculative_tokens": 2})])
    assert list(feature.level(rows) > 0) == [False, True]
    assert feature.covariance[0, 0] == 0.0


def test_the_surrogate_follows_the_data_against_its_beliefs():
    told, encoding = beliefs(traffic())
    plain, drafting = BASELINE, Candidate(values={**BASELINE.values, "speculative_method": "ngram",
                                                  "num_speculative_tokens": 2})  # fmt: skip
    rows = encoding.rows([plain, drafting, plain.with_value("async_scheduling", False)])
    fitted = Surrogate(told, rows, np.log([1000.0, 1500.0, 900.0]))
    at = fitted.at(rows)
    assert math.exp(at.mean[1] - at.mean[0]) == pytest.approx(1.5, rel=0.08)
    assert np.all(at.sd < 0.06)
    unseen = fitted.at(encoding.rows([drafting.with_value("max_num_seqs", 1024)]))
    assert unseen.sd[0] > at.sd.max()


def test_a_draw_that_nothing_is_known_of_is_none():
    space = build_space(Search(), FACTS, BASELINE)
    assert draw(space, [], None, FACTS, lambda _: True, 1) is None
    assert draw(space, [trial(0, BASELINE, 0.0)], None, FACTS, lambda _: True, 1) is None  # no log of it
    assert draw(space, [trial(0, BASELINE, 1000.0)], None, FACTS, lambda _: False, 1) is None


def test_only_what_is_usable_is_drawn():
    space = build_space(Search(), FACTS, BASELINE)
    drawn = draw(space, [trial(0, BASELINE, 1000.0)], traffic(), FACTS,
                 lambda c: "speculative_method" not in c.values, 1)  # fmt: skip
    assert drawn is not None
    assert "speculative_method" not in drawn.candidate.values


def test_draws_keep_away_from_what_misses_the_slo():
    space = build_space(Search(include=("max_num_seqs",)), FACTS, BASELINE)
    trials = [
        trial(0, Candidate(values={"max_num_seqs": 64}), 1000.0, margin=0.15),
        trial(1, Candidate(values={"max_num_seqs": 256}), 1600.0, margin=-0.6),
        trial(2, Candidate(values={"max_num_seqs": 32}), 600.0, margin=0.5),
    ]
    tried = {one.candidate.hash for one in trials}
    drawn = draw(space, trials, traffic(concurrency_p95=512.0), FACTS, lambda c: c.hash not in tried, 1)
    assert drawn is not None
    assert 64 < drawn.candidate.values["max_num_seqs"] < 192


def test_trials_in_flight_are_not_drawn_beside():
    space = build_space(Search(include=("max_num_seqs", "max_num_batched_tokens")), FACTS, BASELINE)
    trials = [trial(0, BASELINE, 1000.0)]
    first = draw(space, trials, traffic(), FACTS, lambda c: c != BASELINE, 1)
    running = TrialRecord(id="1", number=1, purpose=TrialPurpose.SEARCH, candidate=first.candidate)
    second = draw(space, [*trials, running], traffic(), FACTS, lambda c: c not in (BASELINE, first.candidate), 1)
    alone = draw(space, trials, traffic(), FACTS, lambda c: c not in (BASELINE, first.candidate), 1)
    assert second.sd <= alone.sd + 1e-9  # what the one in flight will tell is counted on
