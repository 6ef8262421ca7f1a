"""The canary's share by an HTTPRoute on a real API server, under traffic, with the shipped rights and no more.

No Gateway runs there: clients of the test do what one does, by the route's weights and the Services' endpoints.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_production import NEW, Traffic, deployment, own, production
from cluster_rights import client_with, shipped, used
from test_target import SystemClock, plan, settled, target_of, until

from cluster import wait_for
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import NotFound
from tunewright.kube.resources import CRDS, DEPLOYMENTS, ENDPOINT_SLICES, HTTP_ROUTES, PODS, SERVICES, TUNINGS
from tunewright.platform.kubernetes import httproute
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.ports import TargetPlan, TargetStatus

pytestmark = pytest.mark.timeout(600)

ANY: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
REF: Json = {
    "type": "object",
    "properties": {
        "group": {"type": "string"},
        "kind": {"type": "string", "default": "Service"},
        "name": {"type": "string"},
        "port": {"type": "integer", "format": "int32"},
        "weight": {"type": "integer", "format": "int32", "default": 1, "minimum": 0, "maximum": 1_000_000},
    },
    "required": ["name"],
}
RULE: Json = {"properties": {"backendRefs": {"type": "array", "maxItems": 16, "items": REF}}}
SPEC: Json = {"properties": {"rules": {"type": "array", "items": ANY | RULE}}}
CRD: Json = {
    "metadata": {
        "name": "httproutes.gateway.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, the shape of the Gateway API for tests"},
    },
    "spec": {
        "group": HTTP_ROUTES.group,
        "scope": "Namespaced",
        "names": {
            "plural": HTTP_ROUTES.plural,
            "singular": "httproute",
            "kind": HTTP_ROUTES.kind,
            "listKind": "HTTPRouteList",
        },
        "versions": [
            {
                "name": HTTP_ROUTES.version,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": ANY | SPEC}}},
            }
        ],
    },
}
ROUTE: Json = {
    "metadata": {"name": "chat"},
    "spec": {
        "parentRefs": [{"name": "gateway"}],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                "backendRefs": [{"name": "llm", "port": 80}],
                "timeouts": {"request": "600s"},
            },
            {"matches": [{"path": {"type": "PathPrefix", "value": "/docs"}}], "backendRefs": [{"name": "docs"}]},
        ],
    },
}


@pytest.fixture(scope="module")
def gateway_api(admin: Kube) -> Iterator[None]:
    """HTTPRoutes of a shape as the Gateway API has it, where the cluster has none of its own."""
    try:
        admin.get(CRDS, CRD["metadata"]["name"])
    except NotFound:
        made = admin.create(CRDS, CRD)
    else:
        made = None
    wait_for(lambda: _listed(admin), "HTTPRoutes are served")
    yield
    if made is not None:
        admin.delete(CRDS, CRD["metadata"]["name"], uid=made["metadata"]["uid"])


def _listed(kube: Kube) -> bool:
    try:
        kube.list(HTTP_ROUTES, "default")
    except NotFound:
        return False
    return True


class Gateway(Traffic):
    """Clients behind a gateway: a Service by the weights, then one of its endpoints; none is a request refused."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        super().__init__("")
        self._kube, self._namespace = kube, namespace
        self.sent: Counter[str] = Counter()

    def address(self) -> str:
        refs = self._kube.get(HTTP_ROUTES, "chat", self._namespace)["spec"]["rules"][0]["backendRefs"]
        (name,) = random.choices([ref["name"] for ref in refs], [ref["weight"] for ref in refs])
        served = self._kube.served(*ENDPOINT_SLICES)
        assert served is not None
        slices = self._kube.list(served, self._namespace, labels=f"kubernetes.io/service-name={name}").items
        ready = [e for each in slices for e in each.get("endpoints") or [] if e["conditions"]["ready"]]
        if not ready:
            raise ValueError(f"503: {name} has no endpoint")
        self.sent[name] += 1
        return f"http://{random.choice(ready)['addresses'][0]}:8000"


def weights(kube: Kube, namespace: str) -> dict[str, int]:
    """What the first rule gives to whom."""
    refs = kube.get(HTTP_ROUTES, "chat", namespace)["spec"]["rules"][0]["backendRefs"]
    return {ref["name"]: ref["weight"] for ref in refs}


