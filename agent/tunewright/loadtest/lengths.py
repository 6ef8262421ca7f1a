"""How long requests are: drawn from distributions by the job's seed, or as prompt and output belong together."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tunewright.domain.traffic import Normal
from tunewright.domain.workload import Lengths
from tunewright.loadtest.job import LoadFailure

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_BLOCK = 1024
_LEAST, _MOST = 1e-300, 1 - 2**-53  # probabilities that have a quantile


class Drawn(Protocol):
    """Where lengths are drawn from."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of `count` requests."""
        ...


class Separate:
    """Prompts and outputs apart. What does not fit the server together is cut to it."""

    def __init__(self, prompts: Lengths, outputs: Lengths, limit: int | None) -> None:
        """Raises `LoadFailure` for fixed lengths that do not fit."""
        self._prompts, self._outputs, self._limit = prompts, outputs, limit
        _refuse_too_long(prompts.fixed or 0, outputs.fixed or 0, limit)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        prompts, outputs = draw_lengths(self._prompts, rng, count), draw_lengths(self._outputs, rng, count)
        if self._limit is not None:
            outputs = np.minimum(outputs, self._limit - 1)
            prompts = np.minimum(prompts, self._limit - outputs)
        return prompts, outputs


class Paired:
    """Prompts and outputs as they belong together, by weight."""

    def __init__(self, pairs: Sequence[tuple[int, int, float]], limit: int | None) -> None:
        """Of (prompt, output, weight). Raises `LoadFailure` for a pair that does not fit the server."""
        for prompt, output, _ in pairs:
            _refuse_too_long(prompt, output, limit)
        prompts, outputs, weights = zip(*pairs, strict=True)
        self._prompts, self._outputs = np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64)
        self._shares = np.array(weights, dtype=np.float64) / sum(weights)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        which = rng.choice(len(self._prompts), size=count, p=self._shares)
        return self._prompts[which], self._outputs[which]


class LengthSource:
    """The lengths of one run's requests, in order: the i-th is the same in every run with the same seed."""

    def __init__(self, drawn: Drawn, seed: int) -> None:
        self._drawn, self._rng = drawn, np.random.default_rng([seed, 1])
        self._ready: list[tuple[int, int]] = []

    def draw(self, count: int) -> tuple[Ints, Ints]:
        """`count` of them, which no request then has."""
        return self._drawn.draw(self._rng, count)

    def next(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request."""
        if not self._ready:
            prompts, outputs = self.draw(_BLOCK)
            self._ready = list(zip(prompts.tolist(), outputs.tolist(), strict=True))[::-1]
        return self._ready.pop()


def draw_lengths(lengths: Lengths, rng: np.random.Generator, count: int) -> Ints:
    """`count` token counts, such that a known mean is met; the overflow counts as the last edge."""
    if lengths.fixed is not None:
        return np.full(count, lengths.fixed, dtype=np.int64)
    if lengths.normal is not None:
        return _draw_normal(lengths.normal, rng, count)
    histogram = lengths.histogram
    if histogram is None or histogram.total <= 0:
        raise LoadFailure("the workload's histogram of lengths is empty: learn the profile over a longer window")
    weights = np.array([*histogram.counts, histogram.overflow]) / histogram.total
    edges = np.floor([0.0, *histogram.edges]).astype(np.int64)
    lower = np.append(edges[:-1] + 1, edges[-1])
    sizes = np.append(np.maximum(np.diff(edges), 1), 1)
    middle = 0.5 if lengths.mean is None else _middle(lengths.mean, weights, lower, sizes)
    buckets = rng.choice(len(weights), size=count, p=weights)
    inside = rng.random(count) ** (1 / middle - 1)  # its mean is `middle`; evenly spread where that is a half
    drawn: Ints = np.maximum(lower[buckets] + (inside * sizes[buckets]).astype(np.int64), 1)
    return drawn


def _middle(mean: float, weights: Floats, lower: Ints, sizes: Ints) -> float:
    """How far into every bucket lengths must lie on average, from 0 to 1, to have this mean."""
    wide = weights * (sizes > 1)
    space = float((wide * sizes).sum())
    if space <= 0:
        return 0.5
    missing = mean - float((weights * lower).sum()) + 0.5 * float(wide.sum())  # whole tokens are rounded down
    return min(max(missing / space, 0.02), 0.98)


def _draw_normal(normal: Normal, rng: np.random.Generator, count: int) -> Ints:
    """By the inverse of its distribution, so that nothing is thrown away, however much the bounds cut off."""
    whole, (low, high) = normal.untruncated, normal.range
    below, above = whole.cdf(low), whole.cdf(high)
    chances = np.clip(below + (above - below) * rng.random(count), _LEAST, _MOST)
    drawn = np.rint([whole.inv_cdf(chance) for chance in chances.tolist()])
    lengths: Ints = np.clip(drawn, normal.least, normal.most).astype(np.int64)
    return lengths


def _refuse_too_long(prompt: int, output: int, limit: int | None) -> None:
    if limit is not None and prompt + output > limit:
        raise LoadFailure(
            f"{prompt} prompt and {output} output tokens do not fit the server's max_model_len of {limit}: "
            "shorten them, or raise --max-model-len"
        )
