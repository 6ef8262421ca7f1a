"""From a window of raw samples to the traffic profile. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunewright.domain.profile import Source, TrafficProfile
from tunewright.domain.units import format_duration
from tunewright.observe import names
from tunewright.observe.names import PROFILE_METRICS
from tunewright.observe.window import Cleaned, Distribution, Server, clean
from tunewright.ports import Refused, SeriesWindow

__all__ = ["PROFILE_METRICS", "learn_profile"]

REQUIRED = (
    names.FINISHED,
    names.RUNNING,
    names.WAITING,
    f"{names.PROMPT_LENGTH}_bucket",
    f"{names.OUTPUT_LENGTH}_bucket",
)

QUEUED_SHARE = 0.95
"""Saturated: requests waited at this share of the samples …"""
FLAT = 0.25
"""… while the running requests varied by no more than this (standard deviation over mean): they were at a limit."""
MIN_QUEUE_SAMPLES = 8
"""With fewer samples nothing is said about saturation."""
MIN_STEPS = 20
"""With fewer steps nothing is said about burstiness."""


@dataclass(frozen=True)
class _Flow:
    """One server's requests over time, at the moments at which counters and gauges all have samples."""

    running: Sequence[float]
    waiting: Sequence[float]
    arrivals: Sequence[float]
    seconds: float


def learn_profile(window: SeriesWindow, *, via: str, source: Source, min_requests: int) -> TrafficProfile:
    """The traffic profile, per replica. Raises `Refused` where the window shows too little, saying what is missing.

    `via` and `source` are noted as they are. Rates are over the time in which each server had samples.
    """
    cleaned = clean(window)
    _refuse_missing(window, cleaned)
    length = format_duration(round(window.end - window.start))
    flows = [flow for server in cleaned.servers if (flow := _flow(server)) is not None]
    server_seconds = math.fsum(flow.seconds for flow in flows)
    if server_seconds <= 0:
        raise Refused(f"no server has two samples in {length}; wait, or check that metrics.interval is the true one")
    everything = cleaned.increase(names.FINISHED) or 0.0
    aborted = cleaned.increase(names.FINISHED, finished_reason="abort") or 0.0
    errors = cleaned.increase(names.FINISHED, finished_reason="error") or 0.0
    finished = everything - aborted
    if finished < min_requests:
        raise Refused(
            f"{finished:.0f} of {min_requests} requests finished in {length}; "
            "wait, widen metrics.window or lower metrics.minRequests"
        )
    notes = list(cleaned.notes)
    prompt = _lengths(cleaned, names.PROMPT_LENGTH, notes)
    output = _lengths(cleaned, names.OUTPUT_LENGTH, notes)
    saturated = _saturated(flows)
    if not saturated and len(flows) > 1 and any(_saturated([flow]) for flow in flows):
        notes.append("some servers are saturated and others are not: the requests are spread unevenly")
    if aborted:
        notes.append(f"{aborted:.0f} requests were aborted by clients; they count as demand, not as finished or errors")
    alive = _alive(cleaned.servers)
    if len(cleaned.servers) > alive:
        notes.append(f"{len(cleaned.servers)} servers came and went; {alive} served at a time")
    load = [r + w for flow in flows for r, w in zip(flow.running, flow.waiting, strict=True)]
    arrivals = math.fsum(a for flow in flows for a in flow.arrivals)
    return TrafficProfile(
        start=window.start,
        end=window.end,
        replicas=alive,
        via=via,
        source=source,
        finished_requests=finished,
        saturated=saturated,
        demand=max(0.0, arrivals) / server_seconds,
        burstiness=None if saturated else _burstiness(flows),
        concurrency=statistics.fmean(load),
        concurrency_p95=_percentile(load, 0.95),
        running=statistics.fmean(r for flow in flows for r in flow.running),
        waiting=statistics.fmean(w for flow in flows for w in flow.waiting),
        prompt_tokens=prompt.histogram,
        output_tokens=output.histogram,
        prompt_tokens_mean=prompt.mean or 0.0,
        output_tokens_mean=output.mean or 0.0,
        prefix_reuse=_prefix_reuse(cleaned),
        acceptance=_acceptance(cleaned),
        error_rate=min(1.0, errors / finished),
        output_tokens_per_second=(cleaned.increase(names.GENERATED) or 0.0) / server_seconds,
        ttft_p95=_p95(cleaned, names.TTFT, notes),
        itl_p95=_p95(cleaned, names.ITL, notes),
        e2e_p95=_p95(cleaned, names.E2E, notes),
        notes=tuple(notes),
    )


