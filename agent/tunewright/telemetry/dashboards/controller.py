"""Dashboard *Controller*: whether Tunewright itself is well."""

from tunewright.telemetry.dashboards.grafana import Dashboard, Panel, Query, Row
from tunewright.telemetry.dashboards.shared import NAMESPACE, RATE

_NS = 'namespace=~"$namespace"'
_GOOD = ((None, "red"), (1.0, "green"))

CONTROLLER_DASHBOARD = Dashboard(
    uid="tunewright-controller",
    title="Tunewright / Controller",
    description="Health of Tunewright's own process: leadership, passes, errors, its metrics source, its watches.",
    variables=(NAMESPACE,),
    since="now-3h",
    rows=[
        Row("Health", [
            Panel("Version", "Versions that are running; more than one only while it is being updated.",
                  [Query("count by (version) (tunewright_build_info)", "{{version}}")], kind="stat", width=6, height=4,
                  no_value="No Tunewright is scraped", options={"textMode": "name", "colorMode": "none"}),
            Panel("Leader", "How many processes may act: one, or none for the seconds of a change.",
                  [Query("sum(tunewright_leader)", "acting")], kind="stat", width=6, height=4, steps=_GOOD,
                  no_value="No Tunewright is scraped"),
            Panel("Records readable", "1 where the records of all namespaces can be read; at 0 no tuning is exported.",
                  [Query("min(tunewright_store_readable)", "readable")], kind="stat", width=6, height=4, steps=_GOOD),
            Panel("Last metrics from production", "Since Prometheus (or the direct scrape) last answered with data. "
                  "It is asked only while something is learned or judged.",
                  [Query("time() - (max(tunewright_metric_source_last_data_timestamp_seconds) > 0)", "ago",
                         empty="before the first answer with data")],
                  kind="stat", unit="s", width=6, height=4, no_value="Never yet"),
        ]),
        Row("Tunings", [
            Panel("Tunings by phase", "How many tunings are in each phase.",
                  [Query(f"sum by (phase) (tunewright_tuning_phase{{{_NS}}}) > 0", "{{phase}}")], kind="bargauge"),
            Panel("Steps that keep failing", "Failures in a row of each tuning's current step; what fails is in its "
                  "sentence: `tunewright show`.",
                  [Query(f"max by (namespace, tuning) (tunewright_tuning_step_failures{{{_NS}}})",
                         "{{namespace}} {{tuning}}")], minimum=0),
        ]),
        Row("Passes", [
            Panel("Passes/s", "Looks at a tuning, each of which takes one short step.",
                  [Query(f"sum(rate(tunewright_reconcile_duration_seconds_count{RATE}))", "passes")], unit="ops",
                  minimum=0, width=8),
            Panel("Duration of a pass", "They are short by design: long ones mean that something outside is slow.",
                  [
                      Query("histogram_quantile(0.99, sum by (le) "
                            f"(rate(tunewright_reconcile_duration_seconds_bucket{RATE})))", "p99"),
                      Query("histogram_quantile(0.5, sum by (le) "
                            f"(rate(tunewright_reconcile_duration_seconds_bucket{RATE})))", "p50"),
                  ],
                  unit="s", minimum=0, width=8),
            Panel("Errors by kind", "conflict: tried again at once. port: something outside. refused: needs a person. "
                  "fault: a mistake in Tunewright.",
                  [Query(f"sum by (kind) (rate(tunewright_reconcile_errors_total{RATE}))", "{{kind}}")], unit="cps",
                  minimum=0, width=8),
        ]),
        Row("What it depends on", [
            Panel("Questions to the metrics source", "By outcome: data, empty (no series matched), error.",
                  [Query(f"sum by (outcome) (rate(tunewright_metric_source_requests_total{RATE}))", "{{outcome}}")],
                  unit="ops", minimum=0, width=8),
            Panel("Age of the watches", "Since the Kubernetes API server last answered each watch: normally below a "
                  "minute.",
                  [Query("max by (resource) (tunewright_watch_age_seconds)", "{{resource}}",
                         empty="outside of Kubernetes, where nothing is watched")], unit="s", minimum=0, width=8,
                  no_value="Nothing is watched here"),
            Panel("Memory and CPU", "Of Tunewright's own process: resident memory, and cores in use.",
                  [
                      Query("sum by (instance) (process_resident_memory_bytes and on (instance) tunewright_build_info)",
                            "memory of {{instance}}"),
                      Query(f"sum by (instance) (rate(process_cpu_seconds_total{RATE}) "
                            "and on (instance) tunewright_build_info)", "cores of {{instance}}"),
                  ],
                  unit="bytes", minimum=0, width=8, overrides=[
                      {"matcher": {"id": "byFrameRefID", "options": "B"}, "properties": [
                          {"id": "unit", "value": "short"}, {"id": "custom.axisPlacement", "value": "right"}]}]),
        ]),
    ],
)  # fmt: skip
