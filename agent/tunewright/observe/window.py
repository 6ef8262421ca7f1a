"""Arithmetic on raw samples: what counters and histograms grew by, server by server. Pure.

What Prometheus' own functions would get wrong here: all counters of one process restart together, so a drop of any
one is a restart of all of them (a counter that is higher than before a restart is not missed); a labelled counter
that appears on a server which was there already grew from 0; and histograms are merged only where edges agree.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from tunewright.domain.profile import Histogram
from tunewright.ports import Refused, Series, SeriesWindow

OWN_LABELS = frozenset({"__name__", "engine", "model_name", "le", "finished_reason", "position", "reason"})
"""Labels that vLLM itself sets; the others describe the target and how it was found."""

COUNTER_SUFFIXES = ("_total", "_bucket", "_count", "_sum")

Samples = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Increase:
    """What a counter grew by: `value` over `seconds` from its first to its last sample, across `resets` restarts."""

    value: float
    seconds: float
    samples: int
    resets: int


@dataclass(frozen=True)
class Distribution:
    """What a histogram grew by. `total` is the exact sum of the observations, None where `_sum` is not there."""

    histogram: Histogram
    total: float | None

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.histogram.total

    @property
    def mean(self) -> float | None:
        """The exact mean; None without observations or without `_sum`."""
        return self.total / self.count if self.count > 0 and self.total is not None else None


def finite(samples: Samples) -> list[tuple[float, float]]:
    """The samples that are numbers."""
    return [(at, value) for at, value in samples if math.isfinite(value)]


def drops(samples: Samples) -> list[float]:
    """Times at which a counter is lower than at the sample before: it restarted from 0 in between."""
    return [at for (_, before), (at, value) in pairwise(samples) if value < before]


def increments(samples: Samples, resets: Sequence[float] = (), born: bool = False) -> list[tuple[float, float]]:
    """What a counter grew by up to each sample. `resets` are restarts known from elsewhere, in order.

    `born`: the counter was not there before its first sample, so that sample counts from 0.
    """
    known = sorted({*resets, *drops(samples)})
    grown = [(samples[0][0], samples[0][1])] if born and samples else []
    for (before_at, before), (at, value) in pairwise(samples):
        restarted = bisect_right(known, at) > bisect_right(known, before_at)
        grown.append((at, value if restarted else value - before))
    return grown


def increase(series: Series, resets: Sequence[float] = (), born: bool = False) -> Increase | None:
    """What one counter grew by; None when fewer than two samples are numbers, which says nothing of growth."""
    samples = finite(series.samples)
    if len(samples) < 2 and not (born and samples):
        return None
    known = {*resets, *drops(samples)}
    inside = [at for at in known if samples[0][0] < at <= samples[-1][0]]
    value = math.fsum(delta for _, delta in increments(samples, resets, born))
    return Increase(value, samples[-1][0] - samples[0][0], len(samples), len(inside))


@dataclass(frozen=True)
class Server:
    """The series of one server, with the restarts that its counters show."""

    name: str
    series: Mapping[str, Sequence[Series]]
    resets: Sequence[float] = field(default=())

    @cached_property
    def first(self) -> float:
        """Time of its first sample."""
        return min(s.samples[0][0] for group in self.series.values() for s in group)

    @cached_property
    def last(self) -> float:
        """Time of its last sample."""
        return max(s.samples[-1][0] for group in self.series.values() for s in group)

    def born(self, series: Series) -> bool:
        """Whether `series` appeared later than the server, so that it counts from 0."""
        return series.samples[0][0] > self.first

    def matching(self, name: str, labels: Mapping[str, str]) -> list[Series]:
        """Its series called `name` whose labels are equal to `labels`."""
        return [s for s in self.series.get(name, ()) if all(s.labels.get(k) == v for k, v in labels.items())]

    def increase(self, name: str, **labels: str) -> float | None:
        """What its counters `name` with these labels grew by, all engines; None when nothing tells."""
        found = [increase(s, self.resets, self.born(s)) for s in self.matching(name, labels)]
        values = [one.value for one in found if one is not None]
        return math.fsum(values) if values else None

    def growth(self, name: str, **labels: str) -> dict[float, float]:
        """What its counters `name` with these labels grew by up to each time, all engines."""
        grown: dict[float, float] = defaultdict(float)
        for series in self.matching(name, labels):
            for at, delta in increments(finite(series.samples), self.resets, self.born(series)):
                grown[at] += delta
        return dict(grown)

    def gauge(self, name: str) -> dict[float, float]:
        """The sum of its gauges `name` over its engines, at the times at which each of them has a sample."""
        return _sum_where_all(finite(s.samples) for s in self.series.get(name, ()))

    def distribution(self, name: str) -> Distribution | None:
        """What its histogram `name` grew by, all engines; None without two samples. Raises `Refused` if it is broken.

        Engines of one server have the same edges.
        """
        groups: dict[tuple[tuple[str, str], ...], list[Series]] = defaultdict(list)
        for series in self.series.get(f"{name}_bucket", ()):
            groups[tuple(sorted((k, v) for k, v in series.labels.items() if k != "le"))].append(series)
        parts = [part for group in groups.values() if (part := self._buckets(name, group)) is not None]
        if not parts:
            return None
        merged, _ = merge(name, [Distribution(part, None) for part in parts])
        return Distribution(merged.histogram, self.increase(f"{name}_sum"))

    def _buckets(self, name: str, group: Sequence[Series]) -> Histogram | None:
        by_edge: dict[float, dict[float, float]] = defaultdict(dict)
        for series in group:
            by_edge[self._edge(name, series)].update(finite(series.samples))
        if math.inf not in by_edge:
            raise Refused(f'{name}_bucket of {self.name} has no bucket le="+Inf": it isn\'t a whole histogram')
        # Buckets are compared with each other, so they must be of the same moments.
        common = sorted(set.intersection(*(set(samples) for samples in by_edge.values())))
        born = bool(common) and common[0] > self.first and all(self.born(s) for s in group)
        if len(common) < 2 and not (born and common):
            return None
        edges = sorted(by_edge)
        cumulative = [
            math.fsum(delta for _, delta in increments([(at, by_edge[e][at]) for at in common], self.resets, born))
            for e in edges
        ]
        counts = [cumulative[0], *(right - left for left, right in pairwise(cumulative))]
        if min(counts) < -1e-6 * max(1.0, cumulative[-1]):
            raise Refused(
                f"{name}_bucket of {self.name} isn't cumulative: a bucket holds fewer than the one below it. "
                "Check that its series come from one server only and that nothing rewrites them"
            )
        counts = [max(0.0, count) for count in counts]
        return Histogram(edges=tuple(edges[:-1]), counts=tuple(counts[:-1]), overflow=counts[-1])

    def _edge(self, name: str, series: Series) -> float:
        text = series.labels.get("le", "")
        try:
            edge = float(text)
        except ValueError:
            edge = math.nan
        if math.isnan(edge):
            raise Refused(f"{name}_bucket of {self.name} has a bucket without a readable edge: le={text!r}")
        return edge


@dataclass(frozen=True)
class Cleaned:
    """A window taken apart by server, with what a reader should know about it."""

    start: float
    end: float
    servers: Sequence[Server]
    notes: Sequence[str]

    def increase(self, name: str, **labels: str) -> float | None:
        """What the counters `name` grew by on all servers; None when nothing tells."""
        values = [value for server in self.servers if (value := server.increase(name, **labels)) is not None]
        return math.fsum(values) if values else None

    def distribution(self, name: str) -> tuple[Distribution | None, str | None]:
        """What the histogram `name` grew by on all servers, and a note where their edges differ."""
        parts = [part for server in self.servers if (part := server.distribution(name)) is not None]
        return merge(name, parts) if parts else (None, None)


def clean(window: SeriesWindow) -> Cleaned:
    """Take a window apart by server: no NaN, nothing twice, restarts found."""
    notes = list(window.warnings)
    lost = sum(1 for s in window.series for _, value in s.samples if not math.isfinite(value))
    if lost:
        notes.append(f"{lost} samples are no numbers and were left out")
    series = [s for s in window.series if s.samples]
    once = _without_doubles(series)
    doubled = sum(len(s.samples) for s in series) - sum(len(s.samples) for s in once)
    if doubled:
        notes.append(
            f"{doubled} samples are the same servers' once more under other labels (scraped twice?) "
            "and were left out; a narrower metrics.selector avoids that"
        )
    by_server: dict[str, dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
    for one in once:
        by_server[_server_name(one)][one.name].append(one)
    servers = [_with_resets(name, by_server[name]) for name in sorted(by_server)]
    for server in servers:
        if server.resets:
            notes.append(f"{server.name or 'the server'} restarted {len(server.resets)} times in the window")
    if len(once) > 0 and "" in by_server:
        notes.append("series carry neither an instance nor a pod label: they are taken as one server's")
    return Cleaned(window.start, window.end, servers, notes)


def merge(name: str, parts: Sequence[Distribution]) -> tuple[Distribution, str | None]:
    """One histogram out of several, exact: at edges that all of them have, since only there all counts are known.

    Histograms without observations don't restrict the edges. Raises `Refused` when no edge is common.
    """
    holding = [part for part in parts if part.count > 0] or list(parts[:1])
    histograms = [part.histogram for part in holding]
    edges = tuple(sorted(set.intersection(*(set(h.edges) for h in histograms))))
    if not edges and len(histograms) > 1:
        raise Refused(f"the servers' histograms {name} have no bucket edge in common, so they can't be compared")
    cut = [coarsen(histogram, edges) for histogram in histograms]
    merged = Histogram(
        edges=edges,
        counts=tuple(math.fsum(column) for column in zip(*(h.counts for h in cut), strict=True)),
        overflow=math.fsum(h.overflow for h in cut),
    )
    totals = [part.total for part in parts]
    total = None if any(t is None for t in totals) else math.fsum(t for t in totals if t is not None)
    left_out = {edge for h in histograms for edge in h.edges} - set(edges)
    note = None
    if left_out:
        note = f"{name}: the servers' bucket edges differ; merged at the {len(edges)} edges that all of them have"
    return Distribution(merged, total), note


def coarsen(histogram: Histogram, edges: Sequence[float]) -> Histogram:
    """The same observations counted at fewer edges, each of which the histogram must have."""
    counts = [0.0] * (len(edges) + 1)
    for edge, count in zip(histogram.edges, histogram.counts, strict=True):
        counts[sum(1 for kept in edges if kept < edge)] += count
    return Histogram(edges=tuple(edges), counts=tuple(counts[:-1]), overflow=counts[-1] + histogram.overflow)


def join(windows: Sequence[SeriesWindow]) -> SeriesWindow:
    """Several windows over the same time as one."""
    first = windows[0]
    if any((w.start, w.end) != (first.start, first.end) for w in windows):
        raise ValueError("the windows are not of the same time")
    return replace(
        first,
        series=[s for w in windows for s in w.series],
        queries=list(dict.fromkeys(q for w in windows for q in w.queries)),
        warnings=list(dict.fromkeys(text for w in windows for text in w.warnings)),
    )


def _server_name(series: Series) -> str:
    labels = series.labels
    instance, pod = labels.get("instance", ""), labels.get("pod", "")
    return f"{labels.get('namespace', '')}/{pod}".lstrip("/") if pod else instance


def _identity(series: Series) -> tuple[str, ...]:
    own = sorted(f"{key}={value}" for key, value in series.labels.items() if key in OWN_LABELS)
    return (_server_name(series), series.labels.get("instance", ""), *own)


def _without_doubles(series: Sequence[Series]) -> list[Series]:
    """Of series that are one server's under several target labels, the longest; joined where one follows the other."""
    groups: dict[tuple[str, ...], list[Series]] = defaultdict(list)
    for one in series:
        groups[_identity(one)].append(one)
    kept: list[Series] = []
    for group in groups.values():
        chosen: list[Series] = []
        # By labels where lengths are equal, so that all series of a server are taken from the same job.
        for one in sorted(group, key=lambda s: (-len(s.samples), sorted(s.labels.items()))):
            start, end = one.samples[0][0], one.samples[-1][0]
            if all(end < other.samples[0][0] or start > other.samples[-1][0] for other in chosen):
                chosen.append(one)
        chosen.sort(key=lambda s: s.samples[0][0])
        kept.append(Series(chosen[0].labels, [sample for one in chosen for sample in one.samples]))
    return kept


def _with_resets(name: str, series: Mapping[str, Sequence[Series]]) -> Server:
    counters = [s for metric, group in series.items() if metric.endswith(COUNTER_SUFFIXES) for s in group]
    resets = sorted({at for s in counters for at in drops(finite(s.samples))})
    return Server(name, dict(series), resets)


def _sum_where_all(members: Iterable[Samples]) -> dict[float, float]:
    tables = [dict(samples) for samples in members]
    if not tables:
        return {}
    return {at: math.fsum(t[at] for t in tables) for at in sorted(set.intersection(*(set(t) for t in tables)))}
