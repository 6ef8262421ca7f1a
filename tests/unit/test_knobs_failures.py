"""Recorded failures of a real vLLM, the wordings of other machines, and words nobody wrote down yet."""

import json
from pathlib import Path

import pytest

from tunewright.domain.state import FailureKind as Kind
from tunewright.knobs.failures import explain

RECORDED = Path(__file__).parents[1] / "fixtures/vllm/failures"

EXPECTED = {
    "bad_choice": (Kind.INVALID_FLAG, "argument --dtype: invalid choice: 'float12'", {}),
    "bad_value": (Kind.INVALID_FLAG, "argument --max-num-seqs: invalid int value: 'many'", {}),
    "unknown_flag": (Kind.INVALID_FLAG, "unrecognized arguments: --no-such-flag 1", {}),
    "gpu_util_2": (Kind.INVALID_FLAG, "gpu_memory_utilization: Input should be less than or equal to 1 (not 2.0)", {}),
    "kv_space_over_ram": (Kind.OUT_OF_MEMORY, "requested memory for kv (200.0 GiB)", {}),
    "kv_too_small_for_maxlen": (
        Kind.KV_TOO_SMALL, "To serve at least one request with the model's max seq len", {"max_model_len": 524160},
    ),
    "mbt_below_maxlen": (
        Kind.INVALID_COMBINATION, "max_num_batched_tokens (512) is smaller than max_model_len (2048)", {},
    ),
    "tp3_heads": (Kind.INVALID_COMBINATION, "must be divisible by tensor parallel size (3)", {}),
    "tp2_two_cores": (Kind.INVALID_COMBINATION, "Not enough allowed NUMA nodes", {}),
    "model_missing_path": (Kind.MODEL_MISSING, "'/srv/models/nosuch'", {}),
    "port_in_use": (Kind.PORT_IN_USE, "Address already in use", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("merged", [False, True])
def test_recorded_starts(name, merged):
    kind, cause, limits = EXPECTED[name]
    folder = RECORDED / name
    code = json.loads((folder / "result.json").read_text(encoding="utf-8"))["rc"]
    out, err = ((folder / stream).read_text(encoding="utf-8") for stream in ("stdout", "stderr"))
    failure = explain(code, out + err, "") if merged else explain(code, out, err)
    assert failure.kind is kind
    assert cause in failure.cause
    assert failure.limits == limits
    assert failure.advice
    assert failure.exit_code == code
    assert failure.machine_fault == (kind in (Kind.MODEL_MISSING, Kind.PORT_IN_USE))
    assert "Engine core initialization failed" not in failure.cause


def test_every_recorded_folder_is_covered():
    assert {folder.name for folder in RECORDED.iterdir()} == {*EXPECTED, "main_sigkill", "worker_killed"}


@pytest.mark.parametrize("code", [-9, 137, -15, 143])
def test_a_server_that_was_killed_is_nobodys_fault(code):
    failure = explain(code, (RECORDED / "main_sigkill/server.log").read_text(encoding="utf-8"), "", under_load=True)
    assert failure.kind is Kind.KILLED
    assert failure.machine_fault


@pytest.mark.parametrize("code", [0, 1, None])
def test_a_killed_worker_is_told_not_what_followed_from_it(code):
    log = (RECORDED / "worker_killed/server.log").read_text(encoding="utf-8")
    failure = explain(code, log, "", under_load=True)
    assert failure.kind is Kind.KILLED
    assert failure.cause.startswith("Worker proc VllmWorker-0 died unexpectedly")


PREFIX = "(EngineCore pid=12) ERROR 11-30 02:17:20 [core.py:1510] "


@pytest.mark.parametrize(
    ("line", "kind", "limits"),
    [
        ("ValueError: No available memory for the cache blocks. Try increasing", Kind.KV_TOO_SMALL, {}),
        ("ValueError: To serve at least one request … the estimated maximum model length is 12,345.",
         Kind.KV_TOO_SMALL, {"max_model_len": 12345}),
        ("ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
         "in KV cache (86432).", Kind.KV_TOO_SMALL, {"max_model_len": 86432}),
        ("ValueError: Free memory on device (10.5/79.2 GiB) on startup is less than desired GPU memory utilization "
         "(0.92, 72.86 GiB).", Kind.GPU_NOT_CLEAN, {}),
        ("ValueError: Free memory on cuda:0 is less than desired GPU memory utilization", Kind.GPU_NOT_CLEAN, {}),
        ("ValueError: Free memory on device (139.29/139.8 GiB) on startup is less than desired GPU memory utilization "
         "(1.0, 139.8 GiB).", Kind.OUT_OF_MEMORY, {"gpu_memory_utilization": 0.99}),
        ("ValueError: Available memory on node 0 (3.0/23.5 GiB) on kv cache allocation is less than requested memory "
         "for kv (8.0 GiB).", Kind.GPU_NOT_CLEAN, {}),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Kind.OUT_OF_MEMORY, {}),
        ("torch.OutOfMemoryError: CUDA out of memory. Process 77 has 60.00 GiB memory in use. Including non-PyTorch "
         "memory, this process has 19.00 GiB memory in use.", Kind.GPU_NOT_CLEAN, {}),
        ("RuntimeError: HIP out of memory", Kind.OUT_OF_MEMORY, {}),
        ("terminate called after throwing an instance of 'std::bad_alloc'", Kind.OUT_OF_MEMORY, {}),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", Kind.OUT_OF_MEMORY,
         {}),
        ("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (658). Each decode sequence requires",
         Kind.MAMBA_BLOCKS, {"max_num_seqs": 658}),
        ("RuntimeError: Worker failed with error 'max_num_seqs (1024) exceeds available Mamba cache blocks (600). Each'"
         ", please check the stack trace above for the root cause", Kind.MAMBA_BLOCKS, {"max_num_seqs": 600}),
        ("  Value error, max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256). "
         "[type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]", Kind.INVALID_COMBINATION, {}),
        ("  Value error, num_speculative_tokens:5 must be divisible by n_predict=2 [type=value_error, input_value=1]",
         Kind.INVALID_COMBINATION, {}),
        ("  Value error, VllmConfig does not have enough slots to schedule a token and support the speculative decoding"
         " settings. Got max_num_batched_tokens=4", Kind.INVALID_COMBINATION, {}),
        ("  Value error, Stochastic rounding for Mamba cache requires the SSM cache to be float16.",
         Kind.INVALID_COMBINATION, {}),
        ("  Value error, Stochastic rounding for Mamba cache with triton backend requires compute capability 10.0",
         Kind.INVALID_COMBINATION, {}),
        ("  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
         "(max_position_embeddings=32768 or model_max_length=None", Kind.INVALID_COMBINATION, {"max_model_len": 32768}),
        ("ValueError: Unknown Mamba SSU backend: x", Kind.UNSUPPORTED_BACKEND, {}),
        ("ValueError: No valid attention backend found for cuda with", Kind.UNSUPPORTED_BACKEND, {}),
        ("ValueError: Selected backend AttentionBackendEnum.FLASHMLA is not valid for this configuration.",
         Kind.UNSUPPORTED_BACKEND, {}),
        ("ValueError: MoE backend 'deep_gemm' does not support the deployment configuration", Kind.UNSUPPORTED_BACKEND,
         {}),
        ("ModuleNotFoundError: No module named 'deep_ep'", Kind.UNSUPPORTED_BACKEND, {}),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", Kind.GPU_NOT_CLEAN, {}),
        ("OSError: [Errno 28] No space left on device", Kind.GPU_NOT_CLEAN, {}),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.", Kind.MODEL_MISSING, {}),
        ("NotImplementedError: Speculative decoding is not supported with pipeline parallelism",
         Kind.INVALID_COMBINATION, {}),
        # Wordings that no list has.
        ("  Value error, the moon and the sun may not both be set [type=value_error, input_value=1, input_type=int]",
         Kind.INVALID_COMBINATION, {}),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", Kind.CRASHED, {}),
        ("KeyError: 'layers.0.weird'", Kind.CRASHED, {}),
        ("AssertionError", Kind.CRASHED, {}),
    ],
)  # fmt: skip
def test_wordings(line, kind, limits):
    head = "1 validation error for VllmConfig\n" if line.startswith("  ") else ""
    log = "\n".join(
        [
            "(APIServer pid=1) INFO 11-30 02:16:10 [api_utils.py:286] non-default args: {'max_num_seqs': 1024}",
            PREFIX + "Traceback (most recent call last):",
            PREFIX + '  File "core.py", line 3, in run',
            PREFIX + "    raise torch.OutOfMemoryError(  # quoted source names no cause",
            *(head + line if head else PREFIX + line).splitlines(),
            PREFIX + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    failure = explain(1, log, "")
    assert failure.kind is kind, failure.cause
    assert failure.limits == limits
    assert failure.cause
    assert failure.cause.split("(not")[0].strip()[:40] in log
    assert "Engine core" not in failure.cause


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("vllm serve: error: argument --new-flag: expected one argument", Kind.INVALID_FLAG),
        ("vllm serve: error: ambiguous option: --max-num could match --max-num-seqs", Kind.INVALID_FLAG),
        ("vllm serve: error: something argparse never said before", Kind.INVALID_FLAG),
    ],
)
def test_any_refusal_of_the_command_line(error, kind):
    assert explain(2, "", f"usage: vllm serve [model_tag] [options]\n{error}\n").kind is kind


