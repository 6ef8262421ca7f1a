"""As a user would: the manifests applied, a Tuning applied, approved over REST, and promoted under traffic.

The controller runs in its own pod from the image; Prometheus is real and finds the pods by the Kubernetes API.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from cluster_production import IMAGE, Traffic, container, ready_replicas

from cluster import wait_for
from tunewright.demo.prometheus import free_port
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICES,
    TUNINGS,
    Resource,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
NAMESPACE = "tunewright-e2e"
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")


def kubectl(*arguments: str, timeout: float = 120.0) -> str:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def gpus(admin: Kube) -> None:
    """Three GPUs that are none: two for production, one to spare."""
    node = admin.list(NODES).items[0]["metadata"]["name"]
    patch = {"status": {"capacity": {"nvidia.com/gpu": "3"}, "allocatable": {"nvidia.com/gpu": "3"}}}
    admin.patch(NODES, node, patch, type=PatchType.MERGE, subresource="status")


@pytest.fixture(scope="module")
def installed(admin: Kube, gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The controller as its manifests install it, in a namespace and with an image of the test's."""
    folder = tmp_path_factory.mktemp("overlay")
    name, _, tag = IMAGE.rpartition(":")
    overlay = {
        "namespace": NAMESPACE,
        "resources": [os.path.relpath(ROOT / "deploy" / "base", folder.resolve())],
        "images": [{"name": "tunewright", "newName": name, "newTag": tag}],
        "patchesStrategicMerge": ["image.yaml"],
    }
    env = [{"name": "TUNEWRIGHT_IMAGE", "value": IMAGE}]
    spec = {"template": {"spec": {"containers": [{"name": "tunewright", "env": env}]}}}
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "tunewright"}, "spec": spec}
    patch["metadata"]["namespace"] = "tunewright"
    (folder / "image.yaml").write_text(yaml.safe_dump(patch))
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl("apply", "-k", str(folder))
    kubectl("-n", NAMESPACE, "rollout", "status", "deployment/tunewright", "--timeout=120s", timeout=150)
    yield admin
    print(kubectl("-n", NAMESPACE, "logs", "deployment/tunewright", "--tail=200"))
    kubectl("delete", "-k", str(folder), "--wait=false")
    admin.delete(NAMESPACES, NAMESPACE)


