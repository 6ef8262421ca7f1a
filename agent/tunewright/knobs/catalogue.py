"""The catalogue of vLLM's knobs: 0.26 to 0.33, for dense, MoE and hybrid Mamba models.

Defaults and values are from `vllm serve --help=all` of 0.32 and from the wheels of 0.30 to 0.33 ("wheels"). Flags come
and go between minor versions: `since` is the first version a flag was seen in, never a promise about earlier ones.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from tunewright.knobs.knob import Family, Knob, Searched

_HELP = "help of vLLM 0.32"
_WHEELS = "wheels of vLLM 0.30-0.33"
_MOE = frozenset({Family.MOE, Family.HYBRID})
_HYBRID = frozenset({Family.HYBRID})

SCHEDULER = (
    Knob(
        "max_num_seqs", "int", "scheduler", "Requests that one engine step may hold.",
        "1024 on GPUs of 70 GiB or more that are not A100, else 256", _WHEELS,
        flag="--max-num-seqs", minimum=1,
        grid=(8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
        needs="at most max_num_batched_tokens; hybrid: at most the blocks of the Mamba cache",
    ),
    Knob(
        "max_num_batched_tokens", "int", "scheduler", "Tokens that one engine step may process.",
        "16384 on 160 GiB or more, 8192 on H100 and H200, else 2048", _WHEELS,
        flag="--max-num-batched-tokens", minimum=1, human=True,
        grid=(1024, 2048, 4096, 8192, 16384, 32768),
        needs="at least max_num_seqs; without chunked prefill at least max_model_len",
    ),
    Knob(
        "async_scheduling", "bool", "scheduler", "Schedule the next step while this one still runs.",
        "automatic: on where compatible", _HELP,
        flag="--async-scheduling", grid=(True, False), gpu=True,
        needs="on: no speculation that drafts on the host, as ngram",
    ),
    Knob(
        "enable_chunked_prefill", "bool", "scheduler", "Cut long prompts into chunks that share steps with decoding.",
        "automatic: on for generating models", _HELP,
        flag="--enable-chunked-prefill", grid=(True, False), search=Searched.NAMED,
        needs="off: max_num_batched_tokens at least max_model_len",
    ),
    Knob(
        "long_prefill_token_threshold", "int", "scheduler", "Longest chunk of one prompt in a step; 0 is no cap.",
        "0", _HELP,
        flag="--long-prefill-token-threshold", minimum=0, grid=(0, 512, 1024, 2048, 4096), nominal=0,
        needs="chunked prefill",
    ),
    Knob(
        "scheduling_policy", "choice", "scheduler", "Which waiting request is next.", "fcfs", _HELP,
        flag="--scheduling-policy", choices=("fcfs", "priority"), grid=("fcfs", "priority"), nominal="fcfs",
        search=Searched.NAMED, needs="requests that carry a priority",
    ),
    Knob(
        "stream_interval", "int", "scheduler", "Tokens that are gathered before they are streamed.", "1", _HELP,
        flag="--stream-interval", minimum=1, grid=(1, 2, 4, 8), nominal=1, search=Searched.NAMED,
        needs="clients that accept coarser streaming",
    ),
    Knob(
        "performance_mode", "choice", "scheduler", "A bundle of defaults for latency or for throughput.",
        "balanced", _WHEELS,
        flag="--performance-mode", choices=("balanced", "interactivity", "throughput"),
        grid=("balanced", "interactivity", "throughput"), nominal="balanced", gpu=True, since=(0, 30),
    ),
    Knob(
        "optimization_level", "int", "scheduler", "Start-up time against speed: -O0 to -O3.", "2", _WHEELS,
        flag="--optimization-level", aliases=("-O",), minimum=0, maximum=3, grid=(1, 2, 3), nominal=2, gpu=True,
        search=Searched.NAMED,
    ),
)  # fmt: skip

MEMORY = (
    Knob(
        "gpu_memory_utilization", "float", "memory", "Share of the GPU's memory that vLLM may take.", "0.92", _HELP,
        flag="--gpu-memory-utilization", aliases=("--device-memory-utilization",), minimum=0.01, maximum=1.0,
        grid=(0.85, 0.88, 0.9, 0.92, 0.94, 0.95), nominal=0.92, gpu=True,
        needs="no kv_cache_memory_bytes, which overrides it",
    ),
    Knob(
        "kv_cache_memory_bytes", "int", "memory", "Bytes of KV cache per GPU, instead of a share of its memory.",
        "unset: what gpu_memory_utilization leaves", _HELP,
        flag="--kv-cache-memory-bytes", aliases=("--kv-cache-memory",), minimum=1, human=True,
        search=Searched.NEVER,
    ),
    Knob(
        "kv_cache_dtype", "choice", "memory", "Data type of the KV cache; FP8 holds twice as many tokens.",
        "auto: the model's", _HELP,
        flag="--kv-cache-dtype", grid=("auto", "fp8"), nominal="auto", gpu=True,
        choices=(
            "auto", "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc",
            "fp8_per_token_head", "int4_per_token_head", "int8_per_token_head", "nvfp4", "nvfp4_4over6",
            "nvfp4_ds_mla", "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4",
            "ultraquant_4bit",
        ),
        lossy=frozenset({
            "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc",
            "fp8_per_token_head", "int4_per_token_head", "int8_per_token_head", "nvfp4", "nvfp4_4over6",
            "nvfp4_ds_mla", "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4",
            "ultraquant_4bit",
        }),
        needs="an attention backend that reads it",
    ),
    Knob(
        "enable_prefix_caching", "bool", "memory", "Keep the KV cache of prompts whose beginnings come again.",
        "automatic: on, but off for hybrid models", _HELP,
        flag="--enable-prefix-caching", grid=(True, False),
    ),
    Knob(
        "block_size", "int", "memory", "Tokens per block of the KV cache; hybrid models raise it to their page.",
        "automatic: by attention backend", _HELP,
        flag="--block-size", minimum=1, grid=(16, 32, 64, 128), gpu=True, search=Searched.NAMED,
    ),
    Knob(
        "max_model_len", "int", "memory", "Longest request (prompt and output); decides what clients may send.",
        "the model's context length", _HELP,
        flag="--max-model-len", minimum=1, human=True, search=Searched.NEVER,
    ),
)  # fmt: skip

GRAPHS = (
    Knob(
        "enforce_eager", "bool", "graphs", "No compiled kernels and no CUDA graphs: starts soon, runs slower.",
        "off", _HELP,
        flag="--enforce-eager", grid=(True, False), nominal=False, search=Searched.NAMED,
    ),
    Knob(
        "cudagraph_mode", "choice", "graphs", "Which steps run as CUDA graphs.",
        "FULL_AND_PIECEWISE where the attention backend can, else PIECEWISE", _WHEELS,
        json_flag="--compilation-config", json_key="cudagraph_mode", gpu=True,
        choices=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        grid=("PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        needs="no enforce_eager",
    ),
    Knob(
        "max_cudagraph_capture_size", "int", "graphs", "Largest batch that runs as a CUDA graph.",
        "twice max_num_seqs, at most 512", _HELP,
        flag="--max-cudagraph-capture-size", minimum=0, grid=(128, 256, 512, 1024, 2048), gpu=True,
        needs="no enforce_eager",
    ),
)  # fmt: skip

KERNELS = (
    Knob(
        "attention_backend", "choice", "kernels", "Attention kernels.", "automatic: by GPU and model", _WHEELS,
        flag="--attention-backend", grid=("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), gpu=True,
        needs="support for the GPU, the model and the KV cache's data type",
    ),
    Knob(
        "moe_backend", "choice", "kernels", "Kernels of the experts.", "auto: by GPU and model", _HELP,
        flag="--moe-backend", grid=("auto", "triton", "flashinfer_cutlass"), nominal="auto", gpu=True,
        families=_MOE, since=(0, 26), needs="support for the GPU and the weights' data type",
    ),
    Knob(
        "linear_backend", "choice", "kernels", "Kernels of the linear layers.", "auto: by GPU and model", _HELP,
        flag="--linear-backend", grid=("auto", "cutlass", "flashinfer_cutlass"), nominal="auto", gpu=True,
        since=(0, 30), search=Searched.NAMED, needs="support for the GPU and the weights' data type",
    ),
)  # fmt: skip

PARALLEL = (
    Knob(
        "tensor_parallel_size", "int", "parallel", "GPUs that share every layer.", "1", _HELP,
        flag="--tensor-parallel-size", aliases=("-tp",), minimum=1, grid=(1, 2, 4, 8), nominal=1, min_gpus=2,
        needs="divides the attention heads; tp × pp × dp at most the GPUs",
    ),
    Knob(
        "pipeline_parallel_size", "int", "parallel", "Stages that the layers are cut into.", "1", _HELP,
        flag="--pipeline-parallel-size", aliases=("-pp",), minimum=1, grid=(1, 2, 4), nominal=1, min_gpus=2,
        search=Searched.NAMED, needs="at most the layers; tp × pp × dp at most the GPUs",
    ),
    Knob(
        "data_parallel_size", "int", "parallel", "Whole copies of the attention layers behind one address.", "1",
        _HELP,
        flag="--data-parallel-size", aliases=("-dp",), minimum=1, grid=(1, 2, 4, 8), nominal=1, min_gpus=2,
        needs="tp × pp × dp at most the GPUs",
    ),
    Knob(
        "enable_expert_parallel", "bool", "parallel", "Spread the experts over the GPUs instead of cutting each.",
        "off", _HELP,
        flag="--enable-expert-parallel", aliases=("-ep",), grid=(True, False), nominal=False, families=_MOE,
        min_gpus=2, needs="a MoE model",
    ),
    Knob(
        "all2all_backend", "choice", "parallel", "How tokens travel to experts on other GPUs.",
        "allgather_reducescatter", _HELP,
        flag="--all2all-backend",
        choices=(
            "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2",
            "flashinfer_all2allv", "flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided", "moonep",
            "mori_high_throughput", "mori_low_latency", "naive", "nixl_ep", "pplx",
        ),
        grid=("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"),
        nominal="allgather_reducescatter", families=_MOE, min_gpus=2, search=Searched.NAMED,
        needs="enable_expert_parallel",
    ),
)  # fmt: skip

SPECULATION = (
    Knob(
        "speculative_method", "choice", "speculation", "What drafts the tokens that are then verified.",
        "none", _WHEELS,
        json_flag="--speculative-config", json_key="method", grid=("mtp", "ngram"),
        needs="mtp: a model with MTP layers; eagle3, draft_model, …: production's own --speculative-config",
    ),
    Knob(
        "num_speculative_tokens", "int", "speculation", "Tokens drafted per step; 0 leaves speculation off.",
        "0 (no speculation)", _WHEELS,
        json_flag="--speculative-config", json_key="num_speculative_tokens", minimum=0, grid=(0, 1, 2, 3, 4),
        nominal=0, needs="speculative_method; mtp: at most the MTP layers, or a multiple of them",
    ),
)  # fmt: skip

MAMBA = (
    Knob(
        "mamba_backend", "choice", "hybrid Mamba", "Kernels of the Mamba state update.", "triton", _WHEELS,
        flag="--mamba-backend", choices=("triton", "flashinfer"), grid=("triton", "flashinfer"), nominal="triton",
        families=_HYBRID, gpu=True,
    ),
    Knob(
        "mamba_ssm_cache_dtype", "choice", "hybrid Mamba", "Data type of the Mamba state; 16 bits halve its page.",
        "auto: as the model says, often float32", _HELP,
        flag="--mamba-ssm-cache-dtype", choices=("auto", "float32", "float16", "bfloat16"),
        grid=("auto", "float32", "float16", "bfloat16"), nominal="auto",
        lossy=frozenset({"float16", "bfloat16"}), families=_HYBRID,
    ),
    Knob(
        "enable_mamba_cache_stochastic_rounding", "bool", "hybrid Mamba",
        "Round the 16-bit state at random, so that errors do not add up.", "off", _HELP,
        flag="--enable-mamba-cache-stochastic-rounding", grid=(True, False), nominal=False,
        lossy=frozenset({True}), families=_HYBRID, gpu=True,
        needs="mamba_ssm_cache_dtype float16; below compute capability 10.0: mamba_backend flashinfer",
    ),
    Knob(
        "mamba_cache_philox_rounds", "int", "hybrid Mamba", "Quality of that randomness; 0 is the kernel's default.",
        "0", _HELP,
        flag="--mamba-cache-philox-rounds", minimum=0, grid=(0, 4, 7, 10), nominal=0,
        lossy=frozenset({4, 7, 10}), families=_HYBRID, gpu=True, search=Searched.NAMED,
        needs="enable_mamba_cache_stochastic_rounding",
    ),
)  # fmt: skip

ENVIRONMENT = (
    Knob(
        "omp_num_threads", "int", "environment", "CPU threads of each worker's own computation.",
        "1 where vLLM cuts it, else the cores", "start-up log of vLLM 0.32",
        environment="OMP_NUM_THREADS", minimum=1, grid=(1, 2, 4, 8),
    ),
)  # fmt: skip

CATALOGUE: dict[str, Knob] = {
    knob.name: knob
    for group in (SCHEDULER, MEMORY, GRAPHS, KERNELS, PARALLEL, SPECULATION, MAMBA, ENVIRONMENT)
    for knob in group
}
"""Every knob by its name, in the order in which flags are added to a command."""


def near(name: str) -> list[str]:
    """Knob names that look like `name`, nearest first; a flag's spelling is understood too."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return get_close_matches(plain, CATALOGUE, n=3, cutoff=0.5)


def is_lossy(name: str, value: object) -> bool:
    """Whether this value of the knob can change answers."""
    knob = CATALOGUE.get(name)
    if knob is None:
        return False
    if name == "mamba_cache_philox_rounds":
        return value not in (0, None)  # any number of rounds changes what the rounding does
    return value in knob.lossy


def new_speculation(candidate: Mapping[str, object], baseline: Mapping[str, object]) -> str:
    """The method by which `candidate` drafts tokens and `baseline` does not; empty when there is none.

    Speculation promises the same answers: it has to prove that.
    """
    method = _drafts(candidate)
    return "" if method == _drafts(baseline) else method


def _drafts(values: Mapping[str, object]) -> str:
    off = values.get("num_speculative_tokens") == 0
    return "" if off else str(values.get("speculative_method") or "")


def gpus_of(values: Mapping[str, object]) -> int:
    """GPUs of one server, as far as its configuration tells: the product of its parallel sizes."""
    count = 1
    for knob in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        value = values.get(knob, 1)
        count *= value if isinstance(value, int) and value > 0 else 1
    return count
