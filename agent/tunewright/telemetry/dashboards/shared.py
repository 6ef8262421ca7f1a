"""What the dashboards have in common: variables, selectors, annotations."""

from tunewright.domain.phases import TOUCHES_PRODUCTION, Phase
from tunewright.telemetry.dashboards.grafana import Annotation, Query, Variable

OURS = 'namespace=~"$namespace",tuning=~"$tuning"'
"""Selects the series of the chosen tuning. Without Kubernetes there is no namespace label, which `.*` matches too."""

VLLM = 'namespace=~"$namespace",job=~"$job",model_name=~"$model"'
"""Selects the servers' own series."""

RATE = "[$__rate_interval]"

NAMESPACE = Variable(
    "namespace", "Namespace", "label_values(tunewright_tuning_phase, namespace)", everything=".*",
    hint="Namespace of the tunings; there is none outside of Kubernetes.",
)  # fmt: skip
TUNING = Variable(
    "tuning", "Tuning", 'label_values(tunewright_tuning_phase{namespace=~"$namespace"}, tuning)',
    hint="One tuning: objectives of two can't share an axis.",
)  # fmt: skip
JOB = Variable(
    "job", "vLLM job", 'label_values(vllm:num_requests_running{namespace=~"$namespace"}, job)', everything=".+",
    hint="Scrape jobs of the vLLM servers: production's, and the spare's if it is scraped.",
)  # fmt: skip
MODEL = Variable(
    "model", "Model", 'label_values(vllm:num_requests_running{namespace=~"$namespace",job=~"$job"}, model_name)',
    everything=".+", hint="Served model name.",
)  # fmt: skip
API = Variable(
    "api", "Tunings in the REST API", default="http://127.0.0.1:8765/api/v1alpha1/tunings",
    hint="Where your browser finds the tunings in Tunewright's REST API, in a cluster those of their namespace: "
    "…/api/v1alpha1/namespaces/NAMESPACE/tunings. Links to the report and to the decision go there.",
)  # fmt: skip

PHASE_MARKS = Annotation(
    name="Production moves",
    expr=f'tunewright_tuning_phase{{{OURS},phase=~"{"|".join(sorted(TOUCHES_PRODUCTION))}"}} == 1',
    title="{{phase}}",
    text="{{tuning}}",
    colour="blue",
)
APPROVAL_MARKS = Annotation(
    name="Waiting for approval",
    expr=f'tunewright_tuning_phase{{{OURS},phase="{Phase.AWAITING_APPROVAL}"}} == 1',
    title="Waiting for approval",
    text="{{tuning}}",
    colour="orange",
)
TRIAL_MARKS = Annotation(
    name="Trials",
    expr=(
        f"(((time() - tunewright_trial_finished_timestamp_seconds{{{OURS}}}) < 60) + 1)"
        " * on (namespace, tuning, trial) group_left (candidate, outcome, changes)"
        f" tunewright_trial_info{{{OURS}}}"
    ),
    title="Trial {{trial}}: {{outcome}}",
    text="{{changes}}",
    colour="purple",
)


def quantile(q: float, histogram: str, selector: str, by: str) -> str:
    """A quantile of a vLLM histogram, over time."""
    return f"histogram_quantile({q:g}, sum by (le, {by}) (rate({histogram}_bucket{{{selector}}}{RATE})))"


def ratio(above: str, below: str, by: str) -> str:
    """A ratio of two rates of counters (series with their selectors), never of totals."""
    return f"sum by ({by}) (rate({above}{RATE})) / sum by ({by}) (rate({below}{RATE}))"


def slo(latency: str) -> Query:
    """The bounds of the SLO on one latency, drawn as dashed red lines."""
    return Query(
        f'max by (percentile) (tunewright_slo_bound_seconds{{{OURS},latency="{latency}"}})',
        "SLO {{percentile}}", style="bound", empty=f"of a bound where the SLO has none on {latency.upper()}",
    )  # fmt: skip
