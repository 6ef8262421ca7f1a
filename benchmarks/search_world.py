"""The world that searches are compared in: a simulator profile under one load, in virtual time.

Every trial costs what it would cost on a GPU: importing, loading, compiling (less once the caches hold it), capturing
graphs, warming up and measuring; a start that fails costs what had passed when it did. Values come from
`simulate.steady.capacity`, with noise between starts and within a run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.search_profiles import facts_of, flags_of, perturbed, traffic

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.measurement import Estimate, GeneratorHealth, Interim, Latency, Measurement, ServerCounters
from tunewright.domain.objective import judge
from tunewright.domain.profile import Source
from tunewright.domain.state import Failure, TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.stopping import hopeless
from tunewright.domain.tuning import LATENCIES, PERCENTILES, Objective, Search, Slo
from tunewright.knobs import failures, readback
from tunewright.loadtest.session import LOOKS
from tunewright.propose.space import Space, build_space
from tunewright.simulate.config import CONFIG, ENGINE, EngineConfig, StartFailure, resolve
from tunewright.simulate.memory import plan
from tunewright.simulate.profile import load
from tunewright.simulate.steady import capacity
from tunewright.simulate.virtual import Workload

MEASURE_S = 35.0  # the steady window
WARMUP_S = 20.0  # load before it, once the kernels are compiled
SLO_TOLERANCE = 0.02  # a candidate that misses its bound by no more is one that noise let through, not a wrong answer
STOP_S = 8.0  # ending the server and proving that it is gone
COLD = 2.2  # a compilation that no cache holds yet takes this much longer than the profile's, which has warm caches
OOM_AFTER_S = 10.0  # of load, until a server that runs out of memory under load dies
TPOT_P95, TTFT_P95 = 1.15, 2.0  # percentiles over the means, which is all that the steady state knows
_COMPILED = ("max_num_batched_tokens", "spec_method", "spec_tokens", "mamba_backend", "ssm_dtype", "tensor_parallel",
             "kv_cache_dtype")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A profile, the traffic on it, what is wanted, and what production runs."""

    profile: str
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    baseline: Mapping[str, KnobValue] = field(default_factory=dict)
    allow_lossy: bool = False


