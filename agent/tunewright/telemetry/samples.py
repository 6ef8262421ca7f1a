"""A tuning's record and trials as samples of the exported metrics. Pure."""

import math
from collections.abc import Iterator, Sequence

from tunewright.controller.deadlines import deadline
from tunewright.controller.trials import running
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Measurement
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Histogram
from tunewright.domain.redact import redact
from tunewright.domain.state import TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import LATENCIES, PERCENTILES
from tunewright.domain.verdict import Outcome, Verdict
from tunewright.telemetry import catalog
from tunewright.telemetry.effects import knob_effects
from tunewright.telemetry.facts import (
    baseline_objective,
    baseline_trials,
    best_trial,
    difference_text,
    gpus,
    idle_seconds,
    is_judged,
    knob_text,
    objective_interval,
    objective_name,
    shown_objective,
    spare_time,
)

MAX_CANDIDATES = 20
"""Candidates exported per tuning beside baseline, winner and best: the latest ones. Bounds the number of series."""
MAX_TRIALS = 50
"""Trials exported one by one per tuning: the latest ones."""
MAX_EFFECTS = 20
"""Knob effects exported per tuning: the largest ones."""
MAX_TEXT = 200
"""Characters of a label that tells what a candidate changes."""

Sample = tuple[catalog.Metric, tuple[str, ...], float]
Age = tuple[catalog.Metric, tuple[str, ...], float, float | None]
"""A sample that grows: metric, labels, since when, and until when; None: it still does."""


def tuning_samples(record: TuningRecord, trials: Sequence[TrialRecord], namespace: str = "") -> list[Sample]:
    """Every sample of one tuning that holds until its records change.

    `namespace` is empty outside of Kubernetes, where there is none.
    """
    found = (
        *_phase(record, trials),
        *_asked_for(record),
        *_traffic(record),
        *_trials(trials),
        *_objective(record, trials),
        *_effects(record, trials),
        *_gpu_seconds(trials),
        *_each_trial(record, trials),
        *_candidates(record, trials),
        *_promotion(record),
    )
    return [(metric, (namespace, record.name, *labels), value) for metric, labels, value in found]


def tuning_ages(record: TuningRecord, trials: Sequence[TrialRecord], namespace: str = "") -> list[Age]:
    """The samples of one tuning that grow with time."""
    found: list[Age] = [(catalog.PHASE_SECONDS, (), record.phase_since + record.waited, record.suspended_since)]
    if record.phase is Phase.AWAITING_APPROVAL:
        since = record.approval_since if record.approval_since is not None else record.phase_since
        found.append((catalog.APPROVAL_WAITING_SECONDS, (), since, None))
    if record.suspended_since is None:
        first: dict[str, float] = {}
        for trial in running(trials):
            since = trial.phase_since or math.inf  # one that was only just proposed has no moment yet
            first[trial.phase.value] = min(first.get(trial.phase.value, math.inf), since)
        found += [(catalog.SPARE_PHASE_SECONDS, (phase,), since, None) for phase, since in first.items()]
    return [(metric, (namespace, record.name, *labels), since, until) for metric, labels, since, until in found]


def seconds_of(age: Age, now: float) -> float:
    """How long it is by now; never below 0."""
    _, _, since, until = age
    return max(0.0, (now if until is None else until) - since)


