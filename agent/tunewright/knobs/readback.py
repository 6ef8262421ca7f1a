"""The configuration that a server really runs, read back from its start-up log and its metrics.

Asking is not having: vLLM changes some knobs silently, and a server left over from an earlier trial answers as well.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import StartMemory
from tunewright.knobs.catalogue import CATALOGUE

DEFAULT = "default"
"""Stands for "not among the non-default arguments" of knobs that a server reports in no other way."""

_LISTED = ("max_num_seqs", "long_prefill_token_threshold", "scheduling_policy", "stream_interval", "performance_mode")
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})\s*$", re.MULTILINE)
_ENGINE = re.compile(r"Initializing a V1 LLM engine .* with config: (.*)$", re.MULTILINE)
_ENGINE_NAMES = {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "kv_cache_dtype": "kv_cache_dtype",
    "max_seq_len": "max_model_len",
}
_LINES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("max_num_batched_tokens", re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")),
    ("max_model_len", re.compile(r"Using max model len (\d+)")),
    ("attention_backend", re.compile(r"Using (\w+) attention backend")),
    ("mamba_ssm_cache_dtype", re.compile(r"Updating mamba_ssm_cache_dtype to '(\w+)'")),
    ("mamba_ssm_cache_dtype", re.compile(r"Reset SSM cache type to (\w+)")),
    ("mamba_backend", re.compile(r"Using (\w+) Mamba SSU backend")),
    ("block_size", re.compile(r"Setting attention block size to (\d+) tokens")),
    ("omp_num_threads", re.compile(r"Reducing Torch threads from \d+ to (\d+)")),
    ("cudagraph_mode", re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)")),
    ("cudagraph_mode", re.compile(r"[Ss]etting cudagraph_mode=(?:CUDAGraphMode\.)?(\w+)")),
    ("max_cudagraph_capture_size", re.compile(r"'max_cudagraph_capture_size': (\d+)")),
)
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)|[Aa]sync scheduling .*will be (disabled)")
_LABELS = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "mamba_ssm_cache_dtype": "mamba_ssm_cache_dtype",
}


@dataclass(frozen=True)
class StartFacts:
    """What a good start tells. None: the line is not there."""

    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None  # requests of full length that the KV cache holds at once
    available_kv_gib: float | None = None
    init_seconds: float | None = None  # profiling, making the KV cache, warming up
    device_gib: float | None = None  # the whole memory of one GPU


def start_facts(log: str) -> StartFacts:
    """The lines of a good start, the last of each (with several engines, the one that came up last)."""
    tokens = _last(log, r"KV cache size: ([\d,]+) tokens")
    concurrency = _last(log, r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x")
    memory = _last(log, r"Available KV cache memory: ([\d.]+) GiB")
    device = _last(log, r"Free memory on device \([\d.]+/([\d.]+) GiB\)")
    seconds = _last(log, r"init engine \(.*?\) took ([\d.]+) s")
    return StartFacts(
        kv_cache_tokens=int(tokens) if tokens else None,
        max_concurrency=float(concurrency) if concurrency else None,
        available_kv_gib=float(memory) if memory else None,
        init_seconds=float(seconds) if seconds else None,
        device_gib=float(device) if device else None,
    )


def start_memory(log: str) -> StartMemory | None:
    """The same, as far as it is kept with the trial; None when the log says nothing of memory."""
    facts = start_facts(log)
    if facts.available_kv_gib is None and facts.kv_cache_tokens is None:
        return None
    return StartMemory(
        available_kv_gib=facts.available_kv_gib,
        kv_cache_tokens=facts.kv_cache_tokens,
        max_concurrency=facts.max_concurrency,
        device_gib=facts.device_gib,
    )


def full_version(version: str | None, log: str) -> str | None:
    """The version with the build's local part, as `vllm --version` has it and `/version` has not: `0.32.0+cpu`."""
    engine = _ENGINE.search(log)
    on_cpu = engine is not None and re.search(r"\bdevice_config=cpu\b", engine[1])
    return f"{version}+cpu" if version and on_cpu and "+" not in version else version


def _last(log: str, pattern: str) -> str | None:
    found = re.findall(pattern, log)
    return found[-1].replace(",", "") if found else None


def effective(log: str, cache_config: Mapping[str, str]) -> dict[str, KnobValue]:
    """Knobs as the server reports them: the arguments it says it was given, then what it made of them.

    `cache_config` are the labels of `vllm:cache_config_info`. What can't be read is left out.
    """
    values: dict[str, KnobValue] = {}
    listed = _ARGUMENTS.search(log)
    if listed:
        arguments = _literal(listed[1])
        values.update(dict.fromkeys(_LISTED, DEFAULT))
        values.update(_readable(arguments.items()))
        values.update(_inside(arguments))
    engine = _ENGINE.search(log)
    if engine:
        pairs = re.findall(r"(\w+)=('[^']*'|[^,\s]+)", engine[1])
        values.update(_readable((_ENGINE_NAMES[k], v.strip("'")) for k, v in pairs if k in _ENGINE_NAMES))
        if "speculative_config=None" in engine[1]:
            values["num_speculative_tokens"] = 0
    for name, pattern in _LINES:
        match = pattern.search(log)
        if match:
            values.update(_readable([(name, match[1])]))
    scheduling = _ASYNC.findall(log)
    if scheduling:
        values["async_scheduling"] = all("enabled" in pair for pair in scheduling)
    values.update(_readable((_LABELS[k], v) for k, v in cache_config.items() if k in _LABELS))
    return {name: values[name] for name in CATALOGUE if name in values}


