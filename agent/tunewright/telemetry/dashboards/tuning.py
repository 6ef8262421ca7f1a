"""Dashboard *Tuning*: where it is, what it found, and what that took."""

from tunewright.domain.phases import Phase
from tunewright.telemetry.dashboards.grafana import Dashboard, Json, Panel, Query, Row
from tunewright.telemetry.dashboards.shared import (
    API,
    APPROVAL_MARKS,
    NAMESPACE,
    OURS,
    PHASE_MARKS,
    TRIAL_MARKS,
    TUNING,
)

REPORT = ("Report of this tuning", "${api}/${tuning}/report")
_NOT_YET = "before the baseline has been measured"
_NO_INTERVAL = "before there are trials, and where the objective has no interval within a run: goodput and latencies"

_BAD = {Phase.FAILED, Phase.ROLLED_BACK, Phase.ROLLING_BACK, Phase.INFEASIBLE, Phase.REJECTED}
_WAITS = {Phase.AWAITING_APPROVAL}
_DONE = {Phase.PROMOTED, Phase.RECOMMENDED}

PHASE_NOW = Panel(
    "Phase",
    "The phase that the tuning is in. docs/architecture.md tells which may follow.",
    [Query(f"max by (phase) (tunewright_tuning_phase{{{OURS}}} == 1)", "{{phase}}")],
    kind="stat", width=5, height=4, no_value="There is no such tuning",
    options={"textMode": "name", "colorMode": "none"},
)  # fmt: skip
IN_PHASE = Panel(
    "In this phase",
    "How long it has been in its phase, without the time it was suspended, and how long the phase may take in all.",
    [
        Query(f"max(tunewright_tuning_phase_seconds{{{OURS}}})", "so far"),
        Query(
            f"max(tunewright_tuning_phase_deadline_seconds{{{OURS}}})", "at most",
            empty="of a limit where there is none: waiting for a person, going back, and after the end",
        ),
    ],
    kind="stat", unit="s", width=5, height=4,
)  # fmt: skip
TIMELINE = Panel(
    "Phases over time",
    "One row for each phase the tuning was in during this time.",
    [Query(f"max by (phase) (tunewright_tuning_phase{{{OURS}}} == 1)", "{{phase}}")],
    kind="state-timeline", width=24, height=9, mappings={"1": ("in this phase", "blue")},
    overrides=[
        {
            "matcher": {"id": "byName", "options": str(phase)},
            "properties": [
                {"id": "mappings", "value": [
                    {"type": "value", "options": {"1": {"text": str(phase), "color": colour, "index": 0}}}
                ]}
            ],
        }
        for phases, colour in ((_BAD, "red"), (_WAITS, "orange"), (_DONE, "green"))
        for phase in sorted(phases)
    ],
)  # fmt: skip

_TRIAL = "trial, candidate, purpose, outcome, failure, changes"


def _table_of_trials() -> Panel:
    joined: list[Json] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True, "Value #A": True},
                "indexByName": {
                    "trial": 0, "purpose": 1, "changes": 2, "outcome": 3, "failure": 4, "Value #B": 5, "source": 6,
                    "Value #C": 7, "candidate": 8,
                },
                "renameByName": {
                    "trial": "Trial", "purpose": "For", "changes": "Against the baseline", "outcome": "Outcome",
                    "failure": "Failure", "Value #B": "Objective", "source": "Source", "Value #C": "Ended",
                    "candidate": "Candidate",
                },
            },
        },
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Trial", "desc": True}]}},
    ]  # fmt: skip
    return Panel(
        "Trials",
        "The latest 50 trials that ended: what each changed against the baseline, and what came of it. The objective "
        "is in its own unit (latencies in seconds); a trial that failed has none.",
        [
            Query(f"max by ({_TRIAL}) (tunewright_trial_info{{{OURS}}})"),
            Query(f"max by (trial, source) (tunewright_trial_objective{{{OURS}}})"),
            Query(f"max by (trial) (tunewright_trial_finished_timestamp_seconds{{{OURS}}}) * 1000"),
        ],
        kind="table", width=24, height=11, no_value="–", transformations=joined,
        overrides=[
            {"matcher": {"id": "byName", "options": "Ended"},
             "properties": [{"id": "unit", "value": "dateTimeAsLocal"}]},
            {"matcher": {"id": "byName", "options": "Against the baseline"},
             "properties": [{"id": "custom.width", "value": 520}]},
        ],
    )  # fmt: skip


