"""How far the traffic of two profiles is apart: the largest of a few distances that a person can check. Pure."""

import math
from typing import NamedTuple

from tunewright.domain.profile import Histogram, TrafficProfile
from tunewright.observe.window import coarsen

LEAST = 1e-9
"""Rates below are as good as none; keeps ratios finite."""


class Drift(NamedTuple):
    """`value` 0: the same traffic; 0.3 is about 35 % more or less load, or 30 % of the requests of another length.

    `reason` names the distance that is largest, with both numbers.
    """

    value: float
    reason: str


def drift(a: TrafficProfile, b: TrafficProfile) -> Drift:
    """The drift from `a` to `b`; symmetric in value, 0 for the same profile, always finite.

    The largest of: load, length of prompts, length of outputs (both as the log of the ratio of means, and as the share
    of requests that would have to be of another length), and share of reused prefixes.
    """
    return max(
        _load(a, b),
        _lengths("prompts", a.prompt_tokens, b.prompt_tokens, a.prompt_tokens_mean, b.prompt_tokens_mean),
        _lengths("outputs", a.output_tokens, b.output_tokens, a.output_tokens_mean, b.output_tokens_mean),
        _prefixes(a, b),
        key=lambda found: found.value,
    )


def _load(a: TrafficProfile, b: TrafficProfile) -> Drift:
    """The smaller of the changes of demand and of concurrency.

    A faster configuration alone changes one of the two: concurrency where clients come by themselves, demand where
    they wait for answers. More traffic changes both. The demand of a saturated window is a lower bound.
    """
    demand = abs(_log_ratio(a.demand, b.demand))
    if (a.saturated and b.demand >= a.demand) or (b.saturated and a.demand >= b.demand):
        demand = 0.0
    concurrency = abs(_log_ratio(a.concurrency, b.concurrency))
    return Drift(
        min(demand, concurrency),
        f"demand {a.demand:.3g} to {b.demand:.3g} requests/s and replica, "
        f"concurrency {a.concurrency:.3g} to {b.concurrency:.3g}",
    )


def _lengths(what: str, a: Histogram, b: Histogram, mean_a: float, mean_b: float) -> Drift:
    means = abs(_log_ratio(mean_a, mean_b))
    moved = _kolmogorov_smirnov(a, b)
    if moved > means:
        return Drift(moved, f"{moved:.0%} of the {what} are of another length")
    return Drift(means, f"{what} of {mean_a:.0f} to {mean_b:.0f} tokens on average")


def _kolmogorov_smirnov(a: Histogram, b: Histogram) -> float:
    """Largest difference of the two cumulative shares, at the edges that both have; 0 where nothing can be compared."""
    edges = sorted(set(a.edges) & set(b.edges))
    if not edges or a.total <= 0 or b.total <= 0:
        return 0.0
    largest = share_a = share_b = 0.0
    for count_a, count_b in zip(coarsen(a, edges).counts, coarsen(b, edges).counts, strict=True):
        share_a, share_b = share_a + count_a / a.total, share_b + count_b / b.total
        largest = max(largest, abs(share_a - share_b))
    return largest


def _prefixes(a: TrafficProfile, b: TrafficProfile) -> Drift:
    """Unknown (the cache is off) is no drift."""
    if a.prefix_reuse is None or b.prefix_reuse is None:
        return Drift(0.0, "reuse of prefixes is not known")
    return Drift(
        abs(a.prefix_reuse - b.prefix_reuse), f"reuse of prefixes {a.prefix_reuse:.0%} to {b.prefix_reuse:.0%}"
    )


def _log_ratio(a: float, b: float) -> float:
    return math.log(max(b, LEAST) / max(a, LEAST))
