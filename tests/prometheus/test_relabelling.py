"""Scraped as the manifests and docs/dashboards.md say, vLLM's series carry the labels that the dashboards select by."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import READY_SECONDS

from tunewright.cluster import default_selector
from tunewright.platform.kubernetes.names import Owner
from tunewright.telemetry.dashboards import DASHBOARDS

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).parents[2]
META = "__meta_kubernetes_"
Json = dict[str, Any]


def pod(name: str, port: str, **labels: str) -> Json:
    """A pod as Prometheus discovers it, by one of its ports."""
    label = {f"{META}pod_label_{re.sub(r'[^a-zA-Z0-9]', '_', key)}": text for key, text in labels.items()}
    meta = {f"{META}namespace": "prod", f"{META}pod_name": name, f"{META}pod_container_port_name": port}
    return {"targets": ["127.0.0.1:9"], "labels": meta | label}


def ours(role: str) -> dict[str, str]:
    """The labels that Tunewright gives to what it makes, as it makes them."""
    return dict(Owner("chat", "uid").metadata("name", role)["labels"])


PODS = {
    "production": pod("llm-6f9-abcde", "http", app="llm"),
    "canary": pod("llm-canary-7c8-abcde", "http", app="llm", **ours("canary")),
    "canary by a route": pod("llm-canary-7c8-cdefg", "http", **ours("canary"), **{"tunewright.dev/serves": "route"}),
    "canary that starts": pod("llm-canary-7c8-bcdef", "http", **ours("canary")),
    "trial": pod("chat-003-0123456789-1", "http", **ours("trial")),
    "load test": pod("chat-003-0123456789-1-load", "http", **ours("load")),
    "sidecar of production": pod("llm-6f9-abcde", "admin", app="llm"),
    "controller": pod("tunewright-5d4-abcde", "metrics", **{"app.kubernetes.io/name": "tunewright"}),
    "controller's API": pod("tunewright-5d4-abcde", "http", **{"app.kubernetes.io/name": "tunewright"}),
}
ROLES = {"production": "stable", "canary": "canary", "canary by a route": "canary", "trial": "spare"}


def documented() -> list[Json]:
    """The scrape configuration of the page, for a cluster without the operator."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8"), re.S)
    (found,) = [yaml.safe_load(block) for block in blocks if "kubernetes_sd_configs" in block]
    jobs: list[Json] = found["scrape_configs"]
    return jobs


def monitored() -> list[Json]:
    """The PodMonitors as the operator writes them out: what it selects, what it adds, and then the relabelings."""
    jobs = []
    for path in ("podmonitor.yaml", "vllm/podmonitors.yaml"):
        for monitor in yaml.safe_load_all((ROOT / "deploy" / "monitoring" / path).read_text(encoding="utf-8")):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            chosen = {re.sub(r"[^a-zA-Z0-9]", "_", k): v for k, v in monitor["spec"]["selector"]["matchLabels"].items()}
            keep = [
                {"source_labels": [f"{META}pod_label_{label}"], "regex": text, "action": "keep"}
                for label, text in chosen.items()
            ]
            keep.append(
                {"source_labels": [f"{META}pod_container_port_name"], "regex": endpoint["port"], "action": "keep"}
            )
            added = [
                {"source_labels": [f"{META}namespace"], "target_label": "namespace"},
                {"source_labels": [f"{META}pod_name"], "target_label": "pod"},
            ]
            snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
            theirs = [{snake.get(k, k): v for k, v in rule.items()} for rule in endpoint.get("relabelings", [])]
            job = {"job_name": monitor["metadata"]["name"], "honor_labels": endpoint.get("honorLabels", False)}
            jobs.append(job | {"relabel_configs": [*keep, *added, *theirs]})
    return jobs


def seen(jobs: list[Json], folder: Path) -> dict[tuple[str, str], Json]:
    """The labels that each pod is scraped with, by job and pod, as a real Prometheus makes them."""
    configs = []
    for job in jobs:
        job.pop("kubernetes_sd_configs", None)
        groups = [{**each, "labels": each["labels"] | {"__pod": name}} for name, each in PODS.items()]
        keep_name = {"source_labels": ["__pod"], "target_label": "test_pod"}
        configs.append(job | {"static_configs": groups, "relabel_configs": [*job["relabel_configs"], keep_name]})
    with running({"global": {"scrape_interval": "1m"}, "scrape_configs": configs}, folder) as url:
        answer = httpx.get(f"{url}/api/v1/targets", params={"state": "active"}, timeout=10, trust_env=False).json()
    return {
        (each["labels"]["job"], each["labels"]["test_pod"]): each["labels"] for each in answer["data"]["activeTargets"]
    }


@contextmanager
def running(config: Json, folder: Path) -> Iterator[str]:
    """A Prometheus with this configuration."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("there is no prometheus on the PATH (see tests/install-prometheus)")
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [binary, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
        while not _discovered(url, len(config["scrape_configs"]) * len(PODS)):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait(30)


def _discovered(url: str, targets: int) -> bool:
    """Whether it has looked at all targets; it takes them up some seconds after it is ready."""
    try:
        answer = httpx.get(f"{url}/api/v1/targets", params={"state": "any"}, timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    data = answer.json()["data"]
    return len(data["activeTargets"]) + len(data["droppedTargets"]) == targets


@pytest.mark.parametrize("jobs", [documented, monitored])
def test_each_server_is_scraped_once_with_its_role(jobs: Any, tmp_path: Path) -> None:
    found = seen(jobs(), tmp_path)
    assert sorted(name for _, name in found) == sorted([*ROLES, "controller"]), "each once, and nothing else"
    for (_, name), labels in found.items():
        assert labels.get("role") == ROLES.get(name), name
        meta = PODS[name]["labels"]
        assert (labels["namespace"], labels["pod"]) == (meta[f"{META}namespace"], meta[f"{META}pod_name"])
    by_pod = {name: job for job, name in found}
    assert by_pod["production"] == by_pod["canary"] != by_pod["trial"], "load tests are no traffic of production's"
    assert [job["honor_labels"] for job in jobs() if job["job_name"] == by_pod["controller"]] == [True]


def test_tunewright_s_own_selector_finds_production_and_canary_alone(tmp_path: Path) -> None:
    selector = default_selector("prod", "llm")
    (namespace, pods) = re.findall(r'"([^"]*)"', selector)
    found = seen(documented(), tmp_path)
    chosen = [name for (_, name), labels in found.items() if re.fullmatch(pods, labels["pod"])]
    assert namespace == "prod"
    assert sorted(chosen) == ["canary", "canary by a route", "production"]


def test_the_dashboards_select_no_other_role() -> None:
    text = " ".join(query.expr for each in DASHBOARDS for panel in each.panels for query in panel.queries)
    selected = {role for match in re.findall(r'role=~?"([^"]*)"', text) for role in match.split("|")}
    assert selected
    assert selected <= set(ROLES.values())
