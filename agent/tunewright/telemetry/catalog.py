"""Every metric that Tunewright exports: the only place where names, types, labels and help are written down."""

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One exported metric. A counter's `name` ends in `_total`, as it is exposed."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    process_local: bool = False


_T = ("tuning",)
_C = ("tuning", "candidate", "source")

BUILD_INFO = Metric(
    "tunewright_build_info", "gauge", "Always 1; the version of Tunewright is in the label.", ("version",)
)
STORE_READABLE = Metric(
    "tunewright_store_readable", "gauge", "1 when the records could be read for this scrape; 0: no tuning is exported."
)

PHASE = Metric("tunewright_tuning_phase", "gauge", "1 for the phase that the tuning is in, else 0.", (*_T, "phase"))
PHASE_SECONDS = Metric(
    "tunewright_tuning_phase_seconds", "gauge", "Time in the current phase, without the time it was suspended.", _T
)
SUSPENDED = Metric("tunewright_tuning_suspended", "gauge", "1 while the tuning is suspended.", _T)
STEP_FAILURES = Metric("tunewright_tuning_step_failures", "gauge", "Failures in a row of the current step.", _T)
APPROVAL_WAITING = Metric("tunewright_tuning_approval_waiting", "gauge", "1 while a person is to approve.", _T)
APPROVAL_WAITING_SECONDS = Metric(
    "tunewright_tuning_approval_waiting_seconds",
    "gauge",
    "How long the approval has been waited for; absent if not.",
    _T,
)
ROLLBACKS = Metric(
    "tunewright_tuning_rollbacks_total", "counter", "How often production was taken back to the baseline.", _T
)

TRIALS = Metric(
    "tunewright_tuning_trials",
    "gauge",
    "Trials by purpose (baseline, search, confirm) and outcome (complete, infeasible, failed, running).",
    (*_T, "purpose", "outcome"),
)
TRIALS_BUDGET = Metric("tunewright_tuning_trials_budget", "gauge", "Trials that the search may take.", _T)
BASELINE_OBJECTIVE = Metric(
    "tunewright_tuning_baseline_objective",
    "gauge",
    "Mean objective of the baseline before the search, in the objective's own unit (latencies in seconds).",
    (*_T, "objective", "source"),
)
BEST_OBJECTIVE = Metric(
    "tunewright_tuning_best_objective",
    "gauge",
    "Objective of the best feasible trial so far (one run), in the objective's own unit.",
    (*_T, "objective", "source"),
)
GAIN = Metric(
    "tunewright_tuning_gain_ratio",
    "gauge",
    "Gain of a finalist over the baseline from the confirming rounds alone (0.1: 10 % better).",
    (*_T, "candidate"),
)
GAIN_LOW = Metric("tunewright_tuning_gain_low_ratio", "gauge", "Lower end of the gain's interval.", (*_T, "candidate"))
GAIN_HIGH = Metric(
    "tunewright_tuning_gain_high_ratio", "gauge", "Upper end of the gain's interval.", (*_T, "candidate")
)
GAIN_ROUNDS = Metric(
    "tunewright_tuning_gain_rounds", "gauge", "Fresh starts of each side that the gain rests on.", (*_T, "candidate")
)
GPU_SECONDS = Metric(
    "tunewright_tuning_gpu_seconds_total",
    "counter",
    "Time that finished trials held the spare, times the GPUs of one server, by use: starting, warming, measuring, "
    "other. Starts again from 0 when the tuning starts anew.",
    (*_T, "use"),
)

CANDIDATE_OBJECTIVE = Metric(
    "tunewright_candidate_objective",
    "gauge",
    "Objective of the candidate's last trial, in the objective's own unit. Exported for the baseline, the winner, the "
    "best and the latest candidates.",
    _C,
)
CANDIDATE_TOKENS = Metric(
    "tunewright_candidate_output_tokens_per_second", "gauge", "Output tokens/s of the candidate's last trial.", _C
)
CANDIDATE_LATENCY = Metric(
    "tunewright_candidate_latency_seconds",
    "gauge",
    "Latency of the candidate's last trial: ttft, tpot, itl or e2e, from the load generator's own samples.",
    (*_C, "latency", "percentile"),
)
CANDIDATE_SLO_MARGIN = Metric(
    "tunewright_candidate_slo_margin_ratio",
    "gauge",
    "Smallest (bound - value) / bound over the SLO in the candidate's last trial; negative: the SLO is missed.",
    _C,
)
CANDIDATE_START = Metric(
    "tunewright_candidate_start_seconds", "gauge", "From launch to the first completion, in its last trial.", _C
)

PROMOTION_REPLICAS = Metric(
    "tunewright_promotion_replicas", "gauge", "Production replicas that the promotion is to move.", _T
)
PROMOTION_UPDATED = Metric(
    "tunewright_promotion_updated_replicas", "gauge", "Production replicas that are to run the candidate by now.", _T
)
VERDICT = Metric(
    "tunewright_promotion_verdict",
    "gauge",
    "1 for the outcome (pass, fail, inconclusive) of the last verdict on the canary, else 0; by metric, and `all`.",
    (*_T, "metric", "outcome"),
)
VERDICT_SAMPLES = Metric(
    "tunewright_promotion_verdict_samples",
    "gauge",
    "Samples that the last verdict rests on, on each side (canary, stable).",
    (*_T, "metric", "side"),
)

RECONCILE_SECONDS = Metric(
    "tunewright_reconcile_duration_seconds", "histogram", "How long one pass over one tuning took.", (), True
)
RECONCILE_ERRORS = Metric(
    "tunewright_reconcile_errors_total",
    "counter",
    "Passes that ended in an error, by kind: conflict (tried again), port (something outside), refused, fault (ours).",
    ("kind",),
    True,
)
METRIC_SOURCE_FAILURES = Metric(
    "tunewright_metric_source_failures_total",
    "counter",
    "Questions to Prometheus, or scrapes of the servers, that came to nothing.",
    (),
    True,
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
