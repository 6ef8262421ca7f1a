"""Memory: what is left for the KV cache, how many blocks that makes, and what one request takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import ENGINE, EngineConfig, StartFailure
from .profile import Profile

GIB = 2**30
_KV_BYTES = {"auto": 1.0, "bfloat16": 1.0, "float16": 1.0}  # every other cache data type halves the cache
_SSM_BYTES = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5}


@dataclass(frozen=True)
class Memory:
    """The KV cache of one configuration."""

    available_gib: float
    block_size: int  # tokens in an attention block
    num_blocks: int
    state_blocks: int  # blocks that a request holds whatever its length (Mamba state)
    hash_block_size: int  # tokens of a prefix that are found or missed together

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a request that holds `tokens` tokens of context."""
        return self.state_blocks + -(-tokens // self.block_size)

    def concurrency(self, max_model_len: int) -> float:
        """How many requests of the longest kind fit at once."""
        return self.num_blocks / self.blocks_for(max_model_len)

    def size_tokens(self, max_model_len: int) -> int:
        """The cache's size in tokens as vLLM logs it."""
        if self.state_blocks == 0:
            return self.num_blocks * self.block_size
        return int(self.concurrency(max_model_len) * max_model_len)


def available_gib(profile: Profile, config: EngineConfig, environment_gib: float | None = None) -> float:
    """GiB left for the KV cache; may be negative."""
    model, hardware = profile.model, profile.hardware
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes / GIB
    if environment_gib is not None:
        return environment_gib
    draft = profile.speculation[config.spec_method].weights_gib if config.spec_tokens else 0.0
    tensor_parallel = config.tensor_parallel
    used = (
        (model.weights_gib + draft) / tensor_parallel
        + hardware.overhead_gib
        + hardware.activation_gib
        + hardware.activation_gib_per_token * config.max_num_batched_tokens
        + hardware.sequence_gib * config.max_num_seqs * (1 + config.spec_tokens)
        + hardware.graphs_gib * config.capture_size / 512
    )
    return config.gpu_memory_utilization * hardware.memory_gib - used


def runs_out_under_load(profile: Profile, config: EngineConfig) -> bool:
    """Whether it starts, and then dies of what start-up's profiling run did not see (fragments, workspaces)."""
    if profile.hardware.device == "cpu" or config.kv_cache_memory_bytes is not None:
        return False
    hardware = profile.hardware
    return config.gpu_memory_utilization * hardware.memory_gib + hardware.unprofiled_gib > hardware.memory_gib


def plan(profile: Profile, config: EngineConfig, environment_gib: float | None = None) -> Memory:
    """Divides the memory into blocks. Raises StartFailure with vLLM's message where it does not suffice."""
    model = profile.model
    available = available_gib(profile, config, environment_gib)
    kv_factor = _KV_BYTES.get(config.kv_cache_dtype, 0.5) / config.tensor_parallel
    token_bytes = max(1, int(model.kv_bytes_per_token_layer * kv_factor))
    draft_layers = profile.speculation[config.spec_method].attention_layers if config.spec_tokens else 0
    layers = model.attention_layers + draft_layers
    block_size, state_blocks = config.block_size or model.block_size, 0
    if model.mamba_layers:
        state = model.ssm_bytes * _SSM_BYTES[config.ssm_dtype] + model.conv_bytes
        block_size = 16 * math.ceil(state / config.tensor_parallel / token_bytes / 16)
        # With prefix caching the state before the last block is kept beside the running one.
        state_blocks = math.ceil(model.mamba_layers / layers) * (1 + config.spec_tokens + int(config.prefix_caching))
    blocks = int(available * GIB // (token_bytes * block_size * layers))
    if available <= 0 or blocks <= 0:
        raise StartFailure(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
            "the engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            stage=ENGINE,
        )
    if config.num_gpu_blocks_override:
        blocks = config.num_gpu_blocks_override
    hash_size = block_size if model.mamba_layers or config.block_size else model.hash_block_size
    memory = Memory(available, block_size, blocks, state_blocks, hash_size)
    needed = memory.blocks_for(config.max_model_len)
    if needed > blocks:
        block_gib = token_bytes * block_size * layers / GIB
        longest = max(0, (blocks - state_blocks - 1) * block_size)  # vLLM keeps one block for itself
        raise StartFailure(
            f"To serve at least one request with the model's max seq len ({config.max_model_len}), "
            f"({needed * block_gib:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({round(available, 2)} GiB). Based on the available memory, the estimated maximum model length is "
            f"{longest}. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) "
            "or decreasing `max_model_len` when initializing the engine. See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            stage=ENGINE,
        )
    if model.mamba_layers and config.capture_size and config.max_num_seqs > blocks:
        raise StartFailure(
            f"max_num_seqs ({config.max_num_seqs}) exceeds available Mamba cache blocks ({blocks}). Each decode "
            "sequence requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower "
            f"max_num_seqs to at most {blocks} or increase gpu_memory_utilization.",
            stage=ENGINE,
        )
    return memory
