"""The proposer: chosen first trials, what failures teach, never twice the same, and better than chance."""

import math
import random
import statistics
from dataclasses import replace

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.load import Load
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.state import Failure, FailureKind, StartMemory, TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.binary import BinaryFlags, Flag
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.failures import explain
from tunewright.knobs.knob import Family
from tunewright.knobs.validity import problems
from tunewright.ports import Proposer, Refused
from tunewright.propose.proposer import OptunaProposer
from tunewright.propose.space import build_space
from tunewright.propose.starts import starts

HYBRID = ModelFacts(
    family=Family.HYBRID, attention_heads=32, experts=128, mtp_layers=1, gpu_count=1, gpu_memory_gib=139.8,
    compute_capability=9.0, gpu_name="NVIDIA H200", vllm_version="0.32.0",
)  # fmt: skip
DENSE = replace(HYBRID, family=Family.DENSE, experts=0, mtp_layers=0)
BASELINE = Candidate(values={"max_num_seqs": 64, "max_model_len": 4096})


def profile(**changes):
    lengths = Histogram(edges=(512.0,), counts=(100.0,))
    values = {
        "start": 0.0, "end": 1800.0, "replicas": 1, "via": "test", "source": Source.SIMULATED,
        "finished_requests": 1000.0, "saturated": False, "demand": 1.0, "concurrency": 100.0,
        "concurrency_p95": 150.0, "running": 100.0, "waiting": 0.0, "prompt_tokens": lengths,
        "output_tokens": lengths, "prompt_tokens_mean": 512.0, "output_tokens_mean": 512.0, "prefix_reuse": 0.4,
        "error_rate": 0.0, "output_tokens_per_second": 1000.0,
    }  # fmt: skip
    return TrafficProfile(**{**values, **changes})


def trial(number, candidate, objective=None, *, margin=0.1, failure=None, outcome=None, effective=None):
    if outcome is None:
        outcome = TrialOutcome.INFEASIBLE if failure or margin < 0 else TrialOutcome.COMPLETE
    return TrialRecord(
        id=f"{number}-{candidate.hash}", number=number, candidate=candidate, outcome=outcome, objective=objective,
        purpose=TrialPurpose.BASELINE if number == 0 else TrialPurpose.SEARCH, failure=failure,
        slo_margin=None if failure else margin, effective=effective or {},
    )  # fmt: skip


def search(count, answer, facts=HYBRID, baseline=BASELINE, traffic=None, **spec):
    """Run a whole search against `answer(candidate)`, a number or a failure."""
    proposer: Proposer = OptunaProposer(Search(**spec), facts)
    trials = [trial(0, baseline, 1000.0)]
    for number in range(1, count + 1):
        proposal = proposer.propose(baseline, trials, traffic)
        if proposal is None:
            break
        told = answer(proposal.candidate)
        failed = isinstance(told, Failure)
        machine = failed and told.machine_fault
        trials.append(
            trial(
                number, proposal.candidate, None if failed else told, failure=told if failed else None,
                outcome=TrialOutcome.FAILED if machine else None,
            )
        )  # fmt: skip
    return trials


def test_streams_that_the_spec_names_count_more_than_what_was_seen():
    load = Load(mode="closedLoop", concurrency=16)
    quiet = profile(concurrency=2.0, concurrency_p95=3.0)
    small = Candidate(values={"max_num_seqs": 4})
    trials = [trial(0, small, 100.0), trial(1, Candidate(), 100.0)]
    first = OptunaProposer(Search(include=("max_num_seqs",)), HYBRID, load).propose(small, trials, quiet)
    assert first.candidate.values["max_num_seqs"] == 32, first
    assert first.reason == "room for twice the 16 requests at a time"


