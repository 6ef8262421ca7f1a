"""The truth: the noise-free steady state of any configuration, for many configurations at once.

Closed loop at a workload's concurrency. A mean-field balance replaces the stepper's queues:

* R requests run: as many as clients, max_num_seqs and KV memory allow.
* A request decodes for N steps, which depends on its output and on the acceptance of speculation.
* Prompts arrive at random steps, so the prompts that share a step are Poisson distributed, cut off where the
  token budget ends; what does not fit waits, and the waiting requests do not decode.
* The mean step is the step formula averaged over that distribution; capacity follows from it.

Tests hold it to the stepper within 3 %. Where KV memory is what limits R the stepper preempts and recomputes,
which no balance describes well; those configurations are run through the stepper itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import EngineConfig, StartFailure, resolve
from .cost import Coefficients, coefficients, step_seconds
from .memory import Memory, plan, runs_out_under_load
from .profile import Profile
from .virtual import Workload, run_closed

Array = NDArray[np.float64]
_ITERATIONS = 200
_MOST_PROMPTS = 48  # prompts in one step beyond which the distribution is cut


@dataclass(frozen=True)
class Capacity:
    """One entry per configuration; NaN where the configuration does not start or run. Times in seconds."""

    output_tokens_per_s: Array
    ttft: Array
    tpot: Array
    running: Array
    failures: list[str | None]


def capacity(
    profile: Profile,
    configs: Sequence[Mapping[str, Any] | EngineConfig],
    workload: Workload,
    *,
    stepper: bool = True,
) -> Capacity:
    """Capacity, mean TTFT and mean TPOT of each configuration under the workload's closed loop.

    A configuration is vLLM's flags as a mapping (`{"max-num-seqs": 64}`; dashes or underscores) or resolved.
    With `stepper` off, what KV memory limits is balanced too, as if only so many requests were let in as memory holds:
    quick enough for whole grids, and too kind where requests would be preempted.
    """
    resolved: list[tuple[int, EngineConfig, Memory]] = []
    failures: list[str | None] = [None] * len(configs)
    for index, item in enumerate(configs):
        try:
            config = item if isinstance(item, EngineConfig) else resolve(profile, item)
            memory = plan(profile, config)
            if runs_out_under_load(profile, config):
                raise StartFailure("torch.OutOfMemoryError: CUDA out of memory (under load, after a healthy start)")
            if not stepper:
                config = _within_memory(config, memory, workload)
            resolved.append((index, config, memory))
        except StartFailure as failure:
            failures[index] = failure.message
    out = np.full((4, len(configs)), np.nan)
    limited = [entry for entry in resolved if stepper and _memory_limits(entry[1], entry[2], workload)]
    through_stepper = {index for index, _, _ in limited}
    free = [entry for entry in resolved if entry[0] not in through_stepper]
    if free:
        out[:, [i for i, _, _ in free]] = _balance(profile, free, workload)
    for index, config, _ in limited:
        out[:, index] = _stepped(profile, config, workload)
    return Capacity(out[0], out[1], out[2], out[3], failures)


def _held_blocks(memory: Memory, workload: Workload, output: float) -> float:
    prompt = max(workload.prompt_tokens, workload.shared_prefix_tokens + 1)
    return memory.state_blocks + (prompt + output) / memory.block_size + 0.5


def _memory_limits(config: EngineConfig, memory: Memory, workload: Workload) -> bool:
    """Whether KV memory, rather than clients or max_num_seqs, may bound the running requests."""
    running = min(workload.concurrency, config.max_num_seqs)
    # Long requests run longer, so the mean output of those running is size-biased; half of it is there already.
    output = workload.output_tokens * (1 + workload.output_cv**2) / 2
    spread = 2.5 * np.sqrt(running) * workload.output_tokens * 0.6 / memory.block_size
    return bool(running * _held_blocks(memory, workload, output) + spread > memory.num_blocks)


def _within_memory(config: EngineConfig, memory: Memory, workload: Workload) -> EngineConfig:
    """`config` with no more requests at a time than its KV memory holds on average."""
    output = workload.output_tokens * (1 + workload.output_cv**2) / 2
    holds = max(1, int(memory.num_blocks / _held_blocks(memory, workload, output)))
    return replace(config, max_num_seqs=min(config.max_num_seqs, holds))


def _stepped(profile: Profile, config: EngineConfig, workload: Workload) -> tuple[float, float, float, float]:
    run = run_closed(profile, config, workload, requests=max(300, 6 * workload.concurrency))
    tpot = float(np.mean(run.tpot)) if run.tpot else float("nan")
    running = run.output_tokens_per_s * float(np.mean(run.e2e)) / workload.output_tokens
    return run.output_tokens_per_s, float(np.mean(run.ttft)), tpot, running


def _stack(items: Sequence[Coefficients]) -> Coefficients:
    columns = {f.name: np.array([getattr(c, f.name) for c in items])[:, None] for f in fields(Coefficients)}
    return Coefficients(**columns)


def _tokens_per_step(config: EngineConfig) -> tuple[float, float]:
    """Mean and second moment of the tokens that one decode step of one sequence yields."""
    alive, mean, square = 1.0, 0.0, 0.0
    for accepted in range(config.spec_tokens + 1):
        goes_on = config.acceptance[accepted] if accepted < config.spec_tokens else 0.0
        chance = alive * (1 - goes_on)
        mean += chance * (accepted + 1)
        square += chance * (accepted + 1) ** 2
        alive *= goes_on
    return mean, square


def _balance(
    profile: Profile, entries: Sequence[tuple[int, EngineConfig, Memory]], workload: Workload
) -> NDArray[np.float64]:
    configs = [c for _, c, _ in entries]
    cost = _stack([coefficients(profile, c) for c in configs])

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float)[:, None]

    running = column([min(workload.concurrency, c.max_num_seqs) for c in configs])
    budget = column([c.max_num_batched_tokens for c in configs])
    moments = [_tokens_per_step(c) for c in configs]
    mean, square = column([m for m, _ in moments]), column([s for _, s in moments])
    prompt = max(workload.prompt_tokens, workload.shared_prefix_tokens + 1.0)
    hits = column([_cached(c, m, workload) for _, c, m in entries])
    fresh = prompt - hits
    chunk = column([c.long_prefill_token_threshold or 1e12 for c in configs])
    pieces = np.ceil(fresh / chunk)
    last = fresh - (pieces - 1) * chunk  # a threshold cuts a prompt into full pieces and a shorter last one
    chunk = fresh / pieces  # on average
    overshoot = (square - mean) / (2 * mean)
    steps = np.maximum((workload.output_tokens - 1 + overshoot * (workload.output_tokens > 1)) / mean, 1e-9)

    decodes = running * steps / (steps + 1)
    for _ in range(_ITERATIONS):
        space = np.maximum(budget - decodes * cost.rate, 1.0)
        unit = np.minimum(np.minimum(fresh, space), chunk)
        load = decodes / steps * fresh / space
        visits = np.ceil(fresh / unit - 1e-9) + np.minimum(load / (2 * np.maximum(1 - load, 1e-3)), running) * (
            np.maximum(unit / space, load)
        )
        wanted = running * steps / (steps + visits)
        bound = budget / (cost.rate + fresh / steps)
        decodes = 0.9 * decodes + 0.1 * np.minimum(wanted, bound)
    space = np.maximum(budget - decodes * cost.rate, 1.0)
    unit = np.minimum(np.minimum(fresh, space), chunk)
    rate = decodes / steps  # requests per step
    share, prompts = _poisson(rate * fresh / unit, np.maximum(space / unit, 1.0))
    average = (share * prompts).sum(axis=1, keepdims=True)
    # Whatever waits or is in prefill does not decode: the fewer, the more prompts share the step.
    decoding = np.maximum(decodes - (prompts - average), 0.0)
    context_each = prompt + workload.output_tokens * (1 + workload.output_cv**2) / 2
    context = decoding * context_each

    def seconds_for(prefill: Array) -> Array:
        pairs = prefill * (hits + fresh / 2)
        return np.asarray(
            step_seconds(cost, prefill, decoding, context, pairs, prefill, maximum=np.maximum, choose=np.where)
        )

    full = np.where(pieces > 1, (fresh - last) / np.maximum(pieces - 1, 1), unit)
    one = (seconds_for(full) * (pieces - 1) + seconds_for(np.where(pieces > 1, last, unit))) / pieces
    seconds = np.where((prompts == 1) & (pieces > 1), one, seconds_for(prompts * unit))
    step = (share * seconds).sum(axis=1, keepdims=True)
    per_second = rate / step
    tpot = steps * step / max(workload.output_tokens - 1, 1e-9)
    # A request's own prompt makes the step it is in a longer one than the mean.
    own = (share * prompts * seconds).sum(axis=1, keepdims=True) / np.maximum(average, 1e-12)
    queued = np.maximum(workload.concurrency / per_second - (steps + visits) * step, 0.0)
    ttft = queued + (visits - 1) * step + own
    result = [per_second * workload.output_tokens, ttft, tpot, running]
    return np.stack([np.broadcast_to(r, (len(configs), 1))[:, 0] for r in result])


def _cached(config: EngineConfig, memory: Memory, workload: Workload) -> float:
    if not config.prefix_caching:
        return 0.0
    return float(workload.shared_prefix_tokens // memory.hash_block_size * memory.hash_block_size)


def _poisson(mean: Array, most: Array) -> tuple[Array, Array]:
    """Shares of steps, and the prompts in each: Poisson, at most `most` (a fraction is a prompt cut by the
    budget). The cut-off keeps the mean: what does not fit goes to steps that would else have had room."""
    counts = np.arange(_MOST_PROMPTS + 1, dtype=float)[None, :]
    logs = np.concatenate([[0.0], np.cumsum(np.log(counts[0, 1:]))])[None, :]
    share = np.exp(counts * np.log(np.maximum(mean, 1e-12)) - mean - logs)
    prompts = np.minimum(counts, most)
    top = np.minimum(np.ceil(most - 1e-9), _MOST_PROMPTS)
    below = np.where(counts < top, share, 0.0)
    full = np.maximum(1 - below.sum(axis=1, keepdims=True), 0.0)
    missing = mean - (below * prompts).sum(axis=1, keepdims=True) - full * most
    room = (below * (most - prompts)).sum(axis=1, keepdims=True)
    below *= 1 - np.clip(missing / np.maximum(room, 1e-12), 0.0, 1.0)
    full = 1 - below.sum(axis=1, keepdims=True)
    return np.where(counts == top, full, below), prompts
