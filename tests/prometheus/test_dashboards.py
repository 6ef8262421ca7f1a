"""The dashboards, without Grafana: what they are made of, and that Prometheus understands every query."""

import json
import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
import yaml
from conftest import PrometheusServer
from promql import counters_without_rate, filled, names

from tunewright.telemetry.alerts import ALERTS
from tunewright.telemetry.catalog import METRICS
from tunewright.telemetry.dashboards import DASHBOARDS
from tunewright.telemetry.dashboards.__main__ import SIDECAR_LABEL, config_maps, dashboard_text, main
from tunewright.telemetry.dashboards.docs import dashboards_docs
from tunewright.telemetry.dashboards.grafana import COLUMNS, SCHEMA_VERSION, dashboard_json

ROOT = Path(__file__).parents[2]
VLLM_METRICS = ROOT / "tests" / "fixtures" / "vllm" / "vllm-0.32-cpu.metrics.txt"
KINDS = {"timeseries", "stat", "bargauge", "table", "state-timeline"}
UNITS = {"short", "s", "percentunit", "reqps", "ops", "cps", "bytes", "dateTimeAsLocal"}
TRANSFORMATIONS = {"merge", "organize", "sortBy"}
VARIABLES = {
    "namespace": ".*", "tuning": "demo", "job": ".+", "model": ".+", "__rate_interval": "1m", "__range": "1h",
}  # fmt: skip
QUERIES = [
    pytest.param(query.expr, id=f"{dashboard.uid}-{panel.title}-{index}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for index, query in enumerate(panel.queries)
] + [
    pytest.param(mark.expr, id=f"{dashboard.uid}-marks-{mark.name}")
    for dashboard in DASHBOARDS
    for mark in dashboard.annotations
]


def exported() -> set[str]:
    """Every name that Prometheus can know: of our catalogue, and of a recorded vLLM."""
    ours = {metric.name for metric in METRICS}
    parts = {f"{m.name}_{part}" for m in METRICS if m.type == "histogram" for part in ("bucket", "sum", "count")}
    text = VLLM_METRICS.read_text(encoding="utf-8")
    return ours | parts | set(re.findall(r"^(\w[\w:]*)[{ ]", text, re.M)) | {"process_resident_memory_bytes"}


@pytest.mark.parametrize("expr", QUERIES)
def test_counters_are_only_used_under_a_rate_and_ratios_are_of_rates(expr: str) -> None:
    assert counters_without_rate(expr) == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_same_holds_for_the_alerts(alert: object) -> None:
    assert counters_without_rate(alert.expr) == []  # type: ignore[attr-defined]


def test_a_counter_without_a_rate_is_found() -> None:
    assert counters_without_rate("sum(vllm:a_total) / rate(vllm:b_total[1m])") == ["vllm:a_total"]
    assert counters_without_rate("histogram_quantile(0.9, vllm:a_bucket)") == ["vllm:a_bucket"]


def test_every_name_is_one_that_is_exported() -> None:
    known = exported()
    # Speculation is off in the recorded server; the names are those of docs of vLLM 0.26 to 0.33.
    speculation = {f"vllm:spec_decode_num_{part}_tokens_total" for part in ("draft", "accepted")}
    for expr in [str(each.values[0]) for each in QUERIES] + [alert.expr for alert in ALERTS]:
        assert names(expr) - speculation <= known, expr


@pytest.mark.prometheus
def test_prometheus_understands_every_query(prometheus_server: PrometheusServer) -> None:
    for each in QUERIES:
        expr = filled(str(each.values[0]), VARIABLES)
        answer = httpx.get(f"{prometheus_server.url}/api/v1/query", params={"query": expr}, timeout=10, trust_env=False)
        assert answer.json()["status"] == "success", (expr, answer.text)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_each_panel_is_one_that_grafana_10_to_13_know(dashboard: object) -> None:
    model = json.loads(dashboard_text(dashboard))  # type: ignore[arg-type]
    assert model["schemaVersion"] == SCHEMA_VERSION
    assert "id" not in model
    ids = Counter(panel["id"] for panel in model["panels"])
    assert max(ids.values()) == 1
    for panel in model["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        if panel["type"] == "row":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["type"] in KINDS
        assert panel["description"].endswith(".")
        assert len(panel["description"]) > 20
        assert defaults["unit"] in UNITS
        assert defaults["noValue"]
        assert defaults["thresholds"]["steps"][0]["value"] is None, "the first threshold must have no bound"
        assert {each["id"] for each in panel["transformations"]} <= TRANSFORMATIONS
        assert panel["targets"]
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_panels_do_not_overlap(dashboard: object) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard_json(dashboard)["panels"]:  # type: ignore[arg-type]
        place = panel["gridPos"]
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_each_variable_that_is_used_is_there_and_each_that_is_there_is_used(dashboard: object) -> None:
    model = dashboard_json(dashboard)  # type: ignore[arg-type]
    there = {variable["name"] for variable in model["templating"]["list"]}
    text = json.dumps([model["panels"], model["annotations"], model["templating"]])
    used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}
    assert used == there


def test_dashboards_are_linked_by_their_tag_and_their_uids_differ() -> None:
    models = [dashboard_json(dashboard) for dashboard in DASHBOARDS]
    assert len({model["uid"] for model in models}) == 4
    for model in models:
        assert "tunewright" in model["tags"]
        (link,) = model["links"]
        assert link["tags"] == ["tunewright"]
        assert link["includeVars"]
        assert link["keepTime"]


def test_a_panel_that_may_be_empty_says_when() -> None:
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                assert not query.empty or f"Empty {query.empty}." in panel.told


def test_the_sidecar_finds_config_maps_that_hold_the_same_dashboards() -> None:
    documents = list(yaml.safe_load_all(config_maps()))
    assert len(documents) == len(DASHBOARDS)
    for document, dashboard in zip(documents, DASHBOARDS, strict=True):
        assert document["metadata"]["labels"][SIDECAR_LABEL] == "1"
        ((name, text),) = document["data"].items()
        assert name == f"{dashboard.uid}.json"
        assert json.loads(text) == dashboard_json(dashboard)
        assert len(text) < 900_000


def test_every_panel_is_documented() -> None:
    text = dashboards_docs(DASHBOARDS)
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            assert f"| {panel.title} |" in text


def test_the_written_files_are_what_is_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT)]) == 0
    (tmp_path / "docs").mkdir()
    assert main(["--check", str(tmp_path)]) == 1
    assert "run: python -m tunewright.telemetry.dashboards" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