def test_facts_that_come_to_be_known_later_count_from_then_on():
    """The image answers while the baseline is measured; the GPU's memory is told by the first server's log."""
    known = [ModelFacts()]
    proposer = OptunaProposer(Search(include=["max_num_seqs", "mamba_backend"]), lambda: known[0])
    first = trial(0, BASELINE, 1000.0)
    told = first.model_copy(update={"memory": StartMemory(available_kv_gib=60.0, device_gib=139.8)})
    assert proposer._facts_with([told]).gpu_memory_gib == 139.8
    assert proposer._facts_with([first]).gpu_memory_gib is None
    tried = []
    for _ in range(2):
        trials, values = [told], set()
        while (proposal := proposer.propose(BASELINE, trials, None)) is not None:
            values |= set(proposal.candidate.values.items())
            trials.append(trial(len(trials), proposal.candidate, 900.0))
        tried.append(("mamba_backend", "flashinfer") in values)
        known[0] = HYBRID
    assert tried == [False, True]


def test_what_the_search_knows_is_told_for_people():
    flags = BinaryFlags({f"--{name}": Flag() for name in ("max-num-seqs", "novel-flag", "no-novel-flag")})
    told = OptunaProposer(Search(), replace(HYBRID, flags=flags)).inputs(BASELINE, [])
    assert told.version == "0.32.0"
    assert told.gpu == "1 × NVIDIA H200 with 139.8 GiB (compute capability 9)"
    assert told.model.startswith("hybrid, 32 attention heads, 128 experts")
    assert told.searched == ("max_num_seqs", "omp_num_threads")
    assert "max_num_batched_tokens" in told.missing
    assert told.not_tuned == ("--novel-flag",)
    unknown = OptunaProposer(Search(), ModelFacts(flags_unknown="no python3 in the image")).inputs(BASELINE, [])
    assert (unknown.model, unknown.gpu, unknown.not_tuned) == ("", "", ())
    assert unknown.flags_unknown == "no python3 in the image"


def test_the_first_trials_are_chosen():
    trials = search(7, lambda c: 1000.0 + (c.values.get("speculative_method") == "mtp") * 300, traffic=profile())
    tried = [one.candidate.values for one in trials[1:]]
    assert tried[0] == {"max_model_len": 4096}  # vLLM's defaults, for this model length
    assert tried[1] == {**BASELINE.values, "max_num_seqs": 384}  # twice the 150 that were seen
    assert tried[2] == {**BASELINE.values, "enable_prefix_caching": True}
    assert tried[3] == {**BASELINE.values, "max_cudagraph_capture_size": 1024}  # 64 decode, and a prompt of 512
    assert tried[4] == {**BASELINE.values, "speculative_method": "mtp", "num_speculative_tokens": 1,
                        "mamba_backend": "flashinfer", "max_cudagraph_capture_size": 1024}  # fmt: skip


@pytest.mark.parametrize(("facts", "traffic", "largest"), [
    (HYBRID, profile(concurrency_p95=256.0), 2048),  # 256 that decode, and two prompts at a time
    (HYBRID, profile(concurrency_p95=256.0, output_tokens_mean=1024.0), 1024),  # hardly ever more than one prompt
    (HYBRID, profile(concurrency_p95=256.0, output_tokens_mean=8192.0), None),  # hardly ever a prompt
    (HYBRID, profile(concurrency_p95=64.0, prompt_tokens_mean=64.0), None),  # within the 512 that vLLM captures for
    (HYBRID, profile(concurrency_p95=256.0, prompt_tokens_mean=8192.0), None),  # beyond any graph: it is computing then
    (DENSE, profile(concurrency_p95=256.0), None),  # few kernels
    (HYBRID, None, None),
])  # fmt: skip
def test_graphs_are_wanted_for_the_steps_in_which_prompts_ride_along(facts, traffic, largest):
    nothing = Candidate(values={})
    steps = starts(build_space(Search(), facts, nothing), nothing, [], traffic, facts)
    chosen = [step.candidate.values for step in steps if step.reason.startswith("CUDA graphs")]
    assert chosen == ([{"max_cudagraph_capture_size": largest}] if largest else [])


