"""A whole tuning in a cluster, as a user drives it: production, the Tuning, following it, deciding, what is left."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import yaml
from cluster_production import answers, container, routed

from cluster import wait_for
from tunewright.demo.prometheus import free_port
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import KubeError, NotFound
from tunewright.kube.resources import DEPLOYMENTS, PODS, SERVICE_ACCOUNTS, SERVICES, TRIALS, TUNINGS, Resource
from tunewright.loadtest.files import write_atomic

NAMESPACE = "tunewright-e2e"
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
BAD = ["simulate", "serve", "demo-model", "--port", "8000", "--sim-speed", "50", "--max-num-seqs", "4"]
BAD += ["--no-enable-prefix-caching"]
FORWARD = ("Pending", "Profiling", "Baselining", "Searching", "Confirming", "AwaitingApproval")
FORWARD += ("Canary", "Rolling", "Watching", "Promoted")
ENDED_BADLY = ("Failed", "NoImprovement", "Infeasible", "Rejected", "RolledBack")


def kubectl(*arguments: str, timeout: float = 120.0, stdin: Json | None = None) -> str:
    """What a person types."""
    told = json.dumps(stdin) if stdin is not None else None
    done = subprocess.run(
        ["kubectl", *arguments], input=told, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@contextmanager
def prometheus_of_pods(folder: Path, kube: Kube, address: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real Prometheus with the namespace's pods as targets: its process, and its URL as pods reach it.

    Debian's build has no `kubernetes_sd_configs`: a thread lists the pods by the API in its place, and writes the same
    labels into a file that Prometheus watches.
    """
    port, targets, stop = free_port(), folder / "pods.json", threading.Event()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "pods", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    argv = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    discovery = threading.Thread(target=_discover, args=(kube, targets, stop))
    discovery.start()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address={address}:{port}"], stdout=log, stderr=log)
    try:
        url = f"http://{address}:{port}"
        wait_for(lambda: answers(f"{url}/-/ready"), "prometheus is ready")
        yield process, url
    finally:
        stop.set()
        process.terminate()
        process.wait(timeout=30)
        discovery.join(timeout=30)


def _discover(kube: Kube, targets: Path, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        with suppress(KubeError):
            found = [_target(pod) for pod in kube.list(PODS, NAMESPACE).items if _serves(pod)]
            write_atomic(targets, json.dumps(found).encode())


def _serves(pod: Json) -> bool:
    ports = [port["containerPort"] for c in pod["spec"]["containers"] for port in c.get("ports") or []]
    return 8000 in ports and bool(pod["status"].get("podIP")) and pod["status"].get("phase") == "Running"


def _target(pod: Json) -> Json:
    labels = {"namespace": NAMESPACE, "pod": pod["metadata"]["name"]}
    return {"targets": [f"{pod['status']['podIP']}:8000"], "labels": labels}


def production(kube: Kube, name: str, server: Json, *, strategy: Json | None = None, pod: Json | None = None) -> str:
    """Two servers behind a Service, applied by kubectl; the address that clients use, once both serve."""
    labels = {"app": name}
    spec = {"terminationGracePeriodSeconds": 60, "containers": [server], **(pod or {})}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {**labels, "tier": "serving"}},
            "template": {"metadata": {"labels": {**labels, "tier": "serving"}}, "spec": spec},
            **({"strategy": strategy} if strategy else {}),
        },
    }
    kubectl("apply", "-f", "-", stdin=deployment)
    service = {"metadata": {"name": name}, "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]}}
    made = kube.create(SERVICES, service, NAMESPACE)
    wait_for(lambda: ready(kube, name) == 2, f"{name} serves")
    return routed(f"http://{made['spec']['clusterIP']}")


def ready(kube: Kube, name: str) -> int:
    """Replicas that are ready, as the Deployment's status counts them."""
    return int((kube.get(DEPLOYMENTS, name, NAMESPACE).get("status") or {}).get("readyReplicas") or 0)


def vllm(args: list[str] | None = None, **more: object) -> Json:
    """A badly configured server."""
    return container(args if args is not None else BAD, **more)


def tuning(name: str, prometheus: str, *, target: str = "", mode: str = "approve", trials: int = 3) -> Json:
    """Short times, since simulated servers have little to warm up; takeOver, since kubectl owns the arguments."""
    return {
        "apiVersion": "tunewright.dev/v1alpha1",
        "kind": "Tuning",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "target": {"deployment": target or name, "startTimeout": "2m", "drainTimeout": "30s"},
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
            "budget": {"trials": trials},
            "confirm": {"finalists": 1, "minRounds": 2, "maxRounds": 4, "minGain": "10%"},
            "promotion": {
                "mode": mode,
                "takeOver": True,
                "canary": {"share": "34%", "warmup": "5s", "trafficTimeout": "2m"},
                "analysis": {
                    "interval": "5s",
                    "minDuration": "15s",
                    "maxDuration": "3m",
                    "minRequests": 20,
                    "tolerance": "500%",  # eight tunings share two cores: milliseconds are not what is tested here
                },
                "watch": "15s",
            },
        },
    }


