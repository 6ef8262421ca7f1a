"""Facts of a model, from its config.json."""

import json

import pytest

from tunewright.knobs import asking
from tunewright.knobs.facts import ModelFacts, default_value, from_config
from tunewright.knobs.knob import Family


def test_a_dense_model(tmp_path):
    config = {
        "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 36, "max_position_embeddings": 32768,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = from_config(asking.config_of(str(tmp_path), {}), ModelFacts(gpu_count=2, gpu_memory_gib=139.8))
    assert facts == ModelFacts(
        architecture="Qwen2ForCausalLM", family=Family.DENSE, attention_heads=32, kv_heads=8, layers=36, experts=0,
        context_length=32768, mtp_layers=0, gpu_count=2, gpu_memory_gib=139.8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "family", "mtp", "experts"),
    [
        ({"hybrid_override_pattern": "MEM*", "n_routed_experts": 128, "num_nextn_predict_layers": 1},
         Family.HYBRID, 1, 128),
        ({"layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1}, Family.HYBRID, 1, 0),
        ({"layer_types": ["sliding_attention", "full_attention"]}, Family.DENSE, 0, 0),
        ({"num_local_experts": 8}, Family.MOE, 0, 8),
        ({"text_config": {"num_experts": 64, "num_attention_heads": 16}}, Family.MOE, 0, 64),
        ({}, Family.DENSE, 0, 0),
    ],
)  # fmt: skip
def test_families(config, family, mtp, experts):
    facts = from_config(config)
    assert (facts.family, facts.mtp_layers, facts.experts) == (family, mtp, experts)


@pytest.mark.parametrize("content", [None, "", "[]", "{nonsense"])
def test_without_a_readable_config_the_model_is_unknown(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert asking.config_of(str(tmp_path), {}) is None


@pytest.mark.parametrize("place", ["HF_HOME", "HF_HUB_CACHE", "HOME", "--download-dir"])
def test_a_hub_id_is_found_in_the_cache(tmp_path, place):
    below = {"HF_HOME": "hub", "HOME": ".cache/huggingface/hub"}.get(place, "")
    folder = tmp_path / below / "models--org--name/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 7}')
    environment = {} if place == "--download-dir" else {place: str(tmp_path)}
    environment.setdefault("HOME", "/nowhere")
    download_dir = str(tmp_path) if place == "--download-dir" else ""
    assert asking.config_of("org/name", environment, download_dir) == {"num_hidden_layers": 7}
    assert asking.config_of("org/other", environment, download_dir) is None


@pytest.mark.parametrize(
    ("name", "gpu", "memory", "value"),
    [
        ("max_num_seqs", "NVIDIA H200", 139.8, 1024),
        ("max_num_seqs", "NVIDIA A100-SXM4-80GB", 79.2, 256),
        ("max_num_seqs", "NVIDIA L40S", 44.5, 256),
        ("max_num_batched_tokens", "NVIDIA H200", 139.8, 8192),
        ("max_num_batched_tokens", "NVIDIA B200", 178.0, 16384),
        ("max_num_batched_tokens", "NVIDIA L40S", 44.5, 2048),
        ("max_num_seqs", None, None, None),
    ],
)
def test_defaults_by_gpu(name, gpu, memory, value):
    assert default_value(name, ModelFacts(gpu_name=gpu, gpu_memory_gib=memory)) == value


def test_defaults_by_family():
    assert default_value("enable_prefix_caching", ModelFacts(family=Family.HYBRID)) is False
    assert default_value("enable_prefix_caching", ModelFacts(family=Family.DENSE)) is True
    assert default_value("enable_prefix_caching", ModelFacts()) is None
    assert default_value("async_scheduling", ModelFacts(gpu_count=0)) is None