@pytest.mark.parametrize(("streams", "lossy", "place"), [(256.0, True, 0), (256.0, False, None), (8.0, True, -2)])
def test_half_of_a_state_that_many_requests_have_comes_first(streams, lossy, place):
    nothing = Candidate(values={})
    space = build_space(Search(allow_lossy=lossy), HYBRID, nothing)
    traffic = profile(concurrency_p95=streams, prefix_reuse=0.0)
    steps = [one.reason for one in starts(space, nothing, [], traffic, HYBRID)]
    half = "half the memory by mamba_ssm_cache_dtype float16"
    assert steps.count(half) == (place is not None)
    if place is not None:
        assert steps[1:][place] == half  # the first is vLLM's defaults


def test_steps_go_from_the_defaults_where_those_are_better():
    trials = search(3, lambda c: 900.0 if "max_num_seqs" in c.values else 2000.0, traffic=profile())
    assert trials[2].candidate.values == {"max_model_len": 4096, "enable_prefix_caching": True}


def test_steps_that_helped_are_tried_together():
    def answer(candidate):
        values = candidate.values
        return 1000.0 + 200 * ("mamba_backend" in values) + 300 * (values.get("enable_prefix_caching") is True)

    trials = search(9, answer, traffic=profile())
    assert max(answer(one.candidate) for one in trials[1:8]) == 1500


def test_without_reuse_prefix_caching_is_no_first_step():
    trials = search(4, lambda c: 1000.0, traffic=profile(prefix_reuse=0.0))
    assert all(one.candidate.values.get("enable_prefix_caching") is not True for one in trials[1:4])


def test_same_trials_same_proposal():
    trials = search(14, lambda c: 1000.0 + hash_noise(c), seed=1)
    again = [OptunaProposer(Search(seed=1), HYBRID).propose(BASELINE, trials, None) for _ in range(2)]
    assert again[0] == again[1]


def hash_noise(candidate):
    return int(candidate.hash, 16) % 100


@pytest.mark.parametrize("facts", [HYBRID, DENSE, ModelFacts(), replace(DENSE, gpu_count=0, gpu_memory_gib=None)])
def test_no_candidate_twice_and_none_that_is_invalid(facts):
    trials = search(30, lambda c: 1000.0 + hash_noise(c), facts=facts, allow_lossy=True)
    hashes = [one.candidate.hash for one in trials]
    assert len(set(hashes)) == len(hashes)
    for one in trials[1:]:
        assert problems(one.candidate, facts) == []
        assert one.candidate.values["max_model_len"] == 4096


def test_a_small_space_is_walked_to_its_end():
    trials = search(99, lambda c: 1000.0, include=("scheduling_policy", "enable_prefix_caching"))
    tried = {one.candidate.hash for one in trials}
    assert len(tried) == len(trials) == 4


def test_pins_are_in_every_candidate_and_exclusions_as_the_baseline():
    trials = search(
        12, lambda c: 1000.0 + hash_noise(c), pin={"gpu_memory_utilization": "0.9"}, exclude=("max_num_seqs",)
    )
    assert all(one.candidate.values["gpu_memory_utilization"] == 0.9 for one in trials[1:])
    assert all(one.candidate.values["max_num_seqs"] == 64 for one in trials[1:])


def test_lossy_knobs_are_not_tried_unasked():
    proposer = OptunaProposer(Search(), HYBRID)
    for one in search(25, lambda c: 1000.0 + hash_noise(c)):
        assert proposer.lossy(one.candidate, BASELINE) == []
    trials = search(25, lambda c: 1000.0 + hash_noise(c), allow_lossy=True)
    assert any(proposer.lossy(one.candidate, BASELINE) for one in trials)


