"""Samples to figures: percentiles, an interval by batch means, and the test that ends a warm-up. Pure."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tunewright.domain.measurement import Estimate, Latency

Floats = npt.NDArray[np.float64]

# Two-sided 95 % quantiles of Student's t for the numbers of batches that are used.
_T95 = {20: 2.093, 10: 2.262, 5: 2.776}
_CORRELATED = 0.3

HALF = 4
"""Bins in each half of the span that the warm-up's test looks at."""
_THROUGHPUT_CHANGE, _TTFT_CHANGE, _FEWEST_TTFTS = 0.05, 0.10, 3


def latency(samples: Floats) -> Latency:
    """Percentiles (linear between ranks) and the mean, in the samples' unit; all 0 with count 0 without samples."""
    if not len(samples):
        return Latency(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(samples, [50, 90, 95, 99]))
    return Latency(count=len(samples), mean=float(samples.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def at_least(samples: Floats, q: float, sds: float = 3.0) -> float | None:
    """What the q-quantile surely has, by the order statistic `sds` below it; None with too few samples to say."""
    n = len(samples)
    rank = math.floor(n * q - sds * math.sqrt(n * q * (1 - q)))
    return float(np.partition(samples, rank - 1)[rank - 1]) if rank >= 1 else None


def rate(times: Floats, weights: Floats, start: float, end: float) -> Estimate:
    """Weight per second over [start, end] with a 95 % interval by batch means.

    Batches that follow one another are alike where the rate swings slowly, which would make the interval too narrow:
    while they are correlated they are joined, from 20 down to 5.
    """
    counts = np.histogram(times, bins=np.linspace(start, end, 21), weights=weights)[0]
    width = (end - start) / 20
    while len(counts) > 5 and _autocorrelation(counts) > _CORRELATED:
        counts, width = counts.reshape(-1, 2).sum(axis=1), width * 2
    rates = counts / width
    half = _T95[len(rates)] * float(rates.std(ddof=1)) / math.sqrt(len(rates))
    mean = float(rates.mean())
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def share(times: Floats, hits: Floats, start: float, end: float) -> Estimate:
    """The share of `hits` (0 or 1) with a 95 % interval, from what came in [start, end] in ten equal parts of it.

    What comes close together is alike, so the parts tell how sure the share is; chance alone is the least doubt. Where
    everything or nothing hits, the parts can't tell: the doubt is then that of one hit more, and one miss more.
    """
    bins = np.linspace(start, end, 11)
    counts, found = np.histogram(times, bins=bins)[0], np.histogram(times, bins=bins, weights=hits)[0]
    total = float(counts.sum())
    if not total:
        return Estimate(value=0.0, low=0.0, high=1.0)
    value = float(found.sum()) / total
    away = found - value * counts
    between = 10 / 9 * float((away * away).sum()) / total**2
    near = (float(found.sum()) + 1) / (total + 2)
    half = _T95[10] * math.sqrt(max(between, near * (1 - near) / total))
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half))


def _autocorrelation(values: Floats) -> float:
    away = values - values.mean()
    power = float((away * away).sum())
    return float((away[1:] * away[:-1]).sum()) / power if power > 0 else 0.0


def warmup_span(duration: float) -> float:
    """Seconds that the warm-up's test looks back over, for a window of `duration` seconds."""
    return min(max(duration / 4, 2.0), 15.0)


def settled(events: Sequence[float], ttfts: Sequence[Sequence[float]]) -> bool:
    """Whether load has become steady, from the last 2 x HALF bins of equal width, oldest first.

    `events` are events per bin, `ttfts` the times to first token that fell in each. The younger half of the bins must
    differ from the older one by less than 5 % in throughput and 10 % in mean TTFT, or by less than two standard
    errors, which is all that so few bins can tell. TTFTs are left out where a half has fewer than three.
    """
    if len(events) < 2 * HALF or len(ttfts) < 2 * HALF:
        return False
    recent = np.asarray(events[-2 * HALF :], dtype=np.float64)
    if not recent[HALF:].all():
        return False
    if not _alike(recent[:HALF], recent[HALF:], _THROUGHPUT_CHANGE):
        return False
    older = np.array([value for part in ttfts[-2 * HALF : -HALF] for value in part])
    younger = np.array([value for part in ttfts[-HALF:] for value in part])
    if min(len(older), len(younger)) < _FEWEST_TTFTS:
        return True
    return _alike(older, younger, _TTFT_CHANGE)


def _alike(older: Floats, younger: Floats, tolerance: float) -> bool:
    change = abs(float(younger.mean() - older.mean()))
    error = math.sqrt(float(older.var(ddof=1)) / len(older) + float(younger.var(ddof=1)) / len(younger))
    return change <= max(tolerance * float(younger.mean()), 2 * error)