@pytest.fixture(scope="module")
def prometheus(kubeconfig: Path, installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one that discovers the pods by the API; its URL as pods reach it."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("there is no prometheus on the PATH")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    address = urlsplit(server).hostname
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {
                "job_name": "pods",
                "kubernetes_sd_configs": [
                    {"role": "pod", "kubeconfig_file": str(kubeconfig), "namespaces": {"names": [NAMESPACE]}}
                ],
                "relabel_configs": [
                    {
                        "source_labels": ["__meta_kubernetes_pod_container_port_number"],
                        "regex": "8000",
                        "action": "keep",
                    },
                    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    argv = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address={address}:{port}"], stdout=log, stderr=log)
    url = f"http://{address}:{port}"
    try:
        wait_for(lambda: _answers(f"{url}/-/ready"), "prometheus is ready")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def production(installed: Kube) -> str:
    """Two badly configured servers behind a Service, one GPU each, applied by kubectl."""
    args = ["simulate", "serve", "demo-model", "--port", "8000", "--sim-speed", "50"]
    bad = ["--max-num-seqs", "4", "--no-enable-prefix-caching"]
    labels = {"app": "llm"}
    server = container([*args, *bad], resources={"limits": {"nvidia.com/gpu": "1"}})
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "llm", "namespace": NAMESPACE},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 60, "containers": [server]},
            },
        },
    }
    service = {"metadata": {"name": "llm"}, "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]}}
    done = subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=json.dumps(deployment), text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    made = installed.create(SERVICES, service, NAMESPACE)
    wait_for(lambda: _ready(installed) == 2, "production serves")
    return f"http://{made['spec']['clusterIP']}"


def _ready(kube: Kube) -> int:
    return ready_replicas(kube, NAMESPACE)


def tuning(prometheus: str) -> Json:
    """Short times, since simulated servers have little to warm up; takeOver, since kubectl owns the arguments."""
    return {
        "apiVersion": "tunewright.dev/v1alpha1",
        "kind": "Tuning",
        "metadata": {"name": "chat", "namespace": NAMESPACE},
        "spec": {
            "target": {"deployment": "llm", "startTimeout": "2m", "drainTimeout": "30s"},
            "spare": {"startTimeout": "2m"},
            "metrics": {"prometheus": prometheus, "window": "20s", "interval": "1s", "minRequests": 40},
            "objective": {"maximize": "outputTokensPerSecond"},
            "slo": {"ttftP95": "2s", "errorRate": "1%"},
            "load": {
                "mode": "closedLoop",
                "concurrency": 16,
                "promptTokens": 200,
                "outputTokens": 60,
                "duration": "5s",
                "maxWarmup": "5s",
            },
            "search": {"include": ["max_num_seqs", "enable_prefix_caching"]},
            "budget": {"trials": 3},
            "confirm": {"finalists": 1, "minRounds": 3, "maxRounds": 4, "minGain": "10%"},
            "promotion": {
                "mode": "approve",
                "takeOver": True,
                "canary": {"share": "34%", "warmup": "5s", "trafficTimeout": "2m"},
                "analysis": {
                    "interval": "5s",
                    "minDuration": "15s",
                    "maxDuration": "3m",
                    "minRequests": 20,
                    "tolerance": "50%",
                },
                "watch": "15s",
            },
        },
    }


def phase(kube: Kube) -> str:
    return str((kube.get(TUNINGS, "chat", NAMESPACE).get("status") or {}).get("phase"))


def approver_token(kube: Kube) -> str:
    """As `kubectl create token ana --audience tunewright` gives it."""
    kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": "ana"}}, NAMESPACE)
    binding = {
        "metadata": {"name": "ana"},
        "roleRef": {"apiGroup": ROLE_BINDINGS.group, "kind": "ClusterRole", "name": "tunewright-approve"},
        "subjects": [{"kind": "ServiceAccount", "name": "ana", "namespace": NAMESPACE}],
    }
    kube.create(ROLE_BINDINGS, binding, NAMESPACE)
    asked = {"spec": {"audiences": ["tunewright"]}}
    made = kube.create(SERVICE_ACCOUNTS, asked, NAMESPACE, name="ana", subresource="token")
    return str(made["status"]["token"])


def test_from_applied_to_promoted_with_no_failed_request(installed: Kube, prometheus: str, production: str) -> None:
    kube = installed
    with Traffic(production, clients=3).running() as traffic:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=json.dumps(tuning(prometheus)), text=True, check=False, timeout=60
        )
        assert done.returncode == 0
        _follow(kube, lambda: phase(kube) == "AwaitingApproval", 600.0)
        service = kube.get(SERVICES, "tunewright", NAMESPACE)["spec"]["clusterIP"]
        api = httpx.Client(
            base_url=f"http://{service}/api/v1alpha1/tunings/chat",
            headers={"Host": f"tunewright.{NAMESPACE}", "Authorization": f"Bearer {approver_token(kube)}"},
            timeout=20,
        )
        assert httpx.get(f"http://{service}/api/v1alpha1/tunings", headers={"Host": "tunewright"}).status_code == 401
        bind = api.get("/promotion").raise_for_status().json()["bind"]
        stale = api.post("/approve", json={**bind, "candidate": "0000000000", "reason": "not what I looked at"})
        assert stale.status_code == 409
        api.post("/approve", json={**bind, "reason": "looks good"}).raise_for_status()
        _follow(kube, lambda: phase(kube) in ("Promoted", "RolledBack", "Failed"), 600.0)
    kubectl("-n", NAMESPACE, "wait", "--for=condition=Promoted", "tuning/chat", "--timeout=10s")
    assert traffic.failures == []
    assert traffic.answered["all"] > 200
    args = kube.get(DEPLOYMENTS, "llm", NAMESPACE)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "4" not in args, f"production still runs the bad configuration: {args}"
    assert _ready(kube) == 2
    left = [p["metadata"]["name"] for p in kube.list(PODS, NAMESPACE).items if "tunewright.dev/role" in _labels(p)]
    assert left == []
    reasons = {event["reason"] for event in kube.list(EVENTS, NAMESPACE).items}
    assert {"Canary", "Rolling", "Watching", "Promoted"} <= reasons
    row = kubectl("-n", NAMESPACE, "get", "tune")
    assert "Promoted" in row
    decided = api.get("/decisions").raise_for_status().json()
    assert f"system:serviceaccount:{NAMESPACE}:ana" in json.dumps(decided)


def _labels(found: Json) -> Json:
    labels: Json = found["metadata"].get("labels") or {}
    return labels


def _follow(kube: Kube, reached: object, seconds: float) -> None:
    """Wait, printing each new sentence, so that a failure shows the story."""
    deadline, told = time.monotonic() + seconds, ""
    while not reached():  # type: ignore[operator]
        status = kube.get(TUNINGS, "chat", NAMESPACE).get("status") or {}
        line = f"{status.get('phase')}: {status.get('sentence')}"
        if line != told:
            told = line
            print(f"{time.strftime('%H:%M:%S')} {line}")
        assert status.get("phase") not in ("Failed", "NoImprovement", "Infeasible", "Rejected"), line
        assert time.monotonic() < deadline, line
        time.sleep(1.0)
