"""As users would, eight tunings at once: the manifests applied, Tunings applied, approved over REST, and promoted.

The controller runs in its own pod from the image; Prometheus is real. Clients ask all the time. While the tunings run,
controllers are killed, others are deleted half-way, and at the end the API server and Prometheus fall silent.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest
from cluster_production import Traffic
from cluster_story import (
    BAD,
    NAMESPACE,
    arguments,
    controller_pods,
    follow,
    half_rolled,
    kubectl,
    made_for,
    production,
    reached,
    ready,
    rest,
    token,
    trials_of,
    tuning,
    vllm,
)

from cluster import wait_for
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.resources import DEPLOYMENTS, EVENTS, LEASES, Resource

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

HPAS = Resource("autoscaling", "v1", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
GPU_EACH = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "50m"}}
IN_PLACE = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
DELETED_IN = ("Profiling", "Searching", "Canary", "Rolling")
LONG = 1200.0
"""Seconds that one phase may take here: eight tunings share two cores."""
MINUTE = 60.0


def test_eight_tunings_at_once_end_as_they_should_with_no_failed_request(
    installed: Kube, prometheus_server: tuple[subprocess.Popen[bytes], str]
) -> None:
    """Three targets as found in the wild, four deleted half-way, one around which everything fails once."""
    kube, (server, prometheus) = installed, prometheus_server
    script = "exec tunewright " + " ".join(BAD)
    shell = {**vllm([]), "command": ["sh", "-c", script]}
    deleted = {f"gone-{phase.lower()}": phase for phase in DELETED_IN}
    urls = {
        "chat": production(kube, "chat", vllm(resources=GPU_EACH), strategy=IN_PLACE),
        "shell": production(kube, "shell", shell),
        "scaled": production(kube, "scaled", vllm()),
        "faults": production(kube, "faults", vllm()),
        **{name: production(kube, name, vllm()) for name in deleted},
    }
    second_manager(kube, "scaled")
    before = {name: kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"] for name in deleted}
    with ExitStack() as after, ExitStack() as stack:
        # Its GPUs are wanted by other tests.
        after.callback(kubectl, "-n", NAMESPACE, "delete", "deployment,service", *urls, "--wait=false")
        traffic = {name: stack.enter_context(Traffic(url, clients=1).running()) for name, url in urls.items()}
        all_of_them(
            partial(approved_over_rest, kube, prometheus),
            partial(by_itself, kube, prometheus),
            partial(scaled_meanwhile, kube, prometheus),
            partial(killed_before_the_canary, kube, prometheus),
            *(partial(deleted_half_way, kube, prometheus, name, phase) for name, phase in deleted.items()),
        )
        failures = {name: clients.failures for name, clients in traffic.items() if clients.failures}
        assert failures == {}
        outages_while_it_rolls(kube, server)
        judge(kube, traffic, before)


def judge(kube: Kube, traffic: Mapping[str, Traffic], before: Mapping[str, Json]) -> None:
    """Every target as its story wants it, and nothing left of any."""
    for name, clients in traffic.items():
        assert clients.answered["all"] > 200, name
    for name, serving in {"chat": 2, "shell": 2, "scaled": 3, "faults": 2}.items():
        assert "--max-num-seqs 4" not in " ".join(arguments(kube, name)), "it still runs the bad configuration"
        assert made_for(kube, name) == []
        assert ready(kube, name) == serving
        done = [trial["spec"] for trial in trials_of(kube, name)]
        assert len({(t["purpose"], t["round"], str(t["candidate"])) for t in done}) == len(done), "one ran twice"
    assert arguments(kube, "shell")[:2] == ["sh", "-c"]
    for name, spec in before.items():
        after = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]
        for field in ("paused", "strategy", "minReadySeconds", "replicas"):
            assert after.get(field) == spec.get(field), (name, field)
        assert after["template"]["spec"] == spec["template"]["spec"], name


def all_of_them(*stories: Callable[[], None]) -> None:
    """At the same time, each to its end; then every failure at once."""
    with ThreadPoolExecutor(len(stories)) as people:
        told = [people.submit(story) for story in stories]
    failed = [error for each in told if (error := each.exception()) is not None]
    if failed:
        raise BaseExceptionGroup("stories that failed", failed)


# --- three targets as found in the wild ---


def approved_over_rest(kube: Kube, prometheus: str) -> None:
    """Arguments applied by kubectl, on GPUs of which one is free: looked at, approved with a ServiceAccount's token."""
    kubectl("apply", "-f", "-", stdin=tuning("chat", prometheus))
    follow(kube, "chat", reached("AwaitingApproval"), LONG)
    with pytest.raises(subprocess.TimeoutExpired):  # nothing moves without an approval
        subprocess.run(
            ["kubectl", "-n", NAMESPACE, "wait", "--for=condition=Promoted", "tuning/chat"], timeout=3, check=True
        )
    with rest(kube, "chat", "") as nobody:
        nobody.headers.pop("Authorization")
        assert nobody.get("/promotion").status_code == 401
    with rest(kube, "chat", token(kube, "eve", "tunewright-view")) as reader:
        bind = reader.get("/promotion").raise_for_status().json()["bind"]
        assert reader.post("/approve", json={**bind, "reason": "I may only read"}).status_code == 403
    with rest(kube, "chat", token(kube, "ana", "tunewright-approve")) as ana:
        stale = ana.post("/approve", json={**bind, "candidate": "0000000000", "reason": "not what I looked at"})
        assert stale.status_code == 409
        assert "0000000000" in stale.text
        approve(ana)
        follow(kube, "chat", reached("Promoted"), LONG)
        decided = ana.get("/decisions").raise_for_status().json()
    assert f"system:serviceaccount:{NAMESPACE}:ana" in json.dumps(decided)
    kubectl("-n", NAMESPACE, "wait", "--for=condition=Promoted", "tuning/chat", "--timeout=10s")
    about_it = [e for e in kube.list(EVENTS, NAMESPACE).items if e["involvedObject"]["name"] == "chat"]
    assert {"Canary", "Rolling", "Watching", "Promoted"} <= {event["reason"] for event in about_it}
    assert "Promoted" in kubectl("-n", NAMESPACE, "get", "tune", "chat")


