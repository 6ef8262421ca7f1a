"""The statistics behind a verdict: what can be said of two servers from counts and time blocks. Pure.

Latencies of neighbouring requests are alike (a queue, a burst), so the spread of a mean is taken from blocks of time,
never from the number of requests; both sides are compared block by block, since they share the traffic's ups and downs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, ndtr, stdtrit

from tunewright.domain.profile import Histogram

MIN_BLOCKS = 5


@dataclass(frozen=True)
class Block:
    """Observations of one side within one block of time: how many, and their sum."""

    count: float
    total: float


@dataclass(frozen=True)
class Estimated:
    """A difference of two sides (of means, or of their logs), with its standard error from `blocks` blocks of time."""

    estimate: float
    error: float
    blocks: int

    def lower(self, level: float) -> float:
        """It is below with probability `level` at most, by Student's t."""
        return self.estimate - _deviations(level, self.blocks) * self.error

    def upper(self, level: float) -> float:
        """It is above with probability `level` at most, by Student's t."""
        return self.estimate + _deviations(level, self.blocks) * self.error


def mean_ratio(canary: Sequence[Block], stable: Sequence[Block]) -> Estimated | None:
    """The ratio of the means; None where a mean is 0 or unknown, or there are too few blocks of time."""
    used = [(c, s) for c, s in zip(canary, stable, strict=True) if c.count > 0 or s.count > 0]
    (count_c, sum_c), (count_s, sum_s) = _totals(canary), _totals(stable)
    if len(used) < MIN_BLOCKS or min(count_c, count_s, sum_c, sum_s) <= 0:
        return None
    mean_c, mean_s = sum_c / count_c, sum_s / count_s
    influence = [(c.total - mean_c * c.count) / sum_c - (s.total - mean_s * s.count) / sum_s for c, s in used]
    return Estimated(math.log(mean_c / mean_s), _spread(influence), len(used))


def ratio_of_other_times(after: Sequence[Block], before: Sequence[Block]) -> Estimated | None:
    """Log of the ratio of two means over different times, where nothing is shared; None as for `mean_ratio`."""
    errors = []
    for side in (after, before):
        used = [block for block in side if block.count > 0]
        count, total = _totals(used)
        if len(used) < MIN_BLOCKS or total <= 0:
            return None
        errors.append(_spread([(block.total - total / count * block.count) / total for block in used]))
    (count_a, sum_a), (count_b, sum_b) = _totals(after), _totals(before)
    blocks = min(sum(block.count > 0 for block in side) for side in (after, before))
    return Estimated(math.log(sum_a / count_a / (sum_b / count_b)), math.hypot(*errors), blocks)


def mean_of(blocks: Sequence[Block]) -> float | None:
    """The mean of all observations; None without any."""
    count, total = _totals(blocks)
    return total / count if count > 0 else None


def mean_difference(canary: Sequence[Block], stable: Sequence[Block]) -> Estimated | None:
    """The canary's mean minus the stable servers'; means may be 0. None where there are too few blocks of time."""
    used = [(c, s) for c, s in zip(canary, stable, strict=True) if c.count > 0 or s.count > 0]
    (count_c, sum_c), (count_s, sum_s) = _totals(canary), _totals(stable)
    if len(used) < MIN_BLOCKS or min(count_c, count_s) <= 0:
        return None
    mean_c, mean_s = sum_c / count_c, sum_s / count_s
    influence = [(c.total - mean_c * c.count) / count_c - (s.total - mean_s * s.count) / count_s for c, s in used]
    return Estimated(mean_c - mean_s, _spread(influence), len(used))


def apart(canary: Sequence[Block], stable: Sequence[Block], histograms: Sequence[Histogram]) -> float:
    """How many times wider the variance of the ratio of means is than independent requests would have it; at least 1.

    Ups and downs that both sides share don't count.
    """
    means = mean_ratio(canary, stable)
    if means is None:
        return 1.0
    independent = math.fsum(_variance(h) / (h.mean or 1.0) ** 2 / h.total for h in histograms)
    return max(1.0, means.error**2 / independent) if independent > 0 else 1.0