def test_lossy_is_told_against_the_baseline():
    proposer = OptunaProposer(Search(), HYBRID)
    fp8 = Candidate(values={"kv_cache_dtype": "fp8", "max_num_seqs": 4})
    assert proposer.lossy(fp8, Candidate()) == ["kv_cache_dtype"]
    assert proposer.lossy(fp8, fp8) == []
    assert proposer.lossy(Candidate(), fp8) == []


# --- what failures teach ---------------------------------------------------------------------------------------------


def fails(kind, cause="", **limits):
    return Failure(kind=kind, cause=cause, limits=limits)


def test_the_mamba_bound_is_learned_once():
    def answer(candidate):
        pages = 600 / (1 + candidate.values.get("num_speculative_tokens", 0))
        if candidate.values.get("max_num_seqs", 1024) > pages:
            return fails(FailureKind.MAMBA_BLOCKS, "exceeds available Mamba cache blocks", max_num_seqs=int(pages))
        return 1000.0 + hash_noise(candidate)

    trials = search(25, answer)
    failed = [one for one in trials if one.failure]
    assert len(failed) == 1
    assert failed[0].number == 1  # the defaults
    assert any(one.candidate.values.get("max_num_seqs") == 600 for one in trials)  # clamped, not thrown away


def test_a_flag_of_another_version_is_tried_once():
    def answer(candidate):
        if "performance_mode" in candidate.values:
            return fails(FailureKind.INVALID_FLAG, "vllm: error: unrecognized arguments: --performance-mode throughput")
        if candidate.values.get("attention_backend") == "FLASHINFER":
            return fails(FailureKind.UNSUPPORTED_BACKEND, "No valid attention backend found")
        return 1000.0 + hash_noise(candidate)

    trials = search(30, answer)
    assert sum("performance_mode" in one.candidate.values for one in trials) == 1
    assert sum(one.candidate.values.get("attention_backend") == "FLASHINFER" for one in trials) <= 1


def test_hungrier_than_what_ran_out_of_memory_is_not_tried():
    hungry = BASELINE.with_value("max_num_batched_tokens", 16384).with_value("gpu_memory_utilization", 0.94)
    trials = [trial(0, BASELINE, 1000.0), trial(1, hungry, failure=fails(FailureKind.OUT_OF_MEMORY_UNDER_LOAD))]
    proposer = OptunaProposer(
        Search(include=("max_num_batched_tokens", "gpu_memory_utilization")), replace(HYBRID, gpu_memory_gib=139.8)
    )
    seen = set()
    for number in range(2, 60):
        proposal = proposer.propose(BASELINE, trials, None)
        if proposal is None:
            break
        values = proposal.candidate.values
        seen.add((values.get("max_num_batched_tokens", 8192), values.get("gpu_memory_utilization", 0.92)))
        trials.append(trial(number, proposal.candidate, 1000.0))
    assert (32768, 0.95) not in seen
    assert (16384, 0.95) not in seen
    assert (32768, 0.92) in seen


def test_a_utilisation_that_died_under_load_is_not_gambled_on_again():
    bold = BASELINE.with_value("gpu_memory_utilization", 0.94)
    trials = [trial(0, BASELINE, 1000.0), trial(1, bold, failure=fails(FailureKind.OUT_OF_MEMORY_UNDER_LOAD))]
    proposer = OptunaProposer(Search(include=("gpu_memory_utilization", "max_num_batched_tokens")), HYBRID)
    for number in range(2, 40):
        proposal = proposer.propose(BASELINE, trials, None)
        if proposal is None:
            break
        assert proposal.candidate.values.get("gpu_memory_utilization", 0.92) < 0.94
        trials.append(trial(number, proposal.candidate, 1000.0))
    assert len(trials) > 10