def _refuse_missing(window: SeriesWindow, cleaned: Cleaned) -> None:
    there = {name for server in cleaned.servers for name in server.series}
    missing = [name for name in REQUIRED if name not in there]
    if len(missing) < len(REQUIRED) and missing:
        raise Refused(f"there are no series {', '.join(missing)}; is this a vLLM of a supported version?")
    if missing:
        asked = "; ".join(window.queries) or "nothing was asked"
        raise Refused(
            f"there is no vLLM metric in {format_duration(round(window.end - window.start))}. "
            f"Check that the servers are scraped and that metrics.selector names them. Asked: {asked}"
        )


def _flow(server: Server) -> _Flow | None:
    """Requests that came: finished ones plus growth of those in the system. None without two common samples."""
    running, waiting = server.gauge(names.RUNNING), server.gauge(names.WAITING)
    times = sorted(set(running) & set(waiting))
    if len(times) < 2:
        return None
    finished = server.growth(names.FINISHED)
    counted = sorted(finished)
    arrivals, next_count = [], 0
    for before, at in pairwise(times):
        ended = 0.0
        while next_count < len(counted) and counted[next_count] <= at:
            ended += finished[counted[next_count]]
            next_count += 1
        restarted = any(before < reset <= at for reset in server.resets)
        left = 0.0 if restarted else running[before] + waiting[before]
        arrivals.append(ended + running[at] + waiting[at] - left)
    return _Flow([running[t] for t in times], [waiting[t] for t in times], arrivals, times[-1] - times[0])


def _saturated(flows: Sequence[_Flow]) -> bool:
    waiting = [w for flow in flows for w in flow.waiting]
    if len(waiting) < MIN_QUEUE_SAMPLES or sum(w > 0 for w in waiting) < QUEUED_SHARE * len(waiting):
        return False
    # Server by server: replicas of unequal size are each flat at their own limit.
    spreads = [statistics.pstdev(flow.running) / max(statistics.fmean(flow.running), 1e-9) for flow in flows]
    return statistics.fmean(spreads) <= FLAT


def _burstiness(flows: Sequence[_Flow]) -> float | None:
    """Variance over mean of arrivals per step, from neighbouring steps: a slow swell of traffic is no burst."""
    arrivals = [a for flow in flows for a in flow.arrivals]
    squares = [(right - left) ** 2 / 2 for flow in flows for left, right in pairwise(flow.arrivals)]
    mean = statistics.fmean(arrivals)
    if len(squares) < MIN_STEPS or mean <= 0:
        return None
    return statistics.fmean(squares) / mean or None


def _alive(servers: Sequence[Server]) -> int:
    """How many servers there were at a time, on average over the time in which there was any."""
    seconds = math.fsum(server.last - server.first for server in servers)
    span = max(server.last for server in servers) - min(server.first for server in servers)
    return max(1, round(seconds / span)) if span > 0 else len(servers)


def _lengths(cleaned: Cleaned, name: str, notes: list[str]) -> Distribution:
    found, note = cleaned.distribution(name)
    if note:
        notes.append(note)
    if found is None or found.count <= 0 or found.mean is None:
        raise Refused(f"{name} counted nothing although requests finished; check that its series are scraped whole")
    return found


def _p95(cleaned: Cleaned, name: str, notes: list[str]) -> float | None:
    found, note = cleaned.distribution(name)
    if note:
        notes.append(note)
    if found is None or found.count <= 0:
        return None
    value = found.histogram.quantile(0.95)
    if value is None:
        notes.append(f"the 95th percentile of {name} lies beyond its last bucket")
    return value


def _prefix_reuse(cleaned: Cleaned) -> float | None:
    queries = cleaned.increase(names.PREFIX_QUERIES) or 0.0
    hits = cleaned.increase(names.PREFIX_HITS)
    if queries <= 0 or hits is None:
        return None
    return min(1.0, max(0.0, hits / queries))


def _acceptance(cleaned: Cleaned) -> tuple[float, ...]:
    drafts = cleaned.increase(names.DRAFTS) or 0.0
    positions = {
        series.labels.get("position", "")
        for server in cleaned.servers
        for series in server.series.get(names.ACCEPTED, ())
    }
    if drafts <= 0:
        return ()
    ordered = sorted((p for p in positions if p.isdecimal()), key=int)
    return tuple(min(1.0, (cleaned.increase(names.ACCEPTED, position=p) or 0.0) / drafts) for p in ordered)


def _percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
