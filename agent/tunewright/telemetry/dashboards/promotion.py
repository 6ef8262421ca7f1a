"""Dashboard *Promotion*: the canary beside the stable servers, and what was decided on it."""

from tunewright.observe import names
from tunewright.telemetry.dashboards.grafana import Dashboard, Panel, Query, Row
from tunewright.telemetry.dashboards.shared import (
    API,
    APPROVAL_MARKS,
    JOB,
    MODEL,
    NAMESPACE,
    OURS,
    PHASE_MARKS,
    RATE,
    TUNING,
    VLLM,
    quantile,
    ratio,
    slo,
)
from tunewright.telemetry.dashboards.tuning import IN_PHASE, PHASE_NOW, REPORT, TIMELINE

_SIDES = f'{VLLM},role=~"canary|stable"'
_NO_ROLE = (
    "of the canary while there is none, and of both sides where the scrape does not set the label `role` "
    "(docs/dashboards.md)"
)
_NO_VERDICT = "before there is a verdict on a canary"
_OUTCOMES = {"0": ("", "text"), "1": ("yes", "blue")}


def _latency(title: str, description: str, histogram: str, latency: str) -> Panel:
    return Panel(
        title,
        f"{description} Canary beside stable servers, over the same minutes; the dashed line is the SLO's bound.",
        [
            Query(quantile(0.95, histogram, _SIDES, "role"), "{{role}} p95", empty=_NO_ROLE),
            Query(quantile(0.5, histogram, _SIDES, "role"), "{{role}} p50", empty=_NO_ROLE),
            slo(latency),
        ],
        unit="s",
        minimum=0,
        width=8,
    )


PROMOTION_DASHBOARD = Dashboard(
    uid="tunewright-promotion",
    title="Tunewright / Promotion",
    description="The guarded rollout: phases, canary beside stable servers, verdicts, and the decision waited for.",
    variables=(NAMESPACE, TUNING, JOB, MODEL, API),
    annotations=(PHASE_MARKS, APPROVAL_MARKS),
    since="now-3h",
    refresh="10s",
    rows=[
        Row("Where it is", [
            PHASE_NOW,
            IN_PHASE,
            Panel(
                "Approval waited for",
                "How long a person has been waited for; it expires on its own, safely. The link has the report with "
                "what is to be decided; decide with `tunewright approve` or `tunewright reject`.",
                [
                    Query(f"max(tunewright_tuning_approval_waiting_seconds{{{OURS}}})", "waiting",
                          empty="while nobody is waited for"),
                    Query(f"max(tunewright_tuning_approval_expiry_seconds{{{OURS}}})", "expires after"),
                ],
                kind="stat", unit="s", width=5, height=4, no_value="Nobody is waited for",
                links=(REPORT, ("What there is to decide", "${api}/${tuning}/promotion")),
            ),
            Panel(
                "Replicas on the winner",
                "Production replicas that are to run the candidate by now, and how many there are to move.",
                [
                    Query(f"max(tunewright_promotion_updated_replicas{{{OURS}}})", "updated",
                          empty="before a promotion has begun"),
                    Query(f"max(tunewright_promotion_replicas{{{OURS}}})", "of", empty="before a promotion has begun"),
                ],
                kind="stat", width=5, height=4, no_value="Not begun",
            ),
            Panel(
                "Rollbacks",
                "How often production was taken back to the baseline during the time shown. docs/runbooks.md tells "
                "what to do then.",
                [
                    Query(
                        "round(max(sum without (cause) "
                        f"(increase(tunewright_tuning_rollbacks_total{{{OURS}}}[$__range]))))",
                        "rollbacks",
                    )
                ],
                kind="stat", width=4, height=4, steps=((None, "green"), (1, "red")),
            ),
            TIMELINE,
        ]),
        Row("Canary beside stable", [
            _latency("TTFT", "Time to first token, from the servers' histograms.", names.TTFT, "ttft"),
            _latency("ITL", "Inter-token latency: under speculation it counts steps of the engine, not tokens.",
                     names.ITL, "itl"),
            _latency("E2E", "Whole requests, from the servers' histograms.", names.E2E, "e2e"),
            Panel(
                "Errors",
                "Share of finished requests that ended in an error; the dashed line is what the SLO allows.",
                [
                    Query(ratio(f'{names.FINISHED}{{{_SIDES},finished_reason="error"}}',
                                f'{names.FINISHED}{{{_SIDES},finished_reason!="abort"}}', "role"),
                          "{{role}}", empty=_NO_ROLE),
                    Query(f"max(tunewright_slo_error_ratio{{{OURS}}})", "SLO", style="bound"),
                ],
                unit="percentunit", minimum=0, width=8,
            ),
            Panel(
                "Output tokens/s per server",
                "At production's own rate this says how the requests are shared, not what a server could do.",
                [Query(f"avg by (role) (sum by (role, instance) (rate({names.GENERATED}{{{_SIDES}}}{RATE})))",
                       "{{role}}", empty=_NO_ROLE)],
                minimum=0, width=8,
            ),
            Panel(
                "Requests/s",
                "Requests that ended, on each side: a canary without traffic can't be judged.",
                [Query(f"sum by (role) (rate({names.FINISHED}{{{_SIDES}}}{RATE}))", "{{role}}", empty=_NO_ROLE)],
                unit="reqps", minimum=0, width=8,
            ),
        ]),
        Row("The verdict", [
            Panel(
                "Verdict",
                "Outcome of the last verdict. Inconclusive is never a pass: too few samples, or not settled.",
                [Query(f'max by (outcome) (tunewright_promotion_verdict{{{OURS},metric="all"}} == 1)', "{{outcome}}",
                       empty=_NO_VERDICT)],
                kind="stat", width=6, height=8, no_value="No verdict yet",
                options={"textMode": "name", "colorMode": "none"},
            ),
            Panel(
                "Verdicts over time",
                "One row for each metric and outcome the verdict had during this time.",
                [Query(f"max by (metric, outcome) (tunewright_promotion_verdict{{{OURS}}} == 1)",
                       "{{metric}}: {{outcome}}", empty=_NO_VERDICT)],
                kind="state-timeline", width=18, mappings=_OUTCOMES, no_value="No verdict yet",
            ),
            Panel(
                "Samples behind the verdict",
                "Requests that the last verdict rests on, on each side, and how many are needed before there is one.",
                [
                    Query(f"max by (side) (tunewright_promotion_verdict_samples{{{OURS}}})", "{{side}}",
                          empty=_NO_VERDICT),
                    Query(f"max(tunewright_promotion_required_samples{{{OURS}}})", "needed", style="bound"),
                ],
                minimum=0, width=12,
            ),
            Panel(
                "Numbers that were compared",
                "What the last verdict compared: latencies in seconds, errors as a share.",
                [
                    Query(f'max by (metric) (tunewright_promotion_verdict_value{{{OURS},side="canary"}})',
                          empty=_NO_VERDICT),
                    Query(f'max by (metric) (tunewright_promotion_verdict_value{{{OURS},side="stable"}})',
                          empty="before a verdict, and while all servers are held to the SLO after the roll"),
                ],
                kind="table", no_value="No verdict yet",
                transformations=[
                    {"id": "merge", "options": {}},
                    {"id": "organize", "options": {
                        "excludeByName": {"Time": True},
                        "indexByName": {"metric": 0, "Value #A": 1, "Value #B": 2},
                        "renameByName": {"metric": "Metric", "Value #A": "Canary", "Value #B": "Stable"},
                    }},
                ],
            ),
        ]),
    ],
)  # fmt: skip