def test_what_crashes_is_not_started_again_in_other_clothes():
    """The message names no knob: what all crashes have in common, and no other trial had, is to blame."""

    def answer(candidate):
        if candidate.values.get("cudagraph_mode") == "FULL_DECODE_ONLY":
            return fails(FailureKind.CRASHED, f"RuntimeError: kernel 0x{hash_noise(candidate)} gave up")
        return 1000.0 + hash_noise(candidate)

    trials = search(40, answer)
    crashed = [one for one in trials if one.failure]
    assert len(crashed) <= 3
    assert len(trials) == 41


def test_a_method_of_speculation_that_the_model_lacks_is_tried_once():
    def answer(candidate):
        if candidate.values.get("speculative_method") == "ngram":
            return explain(1, "", "ValueError: Unsupported speculative method: 'ngram' for NemotronHForCausalLM.")
        return 1000.0 + hash_noise(candidate)

    trials = search(30, answer)
    assert sum(one.failure is not None for one in trials) <= 1


def test_drafted_requests_fit_one_step():
    def answer(candidate):
        values = candidate.values
        seqs, tokens = values.get("max_num_seqs", 1024), values.get("max_num_batched_tokens", 8192)
        assert tokens >= seqs * (1 + values.get("num_speculative_tokens", 0))
        return 1000.0 + hash_noise(candidate)

    include = ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens", "speculative_method")
    assert len(search(30, answer, include=include)) == 31


def test_too_small_a_cache_does_not_end_the_search():
    trials = [
        trial(0, BASELINE, 1000.0),
        trial(1, BASELINE.with_value("max_num_batched_tokens", 32768),
              failure=fails(FailureKind.KV_TOO_SMALL, "estimated maximum model length is 3000", max_model_len=3000)),
    ]  # fmt: skip
    assert OptunaProposer(Search(), HYBRID).propose(BASELINE, trials, None) is not None


def test_the_machines_faults_are_not_held_against_a_candidate_but_bounded():
    trials = search(99, lambda c: fails(FailureKind.GPU_NOT_CLEAN), include=("enable_prefix_caching", "max_num_seqs"))
    counts = {}
    for one in trials[1:]:
        counts[one.candidate.hash] = counts.get(one.candidate.hash, 0) + 1
    assert len(counts) > 10
    assert set(counts.values()) == {2}


def test_a_trial_in_flight_is_not_proposed_again():
    first = OptunaProposer(Search(), HYBRID).propose(BASELINE, [trial(0, BASELINE, 1000.0)], None)
    running = TrialRecord(id="1", number=1, purpose=TrialPurpose.SEARCH, candidate=first.candidate)
    second = OptunaProposer(Search(), HYBRID).propose(BASELINE, [trial(0, BASELINE, 1000.0), running], None)
    assert second.candidate != first.candidate


def in_flight(number, candidate, **fields):
    return TrialRecord(
        id=f"{number}-{candidate.hash}", number=number, purpose=TrialPurpose.SEARCH, candidate=candidate, **fields
    )


@pytest.mark.parametrize("known", [1, 12])
def test_several_at_once_are_never_the_same(known):
    """From the chosen first trials on, and where the model proposes."""
    trials = search(known, lambda c: 1000.0 + hash_noise(c))
    proposer, flying = OptunaProposer(Search(), HYBRID), []
    for number in range(known + 1, known + 9):
        proposal = proposer.propose(BASELINE, [*trials, *flying], None)
        flying.append(in_flight(number, proposal.candidate))
    hashes = [one.candidate.hash for one in [*trials, *flying]]
    assert len(set(hashes)) == len(hashes)


def test_what_the_machine_spoilt_and_will_run_again_is_not_proposed_meanwhile():
    spoilt = fails(FailureKind.GPU_NOT_CLEAN)
    first = OptunaProposer(Search(), HYBRID).propose(BASELINE, [trial(0, BASELINE, 1000.0)], None)
    again = in_flight(1, first.candidate, failure=spoilt)
    second = OptunaProposer(Search(), HYBRID).propose(BASELINE, [trial(0, BASELINE, 1000.0), again], None)
    assert second.candidate != first.candidate
    ended = trial(1, first.candidate, failure=spoilt, outcome=TrialOutcome.FAILED)
    third = OptunaProposer(Search(), HYBRID).propose(BASELINE, [trial(0, BASELINE, 1000.0), ended], None)
    assert third.candidate == first.candidate, "it has ended, and nothing is known of it"