CASES: tuple[Case, ...] = (
    Case("dense-8b-h200", Workload(2048, 300, 192, shared_prefix_tokens=512, prefix_groups=8),
         baseline={"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 2048}, allow_lossy=True),
    Case("hybrid-30b-h200", Workload(512, 512, 256), baseline={"max_model_len": 8192}, allow_lossy=True),
    Case("moe-30b-h200", Workload(600, 400, 192, shared_prefix_tokens=200, prefix_groups=4),
         baseline={"max_model_len": 8192, "max_num_seqs": 128}),
    Case("tight-14b-24gib", Workload(700, 250, 64, shared_prefix_tokens=200, prefix_groups=8),
         baseline={"max_model_len": 8192, "max_num_seqs": 32}, allow_lossy=True),
    Case("dense-32b-h100", Workload(1500, 300, 192, shared_prefix_tokens=300, prefix_groups=16),
         slo=Slo.model_validate({"tpotP95": "32ms"}), baseline={"max_model_len": 8192, "max_num_seqs": 32}),
)  # fmt: skip


def case_for(path: Path) -> Case:
    """A case for a profile that was never seen: a load that fits it, vLLM's defaults, no SLO."""
    profile = load(str(path))
    longest = profile.model.max_position_embeddings
    prompt, output = min(512, longest // 4), min(256, longest // 8)
    concurrency = max(8, profile.defaults.max_num_seqs // 4)
    return Case(str(path), Workload(prompt, output, concurrency), baseline={"max_model_len": min(8192, longest)})


@dataclass(frozen=True)
class Truth:
    """One candidate without noise. `failure` and the stage it came at: it does not start or dies under load."""

    tokens_per_s: float
    ttft: float
    tpot: float
    running: float
    failure: str | None
    stage: str = ""


class World:
    """One case with its coefficients, which `perturb` (a log-sd) and `seed` may have moved."""

    def __init__(self, case: Case, perturb: float = 0.0, seed: int = 0) -> None:
        self.case = case
        base = load(case.profile)
        self.profile = perturbed(base, perturb, seed) if perturb else base
        self.facts = facts_of(base)
        self.baseline = Candidate(values=dict(case.baseline))
        self.search = Search(allow_lossy=case.allow_lossy)
        self.objective = Objective(maximize="outputTokensPerSecond")
        self.traffic = traffic(case.workload)
        self._known: dict[str, Truth] = {}
        while self.truth(self.baseline).failure and self._lower_baseline():
            pass
        # What the first server reports is part of the space, so that all searches have the same one.
        first = Run(self, random.Random(0)).trial(self.baseline, "")
        self.space: Space = build_space(self.search, self.facts, self.baseline, [first])

    def _lower_baseline(self) -> bool:
        """As a person would whose production does not come up; False when there is nothing left to lower."""
        if self.truth(self.baseline).stage == "load":
            share = float(self.baseline.values.get("gpu_memory_utilization", 0.92))
            self.baseline = self.baseline.with_value("gpu_memory_utilization", round(share - 0.02, 2))
            return share > 0.5
        seqs = int(self.baseline.values.get("max_num_seqs", self.profile.defaults.max_num_seqs))
        self.baseline = self.baseline.with_value("max_num_seqs", seqs // 2)
        return seqs > 2

    def truth(self, candidate: Candidate) -> Truth:
        """Its noise-free value."""
        return self.truths([candidate])[0]

    def truths(self, candidates: Sequence[Candidate]) -> list[Truth]:
        """The same for many at once, which takes little longer than for one."""
        keys = [self._key(candidate) for candidate in candidates]
        new = {key: c for key, c in zip(keys, candidates, strict=True) if key not in self._known}
        if new:
            for key, truth in zip(new, self._evaluate(list(new.values())), strict=True):
                self._known[key] = truth
        return [self._known[key] for key in keys]

    def _key(self, candidate: Candidate) -> str:
        return json.dumps({k: v for k, v in candidate.values.items() if k in MODELLED}, sort_keys=True)

    def _evaluate(self, candidates: list[Candidate]) -> list[Truth]:
        found: list[Truth | None] = []
        configs: list[EngineConfig] = []
        for candidate in candidates:
            flags, environment = flags_of(candidate)
            try:
                configs.append(resolve(self.profile, flags, environment))
                found.append(None)
            except StartFailure as failure:
                found.append(Truth(*[math.nan] * 4, f"{failure.kind}: {failure.message}", failure.stage))
        ran = iter([truth for at in range(0, len(configs), 20_000) for truth in self._run(configs[at : at + 20_000])])
        return [truth if truth is not None else next(ran) for truth in found]

    def _run(self, configs: list[EngineConfig]) -> Iterator[Truth]:
        told = capacity(self.profile, configs, self.case.workload, stepper=False)
        columns = (told.output_tokens_per_s, told.ttft, told.tpot, told.running)
        for *numbers, failure in zip(*columns, told.failures, strict=True):
            stage = "" if failure is None else "load" if "under load" in failure else ENGINE
            text = failure if failure is None or stage == "load" else f"ValueError: {failure}"
            yield Truth(*map(float, numbers), text, stage)

    def value(self, truth: Truth, tolerance: float = 0.0) -> float:
        """Output tokens/s where it runs and meets the SLO but for `tolerance` of the bound, else 0."""
        if truth.failure:
            return 0.0
        told = judge(self.objective, self.case.slo, self.measurement(truth, 1.0, 0))
        return truth.tokens_per_s if told.margin >= -tolerance else 0.0

    def measurement(
        self, truth: Truth, factor: float, seed: int, *, window: float = MEASURE_S, sd: float = 0.01
    ) -> Measurement:
        """A steady window of a server that runs `factor` times as fast as the truth; `sd` of the rate, as a share."""
        workload = self.case.workload
        rate = truth.tokens_per_s * factor
        ttft, tpot = truth.ttft / factor, truth.tpot / factor
        requests = rate / workload.output_tokens
        e2e = ttft + tpot * workload.output_tokens
        nothing = GeneratorHealth(asked=workload.concurrency, achieved=workload.concurrency, schedule_lag_p99=0.0,
                                  cpu_share=0.1, merged_reads=0.0)  # fmt: skip
        counters = ServerCounters(prompt_tokens=requests * workload.prompt_tokens * window,
                                  generation_tokens=rate * window, finished_requests=requests * window,
                                  preemptions=0.0)  # fmt: skip
        count = max(1, int(requests * window))
        return Measurement(
            started_at=0.0, duration=window, source=Source.SIMULATED, vllm_version="0.32.0+simulated", seed=seed,
            warmup=WARMUP_S, warmup_settled=True, completed=count, failed=0,
            output_tokens_per_second=Estimate(value=rate, low=rate * (1 - 1.96 * sd), high=rate * (1 + 1.96 * sd)),
            input_tokens_per_second=requests * workload.prompt_tokens, requests_per_second=requests,
            ttft=_latency(ttft, TTFT_P95, count), tpot=_latency(tpot, TPOT_P95, count),
            itl=_latency(tpot, TPOT_P95, count), e2e=_latency(e2e, TPOT_P95, count), generator=nothing, server=counters,
        )  # fmt: skip

    def optimum(self) -> tuple[Candidate, float]:
        """The best of a declared grid (`GRID`) by exhaustion, then polished one axis and two axes at a time."""
        axes = [(axis.name, _coarse(axis.name, axis.values)) for axis in self.space.axes if axis.name in MODELLED]
        grid = {c.hash: c for values in product(*(vs for _, vs in axes)) for c in [self._at(axes, values)]}
        tops = self._best(list(grid.values()), 24)
        for _ in range(8):
            changed = [other for top in tops for other in self._around(top)]
            changed += [other for one in self._around(tops[0]) for other in self._around(one)]
            better = self._best([*tops, *{c.hash: c for c in changed}.values()], 24)
            if better[0] == tops[0]:
                break
            tops = better
        return tops[0], self.value(self.truth(tops[0]))

    def _at(
        self, axes: Sequence[tuple[str, Sequence[KnobValue | None]]], values: Iterable[KnobValue | None]
    ) -> Candidate:
        chosen = {name: value for (name, _), value in zip(axes, values, strict=True) if value is not None}
        return self.space.tidy({**self.space.fixed, **chosen})

    def _around(self, centre: Candidate) -> list[Candidate]:
        here = self.space.positions(centre)
        lengths = {axis.name: len(axis.values) for axis in self.space.axes if axis.name in MODELLED}
        return [self.space.candidate({**here, name: place}) for name, n in lengths.items() for place in range(n)]

    def _best(self, candidates: list[Candidate], count: int) -> list[Candidate]:
        values = [self.value(truth) for truth in self.truths(candidates)]
        order = sorted(range(len(candidates)), key=lambda i: (-values[i], candidates[i].hash))
        return [candidates[i] for i in order[:count]]


GRID: dict[str, tuple[KnobValue, ...]] = {
    "max_num_seqs": (64, 128, 256),
    "max_num_batched_tokens": (1024, 4096),
    "long_prefill_token_threshold": (1024,),
    "gpu_memory_utilization": (0.94,),
    "max_cudagraph_capture_size": (),
    "cudagraph_mode": (),
    "num_speculative_tokens": (0, 1, 2, 4),
    "omp_num_threads": (),
    "mamba_ssm_cache_dtype": ("float16",),
    "enable_mamba_cache_stochastic_rounding": (),
}
"""Values of the exhausted grid, where it is coarser than the axis (each also has the default); the rest are whole."""

MODELLED = frozenset({
    "max_num_seqs", "max_num_batched_tokens", "async_scheduling", "enable_chunked_prefill",
    "long_prefill_token_threshold", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching", "block_size",
    "max_model_len", "cudagraph_mode", "max_cudagraph_capture_size", "enforce_eager", "tensor_parallel_size",
    "speculative_method", "num_speculative_tokens", "mamba_backend", "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding", "omp_num_threads",
})  # fmt: skip
"""Knobs that the simulator models; the searches try the others too, and learn that they do nothing here."""


def _coarse(name: str, values: Sequence[KnobValue | None]) -> list[KnobValue | None]:
    if name not in GRID:
        return list(values)
    return [value for value in values if value is None or value in GRID[name]] or list(values)


class Run:
    """One search in one world: its clock, its caches and its noise."""

    def __init__(self, world: World, rng: random.Random, *, early_stop: bool = False) -> None:
        self.world, self._rng, self._early_stop = world, rng, early_stop
        self.saved = 0.0  # seconds of measuring that early stops spared
        self.seconds = 0.0
        self.trials: list[TrialRecord] = []
        self._compiled: set[tuple[Any, ...]] = set()

    def trial(self, candidate: Candidate, reason: str) -> TrialRecord:
        """Run a trial, and charge for it."""
        truth = self.world.truth(candidate)
        began, number = self.seconds, len(self.trials)
        start = self._start_seconds(candidate, truth)
        failure = _failure(truth) if truth.failure else None
        busy = start + STOP_S
        measured, stopped = None, None
        if not truth.failure:
            measured, stopped = self._measure(truth, number)
            self.saved += MEASURE_S - measured.duration
            busy += WARMUP_S + measured.duration
        elif truth.stage == "load":
            busy += OOM_AFTER_S
        self.seconds += busy
        record = self._record(candidate, reason, number, began, start, failure, measured, stopped)
        self.trials.append(record)
        return record

    def _measure(self, truth: Truth, number: int) -> tuple[Measurement, str | None]:
        """One window; where a search stops early, the part of it after which that is clear, and why."""
        world, noise = self.world, self.world.profile.noise
        start = self._rng.gauss(0, noise.between)
        rest = self._rng.gauss(0, 1)  # drawn whether or not it is stopped: the same world for every search

        def after(window: float) -> Measurement:
            sd = noise.within * math.sqrt(min(1.0, 2 * noise.drift_s / window))
            return world.measurement(truth, math.exp(start + sd * rest), number, window=window, sd=max(sd, 0.002))

        done = [t.objective for t in self.trials if t.outcome is TrialOutcome.COMPLETE and t.objective is not None]
        for share in LOOKS if self._early_stop and number else ():
            part = after(share * MEASURE_S)
            interim = Interim(measurement=part, at_least=_at_least(part))
            why = hopeless(world.objective, world.case.slo, max(done, default=None), interim)
            if why is not None:
                return part, why
        return after(MEASURE_S), None

    def _record(
        self, candidate: Candidate, reason: str, number: int, began: float, start: float, failure: Failure | None,
        measured: Measurement | None, stopped: str | None,
    ) -> TrialRecord:  # fmt: skip
        world = self.world
        told = judge(world.objective, world.case.slo, measured) if measured is not None else None
        complete = told is not None and told.feasible
        log, effective = world_log(world, candidate) if failure is None else ("", {})
        memory = readback.start_memory(log)
        return TrialRecord(
            id=f"{number:03d}-{candidate.hash}", number=number, candidate=candidate, reason=reason,
            purpose=TrialPurpose.SEARCH if number else TrialPurpose.BASELINE,
            created_at=1.0 + began, finished_at=1.0 + self.seconds, start_seconds=start if failure is None else None,
            outcome=TrialOutcome.STOPPED if stopped else TrialOutcome.COMPLETE if complete else TrialOutcome.INFEASIBLE,
            stopped=stopped,
            measurement=measured, failure=failure, objective=told.value if told else None,
            slo_margin=told.margin if told else None, effective=effective, memory=memory,
        )  # fmt: skip

    def _start_seconds(self, candidate: Candidate, truth: Truth) -> float:
        start = self.world.profile.start
        slower = math.exp(self._rng.gauss(0, 0.05))
        if truth.failure and truth.stage == CONFIG:
            return start.import_s * slower
        flags, environment = flags_of(candidate)
        config = resolve(self.world.profile, flags, environment)
        compiled = tuple(getattr(config, name) for name in _COMPILED)
        compiling = 0.0
        if not config.enforce_eager:
            compiling = start.compile_s * (1.0 if compiled in self._compiled else COLD)
            self._compiled.add(compiled)
        if truth.failure and truth.stage != "load":  # memory is only known once the model was compiled and profiled
            return (start.import_s + start.load_s + compiling) * slower
        capturing = (
            start.capture_s * config.capture_size / max(1, self.world.profile.defaults.max_cudagraph_capture_size)
        )
        return (start.import_s + start.load_s + compiling + capturing) * slower


def _failure(truth: Truth) -> Failure:
    return failures.explain(
        1, "", f"Traceback (most recent call last):\n{truth.failure}", under_load=truth.stage == "load"
    )


def world_log(world: World, candidate: Candidate) -> tuple[str, dict[str, KnobValue]]:
    """What a good start logs of its memory, and the defaults that the server reports."""
    flags, environment = flags_of(candidate)
    config = resolve(world.profile, flags, environment)
    memory = plan(world.profile, config)
    length = config.max_model_len
    log = (
        f"Available KV cache memory: {memory.available_gib:.2f} GiB\n"
        f"GPU KV cache size: {memory.size_tokens(length):,} tokens, "
        f"Maximum concurrency for {length:,} tokens per request: {memory.concurrency(length):.2f}x\n"
    )
    return log, {"max_num_batched_tokens": config.max_num_batched_tokens, "async_scheduling": config.async_scheduling}


def _latency(mean: float, p95: float, count: int) -> Latency:
    return Latency(
        count=count, mean=mean, p50=mean, p90=mean * (1 + 0.8 * (p95 - 1)), p95=mean * p95, p99=mean * p95 * 1.3
    )


def _at_least(part: Measurement) -> dict[str, float]:
    """Percentiles that are surely reached, by the order statistics of so many requests, as the load test has them."""
    found = {}
    for name in LATENCIES:
        latency: Latency = getattr(part, name)
        known = ((0.0, 0.0), (0.5, latency.p50), (0.9, latency.p90), (0.95, latency.p95), (0.99, latency.p99))
        for percentile in PERCENTILES:
            q, n = int(percentile[1:]) / 100, latency.count
            rank = (n * q - 3 * math.sqrt(n * q * (1 - q))) / n
            for (low, below), (high, above) in pairwise(known):
                if low < rank <= high:
                    found[f"{name}{percentile.upper()}"] = below + (above - below) * (rank - low) / (high - low)
    return found
