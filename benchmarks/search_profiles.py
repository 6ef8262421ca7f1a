"""A simulator profile as a tuning sees it: its traffic, its facts, a candidate's flags; and profiles that are moved."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from typing import Any

import numpy as np

from tunewright.domain.candidate import Candidate
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.simulate.profile import Profile
from tunewright.simulate.virtual import Workload


def traffic(workload: Workload) -> TrafficProfile:
    """The profile that production would have shown."""

    def lengths(mean: float) -> Histogram:
        return Histogram(edges=(mean * 0.9, mean * 1.1), counts=(0.0, 100.0))

    return TrafficProfile(
        start=0.0, end=1800.0, replicas=1, via="benchmark", source=Source.SIMULATED, finished_requests=1000.0,
        saturated=True, demand=1.0, concurrency=workload.concurrency, concurrency_p95=workload.concurrency,
        running=workload.concurrency, waiting=0.0, prompt_tokens=lengths(workload.prompt_tokens),
        output_tokens=lengths(workload.output_tokens), prompt_tokens_mean=workload.prompt_tokens,
        output_tokens_mean=workload.output_tokens, prefix_reuse=workload.shared_prefix_tokens / workload.prompt_tokens,
        error_rate=0.0, output_tokens_per_second=1.0,
    )  # fmt: skip


def flags_of(candidate: Candidate) -> tuple[dict[str, Any], dict[str, str]]:
    """The candidate as the simulator takes it: flags and environment."""
    flags: dict[str, Any] = {}
    environment: dict[str, str] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in candidate.values.items():
        knob = CATALOGUE[name]
        if knob.environment:
            environment[knob.environment] = str(value)
        elif knob.json_flag and knob.json_key:
            nested.setdefault(knob.json_flag[2:].replace("-", "_"), {})[knob.json_key] = value
        else:
            flags[name] = value
    if not nested.get("speculative_config", {}).get("num_speculative_tokens"):
        nested.pop("speculative_config", None)
    return {**flags, **nested}, environment


def facts_of(profile: Profile) -> ModelFacts:
    """What the model's `config.json` and the driver would tell."""
    model, hardware = profile.model, profile.hardware
    experts = profile.cost.expert_share > 0
    family = Family.HYBRID if model.mamba_layers else Family.MOE if experts else Family.DENSE
    mtp = profile.speculation.get("mtp")
    gpus = hardware.devices if hardware.device == "cuda" else 0
    return ModelFacts(
        architecture=model.architecture, family=family, attention_heads=model.attention_heads,
        layers=model.attention_layers + model.mamba_layers, experts=128 if experts else 0,
        context_length=model.max_position_embeddings, mtp_layers=mtp.n_predict if mtp else 0, gpu_count=gpus,
        gpu_memory_gib=hardware.memory_gib if gpus else None,
        compute_capability=hardware.compute_capability if gpus else None, vllm_version="0.32.0",
    )  # fmt: skip


def perturbed(profile: Profile, sd: float, seed: int) -> Profile:
    """The profile with its times, memory and acceptance moved: another model on another machine of that kind."""
    rng = random.Random(f"{profile.name} {seed}")

    def moved(value: Any, width: float) -> Any:
        if isinstance(value, dict):
            return {key: v if v == 1.0 else moved(v, width) for key, v in value.items()}
        return value * math.exp(rng.gauss(0, width)) if isinstance(value, float) else value

    skip = ("expert_share", "expert_use")
    cost = replace(profile.cost, **{f.name: moved(getattr(profile.cost, f.name), sd)
                                    for f in fields(profile.cost) if f.name not in skip})  # fmt: skip
    sizes = ("activation_gib", "activation_gib_per_token", "sequence_gib", "graphs_gib", "unprofiled_gib")
    hardware = replace(profile.hardware, **{n: moved(getattr(profile.hardware, n), sd) for n in sizes})
    model = replace(profile.model, weights_gib=moved(profile.model.weights_gib, sd / 8))
    speculation = {
        method: replace(one, acceptance=[float(np.clip(a + rng.gauss(0, 0.1), 0.05, 0.95)) for a in one.acceptance])
        for method, one in profile.speculation.items()
    }
    return replace(profile, cost=cost, hardware=hardware, model=model, speculation=speculation)