def test_where_nothing_is_left_it_is_asked_again_once_something_ended(monkeypatch):
    include = ("scheduling_policy", "enable_prefix_caching")
    trials = search(99, lambda c: 1000.0, include=include)
    proposer = OptunaProposer(Search(include=include), HYBRID)
    flying = [*trials[:-1], in_flight(3, trials[-1].candidate)]
    assert proposer.propose(BASELINE, flying, None) is None
    with monkeypatch.context() as busy:
        busy.setattr("tunewright.propose.proposer.build_space", lambda *_: pytest.fail("it was all reckoned again"))
        assert proposer.propose(BASELINE, [one.model_copy() for one in flying], None) is None
    spoilt = trial(3, trials[-1].candidate, failure=fails(FailureKind.KILLED), outcome=TrialOutcome.FAILED)
    assert proposer.propose(BASELINE, [*trials[:-1], spoilt], None).candidate == trials[-1].candidate


def test_a_default_that_the_server_reports_is_not_tried_by_name():
    effective = {"attention_backend": "FLASH_ATTN"}
    trials = [trial(0, BASELINE, 1000.0, effective=effective)]
    space = build_space(Search(), HYBRID, BASELINE, trials)
    assert "FLASH_ATTN" not in space.axis("attention_backend").values
    assert None in space.axis("attention_backend").values


def test_latency_objectives_and_slo_misses_are_searched_too():
    trials = search(15, lambda c: -0.5 + hash_noise(c) / 1000, traffic=profile())
    assert len(trials) == 16
    missed = [replace_margin(one, -0.3) for one in trials]
    assert OptunaProposer(Search(), HYBRID).propose(BASELINE, missed, None) is not None


def replace_margin(one, margin):
    return one.model_copy(update={"slo_margin": margin, "outcome": TrialOutcome.INFEASIBLE})


def test_a_misnamed_search_is_refused_at_once():
    with pytest.raises(Refused, match=r"spec\.search\.include\[0\]"):
        OptunaProposer(Search(include=("max_seqs",)), HYBRID)


# --- against chance --------------------------------------------------------------------------------------------------

FIVE = (
    "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "long_prefill_token_threshold",
    "enable_prefix_caching",
)  # fmt: skip


def surface(space, seed):
    """A quadratic with its best somewhere, weights of its own, and one pair of knobs that act together."""
    rng = random.Random(seed)
    best = {axis.name: rng.randrange(len(axis.values)) for axis in space.axes}
    weights = {axis.name: rng.uniform(0.3, 1.5) for axis in space.axes}

    def value(candidate):
        at = space.positions(candidate)
        away = {a.name: (at[a.name] - best[a.name]) / (len(a.values) - 1) for a in space.axes}
        loss = sum(weights[name] * distance**2 for name, distance in away.items())
        return 1000 * math.exp(-loss - abs(away["max_num_seqs"] * away["max_num_batched_tokens"]))

    return value


def test_it_beats_random_search_at_the_same_budget():
    ours, chance = [], []
    for seed in range(10):
        space = build_space(Search(include=FIVE), HYBRID, BASELINE)
        value = surface(space, seed)
        trials = search(20, value, include=FIVE, seed=seed)
        ours.append(max(value(one.candidate) for one in trials[1:]))
        rng = random.Random(1000 + seed)  # not the surface's own draws
        drawn = [space.candidate({a.name: rng.randrange(len(a.values)) for a in space.axes}) for _ in range(20)]
        chance.append(max(value(candidate) for candidate in drawn))
    assert statistics.median(ours) > statistics.median(chance)
