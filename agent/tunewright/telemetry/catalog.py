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


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"tunewright_{name}", "gauge", help_text, labels)


def _of_tuning(name: str, help_text: str, *labels: str) -> Metric:
    kind: MetricType = "counter" if name.endswith("_total") else "gauge"
    return Metric(f"tunewright_{name}", kind, help_text, ("namespace", "tuning", *labels))


def _of_process(name: str, kind: MetricType, help_text: str, *labels: str) -> Metric:
    return Metric(f"tunewright_{name}", kind, help_text, labels, process_local=True)


# --- the exporter ----------------------------------------------------------------------------------------------------

BUILD_INFO = _gauge("build_info", "Always 1; the version of Tunewright is in the label.", "version")
STORE_READABLE = _gauge(
    "store_readable", "1 when the records could be read for this scrape; 0: no tuning of the namespace is exported.",
    "namespace",
)  # fmt: skip

# --- where a tuning is -----------------------------------------------------------------------------------------------

PHASE = _of_tuning("tuning_phase", "1 for the phase that the tuning is in, else 0.", "phase")
PHASE_SECONDS = _of_tuning("tuning_phase_seconds", "Time in the current phase, without the time it was suspended.")
PHASE_DEADLINE = _of_tuning(
    "tuning_phase_deadline_seconds",
    "How long the current phase may take in all; absent where a person is waited for, going back, and after the end.",
)
PHASE_START = _of_tuning(
    "tuning_phase_start_timestamp_seconds", "When the tuning last entered the phase; absent where it never did.",
    "phase",
)  # fmt: skip
SUSPENDED = _of_tuning("tuning_suspended", "1 while the tuning is suspended.")
STEP_FAILURES = _of_tuning("tuning_step_failures", "Failures in a row of the current step.")
APPROVAL_WAITING = _of_tuning("tuning_approval_waiting", "1 while a person is to approve.")
APPROVAL_WAITING_SECONDS = _of_tuning(
    "tuning_approval_waiting_seconds", "How long the approval has been waited for; absent if not."
)
APPROVAL_EXPIRY = _of_tuning("tuning_approval_expiry_seconds", "How long an approval is waited for at most.")
ROLLBACKS = _of_tuning(
    "tuning_rollbacks_total",
    "How often production was taken back to the baseline: by the guard itself, or because a person asked for it.",
    "cause",
)
FOREIGN = _of_tuning(
    "tuning_foreign_manager", "1 while somebody else changes what Tunewright set in production, or owns it."
)
DRIFT = _of_tuning(
    "tuning_drift_ratio",
    "Distance of production's traffic from the traffic it was tuned for, at the last look (0: the same; 0.3: about "
    "35 % more or less load, or 30 % of the requests of another length). Absent before the first look after an end.",
)
DRIFT_THRESHOLD = _of_tuning("tuning_drift_threshold_ratio", "Drift past which the tuning no longer fits.")

# --- the search ------------------------------------------------------------------------------------------------------

