"""Exported metrics. All but the process's own are derived from the store's records at each scrape.

So a deleted tuning's series go, nothing is lost when the process restarts, and no second truth can disagree.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tunewright import __version__
from tunewright.domain.measurement import Measurement
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.step import age
from tunewright.domain.tuning import LATENCIES, PERCENTILES
from tunewright.domain.verdict import Outcome, Verdict
from tunewright.ports import Clock, Conflict, PortError, Refused, Store
from tunewright.telemetry import catalog
from tunewright.telemetry.facts import (
    baseline_objective,
    baseline_trials,
    best_trial,
    gpus,
    is_judged,
    objective_name,
    shown_objective,
    spare_time,
)

MAX_CANDIDATES = 20
"""Candidates exported per tuning beside baseline, winner and best: the latest ones. Bounds the number of series."""

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Sample = tuple[catalog.Metric, tuple[str, ...], float]


class Instruments:
    """What only this process knows; starts from 0 with it, as Prometheus expects of counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        duration, errors = catalog.RECONCILE_SECONDS, catalog.RECONCILE_ERRORS
        failures = catalog.METRIC_SOURCE_FAILURES
        self._duration = Histogram(duration.name, duration.help, buckets=_RECONCILE_BUCKETS, registry=registry)
        self._errors = Counter(errors.name, errors.help, errors.labels, registry=registry)
        self._failures = Counter(failures.name, failures.help, registry=registry)
        for kind in ("conflict", "port", "refused", "fault"):
            self._errors.labels(kind)

    def reconciled(self, seconds: float, error: BaseException | None = None) -> None:
        """Count one pass over one tuning, which took so long and perhaps ended in `error`."""
        self._duration.observe(seconds)
        if error is not None:
            self._errors.labels(_error_kind(error)).inc()

    def metric_source_failed(self) -> None:
        """Count one question to the metrics source that came to nothing."""
        self._failures.inc()


class Metrics:
    """The registry behind `/metrics`: the store's records, seen at each scrape, and the process's `instruments`.

    The store is read from the scraping thread.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self.instruments = Instruments(self.registry)
        self.registry.register(_RecordCollector(store, clock))

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _RecordCollector(Collector):
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def describe(self) -> Iterable[Family]:
        """Names alone, so that registering does not read the store."""
        return [_family(metric) for metric in catalog.METRICS if not metric.process_local]

    def collect(self) -> Iterator[Family]:
        """Read every record, and turn it into samples."""
        samples: list[Sample] = [(catalog.BUILD_INFO, (__version__,), 1.0)]
        try:
            for name in self._store.names():
                record = self._store.load(name)
                if record is not None:
                    samples += tuning_samples(record, self._store.trials(name), self._clock.now())
            readable = 1.0
        except (
            PortError,
            Refused,
        ):  # the process lives even so: its own metric says it
            samples, readable = samples[:1], 0.0
        samples.append((catalog.STORE_READABLE, (), readable))
        families = {metric: _family(metric) for metric in catalog.METRICS if not metric.process_local}
        for metric, labels, value in samples:
            families[metric].add_metric(labels, value)
        yield from families.values()


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


def tuning_samples(record: TuningRecord, trials: Sequence[TrialRecord], now: float) -> list[Sample]:
    """Every sample of one tuning."""
    return [
        *_phase(record, now),
        *_search(record, trials),
        *_candidates(record, trials),
        *_promotion(record),
    ]


def _phase(record: TuningRecord, now: float) -> Iterator[Sample]:
    name = (record.name,)
    for phase in Phase:
        yield catalog.PHASE, (record.name, phase.value), float(phase is record.phase)
    yield catalog.PHASE_SECONDS, name, age(record, now)
    yield catalog.SUSPENDED, name, float(record.suspended_since is not None)
    yield catalog.STEP_FAILURES, name, float(record.errors)
    waiting = record.phase is Phase.AWAITING_APPROVAL
    yield catalog.APPROVAL_WAITING, name, float(waiting)
    if waiting:
        since = record.approval_since if record.approval_since is not None else record.phase_since
        yield catalog.APPROVAL_WAITING_SECONDS, name, max(0.0, now - since)
    yield catalog.ROLLBACKS, name, float(sum(change.phase is Phase.ROLLING_BACK for change in record.history))


def _search(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    name, objective = record.name, record.tuning.spec.objective
    for purpose in TrialPurpose:
        mine = [trial for trial in trials if trial.purpose is purpose]
        for outcome in TrialOutcome:
            count = sum(trial.outcome is outcome for trial in mine)
            yield catalog.TRIALS, (name, purpose.value, outcome.value), float(count)
        running = sum(trial.phase is not TrialPhase.DONE for trial in mine)
        yield catalog.TRIALS, (name, purpose.value, "running"), float(running)
    yield catalog.TRIALS_BUDGET, (name,), float(record.tuning.spec.budget.trials)

    baseline, best = baseline_objective(trials), best_trial(trials)
    if baseline is not None and (measured := baseline_trials(trials)[-1].measurement) is not None:
        labels = (name, objective_name(objective), measured.source.value)
        yield catalog.BASELINE_OBJECTIVE, labels, shown_objective(objective, baseline)
    if best is not None and best.objective is not None and best.measurement is not None:
        labels = (name, objective_name(objective), best.measurement.source.value)
        yield catalog.BEST_OBJECTIVE, labels, shown_objective(objective, best.objective)

    for finalist in {finalist.candidate.hash: finalist for finalist in record.finalists}.values():
        # Below two rounds there is no interval, only a placeholder that would be plotted as a loss of 100 %.
        if finalist.gain is not None and finalist.gain.rounds >= 2:
            labels_of = (name, finalist.candidate.hash)
            yield catalog.GAIN, labels_of, finalist.gain.estimate.value
            yield catalog.GAIN_LOW, labels_of, finalist.gain.estimate.low
            yield catalog.GAIN_HIGH, labels_of, finalist.gain.estimate.high
            yield catalog.GAIN_ROUNDS, labels_of, float(finalist.gain.rounds)

    used = dict.fromkeys(("starting", "warming", "measuring", "other"), 0.0)
    for trial in trials:
        time = spare_time(trial)
        for use in used:
            used[use] += getattr(time, use) * gpus(trial)
    for use, value in used.items():
        yield catalog.GPU_SECONDS, (name, use), value


def exported_trials(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The last judged trial of each candidate that is exported, at most `MAX_CANDIDATES` and three more."""
    last = {trial.candidate.hash: trial for trial in sorted(trials, key=lambda t: t.number) if is_judged(trial)}
    best = best_trial(trials)
    always = {
        candidate.hash
        for candidate in (record.baseline, record.winner, best.candidate if best else None)
        if candidate is not None
    }
    latest = sorted(last.values(), key=lambda trial: trial.number)[-MAX_CANDIDATES:]
    return list({trial.id: trial for trial in [*latest, *(last[h] for h in always if h in last)]}.values())


