"""Continuous batching step by step, without clocks or sockets: the caller says when, the stepper says how long.

As in vLLM's V1 scheduler: running requests first, in order of arrival; then waiting ones as long as there are
tokens in the budget, sequences and blocks. What no longer fits is preempted, latest first, and recomputed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .config import EngineConfig
from .cost import coefficients, step_seconds
from .kvcache import KVCache
from .memory import Memory, plan
from .profile import Profile
from .tokens import next_state

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"


@dataclass(eq=False)
class Request:
    """One sequence. `limit`: output tokens after which it ends, `natural`: whether it ends by itself there."""

    key: int
    prompt_tokens: int
    limit: int
    arrival: float
    hashes: list[int] = field(default_factory=list)
    seed: int = 0
    natural: bool = False
    # progress
    computed: int = 0
    cached: int = 0
    generated: int = 0
    private_blocks: float = 0.0
    held: list[int] = field(default_factory=list)
    scheduled_at: float = -1.0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    preemptions: int = 0
    finish_reason: str = ""
    draws: int = 0

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass
class Batch:
    """What one step computes, and what came of it."""

    seconds: float
    prefills: list[tuple[Request, int]]
    decodes: list[Request]
    prompt_tokens: int
    preempted: int


@dataclass
class Output:
    request: Request
    tokens: int  # new output tokens in this step
    first: bool


@dataclass
class SpecCounts:
    drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


class Noise:
    """A start's own speed and a slow drift within it; all zero gives a noise-free engine."""

    def __init__(self, between: float, within: float, drift_s: float, step: float, seed: int | None) -> None:
        self._random = random.Random(seed)
        self._within, self._drift_s, self._step = within, drift_s, step
        self.start_factor = math.exp(self._random.gauss(0.0, between)) if between else 1.0
        self._drift = self._random.gauss(0.0, 1.0) if within else 0.0

    def factor(self, seconds: float) -> float:
        """The factor for a step of `seconds`; moves the drift on by that time."""
        exponent = 0.0
        if self._within:
            keep = math.exp(-seconds / self._drift_s)
            self._drift = keep * self._drift + math.sqrt(1 - keep * keep) * self._random.gauss(0.0, 1.0)
            exponent = self._within * self._drift
        if self._step:
            exponent += self._random.gauss(0.0, self._step)
        return self.start_factor * math.exp(exponent)


