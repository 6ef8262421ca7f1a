"""The time of one engine step. One formula, used by the stepper on numbers and by steady.py on arrays.

    gpu    = max(weights read, tokens * token_s)             roofline; experts are read as far as tokens reach them
           + sequences * (sampling + Mamba state + draft)    + context * context_s + pairs * prefill_pair_s
    launch = CPU time to launch the kernels: a captured graph costs next to nothing, but only decode steps of at
             most `capture_size` tokens have a full one; larger ones run eagerly
    host   = scheduling and output handling
    step   = host + max(gpu, launch)                         synchronous
           = max(host + launch, gpu) + async_s               asynchronous: the host's work hides behind the GPU's

The interaction that no additive model finds: a speculation depth k multiplies the tokens of a decode step by
(1 + k), so depth and max_num_seqs together decide whether the step still fits a captured graph, and whether
the host's work still hides: raising either alone helps, raising both can cost more than they gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import EngineConfig
from .profile import Profile


@dataclass
class Coefficients:
    """One configuration's constants; in steady.py each field is an array over configurations."""

    weights_s: Any
    expert_s: Any
    expert_miss: Any  # chance that one token does not touch a given expert
    token_s: Any
    decode_s: Any  # per decoding sequence
    draft_s: Any  # per step
    context_s: Any
    pair_s: Any
    rate: Any  # tokens a decoding sequence schedules: 1 + speculation depth
    capture: Any
    launch_full: Any
    launch_mixed: Any
    launch_eager: Any
    host_s: Any
    host_sequence_s: Any
    hash_s: Any
    is_async: Any
    async_s: Any


def coefficients(profile: Profile, config: EngineConfig) -> Coefficients:
    """The constants of the formula for one configuration."""
    cost, k = profile.cost, config.spec_tokens
    spec = profile.speculation[config.spec_method] if k else None
    state = cost.state_s + k * cost.state_draft_s
    state *= cost.mamba_backend.get(config.mamba_backend, 1.0) * cost.ssm_dtype.get(config.ssm_dtype, 1.0)
    if config.stochastic_rounding:
        state += cost.rounding_s * (1 + k)
    graphs = config.cudagraph_mode
    full = cost.launch_graph_s if graphs.startswith("FULL") else cost.launch_piecewise_s
    piecewise = cost.launch_piecewise_s if graphs not in ("FULL_DECODE_ONLY",) else cost.launch_eager_s
    if graphs == "NONE":
        full = piecewise = cost.launch_eager_s
    split = 1.0 / config.tensor_parallel
    host = cost.omp_threads.get(config.omp_threads, 1.0)
    return Coefficients(
        weights_s=cost.weights_s * (1 - cost.expert_share) * split,
        expert_s=cost.weights_s * cost.expert_share * split,
        expert_miss=1 - cost.expert_use,
        token_s=cost.token_s * split,
        decode_s=cost.sequence_s + state * split + (k * spec.draft_sequence_s if spec else 0.0),
        draft_s=k * spec.draft_s if spec else 0.0,
        context_s=cost.context_s * cost.kv_dtype.get(config.kv_cache_dtype, 1.0) * split,
        pair_s=cost.prefill_pair_s * split,
        rate=1 + k,
        capture=config.capture_size,
        launch_full=full,
        launch_mixed=piecewise,
        launch_eager=cost.launch_eager_s,
        host_s=cost.host_s * host,
        host_sequence_s=cost.host_sequence_s * host,
        hash_s=cost.prefix_hash_s if config.prefix_caching else 0.0,
        is_async=config.async_scheduling,
        async_s=cost.async_s if config.async_scheduling else 0.0,
    )


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


def step_seconds(
    c: Coefficients,
    prefill: Any,
    decodes: Any,
    context: Any,
    pairs: Any,
    hashed: Any,
    maximum: Callable[[Any, Any], Any] = max,
    choose: Callable[[Any, Any, Any], Any] = _choose,
) -> Any:
    """Seconds of a step with `prefill` prompt tokens and `decodes` sequences over `context` tokens of KV cache.

    `pairs`: sum over prompt tokens of the context each attends to; `hashed`: prompt tokens newly hashed.
    """
    tokens = prefill + decodes * c.rate
    read = c.weights_s + c.expert_s * (1 - c.expert_miss**tokens)
    gpu = maximum(read, tokens * c.token_s) + decodes * c.decode_s + context * c.context_s + pairs * c.pair_s
    gpu = gpu + choose(decodes > 0, c.draft_s, 0.0)
    launch = choose(prefill > 0, c.launch_mixed, c.launch_full)
    launch = choose(tokens > c.capture, c.launch_eager, launch)
    host = c.host_s + decodes * c.host_sequence_s + hashed * c.hash_s
    return choose(c.is_async, maximum(host + launch, gpu) + c.async_s, host + maximum(gpu, launch))