def status(kube: Kube, name: str) -> Json:
    """The Tuning's status; empty once it is gone."""
    try:
        found: Json = kube.get(TUNINGS, name, NAMESPACE).get("status") or {}
    except NotFound:
        return {}
    return found


def phase(kube: Kube, name: str) -> str:
    """Its phase."""
    return str(status(kube, name).get("phase"))


def follow(kube: Kube, name: str, until: Callable[[Json], object], seconds: float) -> Json:
    """Wait, printing each new sentence, so that a failure shows the story."""
    deadline, told = time.monotonic() + seconds, ""
    while True:
        now = status(kube, name)
        line = f"{now.get('phase')}: {now.get('sentence')}"
        if line != told:
            told = line
            print(f"{time.strftime('%H:%M:%S')} {name}: {line}")
        if until(now):
            return now
        assert now.get("phase") not in ENDED_BADLY, line
        assert time.monotonic() < deadline, line
        time.sleep(0.5)


def reached(phase: str) -> Callable[[Json], object]:
    """For `follow`: in it or past it, as a busy machine may look too late to see a short one."""
    return lambda now: now.get("phase") in FORWARD[FORWARD.index(phase) :]


def half_rolled(now: Json) -> bool:
    """One of two servers is new."""
    assert now.get("phase") not in ("Watching", "Promoted"), "seen too late"
    return now.get("phase") == "Rolling" and "Rolling: 1 of 2" in str(now.get("sentence"))


def token(kube: Kube, who: str, role: str | None) -> str:
    """As `kubectl create token WHO --audience tunewright` gives it, after a RoleBinding to one of the shipped roles."""
    kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": who}}, NAMESPACE)
    if role is not None:
        binding = {
            "metadata": {"name": who},
            "roleRef": {"apiGroup": ROLE_BINDINGS.group, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": who, "namespace": NAMESPACE}],
        }
        kube.create(ROLE_BINDINGS, binding, NAMESPACE)
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    asked = {**kind, "spec": {"audiences": ["tunewright"]}}
    made = kube.create(SERVICE_ACCOUNTS, asked, NAMESPACE, name=who, subresource="token")
    return str(made["status"]["token"])


def rest(kube: Kube, name: str, bearer: str) -> httpx.Client:
    """The REST API of the controller, through its Service."""
    service = kube.get(SERVICES, "tunewright", NAMESPACE)["spec"]["clusterIP"]
    return httpx.Client(
        base_url=f"http://{service}/api/v1alpha1/tunings/{name}",
        headers={"Host": f"tunewright.{NAMESPACE}", "Authorization": f"Bearer {bearer}"},
        timeout=20,
        trust_env=False,
    )


def arguments(kube: Kube, name: str) -> list[str]:
    """What production is told to run."""
    server = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]["template"]["spec"]["containers"][0]
    return [*(server.get("command") or []), *(server.get("args") or [])]


def made_for(kube: Kube, name: str) -> list[str]:
    """What is there of ours beside the Tuning itself: pods, canaries, trials."""
    labels = f"tunewright.dev/tuning={name}"
    pods = [p["metadata"]["name"] for p in kube.list(PODS, NAMESPACE, labels=labels).items]
    deployments = [d["metadata"]["name"] for d in kube.list(DEPLOYMENTS, NAMESPACE, labels=labels).items]
    return [*pods, *deployments]


def trials_of(kube: Kube, name: str) -> list[Json]:
    """Its Trial objects."""
    return list(kube.list(TRIALS, NAMESPACE, labels=f"tunewright.dev/tuning={name}").items)


def controller_pods(kube: Kube) -> list[str]:
    """The controller's own pods that are not ending."""
    found = kube.list(PODS, NAMESPACE, labels="app.kubernetes.io/name=tunewright").items
    return [p["metadata"]["name"] for p in found if not p["metadata"].get("deletionTimestamp")]


def relative(path: Path, folder: Path) -> str:
    """kustomize wants resources by relative paths."""
    return os.path.relpath(path, folder.resolve())