def test_out_of_memory_under_load_is_its_own_kind():
    line = PREFIX + "torch.OutOfMemoryError: CUDA out of memory."
    assert explain(1, line, "", under_load=True).kind is Kind.OUT_OF_MEMORY_UNDER_LOAD
    assert explain(None, line, "", under_load=True, hung=True).kind is Kind.OUT_OF_MEMORY_UNDER_LOAD


def test_an_answer_to_one_request_is_no_cause_of_a_later_death():
    line = "(APIServer pid=1) ERROR 11-30 02:17:20 [serving.py:1] ValueError: logprobs are not supported with this"
    assert explain(-9, line, "", under_load=True).kind is Kind.KILLED


def test_information_names_no_cause():
    log = "(EngineCore pid=1) INFO 11-30 02:17:20 [a.py:1] retry when CUDA out of memory, no valid attention backend"
    assert explain(-9, log, "").kind is Kind.KILLED


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-9, Kind.KILLED), (137, Kind.KILLED), (-2, Kind.KILLED), (-11, Kind.CRASHED), (139, Kind.CRASHED),
     (-6, Kind.CRASHED), (1, Kind.CRASHED), (0, Kind.CRASHED), (None, Kind.UNKNOWN)],
)  # fmt: skip
def test_without_a_word_the_end_tells(code, kind):
    failure = explain(code, "", "")
    assert failure.kind is kind
    assert failure.cause
    assert failure.advice


