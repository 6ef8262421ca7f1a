"""As a user would: the manifests applied, Tunings applied, approved over REST, and promoted under traffic.

The controller runs in its own pod from the image; Prometheus is real and finds the pods by the Kubernetes API.
"""

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from cluster_production import Traffic
from cluster_story import (
    BAD,
    NAMESPACE,
    arguments,
    follow,
    in_phase,
    kubectl,
    made_for,
    phase,
    production,
    ready,
    rest,
    token,
    tuning,
    vllm,
)

from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.resources import DEPLOYMENTS, EVENTS, Resource

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

HPAS = Resource("autoscaling", "v1", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
LIMITS = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "100m"}}


def test_three_targets_as_found_in_the_wild_are_promoted_with_no_failed_request(
    installed: Kube, prometheus: str
) -> None:
    """Arguments applied by kubectl, on GPUs of which one is free; `sh -c`; another field manager and an autoscaler."""
    kube = installed
    in_place = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    script = "exec tunewright " + " ".join(BAD)
    urls = {
        "chat": production(kube, "chat", vllm(resources=LIMITS), strategy=in_place),
        "shell": production(kube, "shell", {**vllm([]), "command": ["sh", "-c", script], "args": []}),
        "scaled": production(kube, "scaled", vllm()),
    }
    second_manager(kube, "scaled")
    with ExitStack() as stack, ThreadPoolExecutor(3) as people:
        traffic = {name: stack.enter_context(Traffic(url).running()) for name, url in urls.items()}
        stories: dict[str, Callable[[], None]] = {
            "chat": lambda: approved_over_rest(kube, prometheus),
            "shell": lambda: by_itself(kube, "shell", prometheus),
            "scaled": lambda: scaled_meanwhile(kube, prometheus),
        }
        for told in [people.submit(story) for story in stories.values()]:
            told.result()
    for name, clients in traffic.items():
        assert clients.failures == [], name
        assert clients.answered["all"] > 200, name
        assert "--max-num-seqs 4" not in " ".join(arguments(kube, name)), "it still runs the bad configuration"
        assert made_for(kube, name) == []
    assert [ready(kube, name) for name in urls] == [2, 2, 3]
    assert arguments(kube, "shell")[:2] == ["sh", "-c"]


def approved_over_rest(kube: Kube, prometheus: str) -> None:
    """Applied, looked at, approved with a ServiceAccount's token, waited for."""
    kubectl("apply", "-f", "-", stdin=tuning("chat", prometheus))
    follow(kube, "chat", in_phase("AwaitingApproval"), 600.0)
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
        approved(ana, bind)
        follow(kube, "chat", in_phase("Promoted"), 600.0)
        decided = ana.get("/decisions").raise_for_status().json()
    assert f"system:serviceaccount:{NAMESPACE}:ana" in json.dumps(decided)
    kubectl("-n", NAMESPACE, "wait", "--for=condition=Promoted", "tuning/chat", "--timeout=10s")
    about_it = [e for e in kube.list(EVENTS, NAMESPACE).items if e["involvedObject"]["name"] == "chat"]
    assert {"Canary", "Rolling", "Watching", "Promoted"} <= {event["reason"] for event in about_it}
    assert "Promoted" in kubectl("-n", NAMESPACE, "get", "tune", "chat")


def approved(api: httpx.Client, bind: Json) -> None:
    """With what was looked at."""
    api.post("/approve", json={**bind, "reason": "looks good"}).raise_for_status()


def by_itself(kube: Kube, name: str, prometheus: str) -> None:
    """Mode auto, from applied to promoted."""
    kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto"))
    follow(kube, name, in_phase("Promoted"), 900.0)


def scaled_meanwhile(kube: Kube, prometheus: str) -> None:
    """The autoscaler adds a replica while the canary is judged."""
    kubectl("apply", "-f", "-", stdin=tuning("scaled", prometheus, mode="auto"))
    follow(kube, "scaled", in_phase("Canary"), 900.0)
    scale = {"spec": {"replicas": 3}}
    kube.patch(DEPLOYMENTS, "scaled", scale, NAMESPACE, type=PatchType.MERGE, subresource="scale")
    follow(kube, "scaled", in_phase("Promoted"), 900.0)
    assert phase(kube, "scaled") == "Promoted"


def second_manager(kube: Kube, name: str) -> None:
    """A GitOps-like manager owns the arguments as well, and an autoscaler the replicas."""
    server = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]["template"]["spec"]["containers"][0]
    leaves = {"name": server["name"], "image": server["image"], "args": server["args"]}
    body = {
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {"app": name, "tier": "serving"}},
            "template": {
                "metadata": {"labels": {"app": name, "tier": "serving"}},
                "spec": {"containers": [leaves]},
            },
        },
    }
    kube.apply(DEPLOYMENTS, body, NAMESPACE, manager="team-deploy", force=True)
    scaler = {
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": 2,
            "maxReplicas": 4,
        },
    }
    kube.create(HPAS, scaler, NAMESPACE)
