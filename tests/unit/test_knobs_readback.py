"""The configuration read back from real logs and metrics."""

import re
from pathlib import Path

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.knobs.readback import StartFacts, compare, effective, full_version, start_facts, start_memory

RECORDED = Path(__file__).parents[1] / "fixtures/vllm"
H200_LOG = (RECORDED / "vllm-0.26-h200-startup.log").read_text(encoding="utf-8")
CPU_LOG = (RECORDED / "failures/main_sigkill/server.log").read_text(encoding="utf-8")


def _labels(name):
    text = (RECORDED / name).read_text(encoding="utf-8")
    line = re.search(r"^vllm:cache_config_info\{(.*)\} 1", text, re.MULTILINE)
    return dict(re.findall(r'(\w+)="([^"]*)"', line[1]))


H200_LABELS = _labels("vllm-0.26-h200-under-load.metrics.txt")


def test_a_gpu_servers_configuration():
    found = effective(H200_LOG, H200_LABELS)
    wanted = {
        "max_num_seqs": "default", "max_num_batched_tokens": 8192, "async_scheduling": True,
        "enable_chunked_prefill": True, "gpu_memory_utilization": 0.92, "kv_cache_dtype": "auto",
        "enable_prefix_caching": False, "block_size": 2096, "max_model_len": 4096, "enforce_eager": False,
        "attention_backend": "FLASH_ATTN", "tensor_parallel_size": 1, "num_speculative_tokens": 0,
        "mamba_backend": "triton", "mamba_ssm_cache_dtype": "float32",
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted


def test_a_cpu_servers_configuration():
    found = effective(CPU_LOG, {})
    assert found["omp_num_threads"] == 1
    assert found["enforce_eager"] is True
    assert found["enable_prefix_caching"] is True
    assert found["cudagraph_mode"] == "NONE"


def test_start_facts():
    assert start_facts(H200_LOG) == StartFacts(3780608, 923.0, 66.43, 266.98, 139.8)
    memory = start_memory(H200_LOG)
    assert memory is not None
    assert memory.device_gib == 139.8
    assert start_facts(CPU_LOG) == StartFacts(524288, 256.0, None, 0.66)
    assert start_facts("") == StartFacts()


@pytest.mark.parametrize(
    ("told", "log", "wanted"),
    [
        ("0.32.0", CPU_LOG, "0.32.0+cpu"),
        ("0.32.0+cpu", CPU_LOG, "0.32.0+cpu"),
        ("0.26.0", H200_LOG, "0.26.0"),
        ("0.32.0", "", "0.32.0"),
        (None, CPU_LOG, None),
    ],
)
def test_a_build_for_the_cpu_is_known_by_its_log(told, log, wanted):
    """`/version` answers 0.32.0 on a CPU too: its numbers would be shown as those of a GPU."""
    assert full_version(told, log) == wanted


def _log(**arguments):
    return f"(APIServer pid=1) INFO 11-30 02:03:05 [api_utils.py:273] non-default args: {arguments!r}\n"


def test_the_launched_server_is_recognized():
    asked = Candidate(values={
        "max_num_seqs": 64, "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8", "stream_interval": 1,
        "speculative_method": "mtp", "num_speculative_tokens": 1, "max_model_len": 4096,
    })  # fmt: skip
    log = _log(
        max_num_seqs=64, gpu_memory_utilization=0.9, kv_cache_dtype="fp8", max_model_len=4096,
        speculative_config={"method": "nemotron_h_mtp", "num_speculative_tokens": 1},
    )  # fmt: skip
    labels = {"gpu_memory_utilization": "0.9", "cache_dtype": "fp8_e4m3", "num_gpu_blocks": "12", "block_size": "16"}
    assert compare(asked, effective(log, labels)) == ([], [])


@pytest.mark.parametrize(
    ("values", "log", "word"),
    [
        ({"max_num_seqs": 64}, _log(max_num_seqs=4), "max_num_seqs was to be 64, and the server says 4"),
        ({"max_num_seqs": 64}, _log(model="m"), "the server says default"),
        ({}, _log(max_num_seqs=4), "left to its default"),
        ({"max_num_batched_tokens": 2048}, "Chunked prefill is enabled with max_num_batched_tokens=8192.\n", "8192"),
        ({"num_speculative_tokens": 1}, _log(speculative_config={"method": "mtp", "num_speculative_tokens": 3}), "3"),
        ({"speculative_method": "mtp"}, _log(speculative_config={"method": "ngram"}), "ngram"),
        ({"async_scheduling": False}, "Asynchronous scheduling is enabled.\n", "async_scheduling"),
        ({"kv_cache_dtype": "fp8"}, _log(kv_cache_dtype="fp8_e5m2"), "fp8_e5m2"),
    ],
)
def test_another_server_is_a_contradiction(values, log, word):
    contradictions, _ = compare(Candidate(values=values), effective(log, {}))
    assert len(contradictions) == 1
    assert word in contradictions[0]


@pytest.mark.parametrize(
    ("values", "log", "word"),
    [
        ({"async_scheduling": True}, "Asynchronous scheduling is disabled.\n", "not compatible"),
        ({}, "Async scheduling not supported with draft_model-based decoding and will be disabled.\n", "is off"),
        ({"block_size": 16}, "Setting attention block size to 2096 tokens to ensure", "raised it"),
        ({}, "Setting attention block size to 2096 tokens to ensure", "raised by vLLM to 2096"),
        ({}, "Reducing Torch threads from 2 to 1 for serving.", "cut by vLLM to 1"),
        ({"omp_num_threads": 4}, "Reducing Torch threads from 4 to 1 for serving.", "cut the threads"),
        (
            {"speculative_method": "mtp", "num_speculative_tokens": 2},
            "Initializing a V1 LLM engine (v0.26.0) with config: model='m', speculative_config=None, seed=0\n",
            "switched speculation off",
        ),
    ],
)
def test_a_silent_change_is_a_surprise(values, log, word):
    contradictions, surprises = compare(Candidate(values=values), effective(log, {}))
    assert contradictions == []
    assert len(surprises) == 1
    assert word in surprises[0]


def test_arguments_that_are_no_literals_are_read_as_far_as_they_go():
    log = "non-default args: {'max_num_seqs': 32, 'compilation_config': CompilationConfig(mode=<X.Y: 3>), 'port': 1}\n"
    assert effective(log, {})["max_num_seqs"] == 32


def test_garbage_reads_as_nothing():
    labels = {"block_size": "None", "gpu_memory_utilization": "nan", "cache_dtype": "", "mamba_ssm_cache_dtype": "?"}
    assert effective("no log\x00at all", labels) == {}
