"""The stepper in virtual time: load an engine without sockets or clocks, far faster than it would serve."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from .config import EngineConfig
from .engine import Noise, Request, Stepper
from .profile import Profile


@dataclass(frozen=True)
class Workload:
    """Requests as a distribution. Lengths are log-normal with these means and coefficients of variation."""

    prompt_tokens: float
    output_tokens: float
    concurrency: int
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1  # how many different shared prefixes there are
    prompt_cv: float = 0.0
    output_cv: float = 0.5


@dataclass
class Measured:
    """What a client would have seen after the warm-up. Times in seconds."""

    seconds: float = 0.0
    requests: int = 0
    output_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)  # one entry per engine step and request
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


class _Requests:
    def __init__(self, workload: Workload, stepper: Stepper, seed: int) -> None:
        self._random = random.Random(seed)
        self._workload, self._memory, self._count = workload, stepper.memory, 0
        self._longest = stepper.config.max_model_len

    def _length(self, mean: float, cv: float) -> int:
        if cv == 0:
            return max(1, round(mean))
        sigma2 = math.log(1 + cv * cv)
        return max(1, round(self._random.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2))))

    def make(self, now: float, residual: bool = False) -> Request:
        w = self._workload
        self._count += 1
        prompt = max(self._length(w.prompt_tokens, w.prompt_cv), w.shared_prefix_tokens + 1)
        prompt = min(prompt, self._longest - 2)
        output = min(self._length(w.output_tokens, w.output_cv), self._longest - prompt)
        if residual:  # spreads the first requests' ends, as if they had been running for a while
            output = max(1, math.ceil(output * self._random.random()))
        unit = self._memory.hash_block_size
        group = self._random.randrange(w.prefix_groups)
        shared = w.shared_prefix_tokens // unit
        hashes = [hash((-1, group, i)) for i in range(shared)]
        hashes += [hash((self._count, i)) for i in range(shared, prompt // unit)]
        seed = self._random.getrandbits(64)
        return Request(self._count, prompt, output, now, hashes, seed)


def _record(measured: Measured, stepper: Stepper, seconds_per_step: float, now: float, since: float) -> None:
    measured.seconds = now - since
    measured.steps += 1 if seconds_per_step else 0
    measured.preemptions = stepper.preemptions


def run_closed(
    profile: Profile,
    config: EngineConfig,
    workload: Workload,
    *,
    requests: int = 400,
    seed: int = 1,
    noise: Noise | None = None,
    max_steps: int = 2_000_000,
) -> Measured:
    """`concurrency` clients, each sending its next request when the last one ended; the first 2 x concurrency
    requests are warm-up. Noise-free unless `noise` is given."""
    stepper = Stepper(profile, config, noise=noise)
    source = _Requests(workload, stepper, seed)
    for _ in range(workload.concurrency):
        stepper.add(source.make(0.0, residual=True))
    measured, now, since, ended, warmup = Measured(), 0.0, 0.0, 0, 2 * workload.concurrency
    for _ in range(max_steps):
        batch = stepper.schedule(now)
        if batch is None:
            raise RuntimeError("the engine can schedule nothing: one request does not fit the KV cache")
        now += batch.seconds
        finished = 0
        for output in stepper.finish(batch, now):
            request = output.request
            if ended >= warmup:
                measured.output_tokens += output.tokens
                if not output.first:
                    measured.itl.append(now - request.last_token_at)
            request.last_token_at = now
            finished += _finish(measured, request, now, ended >= warmup)
        for _ in range(finished):
            stepper.add(source.make(now))
        if ended < warmup <= ended + finished:
            since = now
        ended += finished
        _record(measured, stepper, batch.seconds, now, since)
        if ended >= warmup + requests:
            break
    return measured


def _finish(measured: Measured, request: Request, now: float, counts: bool) -> int:
    if not request.finish_reason:
        return 0
    if counts:
        measured.requests += 1
        measured.ttft.append(request.first_token_at - request.arrival)
        measured.e2e.append(now - request.arrival)
        if request.generated > 1:
            measured.tpot.append((now - request.first_token_at) / (request.generated - 1))
    return 1


def run_open(
    profile: Profile,
    config: EngineConfig,
    workload: Workload,
    rate: float,
    *,
    requests: int = 400,
    seed: int = 1,
    noise: Noise | None = None,
    max_steps: int = 2_000_000,
) -> Measured:
    """Poisson arrivals at `rate` requests/s, whatever the engine does; `workload.concurrency` is not used."""
    stepper = Stepper(profile, config, noise=noise)
    source = _Requests(workload, stepper, seed)
    gaps, arrivals, at = random.Random(seed + 1), [], 0.0
    for _ in range(requests):
        at += gaps.expovariate(rate)
        arrivals.append(at)
    heapq.heapify(arrivals)
    measured, now = Measured(), 0.0
    for _ in range(max_steps):
        while arrivals and arrivals[0] <= now:
            stepper.add(source.make(heapq.heappop(arrivals)))
        batch = stepper.schedule(now)
        if batch is None:
            if not arrivals:
                break
            now = arrivals[0]
            continue
        now += batch.seconds
        for output in stepper.finish(batch, now):
            measured.output_tokens += output.tokens
            if not output.first:
                measured.itl.append(now - output.request.last_token_at)
            output.request.last_token_at = now
            _finish(measured, output.request, now, True)
        _record(measured, stepper, batch.seconds, now, 0.0)
    return measured