def names(kube: Kube, resource: object, namespace: str) -> list[str]:
    """All that are there."""
    return [each["metadata"]["name"] for each in kube.list(resource, namespace).items]  # type: ignore[arg-type]


@pytest.mark.cluster
def test_the_way_there_and_back_with_the_shipped_rights(
    gateway_api: None, kubeconfig: Path, admin: Kube, namespace: str, token: Callable[..., str]
) -> None:
    production(admin, namespace, deployment(2))
    admin.apply(HTTP_ROUTES, ROUTE, namespace, manager="helm")
    before = admin.get(HTTP_ROUTES, "chat", namespace)
    owner = own(admin, namespace)
    extra = shipped("gateway-api/role.yaml")
    limited = client_with([*shipped("base/role.yaml"), *extra], kubeconfig, admin, namespace, token)
    assert target_of(limited, namespace, owner, http_route="other").preflight(NEW) == [
        f"there is no HTTPRoute other in namespace {namespace}: name it right, or leave promotion.canary.httpRoute out"
    ]
    told = target_of(limited, namespace, owner, http_route="chat", take_over=False).preflight(NEW)
    assert any("helm owns .spec.rules of HTTPRoute chat" in each for each in told)
    targets = [target_of(limited, namespace, owner, http_route="chat") for _ in range(2)]
    assert targets[0].preflight(NEW) == []
    assert admin.get(HTTP_ROUTES, "chat", namespace) == before, "nothing is touched"
    turn = iter(range(10**6))

    def go(wanted: TargetPlan) -> TargetStatus:
        return until(lambda: targets[next(turn) % 2].apply(wanted), settled)

    with Gateway(admin, namespace).running() as clients:
        status = go(plan(canary=True))
        assert [(r.ready, r.candidate_hash) for r in status.replicas if r.canary] == [(True, NEW.hash)]
        assert weights(admin, namespace) == {"llm": 750, "llm-canary": 250}
        (canary,) = admin.list(PODS, namespace, labels="tunewright.dev/role=canary").items
        assert "app" not in canary["metadata"]["labels"]
        wait_for(lambda: clients.sent["llm-canary"] > 20, "requests reach the canary")
        go(plan(1, canary=True))
        route = admin.get(HTTP_ROUTES, "chat", namespace)
        assert route["spec"] == before["spec"]
        assert httproute.managers(route) == ["helm"]
        assert not route["metadata"].get("annotations")
        go(plan(0))
    assert clients.failures == []
    assert release_abandoned(limited, namespace, {owner.uid}, SystemClock()) == []
    assert admin.get(HTTP_ROUTES, "chat", namespace)["spec"] == before["spec"]
    assert names(admin, DEPLOYMENTS, namespace) == ["llm"]
    wait_for(lambda: names(admin, SERVICES, namespace) == ["llm"], "the garbage collector takes the canary's Service")
    idle = [
        f"{verb} {rule['resources']}" for rule in extra for verb in rule["verbs"] if not used(limited.asked, rule, verb)
    ]
    assert idle == []


@pytest.mark.cluster_full
def test_a_tuning_deleted_in_the_canary_refuses_no_request(gateway_api: None, kube: Kube, namespace: str) -> None:
    """No controller is there for a while; the next one gives the route back, and only then the canary goes."""
    production(kube, namespace, deployment(2))
    kube.apply(HTTP_ROUTES, ROUTE, namespace, manager="helm")
    before = kube.get(HTTP_ROUTES, "chat", namespace)["spec"]
    owner = own(kube, namespace)
    target = target_of(kube, namespace, owner, http_route="chat")
    with Gateway(kube, namespace).running() as clients:
        until(lambda: target.apply(plan(canary=True)), settled)
        kube.delete(TUNINGS, owner.name, namespace)
        seen = clients.sent["llm-canary"]
        wait_for(lambda: clients.sent["llm-canary"] > seen + 100, "it serves on, and nobody takes it away")
        (done,) = release_abandoned(kube, namespace, set(), SystemClock())
        assert "HTTPRoute chat is without the canary again" in done
        assert kube.get(HTTP_ROUTES, "chat", namespace)["spec"] == before
        wait_for(lambda: names(kube, SERVICES, namespace) == ["llm"], "nothing of it is left")
        wait_for(lambda: len(names(kube, PODS, namespace)) == 2, "nor its pod")
    assert clients.failures == []