class Stepper:
    """One engine. Use: `add`, then `schedule(now)` and, when its seconds have passed, `finish(batch, then)`."""

    def __init__(
        self, profile: Profile, config: EngineConfig, memory: Memory | None = None, noise: Noise | None = None
    ) -> None:
        self.profile, self.config = profile, config
        self.memory = memory or plan(profile, config)
        self.cache = KVCache(self.memory, config.prefix_caching)
        self.noise = noise
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.spec = SpecCounts(0, [0] * config.spec_tokens)
        self.preemptions = 0
        self.finished = 0
        self.prefix_queries = self.prefix_hits = 0
        self._cost = coefficients(profile, config)
        self._unit_blocks = self.memory.hash_block_size / self.memory.block_size

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = ABORT

    def abort_all(self) -> Sequence[Request]:
        """Ends everything, as a dying engine does."""
        ended = [*self.running, *self.waiting]
        for request in ended:
            self.abort(request)
        return ended

    # -- scheduling ------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """The next step's batch and its duration; None when there is nothing to do."""
        budget = self.config.max_num_batched_tokens
        preemptions = self.preemptions
        batch = Batch(0.0, [], [], 0, 0)
        budget = self._schedule_running(batch, budget)
        if self.preemptions == preemptions:
            budget = self._schedule_waiting(batch, budget, now)
        if not batch.prefills and not batch.decodes:
            return None
        batch.preempted = self.preemptions - preemptions
        batch.seconds = self._seconds(batch)
        return batch

    def _schedule_running(self, batch: Batch, budget: int) -> int:
        rate = 1 + self.config.spec_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            left = request.length - request.computed
            decode = left <= 1 and request.generated > 0
            want = min(rate, budget) if decode else self._chunk(left, budget)
            if not self._reserve(request, request.computed + want):
                break  # it was itself the last one and has been preempted
            if decode:
                batch.decodes.append(request)
            else:
                batch.prefills.append((request, want))
            budget -= want
            index += 1
        return budget

    def _chunk(self, left: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(left, budget, threshold) if threshold else min(left, budget)

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Blocks for a running request, preempting later ones; False if it had to give way itself."""
        while True:
            missing = self.memory.blocks_for(tokens) - request.private_blocks - self._held_blocks(request)
            if missing <= 0:
                return True
            if self.cache.allocate(missing):
                request.private_blocks += missing
                return True
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, victim: Request) -> None:
        self._free(victim)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _held_blocks(self, request: Request) -> float:
        return len(request.held) * self._unit_blocks

    def _free(self, request: Request) -> None:
        self.cache.release(request.private_blocks, request.held)
        request.private_blocks, request.held = 0.0, []

    def _schedule_waiting(self, batch: Batch, budget: int, now: float) -> int:
        config, cache = self.config, self.cache
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting[0]
            units = cache.find(request.hashes, request.prompt_tokens)
            cached = units * self.memory.hash_block_size
            left = request.length - cached
            if left > budget and not config.chunked_prefill:
                break
            # vLLM admits a request only when its whole input fits, so that chunks do not thrash the cache.
            blocks = self.memory.blocks_for(request.length) - units * self._unit_blocks
            idle = sum(1 for unit in request.hashes[:units] if cache.references[unit] == 0)
            reserve = config.watermark * cache.total
            if cache.used + blocks + idle * self._unit_blocks + reserve > cache.total + 1e-9:
                break
            self.waiting.popleft()
            if config.prefix_caching and request.preemptions == 0:
                self.prefix_queries += request.prompt_tokens
                self.prefix_hits += cached
            if units:
                cache.claim(request.hashes[:units])
                request.held = request.hashes[:units]
            if request.preemptions == 0:
                request.cached = cached
                request.scheduled_at = now
            request.computed = cached
            want = self._chunk(left, budget)
            self.running.append(request)
            self._reserve(request, cached + want)
            batch.prefills.append((request, want))
            budget -= want
        return budget

    # -- time ------------------------------------------------------------------------------------------------

    def _seconds(self, batch: Batch) -> float:
        prefill = pairs = hashed = 0
        for request, tokens in batch.prefills:
            prefill += tokens
            pairs += tokens * (2 * request.computed + tokens) // 2
            hashed += tokens if request.generated == 0 else 0
        batch.prompt_tokens = prefill
        context = sum(r.prompt_tokens + r.generated for r in batch.decodes)
        seconds = float(step_seconds(self._cost, prefill, len(batch.decodes), context, pairs, hashed))
        start = self.profile.start
        if self.noise is not None:
            seconds *= self.noise.factor(seconds)
            if self.finished < start.warmup_requests:
                seconds *= 1 + start.warmup_slowdown * (1 - self.finished / start.warmup_requests)
        return seconds

    # -- results ---------------------------------------------------------------------------------------------

    def finish(self, batch: Batch, now: float) -> list[Output]:
        """Applies a computed batch at its end; returns each request's new tokens."""
        outputs: list[Output] = []
        ended = False
        for request, tokens in batch.prefills:
            if request.finish_reason:
                continue  # aborted while the step ran
            request.computed += tokens
            if request.computed >= request.length:
                if request.generated == 0:
                    known = len(request.held)
                    fresh = self.cache.publish(request.hashes[known:])
                    request.private_blocks -= len(fresh) * self._unit_blocks
                    request.held = request.held + fresh
                ended |= self._emit(request, 1, now, outputs)
        for request in batch.decodes:
            if request.finish_reason or request.generated == 0:
                continue
            ended |= self._emit(request, 1 + self._accepted(request), now, outputs)
        if ended:
            self.running = [r for r in self.running if not r.finish_reason]
        return outputs

    def _accepted(self, request: Request) -> int:
        rates = self.config.acceptance
        if not rates:
            return 0
        self.spec.drafts += 1
        accepted = 0
        for position, rate in enumerate(rates):
            request.draws = next_state(request.draws ^ request.seed)
            if (request.draws >> 11) / 2**53 >= rate:
                break
            self.spec.accepted_per_position[position] += 1
            accepted += 1
        return accepted

    def _emit(self, request: Request, tokens: int, now: float, outputs: list[Output]) -> bool:
        tokens = min(tokens, request.limit - request.generated)
        first = request.generated == 0
        request.generated += tokens
        request.computed = request.length - 1
        if first:
            request.first_token_at = now
        done = request.generated >= request.limit
        if done:
            request.finish_reason = STOP if request.natural else LENGTH
            self._free(request)
            self.finished += 1
        outputs.append(Output(request, tokens, first))
        return done
