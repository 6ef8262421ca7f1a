"""Token rates of a server that warms up under a load test, on paper: a closed loop of requests as a fluid.

Noise follows on itself with a time constant, requests come back in waves where they began together, and each newcomer
holds the others up while its prompt is worked on.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tunewright.loadtest import statistics

STEP = 0.2  # seconds
_PROMPT = 0.05  # of the engine's time goes to prompts

Speed = Callable[[float], float]
"""Share of the steady speed, by seconds since the load began."""


class Load(NamedTuple):
    """What is sent, and how the measurement is set up. Times in seconds."""

    life: float
    window: float
    limit: float
    noise: float = 0.025
    lasts: float = 2.0
    streams: int = 32
    spread: float = 0.0
    in_step: bool = False


class Ended(NamedTuple):
    """How one warm-up ended."""

    at: float
    by_test: bool
    bias: float
    """Of the mean speed within the window after it, against the steady speed."""
    moved: float | None


def linear(start: float, seconds: float) -> Speed:
    """Faster and faster, until it is steady after so many seconds."""
    return lambda t: min(1.0, start + (1 - start) * t / seconds)


def exponential(start: float, seconds: float) -> Speed:
    """Ever nearer to the steady speed."""
    return lambda t: 1 - (1 - start) * math.exp(-t / seconds)


def waves(speeds: list[float], each: float) -> Speed:
    """Steady within each wave of requests, and faster with the next."""
    return lambda t: speeds[min(len(speeds) - 1, int(t / each))]


def warm_ups(load: Load, speed: Speed, runs: int = 12, seed: int = 0) -> list[Ended]:
    """How the warm-up of so many runs ends, by the test that is used, looked at as often as it is in a run."""
    return [_end(load, speed, *each) for each in _loads(load, speed, runs, seed)]


def _loads(load: Load, speed: Speed, runs: int, seed: int) -> list[tuple[np.ndarray, list[tuple[float, float]], float]]:
    rng = np.random.default_rng(seed)
    steps = int((load.limit + load.window + 1) / STEP)
    keeps = math.exp(-STEP / load.lasts)
    noise = rng.normal(size=runs)
    left = rng.uniform(0.9 if load.in_step else 0.05, 1.0, (runs, load.streams))
    ramp, born = np.ones(left.shape, bool), np.zeros(left.shape)
    rates, lives = np.empty((runs, steps)), [[] for _ in range(runs)]
    started = np.full(runs, np.inf)
    unit, waiting = _PROMPT * load.life / load.streams, np.full(runs, float(load.streams))
    for step in range(steps):
        now = step * STEP
        noise = keeps * noise + rng.normal(size=runs) * math.sqrt(1 - keeps**2)
        prompts = np.minimum(waiting * unit, STEP * 0.8)
        waiting -= prompts / unit
        done = speed(now) * np.exp(load.noise * noise) * (STEP - prompts) / load.life
        rates[:, step] = done / STEP * load.life
        left -= done[:, None]
        over = left <= 0
        if over.any():
            for run, stream in np.argwhere(over & ~ramp):
                lives[run].append((now, now - born[run, stream]))
            born[over], ramp = now, ramp & ~over
            left = np.where(over, left + np.maximum(0.1, rng.normal(1, load.spread, left.shape)), left)
            waiting += over.sum(axis=1)
            started = np.where(~ramp.any(axis=1) & np.isinf(started), now, started)
    return list(zip(rates, lives, started, strict=True))


def _end(load: Load, speed: Speed, rates: np.ndarray, lives: list[tuple[float, float]], started: float) -> Ended:
    width = statistics.warmup_span(load.window) / (2 * statistics.HALF)
    total = np.concatenate([[0.0], np.cumsum(rates) * STEP])

    def binned(edges: np.ndarray) -> list[float]:
        return list(np.diff(np.interp(edges, np.arange(len(total)) * STEP, total)) / np.diff(edges))

    bins = binned(np.arange(int(load.limit / width) + 1) * width)
    at, by_test = load.limit, False
    ended, lasted = np.array([*lives, (math.inf, 0.0)]).T
    for count in range(1, len(bins) + 1):
        now = count * width
        known = lasted[: np.searchsorted(ended, now, side="right")][-256:]
        if now < started or not len(known):
            continue
        spans = {"width": width, "life": float(known.mean()), "window": load.window, "limit": load.limit}
        if statistics.settled(bins[:count], [[]] * count, **spans):
            at, by_test = now, True
            break
    within = np.linspace(at, at + load.window, statistics.PARTS + 1)
    bias = float(np.mean([speed(t) for t in np.linspace(at, at + load.window, 200)])) - 1
    return Ended(at, by_test, bias, statistics.moved(binned(within)))
