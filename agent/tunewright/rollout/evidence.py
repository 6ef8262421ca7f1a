"""The raw numbers of an analysis: from two windows of samples to the readings that are stored, and back. Pure."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunewright.domain.profile import Histogram
from tunewright.domain.verdict import Reading
from tunewright.observe import names
from tunewright.observe.window import Cleaned, Distribution, clean, join, merge
from tunewright.ports import Refused, SeriesWindow
from tunewright.rollout.inference import Block

SIDES = ("canary", "stable")
LATENCY_METRICS = (names.TTFT, names.TPOT, names.E2E)
MAX_BLOCKS = 20
"""Blocks of time that a window is cut into; more say little more and cost room in the record."""

_BUCKET = re.compile(r'(canary|stable): increase\((\S+)_bucket\{le="(\S+)"\}\)')
_MEAN = re.compile(r"(canary|stable): increase\((\S+)_sum\) / increase\(\S+_count\)")
_FURTHER = re.compile(r"(canary|stable): increase\((\S+_total)\) / (?:increase\(\S+\)|GPU seconds)")
_QUEUED = f"share of the time with {names.WAITING} > 0"
_FINISHED = f'increase({names.FINISHED}{{finished_reason!="abort"}})'
_ERRORS = f'increase({names.FINISHED}{{finished_reason="error"}})'
_ABORTED = f'increase({names.FINISHED}{{finished_reason="abort"}})'


@dataclass(frozen=True)
class Latency:
    """One side's observations of one latency: counted by bucket, and by block of time."""

    histogram: Histogram
    blocks: Sequence[Block]

    @property
    def count(self) -> float:
        """Number of observations."""
        return math.fsum(block.count for block in self.blocks)

    @property
    def mean(self) -> float | None:
        """Exact mean in seconds; None without observations."""
        return math.fsum(block.total for block in self.blocks) / self.count if self.count > 0 else None


@dataclass(frozen=True)
class Evidence:
    """What is known of one side. `finished` are requests that ended and were not aborted; None: no data."""

    finished: float | None
    errors: float | None
    aborted: float | None
    latencies: Mapping[str, Latency]
    problems: Sequence[str]
    preemptions: Sequence[Block] = ()
    """By block of time: finished requests, and preemptions."""
    tokens: Sequence[Block] = ()
    """By block of time: seconds of GPUs, and output tokens."""
    queued: float | None = None
    """Share of the time in which requests waited."""


def readings(
    canary: SeriesWindow, stable: Sequence[SeriesWindow], gpus: tuple[int, int] = (1, 1)
) -> tuple[Reading, ...]:
    """The numbers that a verdict rests on, small enough to store; both sides over the same time.

    Buckets are cumulative, at the edges that both sides have. What is broken becomes a reading without a value. `gpus`
    are those of the canary and of one stable server.
    """
    sides = {"canary": clean(canary), "stable": clean(join(stable)) if stable else None}
    if stable and (stable[0].start, stable[0].end) != (canary.start, canary.end):
        raise ValueError("the two sides are not of the same time")
    found: list[Reading] = []
    for side, cleaned in sides.items():
        finished = _finished(cleaned)
        errors = cleaned.increase(names.FINISHED, finished_reason="error") if cleaned else None
        aborted = cleaned.increase(names.FINISHED, finished_reason="abort") if cleaned else None
        for query, value in ((_FINISHED, finished), (_ERRORS, errors), (_ABORTED, aborted)):
            found.append(_reading(f"{side}: {query}", value, finished or 0.0, canary.start, canary.end))
    edges = _block_edges(canary.start, canary.end, [c for c in sides.values() if c is not None])
    for name in LATENCY_METRICS:
        try:
            found += _bucket_readings(name, sides, canary)
        except Refused as refusal:
            found.append(_reading(f"{name}: {refusal}", None, 0.0, canary.start, canary.end))
            continue
        for side, cleaned in sides.items():
            if cleaned is not None:
                found += _block_readings(side, name, cleaned, edges)
    for (side, cleaned), each in zip(sides.items(), gpus, strict=True):
        if cleaned is not None:
            found += _further_readings(side, cleaned, edges, each)
    return tuple(found)


