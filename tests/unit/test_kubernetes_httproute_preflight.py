"""What pre-flight finds of an HTTPRoute that is to give a canary its share, on a cluster in memory."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import NEW, Servers
from fake_route import RULES, begin, live, make, plan, until

from tunewright.kube.errors import Invalid, NotAdmitted
from tunewright.kube.resources import HTTP_ROUTES, SERVICES
from tunewright.platform.kubernetes.canary import ROUTE
from tunewright.platform.kubernetes.httproute import RECORD_ANNOTATION, Record
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.target import DeploymentTarget


def without_gateway_api(cluster: FakeCluster) -> None:
    del cluster.objects[(HTTP_ROUTES.plural, NAMESPACE, "chat")]
    cluster.unserved.add("httproutes")


def second_service(cluster: FakeCluster) -> None:
    cluster.put(SERVICES, {"metadata": {"name": "llm2"}, "spec": {"selector": {"app": "llm"}}})
    live(cluster)["spec"]["rules"].append({"backendRefs": [{"name": "llm2"}]})


def refused(cluster: FakeCluster) -> None:
    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "dry-patch":
            raise Invalid("PATCH", name, "spec.rules[0].backendRefs: Too many: 17", status=422)

    cluster.before = before


def not_admitted(cluster: FakeCluster) -> None:
    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "dry-create":
            raise NotAdmitted("POST", name, 'services "llm-canary" is forbidden: exceeded quota: few', status=403)

    cluster.before = before


def there(cluster: FakeCluster) -> None:
    live(cluster)["spec"]["rules"][0]["backendRefs"].append({"name": "llm-canary", "weight": 0})


def taken(cluster: FakeCluster) -> None:
    record = Record.of(Owner("other", "uid-of-other"), live(cluster), "llm", "llm-canary", 0.5)
    live(cluster)["metadata"]["annotations"] = {RECORD_ANNOTATION: record.text()}


def argo(cluster: FakeCluster) -> None:
    live(cluster)["metadata"]["labels"] = {"argocd.argoproj.io/instance": "prod"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.objects.pop((HTTP_ROUTES.plural, NAMESPACE, "chat")), "there is no HTTPRoute chat in namespace"),
        (without_gateway_api, "this cluster has no Gateway API"),
        (lambda c: live(c)["spec"].update(rules=RULES[2:]), "no rule of HTTPRoute chat sends requests to Service llm:"),
        (lambda c: c.objects.pop((SERVICES.plural, NAMESPACE, "llm")), "no Service selects the target's pods, so HTTP"),
        (second_service, "sends to several Services of the target (llm, llm2)"),
        (argo, "HTTPRoute chat: Argo CD"),
        (taken, "Tuning other has its canary in HTTPRoute chat"),
        (lambda c: c.put(SERVICES, {"metadata": {"name": "llm-canary"}, "spec": {}}), "Service llm-canary is there"),
        (refused, "Too many: 17"),
        (not_admitted, "would refuse the canary in HTTPRoute chat: POST llm-canary: services"),
        (there, "HTTPRoute chat sends to Service llm-canary already"),
        (lambda c: c.forbidden.add("httproutes"), "kubectl apply -k deploy/gateway-api"),
        (lambda c: c.forbidden.add("endpointslices"), "kubectl apply -k deploy/gateway-api"),
    ],
)  # fmt: skip
def test_preflight_finds_it_and_nothing_is_touched(
    cluster: FakeCluster, servers: Servers, change: Callable[[FakeCluster], Any], reason: str
) -> None:
    begin(cluster)
    assert make(cluster).preflight(NEW) == []
    change(cluster)
    before = len(cluster.writes())
    told = " ".join(make(cluster).preflight(NEW))
    assert reason in told
    assert make(cluster, http_route=None).preflight(NEW) == [] or "no Service selects the pods" in told
    assert len(cluster.writes()) == before


def test_who_owns_the_rules_is_named_unless_they_may_be_taken_over(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    told = " ".join(make(cluster, take_over=False).preflight(NEW))
    assert "helm owns .spec.rules of HTTPRoute chat" in told
    assert "promotion.takeOver: true" in told
    notes = " ".join(make(cluster).notes(NEW))
    assert "helm owns its rules" in notes
    assert "has no label app" in notes
    assert "accepted" not in notes
    live(cluster)["status"] = {}
    assert "no Gateway has accepted HTTPRoute chat" in " ".join(make(cluster).notes(NEW))


def test_labels_that_bring_the_canary_into_the_service_are_refused(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    told = " ".join(make(cluster, canary_labels={"app": "llm"}).preflight(NEW))
    assert "Service select the canary beside its weight" in told
    assert make(cluster, canary_labels={"scrape": "yes"}).preflight(NEW) == []


def test_weights_that_a_webhook_changes_are_refused(
    cluster: FakeCluster, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(cluster)
    patch = cluster.patch
    monkeypatch.setattr(
        cluster, "patch", lambda *a, **more: live(cluster) if more.get("dry_run") else patch(*a, **more)
    )
    assert "changes the weights that are written" in " ".join(make(cluster).preflight(NEW))


def test_without_a_route_nothing_of_it_is_read_or_written(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    cluster.forbidden |= {"httproutes", "endpointslices"}

    def plain(cluster: FakeCluster) -> DeploymentTarget:
        return make(cluster, http_route=None)

    assert plain(cluster).preflight(NEW) == []
    assert "HTTPRoute" not in " ".join(plain(cluster).notes(NEW))
    for wanted in (plan(canary=True), plan(1, canary=True), plan(2), plan()):
        until(cluster, servers, wanted, new_target=plain)
    assert not {"httproutes", "endpointslices"} & {plural for _, plural, _ in cluster.calls}
    assert ROUTE not in str(cluster.objects)
