"""The records as the text that Prometheus scrapes. Of a tuning that did not change, the text is kept.

Making it anew for 500 tunings at each scrape would take seconds of CPU, and hold up the loop in the same process.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from tunewright import __version__
from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.ports import Clock, Key, PortError, Refused
from tunewright.telemetry import catalog
from tunewright.telemetry.samples import Age, Sample, seconds_of, tuning_ages, tuning_samples


class Readable(Protocol):
    """What is asked of the store of one namespace."""

    def load(self, name: str) -> TuningRecord | None:
        """The tuning's record."""
        ...

    def trials(self, name: str) -> list[TrialRecord]:
        """The tuning's trials."""
        ...


class Readables(Protocol):
    """What is asked of all stores; `ports.Stores` is one of these."""

    @property
    def own(self) -> str:
        """The namespace of the program itself."""
        ...

    def tunings(self) -> list[Key]:
        """Every tuning."""
        ...

    def of(self, namespace: str) -> Readable | None:
        """The store of one namespace."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A store that knows whether something changed without reading it."""

    def version(self, name: str) -> object:
        """Equal for as long as neither the record nor the trials of a tuning changed."""
        ...


@dataclass(frozen=True)
class _Told:
    """What was told of one tuning: its lines by metric, and what grows with time."""

    version: object
    lines: Mapping[catalog.Metric, bytes]
    ages: Sequence[Age]


class RecordText:
    """The text of all records. Thread-safe."""

    def __init__(self, stores: Readables, clock: Clock) -> None:
        self._stores, self._clock = stores, clock
        self._lock = threading.Lock()
        self._told: dict[Key, _Told] = {}

    def text(self) -> bytes:
        """Every metric but the process's own."""
        with self._lock:
            extra: list[Sample] = [(catalog.BUILD_INFO, (__version__,), 1.0)]
            told: dict[Key, _Told] = {}
            try:
                by_namespace = self._names()
            except (PortError, Refused):  # the process lives even so: its own metric says it
                by_namespace = {}
                extra.append((catalog.STORE_READABLE, (self._stores.own,), 0.0))
            for namespace, names in by_namespace.items():
                try:
                    told |= self._read(namespace, names)
                    extra.append((catalog.STORE_READABLE, (namespace,), 1.0))
                except (PortError, Refused):
                    extra.append((catalog.STORE_READABLE, (namespace,), 0.0))
            self._told, now = told, self._clock.now()
        extra += [(age[0], age[1], seconds_of(age, now)) for each in told.values() for age in each.ages]
        fresh = _lines(extra)
        parts: list[bytes] = []
        for metric in catalog.METRICS:
            if not metric.process_local:
                parts += [_HEADERS[metric], fresh.get(metric, b"")]
                parts += [each.lines[metric] for each in told.values() if metric in each.lines]
        return b"".join(parts)

    def _names(self) -> dict[str, list[str]]:
        """The tunings there are by namespace; our own namespace also where it has none."""
        names: dict[str, list[str]] = {self._stores.own: []}
        for namespace, name in self._stores.tunings():
            names.setdefault(namespace, []).append(name)
        return names

    def _read(self, namespace: str, names: Sequence[str]) -> dict[Key, _Told]:
        store = self._stores.of(namespace)
        if store is None:
            return {}
        told = {(namespace, name): self._tell(namespace, store, name) for name in names}
        return {key: each for key, each in told.items() if each is not None}

    def _tell(self, namespace: str, store: Readable, name: str) -> _Told | None:
        # Before the records are read: what changes meanwhile is told with the next scrape.
        version = store.version(name) if isinstance(store, Versioned) else None
        before = self._told.get((namespace, name))
        if before is not None and version is not None and before.version == version:
            return before
        record = store.load(name)
        if record is None:
            return None
        trials = store.trials(name)
        ages = tuning_ages(record, trials, namespace)
        return _Told(version, _lines(tuning_samples(record, trials, namespace)), ages)


class _Just:
    """What `generate_latest` asks of a registry."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        yield self._family


def _lines(samples: Sequence[Sample]) -> dict[catalog.Metric, bytes]:
    """The sample lines of each metric, without its header."""
    families: dict[catalog.Metric, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric, labels, value in samples:
        if metric not in families:
            families[metric] = _family(metric)
        families[metric].add_metric(labels, value)
    return {metric: _text(family).split(b"\n", 2)[2] for metric, family in families.items()}


def _headers() -> Iterator[tuple[catalog.Metric, bytes]]:
    for metric in catalog.METRICS:
        if not metric.process_local:
            yield metric, _text(_family(metric))


def _text(family: Family) -> bytes:
    return generate_latest(_Just(family))


def _family(metric: catalog.Metric) -> GaugeMetricFamily | CounterMetricFamily:
    if metric.type == "counter":
        return CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


_HEADERS = dict(_headers())
