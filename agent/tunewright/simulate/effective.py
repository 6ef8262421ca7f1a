"""The effective configuration as a server tells it: the labels of `vllm:cache_config_info`."""

from __future__ import annotations

from .config import EngineConfig
from .flags import Arguments
from .memory import Memory


def cache_config_labels(arguments: Arguments, config: EngineConfig, memory: Memory) -> dict[str, str]:
    """vLLM 0.32's labels; what the simulator does not model has vLLM's default."""
    given = arguments.get
    hybrid = memory.state_blocks > 0
    labels: dict[str, object] = {
        "_block_size_resolved": True,
        "block_size": memory.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": memory.block_size,
        "enable_mamba_shared_prefix_checkpoint": given("enable_mamba_shared_prefix_checkpoint", False),
        "enable_prefix_caching": config.prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": given("kv_cache_dtype_skip_layers", []),
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": round(memory.concurrency(config.max_model_len), 2),
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "kv_cache_size_tokens": memory.size_tokens(config.max_model_len),
        "kv_offloading_backend": given("kv_offloading_backend", "native"),
        "kv_offloading_size": given("kv_offloading_size"),
        "kv_sharing_fast_prefill": given("kv_sharing_fast_prefill", False),
        "mamba_block_size": config.max_model_len if hybrid else None,
        "mamba_cache_dtype": given("mamba_cache_dtype", "auto"),
        "mamba_cache_mode": "align" if hybrid and config.prefix_caching else "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": config.ssm_dtype,
        "num_cpu_blocks": None,
        "num_gpu_blocks": memory.num_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "prefix_cache_retention_interval": given("prefix_cache_retention_interval", 0),
        "prefix_caching_hash_algo": given("prefix_caching_hash_algo", "sha256"),
        "prefix_match_unit": given("prefix_match_unit"),
        "replayssm_buffer_len": given("replayssm_buffer_len", 16),
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": given("swa_bounded_replay", True),
        "use_kda_recoverssm": False,
        "use_replayssm": given("use_replayssm", False),
        "user_specified_block_size": config.block_size is not None,
    }
    return {name: str(value) for name, value in labels.items()}