def _phase(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    for phase in Phase:
        yield catalog.PHASE, (phase.value,), float(phase is record.phase)
    limit = deadline(record, trials)
    if limit is not None:
        yield catalog.PHASE_DEADLINE, (), limit
    for phase, at in {change.phase: change.at for change in record.history}.items():
        yield catalog.PHASE_START, (phase.value,), at
    yield catalog.SUSPENDED, (), float(record.suspended_since is not None)
    yield catalog.STEP_FAILURES, (), float(record.errors)
    yield catalog.APPROVAL_WAITING, (), float(record.phase is Phase.AWAITING_APPROVAL)
    back = [change for change in record.history if change.phase is Phase.ROLLING_BACK]
    yield catalog.ROLLBACKS, ("guard",), float(sum(not change.by for change in back))
    yield catalog.ROLLBACKS, ("person",), float(sum(bool(change.by) for change in back))
    yield catalog.FOREIGN, (), float(bool(record.foreign))
    if record.drift is not None:
        yield catalog.DRIFT, (), record.drift


def _asked_for(record: TuningRecord) -> Iterator[Sample]:
    spec = record.tuning.spec
    yield catalog.APPROVAL_EXPIRY, (), spec.promotion.approval_expiry
    yield catalog.DRIFT_THRESHOLD, (), spec.retune.drift
    yield catalog.TRIALS_BUDGET, (), float(spec.budget.trials)
    yield catalog.SPARE_START_TIMEOUT, (), spec.spare.start_timeout
    yield catalog.REQUIRED_SAMPLES, (), float(spec.promotion.analysis.min_requests)
    for latency, percentile, bound in spec.slo.bounds():
        yield catalog.SLO_BOUND, (latency, percentile), bound
    yield catalog.SLO_ERRORS, (), spec.slo.error_rate


def _traffic(record: TuningRecord) -> Iterator[Sample]:
    profile = record.profile
    if profile is None:
        return
    if not profile.given:  # demand is only known where traffic was watched
        yield catalog.TRAFFIC_DEMAND, (), profile.demand
        yield catalog.TRAFFIC_SATURATED, (), float(profile.saturated)
    yield catalog.TRAFFIC_CONCURRENCY, ("mean",), profile.concurrency
    yield catalog.TRAFFIC_CONCURRENCY, ("p95",), profile.concurrency_p95
    yield from _lengths("prompt", profile.prompt_tokens_mean, profile.prompt_tokens)
    yield from _lengths("output", profile.output_tokens_mean, profile.output_tokens)
    if profile.prefix_reuse is not None:
        yield catalog.TRAFFIC_PREFIX_REUSE, (), profile.prefix_reuse


def _lengths(kind: str, mean: float, lengths: Histogram) -> Iterator[Sample]:
    yield catalog.TRAFFIC_TOKENS, (kind, "mean"), mean
    for statistic, q in (("p50", 0.5), ("p95", 0.95)):
        value = lengths.quantile(q)
        if value is not None:
            yield catalog.TRAFFIC_TOKENS, (kind, statistic), value


def _trials(trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    for purpose in TrialPurpose:
        mine = [trial for trial in trials if trial.purpose is purpose]
        for outcome in TrialOutcome:
            count = sum(trial.outcome is outcome for trial in mine)
            yield catalog.TRIALS, (purpose.value, outcome.value), float(count)
        yield catalog.TRIALS, (purpose.value, "running"), float(len(running(mine)))
    kinds = [trial.failure.kind for trial in trials if trial.failure is not None]
    for kind in sorted(set(kinds)):
        yield catalog.TRIAL_FAILURES, (kind.value,), float(kinds.count(kind))


def _objective(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    objective = record.tuning.spec.objective
    baseline, best = baseline_objective(trials), best_trial(trials)
    if baseline is not None and (measured := baseline_trials(trials)[-1].measurement) is not None:
        labels = (objective_name(objective), measured.source.value)
        yield catalog.BASELINE_OBJECTIVE, labels, shown_objective(objective, baseline)
        if (ends := objective_interval(objective, baseline_trials(trials))) is not None:
            yield catalog.BASELINE_OBJECTIVE_LOW, labels, ends[0]
            yield catalog.BASELINE_OBJECTIVE_HIGH, labels, ends[1]
    if best is not None and best.objective is not None and best.measurement is not None:
        labels = (objective_name(objective), best.measurement.source.value)
        yield catalog.BEST_OBJECTIVE, labels, shown_objective(objective, best.objective)
        if (ends := objective_interval(objective, [best])) is not None:
            yield catalog.BEST_OBJECTIVE_LOW, labels, ends[0]
            yield catalog.BEST_OBJECTIVE_HIGH, labels, ends[1]
    for finalist in {finalist.candidate.hash: finalist for finalist in record.finalists}.values():
        # Below two rounds there is no interval, only a stand-in that would be plotted as a loss of 100 %.
        if finalist.gain is not None and finalist.gain.rounds >= 2:
            of = (finalist.candidate.hash,)
            yield catalog.GAIN, of, finalist.gain.estimate.value
            yield catalog.GAIN_LOW, of, finalist.gain.estimate.low
            yield catalog.GAIN_HIGH, of, finalist.gain.estimate.high
            yield catalog.GAIN_ROUNDS, of, float(finalist.gain.rounds)


def _effects(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    found = knob_effects(record.tuning.spec.objective, record.baseline, trials)[:MAX_EFFECTS]
    for effect in {(each.knob, _short(knob_text(each.value))): each for each in found}.values():
        labels = (effect.knob, _short(knob_text(effect.value)))
        yield catalog.KNOB_EFFECT, labels, effect.gain
        yield catalog.KNOB_EFFECT_LOW, labels, effect.low
        yield catalog.KNOB_EFFECT_HIGH, labels, effect.high


def _gpu_seconds(trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    used = dict.fromkeys(("starting", "warming", "measuring", "other"), 0.0)
    for trial in trials:
        time = spare_time(trial)
        for use in used:
            used[use] += getattr(time, use) * gpus(trial)
    used["idle"] = idle_seconds(trials) * max((gpus(trial) for trial in trials), default=1)
    for use, value in used.items():
        yield catalog.GPU_SECONDS, (use,), value


def _each_trial(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    done = sorted((trial for trial in trials if trial.phase is TrialPhase.DONE), key=lambda trial: trial.number)
    for trial in done[-MAX_TRIALS:]:
        number = f"{trial.number:03d}"  # so that a table sorts them by number
        outcome, failure = (
            trial.outcome.value if trial.outcome else "",
            trial.failure.kind.value if trial.failure else "",
        )
        changes = _changes(record.baseline, trial.candidate)
        yield catalog.TRIAL_INFO, (number, trial.candidate.hash, trial.purpose.value, outcome, failure, changes), 1.0
        if trial.finished_at is not None:
            yield catalog.TRIAL_FINISHED, (number,), trial.finished_at
        if trial.objective is not None and trial.measurement is not None:
            shown = shown_objective(record.tuning.spec.objective, trial.objective)
            yield catalog.TRIAL_OBJECTIVE, (number, trial.measurement.source.value), shown


def exported_trials(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The last judged trial of each candidate that is exported, at most `MAX_CANDIDATES` and three more."""
    last = {trial.candidate.hash: trial for trial in sorted(trials, key=lambda t: t.number) if is_judged(trial)}
    always = {candidate.hash for _, candidate in _roles(record, trials)}
    latest = sorted(last.values(), key=lambda trial: trial.number)[-MAX_CANDIDATES:]
    return list({trial.id: trial for trial in [*latest, *(last[h] for h in always if h in last)]}.values())


def _roles(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[tuple[str, Candidate]]:
    best = best_trial(trials)
    roles = (("baseline", record.baseline), ("best", best.candidate if best else None), ("winner", record.winner))
    return [(role, candidate) for role, candidate in roles if candidate is not None]


def _candidates(record: TuningRecord, trials: Sequence[TrialRecord]) -> Iterator[Sample]:
    for role, candidate in _roles(record, trials):
        yield catalog.CANDIDATE_INFO, (candidate.hash, role, _changes(record.baseline, candidate)), 1.0
    objective = record.tuning.spec.objective
    for trial in exported_trials(record, trials):
        measured: Measurement | None = trial.measurement
        if measured is None or trial.objective is None:
            continue
        labels = (trial.candidate.hash, measured.source.value)
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
    yield catalog.PROMOTION_REPLICAS, (), float(promotion.replicas)
    yield catalog.PROMOTION_UPDATED, (), float(promotion.updated)
    shown = promotion.verdict or promotion.canary_verdict
    if shown is not None:
        yield from _verdict(shown)


def _verdict(verdict: Verdict) -> Iterator[Sample]:
    metrics = {metric.metric: metric for metric in verdict.metrics}
    outcomes = {"all": verdict.outcome} | {metric: judged.outcome for metric, judged in metrics.items()}
    for metric, judged in outcomes.items():
        for outcome in Outcome:
            yield catalog.VERDICT, (metric, outcome.value), float(judged is outcome)
    for metric, detail in metrics.items():
        for side, reading in (("canary", detail.canary), ("stable", detail.stable)):
            yield catalog.VERDICT_SAMPLES, (metric, side), reading.samples
            if reading.value is not None:
                yield catalog.VERDICT_VALUE, (metric, side), reading.value


def _changes(baseline: Candidate | None, candidate: Candidate) -> str:
    return _short(difference_text(baseline, candidate))


def _short(text: str) -> str:
    """For a label: on one line, without credentials, and not longer than a table can show."""
    flat = " ".join(redact(text).split())
    return flat if len(flat) <= MAX_TEXT else f"{flat[: MAX_TEXT - 1]}…"