TUNING_DASHBOARD = Dashboard(
    uid="tunewright-tuning",
    title="Tunewright / Tuning",
    description="Where a tuning is, the best so far against the baseline, every trial, and what it cost.",
    variables=(NAMESPACE, TUNING, API),
    annotations=(PHASE_MARKS, APPROVAL_MARKS, TRIAL_MARKS),
    rows=[
        Row("Where it is", [
            PHASE_NOW,
            IN_PHASE,
            Panel(
                "Gain, confirmed",
                "Of the finalist that is ahead, from fresh starts in turns with the baseline alone, with its interval.",
                [
                    Query(f"max(tunewright_tuning_gain_ratio{{{OURS}}})", "gain", empty="before two confirming rounds"),
                    Query(f"max(tunewright_tuning_gain_low_ratio{{{OURS}}})", "at least",
                          empty="before two confirming rounds"),
                ],
                kind="stat", unit="percentunit", width=5, height=4, steps=((None, "red"), (0.0, "green")),
                no_value="Not confirmed yet", links=(REPORT,),
            ),
            Panel(
                "Trials of the search",
                "How many have ended, of how many the budget allows.",
                [
                    Query(f'sum(tunewright_tuning_trials{{{OURS},purpose="search",outcome!="running"}})', "ended"),
                    Query(f"max(tunewright_tuning_trials_budget{{{OURS}}})", "budget"),
                ],
                kind="stat", width=5, height=4,
            ),
            Panel(
                "Approval",
                "Whether a person is waited for, and since when. Read the report, then approve or reject.",
                [Query(f"max(tunewright_tuning_approval_waiting{{{OURS}}})", "waiting")],
                kind="stat", width=4, height=4, mappings={"0": ("not asked for", "text"), "1": ("waiting", "orange")},
                links=(REPORT,),
            ),
            TIMELINE,
        ]),
        Row("What was found", [
            Panel(
                "Best so far against the baseline",
                "Objective of the best feasible trial (one run: the luckiest too) and of the baseline, in the "
                "objective's own unit, with their 95 % intervals within a run (dotted). The confirmed gain is what "
                "counts.",
                [
                    Query(f"max by (objective, source) (tunewright_tuning_best_objective{{{OURS}}})",
                          "best, {{objective}} ({{source}})", empty=_NOT_YET),
                    Query(f"max by (objective, source) (tunewright_tuning_baseline_objective{{{OURS}}})",
                          "baseline, {{objective}} ({{source}})", style="past", empty=_NOT_YET),
                    *(
                        Query(f"max by (objective, source) (tunewright_tuning_{of}_objective_{end}{{{OURS}}})",
                              f"{of}, {end}", style="edge", empty=_NO_INTERVAL)
                        for of in ("best", "baseline")
                        for end in ("low", "high")
                    ),
                ],
                minimum=0,
            ),
            Panel(
                "Trials by outcome",
                "Complete: measured, and the SLO holds. Infeasible: it misses the SLO, or can't run here. Failed: the "
                "machine's fault, more often than it is tried again.",
                [Query(f"sum by (outcome) (tunewright_tuning_trials{{{OURS}}})", "{{outcome}}")],
                minimum=0,
            ),
            _table_of_trials(),
            Panel(
                "What each change is worth",
                "Gain of one change against the baseline by itself, from an additive model of all trials; changes that "
                "were always tried together can't be told apart.",
                [Query(f"max by (knob, value) (tunewright_tuning_knob_effect_ratio{{{OURS}}})", "{{knob}} → {{value}}",
                       empty="before a change was measured")],
                kind="bargauge", unit="percentunit", steps=((None, "red"), (0.0, "green")), height=9,
            ),
            Panel(
                "… and how sure that is",
                "Ends of the 90 % interval of each change's worth: wide where few trials tell.",
                [
                    Query(f"max by (knob, value) (tunewright_tuning_knob_effect_low_ratio{{{OURS}}})",
                          "at least: {{knob}} → {{value}}", empty="before a change was measured"),
                    Query(f"max by (knob, value) (tunewright_tuning_knob_effect_high_ratio{{{OURS}}})",
                          "at most: {{knob}} → {{value}}", empty="before a change was measured"),
                ],
                kind="bargauge", unit="percentunit", steps=((None, "red"), (0.0, "green")), height=9,
            ),
            Panel(
                "TTFT p95 of candidates",
                "From the load generator's own samples, in each candidate's last trial.",
                [Query(f'max by (candidate, source) (tunewright_candidate_latency_seconds{{{OURS},latency="ttft",'
                       'percentile="p95"})', "{{candidate}} ({{source}})", empty=_NOT_YET)],
                kind="bargauge", unit="s",
            ),
            Panel(
                "SLO margin of candidates",
                "Smallest (bound - value) / bound over the whole SLO in the last trial; below 0 the SLO is missed.",
                [Query(f"max by (candidate, source) (tunewright_candidate_slo_margin_ratio{{{OURS}}})",
                       "{{candidate}} ({{source}})", empty=_NOT_YET)],
                kind="bargauge", unit="percentunit", steps=((None, "red"), (0.0, "green")),
            ),
        ]),
        Row("The traffic it is tuned for", [
            Panel(
                "Load per replica",
                "What production showed while its traffic was learned. Demand is a lower bound where it was saturated.",
                [
                    Query(f"max(tunewright_traffic_demand_requests_per_second{{{OURS}}})", "requests/s",
                          empty="before the traffic was learned"),
                    Query(f"max by (statistic) (tunewright_traffic_concurrency{{{OURS}}})", "at a time, {{statistic}}",
                          empty="before the traffic was learned"),
                    Query(f"max(tunewright_traffic_saturated{{{OURS}}})", "saturated (1: yes)",
                          empty="before the traffic was learned"),
                ],
                kind="stat", width=8, height=6,
            ),
            Panel(
                "Tokens per request",
                "Lengths of prompts and outputs that were learned.",
                [Query(f"max by (kind, statistic) (tunewright_traffic_tokens{{{OURS}}})", "{{kind}} {{statistic}}",
                       empty="before the traffic was learned")],
                kind="bargauge", width=8, height=6,
            ),
            Panel(
                "Shared prefix, and drift since",
                "Share of prompt tokens found in the prefix cache; distance of the traffic now from it.",
                [
                    Query(f"max(tunewright_traffic_prefix_reuse_ratio{{{OURS}}})", "shared prefix",
                          empty="where production's prefix cache is off"),
                    Query(f"max(tunewright_tuning_drift_ratio{{{OURS}}})", "drift",
                          empty="before the first look, one window after the end"),
                    Query(f"max(tunewright_tuning_drift_threshold_ratio{{{OURS}}})", "drift allowed"),
                ],
                kind="stat", unit="percentunit", width=8, height=6,
            ),
        ]),
        Row("What it cost", [
            Panel(
                "GPU time of the spare by use",
                "Where the spare's time went, from the first trial to the last that ended: starting servers is what a "
                "tuning pays for.",
                [Query(f"sum by (use) (tunewright_tuning_gpu_seconds{{{OURS}}})", "{{use}}")],
                kind="bargauge", unit="s",
            ),
            Panel(
                "Failed trials by kind",
                "What each kind means, and what to do: the report, section Failures.",
                [Query(f"sum by (kind) (tunewright_tuning_trial_failures{{{OURS}}})", "{{kind}}",
                       empty="when no trial failed")],
                kind="bargauge", no_value="No trial failed",
            ),
        ]),
    ],
)  # fmt: skip
