"""What is known of the model and the machine. Every fact may be unknown; a rule that needs an unknown one is silent."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunewright.domain.candidate import KnobValue
from tunewright.knobs.binary import BinaryFlags
from tunewright.knobs.knob import Family


@dataclass(frozen=True)
class ModelFacts:
    """The model, by its `config.json`, and the machine it runs on. None: not known."""

    architecture: str | None = None
    family: Family | None = None
    attention_heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    experts: int | None = None
    context_length: int | None = None
    mtp_layers: int | None = None  # 0: known to have none
    gpu_count: int | None = None  # 0: a machine without GPUs
    gpu_memory_gib: float | None = None
    compute_capability: float | None = None  # 9.0 is Hopper, 10.0 is data-centre Blackwell
    gpu_name: str | None = None
    vllm_version: str | None = None
    flags: BinaryFlags | None = None  # of the very binary in use; None: the catalogue's versions hold
    flags_unknown: str = ""  # why there are none

    @property
    def told_model(self) -> str:
        """The model in a few words; empty where it is not known."""
        parts = [self.architecture, self.family.value if self.family else None]
        counts = (("layers", self.layers), ("attention heads", self.attention_heads), ("experts", self.experts),
                  ("MTP layers", self.mtp_layers), ("tokens of context", self.context_length))  # fmt: skip
        return ", ".join([*(part for part in parts if part), *(f"{n:,} {what}" for what, n in counts if n)])

    @property
    def told_gpu(self) -> str:
        """The GPUs of one server in a few words; empty where they are not known."""
        if self.gpu_count == 0:
            return "none"
        parts = [
            f"{self.gpu_count} ×" if self.gpu_count else "",
            self.gpu_name or ("GPU" if self.gpu_count or self.gpu_memory_gib else ""),
            f"with {self.gpu_memory_gib:g} GiB" if self.gpu_memory_gib else "",
            f"(compute capability {self.compute_capability:g})" if self.compute_capability else "",
        ]
        return " ".join(part for part in parts if part)


def from_config(config: Mapping[str, Any], machine: ModelFacts | None = None) -> ModelFacts:
    """Facts that a model's `config.json` tells; the text part of a multi-modal model counts."""
    known = machine or ModelFacts()
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else dict(config)
    names = config.get("architectures") or text.get("architectures") or []
    experts = _first(text, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return replace(
        known,
        architecture=str(names[0]) if names else None,
        family=_family(text, experts),
        attention_heads=_first(text, "num_attention_heads"),
        kv_heads=_first(text, "num_key_value_heads"),
        layers=_first(text, "num_hidden_layers"),
        experts=experts or 0,
        context_length=_first(text, "max_position_embeddings", "max_seq_len", "seq_length", "n_positions"),
        mtp_layers=_first(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict") or 0,
    )


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _family(text: Mapping[str, Any], experts: int | None) -> Family:
    """Hybrid when layers keep a recurrent state, as Mamba or a linear attention does; those keys name one."""
    layer_types = text.get("layer_types") or text.get("layers_block_type") or ()
    recurrent = any(str(kind) in ("mamba", "mamba2", "linear_attention", "recurrent") for kind in layer_types)
    keys = ("hybrid_override_pattern", "ssm_state_size", "mamba_num_heads", "mamba_d_state", "linear_num_value_heads")
    if recurrent or any(text.get(key) for key in keys):
        return Family.HYBRID
    return Family.MOE if experts and experts > 1 else Family.DENSE


def default_value(name: str, facts: ModelFacts) -> KnobValue | None:
    """What vLLM resolves a knob that is not set to, where that depends on the model or the GPU; None: not known."""
    if name == "enable_prefix_caching":
        return None if facts.family is None else facts.family is not Family.HYBRID
    if name in ("enable_chunked_prefill", "async_scheduling"):
        return None if name == "async_scheduling" and facts.gpu_count == 0 else True
    memory, gpu = facts.gpu_memory_gib, (facts.gpu_name or "").upper()
    if memory is None or facts.gpu_count == 0:
        return None
    if name == "max_num_seqs":
        return 1024 if memory >= 70 and "A100" not in gpu else 256
    if name == "max_num_batched_tokens":
        if memory >= 160:
            return 16384
        if gpu:
            return 8192 if "H100" in gpu or "H200" in gpu else 2048
        return 8192 if memory >= 70 and (facts.compute_capability or 0) >= 9 else None
    return None
