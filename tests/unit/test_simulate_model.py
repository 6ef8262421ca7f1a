"""The model of time and memory: the truth against the stepper, the interactions, the invariants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunewright.simulate.config import resolve
from tunewright.simulate.cost import coefficients, step_seconds
from tunewright.simulate.engine import Noise, Request, Stepper
from tunewright.simulate.memory import plan, runs_out_under_load
from tunewright.simulate.profile import load
from tunewright.simulate.steady import capacity
from tunewright.simulate.tokens import prefix_hashes, token_ids
from tunewright.simulate.virtual import Workload, run_closed, run_open

DEMO = Workload(200, 60, 24, shared_prefix_tokens=100)


def speculate(method: str, k: int) -> dict[str, Any]:
    return {"speculative-config": {"method": method, "num_speculative_tokens": k}}


def mtp(k: int, **more: Any) -> dict[str, Any]:
    return {**speculate("mtp", k), **{n.replace("_", "-"): v for n, v in more.items()}}


def best(profile: str, flags: dict[str, Any], workload: Workload) -> float:
    return float(capacity(load(profile), [flags], workload).output_tokens_per_s[0])


GRID: list[tuple[str, dict[str, Any], Workload]] = [
    *[
        ("demo", flags, workload)
        for workload in (DEMO, Workload(400, 30, 64), replace(DEMO, concurrency=48))
        for flags in (
            {},
            {"max-num-seqs": 4, "enable-prefix-caching": False, "async-scheduling": False},
            {"max-num-seqs": 16},
            {"max-num-batched-tokens": 256},
            {"enforce-eager": True},
            {"kv-cache-dtype": "fp8"},
            {"long-prefill-token-threshold": 64},
            mtp(1, max_num_seqs=32),
            mtp(2, max_num_seqs=32, max_cudagraph_capture_size=256),
            mtp(3, max_num_seqs=64),
            {**speculate("ngram", 2), "max-num-seqs": 32},
        )
    ],
    *[
        ("hybrid-30b-h200", flags, Workload(512, 128, 160))
        for flags in ({}, {"max-num-seqs": 64}, mtp(1), mtp(3), {"max-num-batched-tokens": 1024})
    ],
    *[
        ("dense-8b-h200", flags, workload)
        for workload in (Workload(512, 128, 160), Workload(2000, 100, 64))
        for flags in ({}, {"max-num-seqs": 32}, {"max-num-batched-tokens": 512, "max-num-seqs": 256})
    ],
    *[
        ("small-cpu", flags, Workload(1100, 64, 8, shared_prefix_tokens=1024))
        for flags in ({}, {"enable-prefix-caching": False}, {"max-num-seqs": 4}, speculate("ngram", 4))
    ],
]


@pytest.mark.parametrize(("profile", "flags", "workload"), GRID)
def test_the_truth_is_within_3_percent_of_the_stepper(profile: str, flags: dict[str, Any], workload: Workload) -> None:
    played = load(profile)
    truth = capacity(played, [flags], workload)
    run = run_closed(played, resolve(played, flags), workload, requests=max(500, 4 * workload.concurrency))
    assert truth.output_tokens_per_s[0] == pytest.approx(run.output_tokens_per_s, rel=0.03)
    assert truth.tpot[0] == pytest.approx(np.mean(run.tpot), rel=0.15)
    assert truth.ttft[0] == pytest.approx(np.mean(run.ttft), rel=0.5)


def test_the_truth_where_kv_memory_limits_comes_from_the_stepper() -> None:
    workload = Workload(400, 300, 64, prompt_cv=0.5)
    flags = {"gpu-memory-utilization": 0.7, "max-num-seqs": 48}
    played = load("demo")
    run = run_closed(played, resolve(played, flags), workload, requests=600, seed=5)
    assert run.preemptions > 50
    assert best("demo", flags, workload) == pytest.approx(run.output_tokens_per_s, rel=0.03)


def test_one_formula_for_numbers_and_arrays() -> None:
    played = load("hybrid-30b-h200")
    c = coefficients(played, resolve(played, mtp(1)))
    for prefill, decodes, context in ((0, 200, 90_000), (4096, 10, 4000), (64, 0, 0), (0, 300, 1)):
        number = step_seconds(c, prefill, decodes, context, 10, prefill)
        arrays = [np.array([float(x)]) for x in (prefill, decodes, context, 10, prefill)]
        assert step_seconds(c, *arrays, maximum=np.maximum, choose=np.where)[0] == pytest.approx(number)


def test_depth_of_speculation_and_graphs_interact() -> None:
    """Two drafts are worse than one, or better, depending on a third knob that alone changes nothing."""
    plain, wide = {"max_num_seqs": 32}, {"max_num_seqs": 32, "max_cudagraph_capture_size": 256}
    assert best("demo", mtp(2, **plain), DEMO) < 0.93 * best("demo", mtp(1, **plain), DEMO)
    alone = best("demo", mtp(1, **wide), DEMO) / best("demo", mtp(1, **plain), DEMO)
    with_depth = best("demo", mtp(2, **wide), DEMO) / best("demo", mtp(2, **plain), DEMO)
    assert alone < 1.06
    assert with_depth > 1.1


def test_depth_and_sequences_interact() -> None:
    """Three drafts help few sequences and hurt many."""
    few, many = replace(DEMO, concurrency=8), replace(DEMO, concurrency=64)
    gain = [best("demo", mtp(3, max_num_seqs=64), w) / best("demo", {"max-num-seqs": 64}, w) for w in (few, many)]
    assert gain[0] > 1.2
    assert gain[1] < 1.0


def test_demo_keeps_its_promises() -> None:
    flags = [
        {"max-num-seqs": s, "async-scheduling": a, **spec, **graph}
        for s in (8, 16, 32, 64)
        for a in (True, False)
        for spec in ({}, *(speculate("mtp", k) for k in (1, 2, 3)))
        for graph in ({}, {"max-cudagraph-capture-size": 256})
    ]
    rates = capacity(load("demo"), flags, DEMO).output_tokens_per_s
    peak = float(np.nanmax(rates))
    assert 2000 <= peak <= 2500
    bad = {"max-num-seqs": 4, "enable-prefix-caching": False, "async-scheduling": False}
    assert best("demo", bad, DEMO) < peak / 3
    assert best("demo", {"kv-cache-dtype": "fp8"}, DEMO) < 0.97 * best("demo", {}, DEMO)
    everything = replace(DEMO, concurrency=256)
    assert float(np.nanmax(capacity(load("demo"), flags, everything).output_tokens_per_s)) <= 3000
    assert sum(vars(load("demo").start)[k] for k in ("import_s", "load_s", "compile_s", "capture_s")) == 8.0


SYNTHETIC = {"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic"}
SYNTHETIC["synthetic_acceptance_rates"] = [0.75]
FLASHINFER = {"speculative-config": SYNTHETIC, "mamba-backend": "flashinfer", "load-format": "dummy"}
HALF = {"mamba-ssm-cache-dtype": "float16", "enable-mamba-cache-stochastic-rounding": True}
BENCH = Workload(512, 512, 256, output_cv=0)


@pytest.mark.parametrize(
    ("profile", "flags", "workload", "measured", "within"),
    [
        ("hybrid-30b-h200", {}, BENCH, 11241, 0.05),
        ("hybrid-30b-h200", FLASHINFER, BENCH, 13365, 0.05),
        ("hybrid-30b-h200", {**FLASHINFER, **HALF}, BENCH, 11969, 0.05),
        ("dense-8b-h200", {}, BENCH, 13400, 0.05),
        ("dense-8b-h200", {"max-num-seqs": 64}, BENCH, 8080, 0.05),
        ("small-cpu", {}, Workload(128, 64, 8, output_cv=0), 250, 0.15),
        ("small-cpu", {}, Workload(128, 64, 32, output_cv=0), 480, 0.15),
        ("small-cpu", {"max-num-seqs": 4}, Workload(128, 64, 8, output_cv=0), 130, 0.15),
        ("small-cpu", {"max-num-seqs": 4}, Workload(128, 64, 32, output_cv=0), 140, 0.15),
    ],
)
def test_profiles_fit_what_was_measured(
    profile: str, flags: dict[str, Any], workload: Workload, measured: float, within: float
) -> None:
    assert best(profile, flags, workload) == pytest.approx(measured, rel=within)


def test_memory_is_that_of_the_recorded_servers() -> None:
    played = load("hybrid-30b-h200")
    plain = plan(played, resolve(played, {"max-model-len": 4096}))
    assert (plain.block_size, plain.num_blocks, plain.size_tokens(4096)) == (2096, 5538, 3_780_608)
    deep = plan(played, resolve(played, {"max-model-len": 4096, **mtp(1)}))
    assert deep.num_blocks == pytest.approx(4425, rel=0.01)
    assert deep.concurrency(4096) == pytest.approx(442.5, rel=0.01)
    half = plan(played, resolve(played, {"max-model-len": 4096, "mamba-ssm-cache-dtype": "float16"}))
    assert half.num_blocks == pytest.approx(2 * plain.num_blocks, rel=0.05)


def test_utilisation_may_start_and_die_under_load() -> None:
    played = load("demo")
    assert not runs_out_under_load(played, resolve(played, {"gpu-memory-utilization": 0.95}))
    tight = {"gpu-memory-utilization": 0.99}
    assert runs_out_under_load(played, resolve(played, tight))
    truth = capacity(played, [tight, {}], DEMO)
    assert math.isnan(truth.output_tokens_per_s[0])
    assert "OutOfMemoryError" in str(truth.failures[0])
    assert truth.failures[1] is None


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_neither_lost_nor_made_up(seed: int) -> None:
    played = load("demo")
    config = resolve(played, {"num-gpu-blocks-override": 300, "max-model-len": 1024, **mtp(1, max_num_seqs=40)})
    stepper, noise = Stepper(played, config), np.random.default_rng(seed)
    requests = []
    for key in range(120):
        prompt = int(noise.integers(1, 500))
        ids = [1] * min(prompt, 128) + [int(t) for t in noise.integers(0, 9999, max(0, prompt - 128))]
        requests.append(Request(key, prompt, int(noise.integers(1, 200)), 0.0, prefix_hashes(ids, 16), seed=key * 7919))
        stepper.add(requests[-1])
    for step in range(100_000):
        batch = stepper.schedule(float(step))
        if batch is None:
            break
        assert len(stepper.running) <= config.max_num_seqs
        scheduled = sum(n for _, n in batch.prefills) + 2 * len(batch.decodes)
        assert scheduled <= config.max_num_batched_tokens
        assert stepper.cache.used <= stepper.cache.total + 1e-6
        stepper.finish(batch, step + 1.0)
        if step % 13 == 0 and stepper.running:
            stepper.abort(stepper.running[-1])
    assert not stepper.busy
    assert stepper.preemptions > 0
    assert stepper.cache.used == pytest.approx(0.0, abs=1e-6)
    assert set(stepper.cache.references.values()) <= {0}
    assert all(r.finish_reason == "abort" or r.generated == r.limit for r in requests)


def test_prefix_caching_finds_what_was_computed() -> None:
    played = load("demo")
    stepper = Stepper(played, resolve(played, {}))
    ids = token_ids("The same long system prompt, again and again. " * 20)
    for key in (1, 2):
        request = Request(key, len(ids), 2, 0.0, prefix_hashes(ids, 16), seed=1)
        stepper.add(request)
        while batch := stepper.schedule(0.0):
            stepper.finish(batch, 0.0)
        assert request.cached == (0 if key == 1 else (len(ids) - 1) // 16 * 16)
    assert stepper.prefix_hits == (len(ids) - 1) // 16 * 16


def test_acceptance_is_the_profiles() -> None:
    played = load("demo")
    stepper = Stepper(played, resolve(played, mtp(2, max_num_seqs=32)))
    for key in range(64):
        stepper.add(Request(key, 50, 300, 0.0, seed=key * 104729 + 1))
    while batch := stepper.schedule(0.0):
        stepper.finish(batch, 0.0)
    first, second = stepper.spec.accepted_per_position
    assert first / stepper.spec.drafts == pytest.approx(0.72, abs=0.02)
    assert second / stepper.spec.drafts == pytest.approx(0.72 * 0.55, abs=0.02)


def test_random_weights_accept_no_drafts() -> None:
    assert resolve(load("hybrid-30b-h200"), {**mtp(1), "load-format": "dummy"}).acceptance == (0.0,)


def test_async_scheduling_is_silently_off_where_it_cannot_be() -> None:
    demo, cpu = load("demo"), load("small-cpu")
    assert resolve(demo, {}).async_scheduling
    assert not resolve(demo, {**speculate("ngram", 2), "max-num-seqs": 32}).async_scheduling
    assert not resolve(cpu, {"async-scheduling": True}).async_scheduling


def test_noise_between_and_within_starts() -> None:
    starts = [Noise(0.05, 0.0, 5.0, 0.0, seed).start_factor for seed in range(400)]
    assert np.std(np.log(starts)) == pytest.approx(0.05, rel=0.15)
    assert Noise(0.05, 0.0, 5.0, 0.0, 3).start_factor == starts[3]
    within = Noise(0.0, 0.04, 2.0, 0.0, 1)
    drift = [math.log(within.factor(0.02)) for _ in range(40_000)]
    assert np.std(drift) == pytest.approx(0.04, rel=0.2)
    assert np.corrcoef(drift[:-1], drift[1:])[0, 1] > 0.98
    assert Noise(0.0, 0.0, 5.0, 0.0, 1).factor(0.02) == 1.0


def test_open_loop_below_capacity_keeps_up() -> None:
    played = load("demo")
    config = resolve(played, {"max-num-seqs": 32})
    slow = run_open(played, config, DEMO, rate=10.0, requests=200)
    fast = run_open(played, config, DEMO, rate=60.0, requests=200)
    assert slow.requests == fast.requests == 200
    assert np.mean(slow.ttft) < 0.1
    assert np.mean(fast.ttft) > 3 * np.mean(slow.ttft)


def test_omp_threads_matter_where_the_profile_says_so() -> None:
    played = load("demo")
    one, four = (coefficients(played, resolve(played, {}, {"OMP_NUM_THREADS": n})) for n in ("1", "4"))
    assert four.host_s > one.host_s
