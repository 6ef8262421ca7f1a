"""Samples to figures: percentiles, an interval by batch means, and the test that ends a warm-up. Pure."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tunewright.domain.measurement import Estimate, Latency

Floats = npt.NDArray[np.float64]

# Two-sided 95 % quantiles of Student's t for the numbers of batches that are used.
_T95 = {20: 2.093, 10: 2.262, 5: 2.776}
_CORRELATED = 0.3

HALF = 4
"""Bins in the shorter span that the warm-up's test looks at, and blocks that it tells the noise from."""
_THROUGHPUT_CHANGE, _TTFT_CHANGE, _FEWEST_TTFTS = 0.03, 0.10, 3
_SURELY_ALIKE = 0.01
"""Share by which two halves may always differ; and the standard error past which the test looks back further."""
_MOVED_SDS = 2.5
PARTS = 16
"""Equal parts of a window, by which it is seen whether its rate moved."""


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
    """Seconds that the warm-up's test looks back over at least, for a window of `duration` seconds."""
    return min(max(duration / 4, 2.0), 15.0)


def settled(
    events: Sequence[float],
    ttfts: Sequence[Sequence[float]],
    *,
    width: float,
    life: float,
    window: float,
    limit: float,
) -> bool:
    """Whether load has become steady, from all bins of `width` seconds since it began, oldest first.

    `events` are events per bin, `ttfts` the times to first token that fell in each, `life` the mean seconds from a
    request's send to its end, `window` the seconds that are to be measured, and `limit` those that a warm-up may take.

    Two stretches that follow one another are compared, each of whole lives, since requests that began together come
    back in waves, and a server that gets faster with each wave is steady within one. They are half of what was seen:
    the slower the change, the longer it takes to see. At the trend from one to the other, throughput must change by
    less than 3 % within the window, or the two be within 1 %. Where the noise hides 1 %, they are together as long as
    the window, or three quarters of the limit, and may differ by two standard errors. TTFT may differ by 10 % or two
    standard errors, and is left out where a stretch has fewer than three.
    """
    bins = _bins(max(HALF * width, len(events) * width / 4), life, width, math.floor)
    if 2 * bins > len(events):
        return False
    change, error = _change(events, bins)
    noise = 0.0
    if error > _SURELY_ALIKE:
        bins = max(bins, _bins(min(window / 2, limit * 3 / 8), life, width, math.ceil))
        if 2 * bins > len(events):
            return False
        change, noise = _change(events, bins)
    allowed = _THROUGHPUT_CHANGE * min(1.0, bins * width / (window / 2))
    if not change <= max(allowed, _SURELY_ALIKE, 2 * noise):
        return False
    older = np.array([value for part in ttfts[-2 * bins : -bins] for value in part])
    younger = np.array([value for part in ttfts[-bins:] for value in part])
    return min(len(older), len(younger)) < _FEWEST_TTFTS or _alike(older, younger, _TTFT_CHANGE)


def _bins(seconds: float, life: float, width: float, rounded: Callable[[float], int]) -> int:
    """Bins of a stretch of about `seconds`, in whole lives of a request; at least one life, and `HALF` bins."""
    lives = max(rounded(seconds / life), 1)
    return max(HALF, round(lives * life / width))


def _change(events: Sequence[float], bins: int) -> tuple[float, float]:
    """By what share the last two stretches of so many bins differ, and the standard error of that.

    Bin is compared with bin, so that a wave that comes back after a whole number of lives is no noise; and the
    differences are taken together in blocks, so that noise that lasts is not taken for less than it is. Infinite where
    nothing came for a whole bin: a stall.
    """
    older, younger = np.asarray(events[-2 * bins : -bins], np.float64), np.asarray(events[-bins:], np.float64)
    if not younger.all():
        return math.inf, 0.0
    blocks = np.array([block.mean() for block in np.array_split(younger - older, HALF)])
    mean = float(younger.mean())
    return abs(float(younger.mean() - older.mean())) / mean, float(blocks.std(ddof=1)) / math.sqrt(HALF) / mean


def part_rates(times: Sequence[float], events: Sequence[int]) -> list[float]:
    """Events a second in `PARTS` equal parts of a window, from how many there had been at these times (seconds).

    Where the process was held up, nobody looked for a while: what came meanwhile is taken as even.
    """
    edges = np.linspace(times[0], times[-1], PARTS + 1)
    return [float(rate) for rate in np.diff(np.interp(edges, times, events)) / np.diff(edges)]


def moved(rates: Sequence[float]) -> float | None:
    """By what share the second half of a window is faster than the first, from its rates in equal parts; None where
    that is less than 3 %, or no more than chance."""
    half = len(rates) // 2
    first, second = (
        np.array([block.mean() for block in np.array_split(np.asarray(part, np.float64), HALF)])
        for part in (rates[:half], rates[half:])
    )
    before, change = float(first.mean()), float(second.mean() - first.mean())
    error = math.sqrt((float(first.var(ddof=1)) + float(second.var(ddof=1))) / HALF)
    if abs(change) <= max(_THROUGHPUT_CHANGE * before, _MOVED_SDS * error):
        return None
    return change / before if before else math.inf


def moved_together(shares: Sequence[float | None]) -> float | None:
    """`moved` of a load that several processes sent, by what each saw of its part; None unless most of them saw it.

    They look at one server: what moved moved for all, and one of many that thinks so by chance is no news.
    """
    by_size = sorted((share or 0.0 for share in shares), key=abs)
    return by_size[(len(by_size) - 1) // 2] or None


def _alike(older: Floats, younger: Floats, tolerance: float) -> bool:
    change = abs(float(younger.mean() - older.mean()))
    error = math.sqrt(float(older.var(ddof=1)) / len(older) + float(younger.var(ddof=1)) / len(younger))
    return change <= max(tolerance * float(younger.mean()), 2 * error)
