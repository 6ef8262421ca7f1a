"""From flags and a profile to the configuration the engine runs with, or the reason vLLM would refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .profile import Profile

CONFIG, ENGINE = "config", "engine"  # where vLLM notices: while building the configuration, or in the engine


class StartFailure(Exception):
    """vLLM would not start. `message` is the exception's text, `kind` its class as vLLM prints it."""

    def __init__(self, message: str, *, stage: str = CONFIG, kind: str = "ValueError", model: str = "VllmConfig"):
        super().__init__(message)
        self.message, self.stage, self.kind, self.config_model = message, stage, kind, model


@dataclass(frozen=True)
class EngineConfig:
    """The effective configuration: every automatic value resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    async_scheduling: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    block_size: int | None
    num_gpu_blocks_override: int | None
    cudagraph_mode: str
    capture_size: int
    enforce_eager: bool
    spec_method: str
    spec_tokens: int
    acceptance: tuple[float, ...]
    mamba_backend: str
    ssm_dtype: str
    stochastic_rounding: bool
    tensor_parallel: int
    long_prefill_token_threshold: int
    stream_interval: int
    watermark: float
    omp_threads: int


def _flag(flags: Mapping[str, Any], name: str, default: Any = None) -> Any:
    value = flags.get(name, flags.get(name.replace("_", "-"), default))
    return default if value is None else value


def _json(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        import json

        loaded = json.loads(value)
        return loaded if isinstance(loaded, dict) else {}
    return dict(value or {})


def resolve(profile: Profile, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> EngineConfig:
    """Resolves flags (vLLM's names, dashes or underscores) as vLLM 0.32 does. Raises StartFailure."""
    environment = environment or {}
    model, defaults = profile.model, profile.defaults
    max_len = _max_model_len(profile, flags, environment)
    utilization = float(_flag(flags, "gpu_memory_utilization", 0.92))
    if not 0 < utilization <= 1:
        word, kind = ("greater than 0", "greater_than")
        if utilization > 1:
            word, kind = ("less than or equal to 1", "less_than_equal")
        raise StartFailure(
            f"gpu_memory_utilization\n  Input should be {word} [type={kind},"
            f" input_value={utilization}, input_type=float]",
            kind="field",
            model="CacheConfig",
        )
    seqs = int(_flag(flags, "max_num_seqs", defaults.max_num_seqs))
    chunked = bool(_flag(flags, "enable_chunked_prefill", True))
    batched = _flag(flags, "max_num_batched_tokens")
    if batched is None:
        batched = max(defaults.max_num_batched_tokens, 0 if chunked else max_len, seqs)
    batched = int(batched)
    _check_scheduler(seqs, batched, max_len, chunked)
    tensor_parallel = int(_flag(flags, "tensor_parallel_size", 1))
    if model.attention_heads % tensor_parallel:
        raise StartFailure(
            f"Total number of attention heads ({model.attention_heads}) must be divisible by tensor parallel size "
            f"({tensor_parallel})."
        )
    _check_devices(profile, tensor_parallel)
    method, k, acceptance = _speculation(profile, flags)
    if batched - seqs * k <= 0:
        raise StartFailure(
            "VllmConfig does not have enough slots to schedule a token and support the speculative decoding "
            f"settings. Got max_num_batched_tokens={batched} and scheduled_token_delta={seqs * k}."
        )
    ssm, backend, rounding = _mamba(profile, flags)
    mode, capture, eager = _graphs(profile, flags, seqs, k)
    return EngineConfig(
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        chunked_prefill=chunked,
        prefix_caching=bool(_flag(flags, "enable_prefix_caching", model.prefix_caching)),
        async_scheduling=_async(profile, flags, method),
        gpu_memory_utilization=utilization,
        kv_cache_memory_bytes=_flag(flags, "kv_cache_memory_bytes"),
        kv_cache_dtype=str(_flag(flags, "kv_cache_dtype", "auto")),
        block_size=_flag(flags, "block_size"),
        num_gpu_blocks_override=_flag(flags, "num_gpu_blocks_override"),
        cudagraph_mode=mode,
        capture_size=capture,
        enforce_eager=eager,
        spec_method=method,
        spec_tokens=k,
        acceptance=acceptance,
        mamba_backend=backend,
        ssm_dtype=ssm,
        stochastic_rounding=rounding,
        tensor_parallel=tensor_parallel,
        long_prefill_token_threshold=int(_flag(flags, "long_prefill_token_threshold", 0)),
        stream_interval=max(1, int(_flag(flags, "stream_interval", 1))),
        watermark=float(_flag(flags, "watermark", 0.0)),
        omp_threads=int(environment.get("OMP_NUM_THREADS") or 0),
    )


def _max_model_len(profile: Profile, flags: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    overrides = _json(_flag(flags, "hf_overrides"))
    longest = int(overrides.get("max_position_embeddings", profile.model.max_position_embeddings))
    asked = _flag(flags, "max_model_len")
    if asked is None or int(asked) == -1:
        return longest
    if int(asked) > longest and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise StartFailure(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={longest} or model_max_length=None in model's config.json).",
            model="ModelConfig",
        )
    return int(asked)


def _check_scheduler(seqs: int, batched: int, max_len: int, chunked: bool) -> None:
    if seqs < 1:
        raise StartFailure(
            "max_num_seqs\n  Input should be greater than or equal to 1 [type=greater_than_equal, "
            f"input_value={seqs}, input_type=int]",
            kind="field",
            model="SchedulerConfig",
        )
    if batched < max_len and not chunked:
        raise StartFailure(
            f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({max_len}). This effectively limits "
            "the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please "
            "increase max_num_batched_tokens or decrease max_model_len.",
            model="SchedulerConfig",
        )
    if batched < seqs:
        raise StartFailure(
            f"max_num_batched_tokens ({batched}) must be greater than or equal to max_num_seqs ({seqs}).",
            model="SchedulerConfig",
        )


def _check_devices(profile: Profile, tensor_parallel: int) -> None:
    hardware = profile.hardware
    if tensor_parallel <= hardware.devices:
        return
    if hardware.device == "cpu":
        raise StartFailure(
            f"Not enough allowed NUMA nodes to bind threads of {tensor_parallel} local CPUWorkers. Allowed NUMA nodes "
            "are [0]. Please try to bind threads manually or decrease DP/TP/PP.",
            stage=ENGINE,
            kind="AssertionError",
        )
    raise StartFailure(
        f"World size ({tensor_parallel}) is larger than the number of available GPUs ({hardware.devices}) in this "
        "node.",
        model="ParallelConfig",
    )


def _speculation(profile: Profile, flags: Mapping[str, Any]) -> tuple[str, int, tuple[float, ...]]:
    settings = _json(_flag(flags, "speculative_config"))
    if _flag(flags, "spec_method"):
        settings.setdefault("method", _flag(flags, "spec_method"))
    if _flag(flags, "spec_tokens"):
        settings.setdefault("num_speculative_tokens", int(_flag(flags, "spec_tokens")))
    if not settings:
        return "", 0, ()
    method = str(settings.get("method", "draft_model"))
    known = profile.speculation.get(method)
    if known is None:
        raise StartFailure(
            f"Unsupported speculative method: '{method}' for {profile.model.architecture}.", model="SpeculativeConfig"
        )
    k = int(settings.get("num_speculative_tokens", known.n_predict))
    if k <= 0:
        raise StartFailure(f"Expected num_speculative_tokens to be greater than zero ({k}).", model="SpeculativeConfig")
    if known.n_predict and k > known.n_predict and k % known.n_predict:
        raise StartFailure(
            f"num_speculative_tokens:{k} must be divisible by n_predict={known.n_predict}", model="SpeculativeConfig"
        )
    rates = list(known.acceptance)
    if settings.get("rejection_sample_method") == "synthetic":
        marginal = [float(r) for r in settings.get("synthetic_acceptance_rates", [])]
        rates = [r / p if p else 0.0 for r, p in zip(marginal, [1.0, *marginal], strict=False)]
    elif _flag(flags, "load_format") == "dummy" and method != "ngram":
        rates = [0.0]  # random weights agree with nothing
    rates += [rates[-1] if rates else 0.0] * (k - len(rates))
    return method, k, tuple(min(1.0, max(0.0, r)) for r in rates[:k])


def _mamba(profile: Profile, flags: Mapping[str, Any]) -> tuple[str, str, bool]:
    hardware = profile.hardware
    backend = str(_flag(flags, "mamba_backend", "triton")).lower()
    dtype = str(_flag(flags, "mamba_ssm_cache_dtype", "auto"))
    rounding = bool(_flag(flags, "enable_mamba_cache_stochastic_rounding", False))
    if profile.model.mamba_layers and backend not in profile.cost.mamba_backend:
        raise StartFailure(f"Unknown Mamba SSU backend: {backend!r}", stage=ENGINE)
    if rounding and hardware.device != "cuda":
        raise StartFailure(
            "Stochastic rounding for Mamba cache is only supported on NVIDIA CUDA platforms. Please do not specify  "
            "`--enable-mamba-cache-stochastic-rounding`.",
            model="MambaConfig",
        )
    if rounding and backend == "triton" and hardware.compute_capability < 10.0:
        raise StartFailure(
            "Stochastic rounding for Mamba cache with triton backend requires compute capability 10.0 (data center "
            "Blackwell).",
            model="MambaConfig",
        )
    if rounding and dtype != "float16":
        raise StartFailure(
            "Stochastic rounding for Mamba cache requires the SSM cache to be float16. Please set it explicitly, by "
            "specifying `--mamba-ssm-cache-dtype float16`, or disable stochastic rounding by not specifying "
            "`--enable-mamba-cache-stochastic-rounding`."
        )
    return ("float32" if dtype == "auto" else dtype), backend, rounding


def _graphs(profile: Profile, flags: Mapping[str, Any], seqs: int, k: int) -> tuple[str, int, bool]:
    settings = _json(_flag(flags, "compilation_config"))
    eager = bool(_flag(flags, "enforce_eager", False)) or int(_flag(flags, "optimization_level", 2)) == 0
    mode = str(settings.get("cudagraph_mode") or "FULL_AND_PIECEWISE").upper()
    if eager or profile.hardware.device == "cpu":
        return "NONE", 0, eager
    sizes = _flag(flags, "cudagraph_capture_sizes", settings.get("cudagraph_capture_sizes"))
    capture = _flag(flags, "max_cudagraph_capture_size", settings.get("max_cudagraph_capture_size"))
    if sizes:
        capture = max(int(s) for s in sizes)
    if capture is None:
        capture = min(seqs * (1 + k) * 2, profile.defaults.max_cudagraph_capture_size)
    return mode, int(capture) if mode != "NONE" else 0, eager


def _async(profile: Profile, flags: Mapping[str, Any], method: str) -> bool:
    """Unset means automatic: on where it is compatible, silently off where it is not."""
    asked = _flag(flags, "async_scheduling")
    compatible = not method or profile.speculation[method].async_scheduling
    if asked and not compatible:
        raise StartFailure(
            "Currently, async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU/DSpark kind of "
            "speculative decoding"
        )
    if profile.hardware.device == "cpu":
        return False
    return compatible and bool(profile.defaults.async_scheduling if asked is None else asked)
