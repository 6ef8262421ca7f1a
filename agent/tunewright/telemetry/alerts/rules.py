"""The alert rules, each with what its reader needs at three in the morning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True)
class Alert:
    """One rule. `means`, `look` and `act` are its section in docs/runbooks.md.

    `critical`: production is at risk, now. `warning`: today. `info`: a person is waited for, or should know.
    """

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    means: str
    look: Sequence[str]
    act: Sequence[str]


_ONE = "on (namespace, tuning)"
_MOVING = 'phase=~"Canary|Watching"'
_WITH_SPARE = 'phase=~"Baselining|Searching|Confirming"'
_SHOWN = "`tunewright show NAME`, in a cluster `kubectl describe tuning NAME`: the sentence says what it waits for."

ALERTS: tuple[Alert, ...] = (
    Alert(
        "TunewrightDown",
        "absent(tunewright_build_info)",
        "5m",
        "critical",
        "Tunewright is not scraped: it is down, or Prometheus does not reach it.",
        "Production keeps serving as it is. But nobody watches a running rollout: a canary stays where it is, and a "
        "regression is not taken back.",
        (
            "Is the process there? `kubectl -n tunewright get pods`, or the terminal that ran `tunewright tune`.",
            "Its log's last lines; Prometheus' page *Status → Targets* where the process is well.",
        ),
        (
            "Start it again: it goes on where it was. Nothing is lost, and no step is taken twice.",
            "Where it can't be started and a canary must go: `tunewright stop` is not it, for it ends production. Set "
            "the target back by hand as the report's section *How to go back* says.",
        ),
    ),
    Alert(
        "TunewrightNoLeader",
        "max(tunewright_leader) == 0",
        "2m",
        "critical",
        "No Tunewright process may act: none holds the Lease.",
        "As if it were down: production keeps serving, and no rollout is watched.",
        (
            "`kubectl -n tunewright get lease tunewright -o yaml`: who holds it, and when was it renewed?",
            "The log: a Lease that can't be renewed names the error of the API server.",
        ),
        (
            "An API server that is slow or refuses: cure that, the process keeps trying.",
            "Rights: compare the Role with `deploy/base/role.yaml`, for all namespaces with `deploy/cluster-wide`.",
        ),
    ),
    Alert(
        "TunewrightStoreUnreadable",
        "tunewright_store_readable == 0",
        "5m",
        "critical",
        "The records of tunings can't be read{{ with $labels.namespace }} in {{ . }}{{ end }}.",
        "No tuning is exported meanwhile, so that the other alerts are blind.",
        ("The log names the file or the API's answer.", "Locally: disk full, or rights of the state folder?"),
        ("Cure what the log names. Records are written durably before each step returns; do not delete them.",),
    ),
    Alert(
        "TunewrightPhaseStuck",
        f"(tunewright_tuning_phase_seconds > {_ONE} (0.9 * tunewright_tuning_phase_deadline_seconds))"
        f" unless {_ONE} (tunewright_tuning_suspended == 1)",
        "1m",
        "warning",
        "Tuning {{ $labels.tuning }} has used nine tenths of the time that its phase may take.",
        "At the deadline the phase is given up: before the canary the tuning fails and production stays as it was; in "
        "Canary, Rolling and Watching it goes back to the baseline.",
        (_SHOWN, "The dashboard *Tuning*: which trial, which step, since when."),
        (
            "Often something outside is slow: a spare that does not start, or no traffic on the canary.",
            "To keep it from ending while you look: `tunewright suspend NAME`. Suspended time costs no deadline.",
        ),
    ),
    Alert(
        "TunewrightRollbackStuck",
        f'(tunewright_tuning_phase_seconds > 900) and {_ONE} (tunewright_tuning_phase{{phase="RollingBack"}} == 1)',
        "0m",
        "critical",
        "Tuning {{ $labels.tuning }} has been going back to the baseline for more than 15 minutes.",
        "Going back is never given up, so it has no deadline. Replicas that are not back yet run the candidate, or "
        "could not start.",
        (_SHOWN, "Are the baseline's servers starting? Their logs; `kubectl get pods`, and events of those Pending."),
        (
            "Give it what it waits for: mostly a free GPU, or an image that can be pulled.",
            "By hand: the report's section *How to go back* has the baseline's settings.",
        ),
    ),
    Alert(
        "TunewrightStepFailing",
        "tunewright_tuning_step_failures >= 5",
        "5m",
        "warning",
        "Tuning {{ $labels.tuning }} fails at the same step again and again.",
        "It tries again every minute, until the phase's deadline. In a phase that moves production, production is kept "
        "as the last good step left it.",
        (_SHOWN,),
        ("Cure what the sentence names; it goes on by itself at the next try.",),
    ),
    Alert(
        "TunewrightApprovalWaiting",
        "tunewright_tuning_approval_waiting_seconds > 86400",
        "0m",
        "info",
        "Tuning {{ $labels.tuning }} has waited for a decision for more than a day.",
        "Nothing is moved, and nothing is lost; the spare is free. Production serves slower, or dearer, than it could.",
        ("The report: what changes, how much better, how sure, at what risk.",),
        ("`tunewright approve NAME`, or `tunewright reject NAME`.",),
    ),
    Alert(
        "TunewrightApprovalExpires",
        f"tunewright_tuning_approval_waiting_seconds > {_ONE} (0.8 * tunewright_tuning_approval_expiry_seconds)",
        "0m",
        "warning",
        "Nobody has decided on tuning {{ $labels.tuning }}, and the question expires soon.",
        "At its expiry the tuning ends as Rejected and production stays as it is: the search would have to be run "
        "again.",
        ("The report: what changes, how much better, how sure, at what risk.",),
        ("Decide; or allow more time: `promotion.approvalExpiry` may be edited at any time.",),
    ),
    Alert(
        "TunewrightRolledBack",
        'increase(tunewright_tuning_rollbacks_total{cause="guard"}[15m]) > 0',
        "0m",
        "warning",
        "Tuning {{ $labels.tuning }} takes production back to the baseline, by itself.",
        "The guard did its work: the canary, a replica or the watch afterwards was worse than allowed, or "
        "stood in the way of a deadline. An abort or a rollback that a person asked for raises nothing.",
        (
            "The report's sections *Promotion* and *Phases*: which metric, by how much, on how many samples.",
            "Is production back whole? The dashboard *Promotion*, replicas on the winner.",
        ),
        (
            "Nothing at once: the baseline serves.",
            "Then ask why the spare showed otherwise: mostly the load test misses something of the traffic.",
        ),
    ),
    Alert(
        "TunewrightMetricsMissing",
        'sum(rate(tunewright_metric_source_requests_total{outcome=~"empty|error"}[10m]))'
        " > 0.5 * sum(rate(tunewright_metric_source_requests_total[10m]))",
        "5m",
        "warning",
        "More than half of Tunewright's questions to Prometheus come to nothing.",
        "Without data there is no traffic profile, and no verdict: no data is never a pass. A canary that can't be "
        "judged goes back in the end.",
        (
            "The dashboard *Controller*: `error` (Prometheus does not answer) or `empty` (nothing matches)?",
            "`tunewright check FILE` asks what the tuning will ask.",
        ),
        (
            "error: Prometheus' URL, its load, the token's file.",
            "empty: `metrics.selector` against the labels your series really have; was a job renamed?",
        ),
    ),
    Alert(
        "TunewrightCanaryBlind",
        f"(tunewright_tuning_phase{{{_MOVING}}} == 1) and on ()"
        " (time() - max(tunewright_metric_source_last_data_timestamp_seconds) > 600)",
        "0m",
        "critical",
        "Tuning {{ $labels.tuning }} is in {{ $labels.phase }}, and there have been no metrics for ten minutes.",
        "The candidate takes production's requests and nobody can see how it does. It neither passes nor is rolled on; "
        "after `analysis.maxDuration` it goes back.",
        ("As for TunewrightMetricsMissing.", "The servers' own `/metrics`, and clients' errors."),
        ("Bring the metrics back; or end it now: `tunewright abort NAME` takes the canary away.",),
    ),
    Alert(
        "TunewrightSparePending",
        f'tunewright_tuning_spare_phase_seconds{{phase=~"Pending|Starting"}} > {_ONE} group_left ()'
        " (0.8 * tunewright_tuning_spare_start_timeout_seconds)",
        "1m",
        "warning",
        "The spare's server of tuning {{ $labels.tuning }} does not come up ({{ $labels.phase }}).",
        "Production is not touched. The search stands still; after `spare.startTimeout` the trial counts as failed.",
        (
            "In a cluster: `kubectl get pods -l tunewright.dev/role=trial` and the events of the one that is Pending.",
            "Locally: `nvidia-smi` (is somebody else on the GPU?), and the trial's log in the state folder.",
        ),
        ("Free the GPU, or name nodes that have one in `spare.nodeSelector`.", "A large model: raise `startTimeout`."),
    ),
    Alert(
        "TunewrightSpareUnusable",
        'sum by (namespace, tuning) (tunewright_tuning_trial_failures{kind=~"unschedulable|gpuNotClean|modelMissing"})'
        f" > 1 and {_ONE} (tunewright_tuning_phase{{{_WITH_SPARE}}} == 1)",
        "0m",
        "warning",
        "Several trials of tuning {{ $labels.tuning }} failed by the machine's fault.",
        "The candidates are not to blame, and are tried again a bounded number of times; the budget runs meanwhile.",
        ("The report's section *Failures*: kinds, causes and advice.",),
        ("As the advice says; then let it go on, or start it anew.",),
    ),
    Alert(
        "TunewrightTrafficDrift",
        f"tunewright_tuning_drift_ratio > {_ONE} tunewright_tuning_drift_threshold_ratio",
        "15m",
        "info",
        "The traffic is no longer what tuning {{ $labels.tuning }} was made for.",
        "Production runs well or not as before; what was found best for other traffic may no longer be.",
        ("The dashboard *Tuning*: load, lengths and shared prefixes that were learned, beside vLLM's own now.",),
        (
            "Tune again, or let it do so itself: `retune.mode: onDrift`.",
            "If it is a passing peak: raise `retune.drift`.",
        ),
    ),
    Alert(
        "TunewrightForeignManager",
        "tunewright_tuning_foreign_manager == 1",
        "5m",
        "warning",
        "Somebody else changes or holds what tuning {{ $labels.tuning }} set in production.",
        "A GitOps tool, another controller or a person owns the same fields: its next apply undoes the promotion, "
        "without a canary. Or a right was taken away, or an HTTPRoute can't be read, so that a canary can't go. A "
        "rollout in progress is held; going back goes on with all else, and is given up after "
        "`promotion.foreignTimeout`.",
        (_SHOWN, "`kubectl get deployment NAME -o yaml --show-managed-fields`: who owns the fields?"),
        (
            "A missing right: the sentence names it, and the command that grants it. It goes on by itself then.",
            "Take the change into the other tool's source; the report has it as text.",
            "Or let Tunewright own the fields: `promotion.takeOver: true`, once the other tool leaves them out.",
        ),
    ),
    Alert(
        "TunewrightWatchSilent",
        "max by (resource) (tunewright_watch_age_seconds) > 120",
        "2m",
        "warning",
        "The watch of {{ $labels.resource }} has been silent for more than two minutes.",
        "Changes are still found by looking every half minute, only later. A watch that never answered shows as +Inf.",
        ("The log names the API server's answer; other controllers' logs tell whether it is the server.",),
        ("Mostly the API server, or the network to it. Rights: `watch` in the Role, or in the ClusterRole.",),
    ),
    Alert(
        "TunewrightFault",
        'increase(tunewright_reconcile_errors_total{kind="fault"}[15m]) > 0',
        "0m",
        "warning",
        "A mistake in Tunewright itself ended a pass.",
        "That tuning does not go on; the others do. Production is kept as the last good step left it.",
        ("The log has the traceback and the tuning's name.",),
        ("Report it with the traceback. `tunewright abort NAME` goes back, where it was moving production.",),
    ),
)
