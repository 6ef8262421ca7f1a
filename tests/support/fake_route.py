"""Production behind a Service and an HTTPRoute on a cluster in memory, and what must hold of it after each step."""

import copy
import json
from collections.abc import Callable
from typing import Any

from fake_cluster import NAMESPACE, FakeCluster, own_rules
from fake_production import BASELINE, NEW, OWNER, REF, Servers, production

from tunewright.kube.client import Json
from tunewright.kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, HTTP_ROUTES, SERVICES
from tunewright.kube.times import format_time
from tunewright.platform.kubernetes import httproute
from tunewright.platform.kubernetes.httproute import RECORD_ANNOTATION
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.ports import PortError, TargetPlan, TargetStatus

SHARE = 0.2
RULES: list[Json] = [
    {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "backendRefs": [{"group": "", "kind": "Service", "name": "llm", "port": 80, "weight": 1}],
        "timeouts": {"request": "600s"},
    },
    {
        "backendRefs": [
            {"name": "other", "port": 80, "weight": 1},
            {"name": "llm", "port": 80, "weight": 3, "filters": [{"type": "URLRewrite"}]},
        ]
    },
    {"backendRefs": [{"name": "docs", "port": 80}]},
    {"filters": [{"type": "RequestRedirect"}]},
]


def route_of(rules: list[Json] = RULES) -> Json:
    """As Helm wrote it, and as a Gateway took it."""
    accepted = {"parents": [{"conditions": [{"type": "Accepted", "status": "True"}]}]}
    found = {"metadata": {"name": "chat", "namespace": NAMESPACE}, "spec": {"rules": copy.deepcopy(rules)}}
    found |= {"status": accepted}
    own_rules(found, "helm", format_time(1.0))
    return found


def begin(cluster: FakeCluster, replicas: int = 2) -> None:
    """Production behind a Service with a port, and the route before it."""
    production(cluster, replicas)
    port = {
        "name": "http",
        "protocol": "TCP",
        "port": 80,
        "targetPort": "http",
        "nodePort": 30080,
        "appProtocol": "h2c",
    }
    cluster.edit(SERVICES, "llm")["spec"]["ports"] = [port]
    cluster.put(HTTP_ROUTES, route_of())


def make(cluster: FakeCluster, **more: Any) -> DeploymentTarget:
    given = {"start_timeout": 100.0, "drain_timeout": 60.0, "take_over": True, "http_route": "chat", **more}
    return DeploymentTarget(cluster, OWNER, REF, cluster.clock, **given)  # type: ignore[arg-type]


def plan(updated: int = 0, *, canary: bool = False) -> TargetPlan:
    return TargetPlan(BASELINE, NEW, updated, canary, SHARE if canary else 0.0)


def live(cluster: FakeCluster) -> Json:
    return cluster.edit(HTTP_ROUTES, "chat")


def weights(cluster: FakeCluster, rule: int = 0) -> dict[str, int]:
    return {ref["name"]: ref.get("weight", 1) for ref in live(cluster)["spec"]["rules"][rule]["backendRefs"]}


def canaries(cluster: FakeCluster) -> list[Json]:
    return cluster.pods(**{"tunewright.dev/role": "canary"})


def in_service(pod: Json) -> bool:
    """Whether the target's Service selects it."""
    return pod["metadata"]["labels"].get("app") == "llm"


def deployment(cluster: FakeCluster) -> Json | None:
    return cluster.objects.get((DEPLOYMENTS.plural, NAMESPACE, "llm-canary"))


def endpoints(cluster: FakeCluster, name: str) -> set[str]:
    found = cluster.objects.get((ENDPOINT_SLICES[0].plural, NAMESPACE, name)) or {"endpoints": []}
    return {each["targetRef"]["name"] for each in found["endpoints"] if each["conditions"]["ready"]}


def nothing_is_refused(cluster: FakeCluster, servers: Servers) -> None:
    """Whoever the route sends requests to has a ready endpoint; and the canary's has completed a token."""
    sent = {name for rule in (0, 1) for name, weight in weights(cluster, rule).items() if weight} - {"other"}
    for name in sent:
        assert (SERVICES.plural, NAMESPACE, name) in cluster.objects
        assert endpoints(cluster, name), f"{name} has no endpoint"
    if "llm-canary" in sent:
        (pod,) = canaries(cluster)
        assert pod["status"]["podIP"] in servers.asked
        assert "tunewright.dev/retired" not in cluster.edit(DEPLOYMENTS, "llm-canary")["metadata"]["annotations"]


def until(
    cluster: FakeCluster,
    servers: Servers,
    wanted: TargetPlan,
    *,
    new_target: Callable[[FakeCluster], DeploymentTarget] = make,
    steps: int = 150,
) -> TargetStatus:
    """Each step by a controller of its own."""
    for _ in range(steps):
        try:
            status = new_target(cluster).apply(wanted)
        except PortError:
            cluster.tick()
            continue
        nothing_is_refused(cluster, servers)
        if status.settled:
            return status
        cluster.tick()
        nothing_is_refused(cluster, servers)
    raise AssertionError(f"not settled: {status}")


def as_before(cluster: FakeCluster) -> None:
    """The route is as it was, to the byte, and the rules are Helm's again."""
    assert json.dumps(live(cluster)["spec"]["rules"]) == json.dumps(RULES)
    assert RECORD_ANNOTATION not in (live(cluster)["metadata"].get("annotations") or {})
    assert httproute.managers(live(cluster)) == ["helm"]


def nothing_left(cluster: FakeCluster) -> None:
    assert sorted(name for plural, _, name in cluster.objects if plural == "deployments") == ["llm"]
    assert sorted(name for plural, _, name in cluster.objects if plural == "services") == ["llm"]
    assert canaries(cluster) == []