def evidence(stored: Sequence[Reading]) -> dict[str, Evidence]:
    """Both sides as the stored readings have them."""
    values = {reading.query: reading.value for reading in stored}
    cumulative: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    blocks: dict[tuple[str, str], list[Block]] = defaultdict(list)
    problems = []
    for reading in stored:
        if (bucket := _BUCKET.fullmatch(reading.query)) and reading.value is not None:
            cumulative[bucket[1], bucket[2]][float(bucket[3])] = reading.value
        elif mean := _MEAN.fullmatch(reading.query) or _FURTHER.fullmatch(reading.query):
            blocks[mean[1], mean[2]].append(Block(reading.samples, (reading.value or 0.0) * reading.samples))
        elif reading.value is None and not reading.query.startswith(SIDES):
            problems.append(reading.query)
    return {
        side: Evidence(
            finished=values.get(f"{side}: {_FINISHED}"),
            errors=values.get(f"{side}: {_ERRORS}"),
            aborted=values.get(f"{side}: {_ABORTED}"),
            latencies={
                name: Latency(_from_cumulative(cumulative[side, name]), blocks[side, name])
                for name in LATENCY_METRICS
                if (side, name) in cumulative and (side, name) in blocks
            },
            problems=problems,
            preemptions=blocks.get((side, names.PREEMPTIONS), ()),
            tokens=blocks.get((side, names.GENERATED), ()),
            queued=values.get(f"{side}: {_QUEUED}"),
        )
        for side in SIDES
    }


def blocks_of_means(stored: Sequence[Reading], side: str = "canary") -> dict[str, list[Block]]:
    """By latency, the blocks of time of one side as the stored readings have them."""
    found: dict[str, list[Block]] = defaultdict(list)
    for reading in stored:
        if (mean := _MEAN.fullmatch(reading.query)) and mean[1] == side:
            found[mean[2]].append(Block(reading.samples, (reading.value or 0.0) * reading.samples))
    return dict(found)


def _reading(query: str, value: float | None, samples: float, start: float, end: float) -> Reading:
    return Reading(query=query, value=value, samples=samples, start=start, end=end)


def _finished(cleaned: Cleaned | None) -> float | None:
    everything = cleaned.increase(names.FINISHED) if cleaned else None
    if cleaned is None or everything is None:
        return None
    return everything - (cleaned.increase(names.FINISHED, finished_reason="abort") or 0.0)


def _bucket_readings(name: str, sides: Mapping[str, Cleaned | None], window: SeriesWindow) -> list[Reading]:
    parts: dict[str, Distribution] = {}
    for side, cleaned in sides.items():
        found, _ = cleaned.distribution(name) if cleaned else (None, None)
        if found is not None and found.count > 0:
            parts[side] = found
    if not parts:
        return []
    merged, _ = merge(name, list(parts.values()))
    edges = merged.histogram.edges
    tables = {side: _cumulative(part.histogram, edges) for side, part in parts.items()}
    kept = _telling(edges, list(tables.values()))
    return [
        _reading(
            f'{side}: increase({name}_bucket{{le="{"+Inf" if edge == math.inf else f"{edge!r}"}"}})',
            table[edge],
            parts[side].count,
            window.start,
            window.end,
        )
        for side, table in tables.items()
        for edge in (*kept, math.inf)
    ]


def _cumulative(histogram: Histogram, edges: Sequence[float]) -> dict[float, float]:
    table = {
        edge: math.fsum(c for e, c in zip(histogram.edges, histogram.counts, strict=True) if e <= edge)
        for edge in edges
    }
    return {**table, math.inf: histogram.total}