def test_a_segmentation_fault_of_a_worker_is_a_crash():
    log = (
        "!!!!!!! Segfault encountered !!!!!!!\n"
        + PREFIX
        + "Worker proc VllmWorker-0 died unexpectedly (exit code: -11)"
    )
    assert explain(1, log, "").kind is Kind.CRASHED


def test_hung_tells_the_last_that_was_heard():
    failure = explain(None, "one\nCapturing CUDA graphs: 3/51\n", "", hung=True)
    assert failure.kind is Kind.HUNG
    assert failure.cause.endswith("by its deadline; the last line of its log: Capturing CUDA graphs: 3/51")
    assert len(explain(None, "x" * 10_000, "", hung=True).cause) <= 500
    assert not failure.machine_fault


def test_who_stops_answering_is_not_blamed_on_a_line_that_says_all_is_well():
    failure = explain(None, 'INFO: "GET /metrics HTTP/1.1" 200 OK\n', "", under_load=True, hung=True)
    assert failure.kind is Kind.HUNG
    assert failure.cause.startswith("it lives, but stopped answering; the last line of its log: INFO")
    assert "startTimeout" not in failure.advice


def test_a_cause_fits_a_record():
    assert len(explain(1, "ValueError: " + "x" * 10_000, "").cause) <= 500
