"""Static validity: what vLLM would refuse, and what it would not."""

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.knobs.validity import problems

H200 = ModelFacts(
    family=Family.HYBRID, attention_heads=32, kv_heads=2, layers=52, experts=128, context_length=262144, mtp_layers=2,
    gpu_count=2, gpu_memory_gib=139.8, compute_capability=9.0, gpu_name="NVIDIA H200", vllm_version="0.32.0",
)  # fmt: skip
FLOAT16 = {"mamba_ssm_cache_dtype": "float16", "enable_mamba_cache_stochastic_rounding": True}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"max_num_batched_tokens": 512, "max_num_seqs": 1024}, "at least max_num_seqs"),
        ({"max_num_batched_tokens": 512, "max_model_len": 2048, "enable_chunked_prefill": False}, "max_model_len"),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, "262144"),
        ({"tensor_parallel_size": 3}, "32 attention heads"),
        ({"pipeline_parallel_size": 64}, "52 layers"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "needs 4 GPUs"),
        ({"num_speculative_tokens": 1}, "needs a speculative_method"),
        ({"speculative_method": "mtp", "num_speculative_tokens": 3}, "divisible by the model's 2 MTP layers"),
        ({"speculative_method": "ngram", "num_speculative_tokens": 4, "max_num_batched_tokens": 4}, "no slots"),
        ({"speculative_method": "draft_model", "num_speculative_tokens": 2, "max_num_batched_tokens": 256,
          "max_num_seqs": 256}, "slots"),
        ({"enable_mamba_cache_stochastic_rounding": True}, "float16"),
        ({**FLOAT16, "mamba_ssm_cache_dtype": "bfloat16"}, "float16"),
        (FLOAT16, "compute capability 10.0"),
        ({"max_num_sequences": 3}, "did you mean max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "above 1"),
        ({"max_num_seqs": "many"}, "not a number"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"async_scheduling": 1}, "true or false"),
        ({"scheduling_policy": "lifo"}, "fcfs, priority"),
        ({"speculative_method": "ngram", "num_speculative_tokens": 2, "async_scheduling": True}, "async_scheduling"),
    ],
)  # fmt: skip
def test_refused(values, word):
    found = problems(Candidate(values=values), H200)
    assert len([text for text in found if word in text]) == 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 1024, "max_num_seqs": 1024},
        {"max_num_batched_tokens": 512},  # vLLM lowers its own default of max_num_seqs
        {"max_num_batched_tokens": 512, "max_model_len": 2048},
        {"tensor_parallel_size": 2},
        {"speculative_method": "ngram", "num_speculative_tokens": 2},  # vLLM itself switches async scheduling off
        {"speculative_method": "mtp", "num_speculative_tokens": 1, "async_scheduling": True},
        {"speculative_method": "mtp", "num_speculative_tokens": 1},
        {"speculative_method": "mtp", "num_speculative_tokens": 4},
        {"speculative_method": "mtp"},
        {"speculative_method": "mtp", "num_speculative_tokens": 0},
        {"speculative_method": "mtp", "num_speculative_tokens": 1, "max_num_batched_tokens": 256, "max_num_seqs": 256},
        {**FLOAT16, "mamba_backend": "flashinfer"},
        {"gpu_memory_utilization": 0.93},
        {"kv_cache_memory_bytes": 70997981287},
        {"max_model_len": -1},
    ],
)
def test_not_refused(values):
    assert problems(Candidate(values=values), H200) == []


@pytest.mark.parametrize(
    ("values", "facts", "word"),
    [
        ({"speculative_method": "mtp", "num_speculative_tokens": 1}, ModelFacts(mtp_layers=0), "has none"),
        ({"enable_expert_parallel": True}, ModelFacts(experts=0), "experts"),
        ({**FLOAT16, "mamba_backend": "flashinfer"}, ModelFacts(gpu_count=0), "NVIDIA GPU"),
        ({"performance_mode": "throughput"}, ModelFacts(vllm_version="0.26.0"), "not in vLLM 0.26.0"),
    ],
)
def test_facts_of_other_machines(values, facts, word):
    (found,) = problems(Candidate(values=values), facts)
    assert word in found


def test_blackwell_rounds_with_triton():
    assert problems(Candidate(values=FLOAT16), ModelFacts(compute_capability=10.0)) == []


def test_what_is_not_known_is_not_held_against_a_candidate():
    values = {"tensor_parallel_size": 3, "speculative_method": "mtp", "num_speculative_tokens": 3, **FLOAT16}
    assert problems(Candidate(values=values), ModelFacts()) == []
