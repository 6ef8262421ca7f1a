"""Exported metrics. All but the process's own are derived from the stores' records at each scrape.

So a deleted tuning's series go, nothing is lost when the process restarts, and no second truth can disagree.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tunewright import __version__
from tunewright.ports import Clock, Conflict, PortError, Refused, Stores
from tunewright.telemetry import catalog
from tunewright.telemetry.samples import Sample, tuning_samples

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Instruments:
    """What only this process knows; starts from 0 with it, as Prometheus expects of counters."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        duration, errors, asked = catalog.RECONCILE_SECONDS, catalog.RECONCILE_ERRORS, catalog.SOURCE_REQUESTS
        data, leader, watch = catalog.SOURCE_SUCCESS, catalog.LEADER, catalog.WATCH_AGE
        self._clock = clock
        self._duration = Histogram(duration.name, duration.help, buckets=_RECONCILE_BUCKETS, registry=registry)
        self._errors = Counter(errors.name, errors.help, errors.labels, registry=registry)
        self._asked = Counter(asked.name, asked.help, asked.labels, registry=registry)
        self._data = Gauge(data.name, data.help, registry=registry)
        self._leader = Gauge(leader.name, leader.help, registry=registry)
        self._watch = Gauge(watch.name, watch.help, watch.labels, registry=registry)
        for kind in ("conflict", "port", "refused", "fault"):
            self._errors.labels(kind)
        for outcome in ("data", "empty", "error"):
            self._asked.labels(outcome)

    def reconciled(self, seconds: float, error: BaseException | None = None) -> None:
        """Count one pass over one tuning, which took so long and perhaps ended in `error`."""
        self._duration.observe(seconds)
        if error is not None:
            self._errors.labels(_error_kind(error)).inc()

    def asked(self, outcome: str) -> None:
        """Count one question to the metrics source: `data`, `empty` or `error`."""
        self._asked.labels(outcome).inc()
        if outcome == "data":
            self._data.set(self._clock.now())

    def leads(self, acting: Callable[[], bool]) -> None:
        """Ask `acting`, at each scrape, whether this process may act. Until then it is exported as 0."""
        self._leader.set_function(lambda: float(acting()))

    def watches(self, resource: str, silent_for: Callable[[], float | None]) -> None:
        """Ask, at each scrape, for the seconds since the API server last answered the watch of `resource`."""

        def age() -> float:
            silent = silent_for()
            return math.inf if silent is None else silent

        self._watch.labels(resource).set_function(age)


class Metrics:
    """The registry behind `/metrics`: the stores' records, seen at each scrape, and the process's `instruments`.

    The stores are read from the scraping thread.
    """

    def __init__(self, stores: Stores, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self.instruments = Instruments(self.registry, clock)
        self.registry.register(_RecordCollector(stores, clock))
        ProcessCollector(registry=self.registry)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _RecordCollector(Collector):
    def __init__(self, stores: Stores, clock: Clock) -> None:
        self._stores = stores
        self._clock = clock

    def describe(self) -> Iterable[Family]:
        """Names alone, so that registering does not read the store."""
        return [_family(metric) for metric in catalog.METRICS if not metric.process_local]

    def collect(self) -> Iterator[Family]:
        """Read every record, and turn it into samples."""
        samples: list[Sample] = [(catalog.BUILD_INFO, (__version__,), 1.0)]
        try:
            by_namespace = self._names()
        except (PortError, Refused):  # the process lives even so: its own metric says it
            by_namespace = {}
            samples.append((catalog.STORE_READABLE, (self._stores.own,), 0.0))
        for namespace, names in by_namespace.items():
            try:
                samples += [*self._read(namespace, names), (catalog.STORE_READABLE, (namespace,), 1.0)]
            except (PortError, Refused):
                samples.append((catalog.STORE_READABLE, (namespace,), 0.0))
        families = {metric: _family(metric) for metric in catalog.METRICS if not metric.process_local}
        for metric, labels, value in samples:
            families[metric].add_metric(labels, value)
        yield from families.values()

    def _names(self) -> dict[str, list[str]]:
        """The tunings there are by namespace; our own namespace also where it has none."""
        names: dict[str, list[str]] = {self._stores.own: []}
        for namespace, name in self._stores.tunings():
            names.setdefault(namespace, []).append(name)
        return names

    def _read(self, namespace: str, names: Sequence[str]) -> list[Sample]:
        store, found = self._stores.of(namespace), list[Sample]()
        for name in names:
            record = store.load(name) if store is not None else None
            if store is not None and record is not None:
                found += tuning_samples(record, store.trials(name), self._clock.now(), namespace)
        return found


def _family(metric: catalog.Metric) -> GaugeMetricFamily | CounterMetricFamily:
    if metric.type == "counter":
        return CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _error_kind(error: BaseException) -> str:
    match error:
        case Conflict():
            return "conflict"
        case PortError():
            return "port"
        case Refused():
            return "refused"
        case _:
            return "fault"