def _telling(edges: Sequence[float], tables: Sequence[Mapping[float, float]]) -> list[float]:
    """The edges without those below all observations but the last, and those above all but the first."""
    below = [e for e in edges if all(t[e] == 0 for t in tables)]
    above = [e for e in edges if all(t[e] == t[math.inf] for t in tables)]
    dropped = {*below[:-1], *above[1:]}
    return [edge for edge in edges if edge not in dropped]


def _from_cumulative(table: Mapping[float, float]) -> Histogram:
    edges = sorted(table)
    values = [table[edge] for edge in edges]
    counts = [values[0], *(right - left for left, right in pairwise(values))]
    return Histogram(edges=tuple(edges[:-1]), counts=tuple(counts[:-1]), overflow=counts[-1])


def _block_edges(start: float, end: float, sides: Sequence[Cleaned]) -> list[float]:
    """Blocks of equal length of at least one sample each, two where there are enough."""
    times = {at for side in sides for server in side.servers for at in server.growth(names.FINISHED)}
    gaps = [right - left for left, right in pairwise(sorted(times)) if right - left > 0]
    steps = int((end - start) / statistics.median(gaps)) if gaps else 1
    count = blocks_of(steps)
    return [start + (end - start) * i / count for i in range(count + 1)]


def blocks_of(steps: int) -> int:
    """How many blocks of time a window of so many scrapes is cut into: of two scrapes each where there are enough."""
    return max(1, min(MAX_BLOCKS, max(steps // 2, min(steps, MAX_BLOCKS // 2))))


def _block_readings(side: str, name: str, cleaned: Cleaned, edges: Sequence[float]) -> list[Reading]:
    counts, totals = (_by_block(cleaned, f"{name}{suffix}", edges) for suffix in ("_count", "_sum"))
    if counts is None or totals is None:
        return []
    return _ratios(f"{side}: increase({name}_sum) / increase({name}_count)", totals, counts, edges)


def _further_readings(side: str, cleaned: Cleaned, edges: Sequence[float], gpus: int) -> list[Reading]:
    found: list[Reading] = []
    finished, preempted = (_by_block(cleaned, name, edges) for name in (names.FINISHED, names.PREEMPTIONS))
    if finished is not None and preempted is not None:
        query = f"{side}: increase({names.PREEMPTIONS}) / increase({names.FINISHED})"
        found += _ratios(query, preempted, finished, edges)
    tokens = _by_block(cleaned, names.GENERATED, edges)
    if tokens is not None:
        seconds = [(edges[1] - edges[0]) * len(cleaned.servers) * gpus] * len(tokens)
        found += _ratios(f"{side}: increase({names.GENERATED}) / GPU seconds", tokens, seconds, edges)
    waiting = [value for server in cleaned.servers for value in server.gauge(names.WAITING).values()]
    if waiting:
        share = sum(value > 0 for value in waiting) / len(waiting)
        found.append(_reading(f"{side}: {_QUEUED}", share, len(waiting), edges[0], edges[-1]))
    return found


def _by_block(cleaned: Cleaned, name: str, edges: Sequence[float]) -> list[float] | None:
    """What the counters `name` grew by in each block of time; None when they tell nothing."""
    width = max(edges[1] - edges[0], 1e-9)
    table, there = [0.0] * (len(edges) - 1), False
    for server in cleaned.servers:
        for at, delta in server.growth(name).items():
            there = True
            table[min(len(table) - 1, max(0, math.ceil((at - edges[0]) / width - 1e-9) - 1))] += delta
    return table if there else None


def _ratios(query: str, totals: Sequence[float], counts: Sequence[float], edges: Sequence[float]) -> list[Reading]:
    return [
        _reading(query, total / count if count > 0 else None, count, low, high)
        for (low, high), count, total in zip(pairwise(edges), counts, totals, strict=True)
    ]
