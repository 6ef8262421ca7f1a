"""The wordings by which vLLM, PyTorch and argparse name a cause, and what each means.

Patterns are short, because messages are split over source lines and change in their ends. The first rule that matches
any line wins, so the narrow ones come first; inside a rule the earliest line is the cause.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tunewright.domain.state import FailureKind as Kind

Limits = Callable[[str], dict[str, float]]


def _no_limits(_: str) -> dict[str, float]:
    return {}


def _bound(knob: str, pattern: str) -> Limits:
    compiled = re.compile(pattern)

    def read(line: str) -> dict[str, float]:
        match = compiled.search(line)
        return {knob: float(match[1].replace(",", ""))} if match else {}

    return read


@dataclass(frozen=True)
class Rule:
    """A cause, by the text that names it."""

    kind: Kind
    pattern: re.Pattern[str]
    advice: str
    limits: Limits = _no_limits


def _rule(kind: Kind, pattern: str, advice: str, limits: Limits = _no_limits) -> Rule:
    return Rule(kind, re.compile(pattern), advice, limits)


RULES: tuple[Rule, ...] = (
    # The machine.
    _rule(
        Kind.PORT_IN_USE,
        r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
        "Another process holds the port: end it, or choose another port.",
    ),
    _rule(
        Kind.MODEL_MISSING,
        r"Repo id must be in the form|HFValidationError|RepositoryNotFoundError|LocalEntryNotFoundError|GatedRepoError"
        r"|RevisionNotFoundError|is not a local folder and is not a valid model|[Cc]an't load the configuration of"
        r"|[Cc]annot find any model weights|does not appear to have a file named|Invalid repository ID or local dir"
        r"|couldn't connect to 'https://huggingface|OfflineModeIsEnabled|SafetensorError"
        r"|[Nn]o such file or directory: .*(config\.json|safetensors|tokenizer)",
        "The model is not there, not whole, or may not be read: check its path, the volume and the token.",
    ),
    _rule(
        Kind.GPU_NOT_CLEAN,
        r"No CUDA GPUs are available|busy or unavailable|NVML Shared Library Not Found"
        r"|Failed to infer device type|uncorrectable ECC|GPU is lost|fallen off the bus|No space left on device"
        r"|unspecified launch failure.*Xid|CUDA driver initialization failed|CUDA unknown error",
        "The machine is at fault, not the candidate: look at the GPU, its driver and the disk, then try again.",
    ),
    # The command line.
    _rule(
        Kind.INVALID_FLAG,
        r"error: unrecognized arguments|error: ambiguous option",
        "This vLLM version has no such flag: leave it out, or use the version that has it.",
    ),
    _rule(
        Kind.INVALID_FLAG,
        r"error: argument |invalid choice:|error: the following arguments are required|error: .*expected .*argument"
        r"|type=unexpected_keyword_argument|Unexpected keyword argument",
        "This vLLM version does not take that value: use one that the message names.",
    ),
    # Memory, told by vLLM itself with the bound.
    _rule(
        Kind.MAMBA_BLOCKS,
        r"exceeds available Mamba cache|Mamba cache blocks \(",
        "Lower max_num_seqs to the blocks that there are, raise gpu_memory_utilization, or halve its data type.",
        _bound("max_num_seqs", r"[Mm]amba cache blocks \(([\d,]+)\)"),
    ),
    _rule(
        Kind.KV_TOO_SMALL,
        r"To serve at least one request with the model's max seq len|estimated maximum model length is",
        "Lower max_model_len to what fits, raise gpu_memory_utilization, or lower max_num_batched_tokens.",
        _bound("max_model_len", r"estimated maximum model length is ([\d,]+)"),
    ),
    _rule(
        Kind.KV_TOO_SMALL,
        r"larger than the maximum number of tokens that can be stored in KV cache",
        "Lower max_model_len to what fits, or raise gpu_memory_utilization.",
        _bound("max_model_len", r"stored in KV cache \(([\d,]+)\)"),
    ),
    _rule(
        Kind.KV_TOO_SMALL,
        r"No available memory for the cache blocks|no memory left for the KV cache",
        "Nothing is left for the KV cache: raise gpu_memory_utilization or lower max_num_batched_tokens.",
    ),
    # Combinations.
    _rule(
        Kind.INVALID_COMBINATION,
        r"must be greater than or equal to max_num_seqs",
        "Raise max_num_batched_tokens to at least max_num_seqs.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"is smaller than max_model_len",
        "Without chunked prefill max_num_batched_tokens must be at least max_model_len: raise it, or turn it on.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"must be divisible by tensor parallel size|not divisible by (the )?tensor|divisible by tp_size",
        "Use a tensor_parallel_size that divides the model's attention heads.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"must be divisible by n_predict",
        "Use a num_speculative_tokens that the model's MTP layers divide.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"does not have enough slots to schedule a token|does not allow any tokens to be scheduled",
        "Raise max_num_batched_tokens, or lower num_speculative_tokens.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"Stochastic rounding for Mamba cache",
        "It needs mamba_ssm_cache_dtype float16, and with mamba_backend triton a GPU of compute capability 10.0.",
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"greater than the derived max_model_len",
        "Lower max_model_len to the model's context length.",
        _bound(
            "max_model_len", r"(?:max_position_embeddings|model_max_length|max_seq_len|derived_max_model_len)=([\d,]+)"
        ),
    ),
    _rule(
        Kind.INVALID_COMBINATION,
        r"Not enough allowed NUMA nodes|is larger than the number of available GPUs|invalid device ordinal"
        r"|[Ww]orld size.*(exceeds|larger|greater)|not enough GPUs",
        "Lower tensor, pipeline or data parallelism to what the machine has.",
    ),
    # Backends.
    _rule(
        Kind.UNSUPPORTED_BACKEND,
        r"Unknown Mamba SSU backend|[Nn]o valid attention backend|Selected backend .* is not valid"
        r"|[Bb]ackend\b.*(does not support|not support(ed)?|is not valid|is not available|unavailable|not installed)"
        r"|([Uu]nsupported|[Ii]nvalid|[Uu]nknown) [\w\s]{0,30}[Bb]ackend|no kernel image is available"
        r"|requires (at least )?compute capability|requires (FlashInfer|flashinfer|DeepEP|DeepGEMM)"
        r"|No module named '?(flashinfer|deep_ep|deep_gemm|pplx|aiter|mori|nixl)",
        "That backend does not work on this GPU or with this model: leave the choice to vLLM.",
    ),
    _rule(
        Kind.UNSUPPORTED_BACKEND,
        r"[Uu]nsupported speculative method|[Ss]peculative method\b.*(not supported|unknown)",
        "That method of speculation does not work with this model: use another one, or none.",
    ),
    # Memory, in everybody's words.
    _rule(
        Kind.OUT_OF_MEMORY,
        r"OutOfMemoryError|[Oo]ut of memory|OUT_OF_MEMORY|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
        r"|std::bad_alloc|\bMemoryError\b|[Cc]an(no|')t allocate memory|is less than requested memory for kv",
        "Lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs: the memory beside the KV cache ran out.",
    ),
    # vLLM's general ways to refuse.
    _rule(
        Kind.INVALID_COMBINATION,
        r"(Error|Exception|Value error).*(not (yet )?(supported|compatible|allowed) (with|when|for|together)"
        r"|incompatible with|can(not| not|'t) be used (with|together)|mutually exclusive|must be divisible by)",
        "vLLM refuses these values together: change one of those that the message names.",
    ),
)

AFTER_START = frozenset({Kind.OUT_OF_MEMORY, Kind.GPU_NOT_CLEAN, Kind.UNSUPPORTED_BACKEND})
"""What can still come after a healthy start; other wordings are then answers to single requests."""

SEGMENTATION = re.compile(r"Segfault encountered|Segmentation fault|Fatal Python error|illegal memory access|SIGSEGV")
WORKER_DIED = re.compile(
    r"Worker proc \S+ died unexpectedly|[Ww]orker\w* (process )?(was killed|died)|Engine core proc \S+ died"
)
WRAPPER = re.compile(
    r"See root cause above|See stack trace|EngineDeadError|Executor failed|initialization failed|"
    r"WorkerProc hit an exception|EngineCore (failed to start|encountered a fatal error)|output_handler failed"
    r"|CancelledError|KeyboardInterrupt|check the stack trace above|leaked s|died unexpectedly"
)
"""Errors that only pass another one on."""