TRIALS = _of_tuning(
    "tuning_trials",
    "Trials by purpose (baseline, search, confirm) and outcome (complete, infeasible, stopped, failed, running).",
    "purpose", "outcome",
)  # fmt: skip
TRIALS_BUDGET = _of_tuning("tuning_trials_budget", "Trials that the search may take.")
TRIAL_FAILURES = _of_tuning(
    "tuning_trial_failures", "Trials whose server or load test failed, by kind of failure; kinds not seen are absent.",
    "kind",
)  # fmt: skip
SPARE_PHASE_SECONDS = _of_tuning(
    "tuning_spare_phase_seconds",
    "How long a running trial has been in its phase (Pending, Starting, Measuring, Stopping), of several in one phase "
    "the longest; absent without one.",
    "phase",
)
SPARE_START_TIMEOUT = _of_tuning(
    "tuning_spare_start_timeout_seconds", "How long a server on the spare may take to start."
)
BASELINE_OBJECTIVE = _of_tuning(
    "tuning_baseline_objective",
    "Mean objective of the baseline before the search, in the objective's own unit (latencies in seconds).",
    "objective", "source",
)  # fmt: skip
BEST_OBJECTIVE = _of_tuning(
    "tuning_best_objective", "Objective of the best feasible trial so far (one run), in the objective's own unit.",
    "objective", "source",
)  # fmt: skip
_WITHIN = (
    "end of its 95 % interval within a run (starts differ by more: see the gain). Absent where the objective has none: "
    "goodput and latencies."
)
BASELINE_OBJECTIVE_LOW, BASELINE_OBJECTIVE_HIGH, BEST_OBJECTIVE_LOW, BEST_OBJECTIVE_HIGH = (
    _of_tuning(f"tuning_{of}_objective_{end}", f"Objective of the {of}: {word} {_WITHIN}", "objective", "source")
    for of in ("baseline", "best")
    for end, word in (("low", "lower"), ("high", "upper"))
)
GAIN = _of_tuning(
    "tuning_gain_ratio",
    "Gain of a finalist over the baseline from the confirming rounds alone (0.1: 10 % better).",
    "candidate",
)
GAIN_LOW = _of_tuning("tuning_gain_low_ratio", "Lower end of the gain's interval.", "candidate")
GAIN_HIGH = _of_tuning("tuning_gain_high_ratio", "Upper end of the gain's interval.", "candidate")
GAIN_ROUNDS = _of_tuning("tuning_gain_rounds", "Fresh starts of each side that the gain rests on.", "candidate")
KNOB_EFFECT = _of_tuning(
    "tuning_knob_effect_ratio",
    "Gain that one change against the baseline is worth by itself, as far as the trials tell (0.1: 10 % better).",
    "knob", "value",
)  # fmt: skip
KNOB_EFFECT_LOW = _of_tuning(
    "tuning_knob_effect_low_ratio", "Lower end of the effect's 90 % interval.", "knob", "value"
)
KNOB_EFFECT_HIGH = _of_tuning(
    "tuning_knob_effect_high_ratio", "Upper end of the effect's 90 % interval.", "knob", "value"
)
GPU_SECONDS = _of_tuning(
    "tuning_gpu_seconds",
    "Time of the spares, each from its first to its last finished trial, times the GPUs of one server, by use: "
    "starting, warming, measuring, other, and idle between trials. Starts again from 0 when the tuning starts anew.",
    "use",
)

# --- what was asked for, and what the traffic is ---------------------------------------------------------------------

SLO_BOUND = _of_tuning("slo_bound_seconds", "Bound of the SLO on a latency; only those given.", "latency", "percentile")
SLO_ERRORS = _of_tuning("slo_error_ratio", "Share of requests that may fail by the SLO.")
TRAFFIC_DEMAND = _of_tuning(
    "traffic_demand_requests_per_second", "Demand per replica that was learned; a lower bound where it was saturated."
)
TRAFFIC_SATURATED = _of_tuning("traffic_saturated", "1 when the queue never emptied while the traffic was learned.")
TRAFFIC_CONCURRENCY = _of_tuning(
    "traffic_concurrency", "Requests at a time per replica that were learned: mean and p95.", "statistic"
)
TRAFFIC_TOKENS = _of_tuning(
    "traffic_tokens", "Length of prompts and outputs that was learned: mean, p50 and p95.", "kind", "statistic"
)
TRAFFIC_PREFIX_REUSE = _of_tuning(
    "traffic_prefix_reuse_ratio", "Share of prompt tokens found in the prefix cache; absent where it is off."
)

# --- trials and candidates -------------------------------------------------------------------------------------------

