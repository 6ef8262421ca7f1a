"""A canary beside stable servers, as their metrics would show it: many requests, quickly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from exposed import HISTOGRAMS

from tunewright.ports import Series, SeriesWindow

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
FINISHED = "vllm:request_success_total"
PREEMPTIONS = "vllm:num_preemptions_total"
PROMPTED = "vllm:prompt_tokens_total"
GENERATED = "vllm:generation_tokens_total"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class Behaviour:
    """One server: requests/s, medians in seconds, the spread of their logs, and the share of errors.

    `swell` is the log-sd of a slow movement of all latencies, so that neighbouring requests are alike; a third of it
    comes on top for each server alone.
    """

    rate: float = 1.0
    ttft: float = 0.3
    tpot: float = 0.02
    output: float = 100.0
    spread: float = 0.6
    swell: float = 0.3
    errors: float = 0.0
    preemptions: float = 0.0
    """Per request; they come in bursts of ten."""
    tokens: float = 100.0
    """Output tokens per request."""
    waiting: float = 0.0
    """Share of the scrapes at which requests wait."""


def windows(
    canary: Behaviour, stable: Behaviour, seed: int, until: float, step: float = 15.0, replicas: int = 1
) -> tuple[SeriesWindow, list[SeriesWindow]]:
    """Both sides from 0 to `until`; the traffic's ups and downs are common to both."""
    rng = np.random.default_rng(seed)
    steps = int(until / step)
    common = _slow(rng, steps)
    sides = []
    for number, behaviour in enumerate([canary] + [stable] * replicas):
        sides.append(_window(f"s{number}:8000", behaviour, rng, common, steps, step))
    return sides[0], sides[1:]


def cut(window: SeriesWindow, end: float) -> SeriesWindow:
    """What was known at an earlier time."""
    series = [Series(s.labels, [x for x in s.samples if x[0] <= end]) for s in window.series]
    return SeriesWindow(window.start, end, series, window.queries)


def _slow(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Unit-variance noise that forgets half of itself every few steps."""
    values = np.zeros(steps)
    state = rng.normal()
    for i in range(steps):
        state = 0.8 * state + 0.6 * rng.normal()
        values[i] = state
    return values


def _window(
    instance: str, b: Behaviour, rng: np.random.Generator, common: np.ndarray, steps: int, step: float
) -> SeriesWindow:
    counts = rng.poisson(b.rate * step, steps)
    which = np.repeat(np.arange(steps), counts)
    own = _slow(rng, steps)
    swell = np.exp(b.swell * (common + 0.3 * own))[which]
    noise = rng.normal(size=(3, len(which))) * b.spread
    ttft = b.ttft * swell * np.exp(noise[0])
    tpot = b.tpot * np.sqrt(swell) * np.exp(noise[1] * 0.3)
    e2e = ttft + tpot * b.output * np.exp(noise[2])
    failed = rng.random(len(which)) < b.errors
    times = [step * i for i in range(steps + 1)]
    labels = {"instance": instance, "model_name": "m", "engine": "0"}
    series = []

    def counter(name: str, per_step: np.ndarray, **more: str) -> None:
        values = np.concatenate([[0.0], np.cumsum(per_step)])
        series.append(Series({"__name__": name, **labels, **more}, list(zip(times, values.tolist(), strict=True))))

    def grouped(weights: np.ndarray) -> np.ndarray:
        return np.bincount(which, weights=weights, minlength=steps)

    counter(FINISHED, grouped(~failed), finished_reason="length")
    counter(FINISHED, grouped(failed), finished_reason="error")
    counter(FINISHED, np.zeros(steps), finished_reason="abort")
    counter(PREEMPTIONS, 10.0 * rng.binomial(counts, b.preemptions / 10))
    counter(GENERATED, counts * b.tokens)
    counter(PROMPTED, counts * 300.0)
    queue = [float(at < b.waiting * (times[-1] + step)) for at in times]
    series.append(Series({"__name__": WAITING, **labels}, list(zip(times, queue, strict=True))))
    good = ~failed
    for name, values in ((TTFT, ttft), (TPOT, tpot), (E2E, e2e)):
        for edge in HISTOGRAMS[name]:
            counter(f"{name}_bucket", grouped(good & (values <= edge)), le=str(edge))
        counter(f"{name}_bucket", grouped(good), le="+Inf")
        counter(f"{name}_sum", grouped(good * values))
        counter(f"{name}_count", grouped(good))
    return SeriesWindow(0.0, step * steps, series, [f'{{instance="{instance}"}}'])
