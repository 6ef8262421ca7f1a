"""The dashboards and alerts, held to a real tuning: every query has data, and every name is really exported.

A whole tuning runs on simulated servers, with real processes and traffic, while a real Prometheus scrapes production,
the spare and Tunewright itself. What has no data there is listed below, with the reason.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from promql import filled, names

from tunewright.clock import SystemClock
from tunewright.controller.decisions import bound
from tunewright.demo.prometheus import binary, free_port, prometheus
from tunewright.demo.run import NAME, RATE, demo_tuning
from tunewright.domain.phases import Phase
from tunewright.domain.state import TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.local import LocalTuning
from tunewright.platform.process import children
from tunewright.platform.process.target import ProcessTarget
from tunewright.serving import serve_api
from tunewright.telemetry.alerts import ALERTS
from tunewright.telemetry.alerts.__main__ import rule_file
from tunewright.telemetry.console import LiveStatus
from tunewright.telemetry.dashboards import DASHBOARDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

LONGEST = 1200.0
VARIABLES = {"namespace": ".*", "tuning": NAME, "job": ".+", "model": ".+"}
ABSENT = {
    "tunewright_watch_age_seconds": "nothing is watched outside of Kubernetes",
    "vllm:spec_decode_num_accepted_tokens_total": "the demo's servers do not speculate",
    "vllm:spec_decode_num_draft_tokens_total": "the demo's servers do not speculate",
    "tunewright_tuning_trial_failures": "no trial has to fail here; one may",
}
"""Metrics that this tuning does not have to show, and why."""


@dataclass
class Run:
    """A tuning that went through to the end, and the Prometheus that saw it."""

    url: str
    start: float
    end: float
    record: TuningRecord
    exposition: str

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30.0, trust_env=False)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def seen(self, expr: str) -> list[Any]:
        """The series that a query had at any time of the run, as a panel over the whole of it shows them."""
        variables = VARIABLES | {"__rate_interval": "5s", "__range": f"{self.end - self.start:.0f}s"}
        query = filled(expr, variables)
        found = self.ask("query_range", query=query, start=str(self.start), end=str(self.end), step="1")
        return [s for s in found["result"] if any(value != "NaN" for _, value in s["values"])]


def short_tuning(prometheus_url: str) -> Tuning:
    """The demo's, with few trials: what counts here is that every phase is gone through."""
    whole = demo_tuning(sys.executable, free_port(), 18100 + (free_port() % 50) * 100, prometheus_url)
    document = whole.model_dump(mode="json", by_alias=True)
    spec = document["spec"]
    spec["budget"]["trials"] = 4
    spec["confirm"] |= {"minRounds": 2, "maxRounds": 4, "minGain": "1%"}
    spec["slo"] |= {"itlP95": "2s", "e2eP95": "1m"}
    spec["search"]["include"] = ["max_num_seqs"]
    spec["target"]["command"].remove("--no-enable-prefix-caching")  # so that there are hits to see
    return Tuning.model_validate(document)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if binary() is None:
        pytest.skip("there is no prometheus on the PATH (see tests/install-prometheus)")
    folder, clock, stop = tmp_path_factory.mktemp("live"), SystemClock(), threading.Event()
    with ExitStack() as exits:
        rules, own = folder / "rules.yaml", folder / "tunewright-targets.json"
        rules.write_text(rule_file(), encoding="utf-8")
        own.write_text("[]", encoding="utf-8")
        place = folder / "state" / NAME
        jobs = {"vllm-spare": place / "spare-targets.json", "tunewright": own}
        production = place / "production" / "prometheus-targets.json"
        url = exits.enter_context(prometheus(folder / "prometheus", production, 1.0, jobs, rules))
        local = exits.enter_context(LocalTuning(folder / "state", short_tuning(url), clock))
        assert isinstance(local.target, ProcessTarget)
        exits.callback(local.target.stop_all)
        exits.callback(local.context.spare.sweep, [])
        api = exits.enter_context(serve_api(local, "127.0.0.1:0"))
        own.write_text(json.dumps([{"targets": [api.url.removeprefix("http://")]}]), encoding="utf-8")
        start = time.time()
        assert local.start_production(stop)
        argv = [sys.executable, "-m", "tunewright.demo.traffic", f"http://{local.tuning.spec.target.listen}"]
        traffic = children.spawn(
            [*argv, str(folder / "traffic.json"), "--rate", str(RATE)],
            {}, folder, folder / "traffic.out", folder / "traffic.err", folder / "traffic.child",
        )  # fmt: skip
        exits.callback(children.end, traffic, 30.0)

        def on_step(record: TuningRecord, _live: LiveStatus) -> None:
            asked = record.phase is Phase.AWAITING_APPROVAL and clock.now() - record.phase_since > 5.0
            if asked and not local.store.decisions(NAME):
                local.store.decide(NAME, bound(record, "approve", at=clock.now(), by="test"))
            if record.drift is not None or clock.now() - start > LONGEST:
                stop.set()

        record = local.run(stop, on_step, keep_going=True)
        assert record is not None
        time.sleep(3.0)  # two scrapes, so that Prometheus has seen the end
        exposition = httpx.get(f"{api.url}/metrics", timeout=10.0, trust_env=False).text
        yield Run(url, start, time.time(), record, exposition)


def test_the_tuning_went_through_to_the_end(run: Run) -> None:
    assert run.record.phase is Phase.PROMOTED, run.record.sentence
    assert run.record.drift is not None


QUERIES = [
    pytest.param(query, id=f"{dashboard.uid}: {panel.title}: {query.legend or index}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for index, query in enumerate(panel.queries)
]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_every_panel_has_data(run: Run, query: Any) -> None:
    if names(query.expr) & ABSENT.keys():
        assert query.empty, "a panel that may be empty has to say so"
        return
    assert run.seen(query.expr), f"no data: {query.expr}"


@pytest.mark.parametrize("mark", [m for d in DASHBOARDS for m in d.annotations], ids=lambda mark: mark.name)
def test_every_annotation_marks_something(run: Run, mark: Any) -> None:
    assert run.seen(mark.expr), f"no data: {mark.expr}"


@pytest.mark.parametrize("role", ["stable", "canary", "spare"])
def test_production_canary_and_spare_are_all_seen(run: Run, role: str) -> None:
    assert run.seen(f'sum by (candidate) (rate(vllm:generation_tokens_total{{role="{role}"}}[5s])) > 0')


def test_every_name_in_panels_and_rules_is_really_exported(run: Run) -> None:
    known = set(run.ask("label/__name__/values"))
    asked = {name for d in DASHBOARDS for panel in d.panels for query in panel.queries for name in names(query.expr)}
    asked |= {name for alert in ALERTS for name in names(alert.expr)}
    assert asked - known <= ABSENT.keys()


def test_what_is_exported_is_in_the_catalogue_and_reaches_prometheus(run: Run) -> None:
    known = set(run.ask("label/__name__/values"))
    exported = set(re.findall(r"^(tunewright_\w+)", run.exposition, re.M))
    assert exported - known == set()


def test_prometheus_evaluates_every_rule_and_none_fires_in_a_tuning_that_goes_well(run: Run) -> None:
    (group,) = run.ask("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert.name for alert in ALERTS}
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
        assert rule["state"] != "firing", rule