def clustering(blocks: Sequence[Block], histogram: Histogram) -> float:
    """How many times wider the variance of the mean is than independent requests would have it; at least 1."""
    count, total = _totals(blocks)
    used = [block for block in blocks if block.count > 0]
    if len(used) < MIN_BLOCKS or count <= 0 or total <= 0 or histogram.total <= 0:
        return 1.0
    mean = total / count
    by_blocks = _spread([(block.total - mean * block.count) / count for block in used]) ** 2
    independent = _variance(histogram) / count
    return max(1.0, by_blocks / independent) if independent > 0 else 1.0


@lru_cache(maxsize=256)
def level_of_a_look(whole: float, first: float, last: float) -> float:
    """The level of each look, so that all looks between the times `first` and `last` together err by `whole`.

    Siegmund's tail of a repeated significance test (Sequential Analysis, 1985, section 4.3), one-sided: it counts
    looks at every moment, so fewer looks err less.
    """
    spread = math.log(max(1.0, last / first))

    def excess(bound: float) -> float:
        density = math.exp(-bound * bound / 2) / math.sqrt(2 * math.pi)
        return density * ((bound - 1 / bound) * spread / 2 + 2 / bound) - whole

    return float(ndtr(-brentq(excess, 1.0, 12.0)))


def share_lower(hits: float, of: float, level: float) -> float:
    """Clopper and Pearson's lower bound of a share: it is below with probability `level` at most."""
    return float(betaincinv(hits, of - hits + 1, level)) if hits > 0 else 0.0


def share_upper(hits: float, of: float, level: float) -> float:
    """Clopper and Pearson's upper bound of a share: it is above with probability `level` at most."""
    return float(betaincinv(hits + 1, of - hits, 1 - level)) if hits < of else 1.0


def chance_of_more(hits: float, of: float, other_hits: float, other_of: float) -> float:
    """How likely so many of all hits, or more, fall on the first of two sides whose true shares are the same.

    Exact given the number of all hits, where hits are rare beside `of`.
    """
    return float(betainc(hits, other_hits + 1, of / (of + other_of))) if hits > 0 else 1.0


def chance_of_fewer(hits: float, of: float, other_hits: float, other_of: float, ratio: float) -> float:
    """How likely so few of all hits, or fewer, fall on the first side if its share is `ratio` times the other's."""
    expected = ratio * of / (ratio * of + other_of)
    return float(betainc(other_hits, hits + 1, 1 - expected)) if other_hits > 0 else 1.0


def first_bucket_holds(q: float, histogram: Histogram) -> bool:
    """Whether the q-quantile lies in the lowest bucket, where it could be anything down to 0."""
    return bool(histogram.counts) and histogram.counts[0] >= q * histogram.total > 0


def _totals(blocks: Sequence[Block]) -> tuple[float, float]:
    return math.fsum(b.count for b in blocks), math.fsum(b.total for b in blocks)


def _spread(influence: Sequence[float]) -> float:
    """Standard error of a sum of block influences that add up to 0.

    Neighbouring blocks may be alike too (a queue that takes minutes to drain); that they are unlike is not believed.
    """
    alike = max(0.0, math.fsum(u * v for u, v in pairwise(influence)))
    return math.sqrt(len(influence) / (len(influence) - 1) * (math.fsum(u * u for u in influence) + 2 * alike))


def _deviations(level: float, blocks: int) -> float:
    """Student's t: so many standard errors off with probability `level` at most."""
    return -float(stdtrit(blocks - 1, level))


def _variance(histogram: Histogram) -> float:
    """Variance of the observations, uniform inside each bucket, those beyond the last edge at it."""
    edges = (0.0, *histogram.edges)
    squares = math.fsum(
        count * (low * low + low * high + high * high) / 3
        for (low, high), count in zip(pairwise(edges), histogram.counts, strict=True)
    )
    mean = histogram.mean or 0.0
    return (squares + histogram.overflow * edges[-1] ** 2) / histogram.total - mean * mean