TRIAL_INFO = _of_tuning(
    "trial_info",
    "Always 1, for each of the latest finished trials: what it changed against the baseline and what came of it.",
    "trial", "candidate", "purpose", "outcome", "failure", "changes",
)  # fmt: skip
TRIAL_FINISHED = _of_tuning("trial_finished_timestamp_seconds", "When the trial ended.", "trial")
TRIAL_OBJECTIVE = _of_tuning(
    "trial_objective", "Objective that the trial measured, in the objective's own unit.", "trial", "source"
)
_C = ("candidate", "source")
CANDIDATE_INFO = _of_tuning(
    "candidate_info", "Always 1, for the candidates of a role: baseline, best (in one run) and winner.",
    "candidate", "role", "changes",
)  # fmt: skip
CANDIDATE_OBJECTIVE = _of_tuning(
    "candidate_objective",
    "Objective of the candidate's last trial, in the objective's own unit. Exported for the baseline, the winner, the "
    "best and the latest candidates.",
    *_C,
)
CANDIDATE_TOKENS = _of_tuning(
    "candidate_output_tokens_per_second", "Output tokens/s of the candidate's last trial.", *_C
)
CANDIDATE_LATENCY = _of_tuning(
    "candidate_latency_seconds",
    "Latency of the candidate's last trial: ttft, tpot, itl or e2e, from the load generator's own samples.",
    *_C, "latency", "percentile",
)  # fmt: skip
CANDIDATE_SLO_MARGIN = _of_tuning(
    "candidate_slo_margin_ratio",
    "Smallest (bound - value) / bound over the SLO in the candidate's last trial; negative: the SLO is missed.",
    *_C,
)
CANDIDATE_START = _of_tuning("candidate_start_seconds", "From launch to the first completion, in its last trial.", *_C)

# --- the promotion ---------------------------------------------------------------------------------------------------

PROMOTION_REPLICAS = _of_tuning("promotion_replicas", "Production replicas that the promotion is to move.")
PROMOTION_UPDATED = _of_tuning(
    "promotion_updated_replicas", "Production replicas that are to run the candidate by now."
)
VERDICT = _of_tuning(
    "promotion_verdict",
    "1 for the outcome (pass, fail, inconclusive) of the last verdict on the canary, else 0; by metric, and `all`.",
    "metric", "outcome",
)  # fmt: skip
VERDICT_SAMPLES = _of_tuning(
    "promotion_verdict_samples", "Samples that the last verdict rests on, on each side (canary, stable).",
    "metric", "side",
)  # fmt: skip
VERDICT_VALUE = _of_tuning(
    "promotion_verdict_value",
    "What the last verdict compared, on each side (canary, stable): latencies in seconds, errors as a ratio; absent "
    "without data.",
    "metric", "side",
)  # fmt: skip
REQUIRED_SAMPLES = _of_tuning("promotion_required_samples", "Requests on each side before there is any verdict.")

# --- of this process -------------------------------------------------------------------------------------------------

RECONCILE_SECONDS = _of_process("reconcile_duration_seconds", "histogram", "How long one pass over one tuning took.")
RECONCILE_ERRORS = _of_process(
    "reconcile_errors_total",
    "counter",
    "Passes that ended in an error, by kind: conflict (tried again), port (something outside), refused, fault (ours).",
    "kind",
)
SOURCE_REQUESTS = _of_process(
    "metric_source_requests_total",
    "counter",
    "Questions to Prometheus (or to a direct scrape), by outcome: data, empty (no series matched), error.",
    "outcome",
)
SOURCE_SUCCESS = _of_process(
    "metric_source_last_data_timestamp_seconds",
    "gauge",
    "When a question to Prometheus (or to a direct scrape) last came back with data; 0: never yet.",
)
LEADER = _of_process("leader", "gauge", "1 while this process may act: it holds the Lease, or the state folder's lock.")
WATCH_AGE = _of_process(
    "watch_age_seconds",
    "gauge",
    "Since the Kubernetes API server last answered the watch of a resource; +Inf: it never did.",
    "resource",
)

API_REQUESTS = _of_process(
    "api_server_requests_total",
    "counter",
    "Requests sent to the Kubernetes API server, each try counted, by verb and resource as in RBAC, and HTTP status "
    "(none: there was no answer).",
    "verb", "resource", "code",
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