def _literal(text: str) -> dict[str, object]:
    """The dictionary of a log line; where it holds objects that are no literals, its plain entries."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = re.findall(r"'(\w+)': ('[^']*'|[\w.+-]+)", text)
        return {name: found.strip("'") for name, found in pairs}
    return value if isinstance(value, dict) else {}


def _readable(pairs: Iterable[tuple[str, object]]) -> dict[str, KnobValue]:
    """The pairs that are knobs with a value that can be read."""
    values: dict[str, KnobValue] = {}
    for name, value in pairs:
        knob = CATALOGUE.get(name)
        if knob is None or value is None or isinstance(value, dict | list) or str(value) in ("None", ""):
            continue
        try:
            values[name] = knob.parse(str(value).removeprefix("torch."))
        except ValueError:
            continue
    return values


def _inside(arguments: Mapping[str, object]) -> dict[str, KnobValue]:
    """Knobs inside the JSON arguments."""
    values: dict[str, KnobValue] = {}
    speculation, compilation = arguments.get("speculative_config"), arguments.get("compilation_config")
    if isinstance(speculation, dict):
        values.update(_readable([("speculative_method", speculation.get("method"))]))
        values.update(_readable([("num_speculative_tokens", speculation.get("num_speculative_tokens"))]))
    if isinstance(compilation, dict):
        values.update(_readable([("cudagraph_mode", compilation.get("cudagraph_mode"))]))
    return values


# --- asked against had -----------------------------------------------------------------------------------------------

_SILENT = {
    "async_scheduling": "vLLM switched it off: not compatible",
    "block_size": "vLLM raised it to fit its pages",
    "num_speculative_tokens": "vLLM switched speculation off",
    "omp_num_threads": "vLLM cut the threads",
    "enable_prefix_caching": "vLLM switched it off for this model",
    "enable_chunked_prefill": "vLLM decides it for this model",
    "enforce_eager": "vLLM runs this model eagerly",
    "cudagraph_mode": "vLLM took the mode that its backends can do",
    "max_cudagraph_capture_size": "vLLM rounded or bounded it",
    "attention_backend": "vLLM took another one for this model",
    "mamba_ssm_cache_dtype": "vLLM reset it for this backend",
}
"""Changes that vLLM is known to make without failing; any other difference means another server."""


def _silently(name: str, asked: KnobValue, got: KnobValue) -> bool:
    """Whether vLLM is known to turn this into that."""
    if name in ("async_scheduling", "enable_prefix_caching"):
        return asked is True and got is False
    if name == "enforce_eager":
        return asked is False and got is True
    if name == "num_speculative_tokens":
        return got == 0
    if name == "block_size":
        return float(got) > float(asked)
    if name == "omp_num_threads":
        return float(got) < float(asked)
    return name in _SILENT


def _unasked(name: str, got: KnobValue) -> str | None:
    """What is worth telling of a knob that was left to its default."""
    if name == "async_scheduling" and got is False:
        return "async_scheduling is off, though vLLM turns it on where it can"
    if name == "block_size" and isinstance(got, int) and got > 256:
        return f"block_size was raised by vLLM to {got} to fit its pages"
    if name == "omp_num_threads":
        return f"omp_num_threads was cut by vLLM to {got}"
    return None


def compare(candidate: Candidate, effective: Mapping[str, KnobValue]) -> tuple[list[str], list[str]]:
    """Contradictions and surprises between what was asked and what the server reports.

    A contradiction means that this is not the server that was launched; a surprise is a change that vLLM is known to
    make. What the server does not report is taken to be as asked.
    """
    contradictions: list[str] = []
    surprises: list[str] = []
    for name, got in effective.items():
        asked = candidate.values.get(name)
        if asked is None:
            if name in _LISTED and got != DEFAULT:
                contradictions.append(f"{name} was left to its default, and the server was started with {got}")
            elif told := _unasked(name, got):
                surprises.append(told)
        elif _agree(name, asked, got):
            continue
        elif got != DEFAULT and _silently(name, asked, got):
            surprises.append(f"{name} {_show(got)} instead of {_show(asked)}: {_SILENT[name]}")
        else:
            contradictions.append(f"{name} was to be {_show(asked)}, and the server says {_show(got)}")
    return contradictions, surprises


def _agree(name: str, asked: KnobValue, got: KnobValue) -> bool:
    if got == DEFAULT:
        return asked == CATALOGUE[name].nominal  # vLLM does not list an argument that equals its default
    if asked == got or asked == "auto" or asked == -1:
        return True
    if name == "speculative_method":  # vLLM names the model's own kind of MTP
        return str(got).endswith("_" + str(asked)) or str(asked).endswith("_" + str(got))
    if isinstance(asked, str) and isinstance(got, str):
        left, right = (value.lower().replace(" ", "_").removesuffix("_e4m3") for value in (asked, got))
        return left == right
    if isinstance(asked, float) or isinstance(got, float):
        return isinstance(asked, int | float) and isinstance(got, int | float) and abs(asked - got) < 1e-6
    return False


def _show(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