def _candidates(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    objective = record.tuning.spec.objective
    for trial in exported_trials(record, trials):
        measured: Measurement | None = trial.measurement
        if measured is None or trial.objective is None:
            continue
        labels = (record.name, trial.candidate.hash, measured.source.value)
        yield catalog.CANDIDATE_OBJECTIVE, labels, shown_objective(objective, trial.objective)
        yield catalog.CANDIDATE_TOKENS, labels, measured.output_tokens_per_second.value
        for latency in LATENCIES:
            for percentile in PERCENTILES:
                yield catalog.CANDIDATE_LATENCY, (*labels, latency, percentile), measured.latency(latency, percentile)
        if trial.slo_margin is not None:
            yield catalog.CANDIDATE_SLO_MARGIN, labels, trial.slo_margin
        if trial.start_seconds is not None:
            yield catalog.CANDIDATE_START, labels, trial.start_seconds


def _promotion(record: TuningRecord) -> Iterator[Sample]:
    promotion = record.promotion
    if promotion is None:
        return
    yield catalog.PROMOTION_REPLICAS, (record.name,), float(promotion.replicas)
    yield catalog.PROMOTION_UPDATED, (record.name,), float(promotion.updated)
    if promotion.verdict is not None:
        yield from _verdict(record.name, promotion.verdict)


def _verdict(name: str, verdict: Verdict) -> Iterator[Sample]:
    metrics = {metric.metric: metric for metric in verdict.metrics}
    outcomes = {"all": verdict.outcome} | {metric: judged.outcome for metric, judged in metrics.items()}
    for metric, judged in outcomes.items():
        for outcome in Outcome:
            yield catalog.VERDICT, (name, metric, outcome.value), float(judged is outcome)
    for metric, detail in metrics.items():
        yield catalog.VERDICT_SAMPLES, (name, metric, "canary"), detail.canary.samples
        yield catalog.VERDICT_SAMPLES, (name, metric, "stable"), detail.stable.samples
