"""Exported metrics. All but the process's own are derived from the stores' records at each scrape.

So a deleted tuning's series go, nothing is lost when the process restarts, and no second truth can disagree.
"""

import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from tunewright.ports import Clock, Conflict, PortError, Refused
from tunewright.telemetry import catalog
from tunewright.telemetry.recordtext import Readables, RecordText

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Instruments:
    """What only this process knows; starts from 0 with it, as Prometheus expects of counters."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        duration, errors, asked = catalog.RECONCILE_SECONDS, catalog.RECONCILE_ERRORS, catalog.SOURCE_REQUESTS
        data, leader, watch = catalog.SOURCE_SUCCESS, catalog.LEADER, catalog.WATCH_AGE
        sent = catalog.API_REQUESTS
        self._clock = clock
        self._duration = Histogram(duration.name, duration.help, buckets=_RECONCILE_BUCKETS, registry=registry)
        self._errors = Counter(errors.name, errors.help, errors.labels, registry=registry)
        self._asked = Counter(asked.name, asked.help, asked.labels, registry=registry)
        self._data = Gauge(data.name, data.help, registry=registry)
        self._leader = Gauge(leader.name, leader.help, registry=registry)
        self._watch = Gauge(watch.name, watch.help, watch.labels, registry=registry)
        self._sent = Counter(sent.name, sent.help, sent.labels, registry=registry)
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

    def sent(self, verb: str, resource: str, status: int | None) -> None:
        """Count one request to the API server; `status` None: there was no answer."""
        self._sent.labels(verb, resource, "none" if status is None else str(status)).inc()

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
    """What is behind `/metrics`: the records of the stores, seen at each scrape, and the process's `instruments`.

    The stores are read from the scraping thread.
    """

    def __init__(self, stores: Readables, clock: Clock) -> None:
        self._registry = CollectorRegistry()
        self.instruments = Instruments(self._registry, clock)
        ProcessCollector(registry=self._registry)
        self._records = RecordText(stores, clock)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry) + self._records.text()


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