def approve(api: httpx.Client) -> None:
    """What is looked at."""
    bind = api.get("/promotion").raise_for_status().json()["bind"]
    api.post("/approve", json={**bind, "reason": "looks good"}).raise_for_status()


def by_itself(kube: Kube, prometheus: str) -> None:
    """`sh -c` of one command, mode auto."""
    kubectl("apply", "-f", "-", stdin=tuning("shell", prometheus, mode="auto"))
    follow(kube, "shell", reached("Promoted"), LONG)


def scaled_meanwhile(kube: Kube, prometheus: str) -> None:
    """Another field manager owns the arguments as well; the autoscaler adds a replica while the canary is judged."""
    kubectl("apply", "-f", "-", stdin=tuning("scaled", prometheus, mode="auto"))
    follow(kube, "scaled", reached("Canary"), LONG)
    more = {"spec": {"replicas": 3}}
    kube.patch(DEPLOYMENTS, "scaled", more, NAMESPACE, type=PatchType.MERGE, subresource="scale")
    follow(kube, "scaled", reached("Promoted"), LONG)


def second_manager(kube: Kube, name: str) -> None:
    """A deployment tool owns the arguments as well, and an autoscaler the replicas."""
    server = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]["template"]["spec"]["containers"][0]
    leaves = {"name": server["name"], "image": server["image"], "args": server["args"]}
    labels = {"app": name, "tier": "serving"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [leaves]}}
    body = {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
    kube.apply(DEPLOYMENTS, body, NAMESPACE, manager="team-deploy", force=True)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    scaler = {"metadata": {"name": name}, "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 4}}
    kube.create(HPAS, scaler, NAMESPACE)


# --- deleted half-way ---


def deleted_half_way(kube: Kube, prometheus: str, name: str, phase: str) -> None:
    """Everything goes that the tuning owned, and production settles as it was."""
    kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto", trials=1))
    follow(kube, name, half_rolled if phase == "Rolling" else reached(phase), LONG)
    kubectl("-n", NAMESPACE, "delete", "tuning", name, "--timeout=30s")
    wait_for(lambda: made_for(kube, name) == [] and trials_of(kube, name) == [], f"what {name} owned is gone", 240)
    wait_for(lambda: settled(kube, name), f"{name} has settled", 240)


def settled(kube: Kube, name: str) -> bool:
    """Whether all its pods are of the present template and ready."""
    found = kube.get(DEPLOYMENTS, name, NAMESPACE)
    now = found.get("status") or {}
    seen = now.get("observedGeneration") == found["metadata"]["generation"]
    counts = {now.get(key) for key in ("replicas", "updatedReplicas", "readyReplicas")}
    return seen and counts == {2} and not found["spec"].get("paused")


# --- everything fails once ---


def killed_before_the_canary(kube: Kube, prometheus: str) -> None:
    """Two controllers, of which the leading one goes; then one, killed as by a node that dies, in two phases."""
    slow = tuning("faults", prometheus, trials=2)
    slow["spec"]["promotion"]["analysis"]["maxDuration"] = "10m"  # outages take some of it
    controllers(kube, 2)
    first = holder(kube)
    kubectl("apply", "-f", "-", stdin=slow)
    follow(kube, "faults", reached("Profiling"), LONG)
    kubectl("-n", NAMESPACE, "delete", "pod", next(p for p in controller_pods(kube) if first.startswith(p)))
    wait_for(lambda: holder(kube) not in ("", first), "the other controller takes over")
    controllers(kube, 1)
    for phase in ("Searching", "Confirming"):
        follow(kube, "faults", reached(phase), LONG)
        kill_controller(kube)
    follow(kube, "faults", reached("AwaitingApproval"), LONG)


def outages_while_it_rolls(kube: Kube, prometheus: subprocess.Popen[bytes]) -> None:
    """Prometheus, then the API server silent for a minute; the controller killed in the canary and in the roll.

    While the API server is silent, nodes and endpoints are taken for dead by Kubernetes itself: requests may fail then.
    """
    with rest(kube, "faults", token(kube, "bob", "tunewright-approve")) as bob:
        approve(bob)
    follow(kube, "faults", reached("Canary"), LONG)
    kill_controller(kube)
    with stopped(prometheus.pid):
        time.sleep(MINUTE)
    follow(kube, "faults", reached("Rolling"), LONG)
    kill_controller(kube)
    server = os.environ.get("TUNEWRIGHT_APISERVER_PID")  # of a cluster that was started for the tests
    if server is not None:
        with stopped(int(server)):
            time.sleep(MINUTE)
    follow(kube, "faults", reached("Promoted"), LONG)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process answers nobody, and closes no connection: what a network that swallows packets looks like."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_controller(kube: Kube) -> None:
    """As a node that dies: no time to say goodbye."""
    names = controller_pods(kube)
    kubectl("-n", NAMESPACE, "delete", "pod", *names, "--grace-period=0", "--force")
    wait_for(lambda: set(controller_pods(kube)) - set(names), "another controller pod is made")


def holder(kube: Kube) -> str:
    """Who holds the lease."""
    return str(kube.get(LEASES, "tunewright", NAMESPACE)["spec"].get("holderIdentity") or "")


def controllers(kube: Kube, replicas: int) -> None:
    """So many of them."""
    wanted = {"spec": {"replicas": replicas}}
    kube.patch(DEPLOYMENTS, "tunewright", wanted, NAMESPACE, type=PatchType.MERGE, subresource="scale")
    wait_for(lambda: ready(kube, "tunewright") == replicas, f"{replicas} controllers are ready")
