"""A canary in an HTTPRoute whose parts, rights or record are taken away in the middle, on a cluster in memory."""

import json
import re
from typing import Any

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import OWNER, Servers, new_cluster
from fake_route import (
    RULES,
    as_before,
    begin,
    canaries,
    deployment,
    live,
    make,
    nothing_left,
    plan,
    until,
    weights,
)

from tunewright.kube.errors import Forbidden, Unavailable
from tunewright.kube.resources import DEPLOYMENTS, HTTP_ROUTES, SERVICES
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.httproute import RECORD_ANNOTATION, Record
from tunewright.ports import PortError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """With a canary that has its weight."""
    found, servers = new_cluster(), Servers(monkeypatch)
    begin(found)
    until(found, servers, plan(canary=True))
    assert weights(found)["llm-canary"] == 200
    return found


@pytest.fixture
def servers(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


def abandoned(cluster: FakeCluster, *live: str) -> list[str]:
    return release_abandoned(cluster, NAMESPACE, set(live), cluster.clock)  # type: ignore[arg-type]


def record_of(cluster: FakeCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(live(cluster)["metadata"]["annotations"][RECORD_ANNOTATION])
    return found


@pytest.mark.parametrize("tuning", [(), (OWNER.uid,)], ids=["deleted too", "there"])
def test_a_new_controller_takes_a_canary_that_somebody_deleted_out_of_its_route(
    cluster: FakeCluster, tuning: tuple[str, ...]
) -> None:
    """Nothing but the route is left to tell of it."""
    cluster.delete(DEPLOYMENTS, "llm-canary", NAMESPACE)
    conflicts = iter([True, True])

    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "patch" and resource is HTTP_ROUTES and next(conflicts, False):
            cluster._touched(live(cluster))

    cluster.before = before
    told = f"HTTPRoute chat is without the canary again: somebody deleted the canary of Tuning {NAMESPACE}/chat"
    assert abandoned(cluster, *tuning) == [told]
    as_before(cluster)
    assert abandoned(cluster, *tuning) == []


def test_a_canary_that_lives_is_left_in_its_route(cluster: FakeCluster) -> None:
    assert abandoned(cluster, OWNER.uid) == []
    assert weights(cluster)["llm-canary"] == 200
    cluster.forbidden.add("httproutes")
    assert abandoned(cluster, OWNER.uid) == [], "without the rights no canary came into a route"


def test_routes_that_can_not_be_listed_keep_no_controller_from_beginning(cluster: FakeCluster) -> None:
    cluster.delete(DEPLOYMENTS, "llm-canary", NAMESPACE)

    def before(verb: str, resource: Any, name: str) -> None:
        if resource is HTTP_ROUTES:
            raise Unavailable("GET", "/it", "a conversion webhook does not answer", status=500)

    cluster.before = before
    assert abandoned(cluster) == []


def test_a_route_that_sends_all_to_a_canary_that_is_gone_is_named(cluster: FakeCluster) -> None:
    cluster.delete(DEPLOYMENTS, "llm-canary", NAMESPACE)
    live(cluster)["spec"]["rules"][0]["backendRefs"][0]["weight"] = 0
    assert "sends all of a rule's requests to llm-canary, which is gone" in abandoned(cluster)[0]
    assert weights(cluster)["llm-canary"] == 200


def test_a_copy_of_the_canary_by_somebody_else_is_left_alone(cluster: FakeCluster) -> None:
    """Only what is marked as ours in every way is deleted."""
    found = deployment(cluster)
    assert found is not None
    for name, change in {
        "no-role": lambda metadata: metadata["labels"].pop("tunewright.dev/role"),
        "no-owner": lambda metadata: metadata["annotations"].pop("tunewright.dev/tuning-uid"),
    }.items():
        copied = json.loads(json.dumps({"metadata": {**found["metadata"], "name": name}, "spec": found["spec"]}))
        change(copied["metadata"])
        cluster.put(DEPLOYMENTS, copied)
    abandoned(cluster)
    as_before(cluster)
    assert sorted(name for plural, _, name in cluster.objects if plural == "deployments") == [
        "llm",
        "no-owner",
        "no-role",
    ]


def test_a_service_of_the_canary_that_somebody_deleted_costs_the_weight_until_it_is_there_again(
    cluster: FakeCluster, servers: Servers
) -> None:
    cluster.delete(SERVICES, "llm-canary", NAMESPACE)
    status = make(cluster).apply(plan(canary=True))
    as_before(cluster)
    assert status.foreign is None
    assert until(cluster, servers, plan(canary=True)).foreign is None
    assert weights(cluster)["llm-canary"] == 200
    assert (SERVICES.plural, NAMESPACE, "llm-canary") in cluster.objects


def test_a_record_that_somebody_took_off_the_route_leaves_no_weight_behind(
    cluster: FakeCluster, servers: Servers
) -> None:
    del live(cluster)["metadata"]["annotations"][RECORD_ANNOTATION]
    for _ in range(3):
        assert "changed the backendRefs of HTTPRoute chat" in str(make(cluster).apply(plan(canary=True)).foreign)
        assert weights(cluster) == {"llm": 800, "llm-canary": 200}, "it is held, and not fought"
    until(cluster, servers, plan())
    assert weights(cluster) == {"llm": 800}
    assert weights(cluster, 1) == {"other": 1000, "llm": 2400}
    nothing_left(cluster)


@pytest.mark.parametrize(
    "change",
    [
        {"before": 1},
        {"before": []},
        {"after": [["llm"]]},
        {"before": [[{"name": "llm", "weight": "many"}], [], [], []]},
        {"service": None},
    ],
)
def test_a_record_that_somebody_broke_stops_no_controller(
    cluster: FakeCluster, servers: Servers, change: dict[str, Any]
) -> None:
    """Whoever may edit the route writes it: it must not keep the controller from all other tunings."""
    text = json.dumps(record_of(cluster) | change)
    live(cluster)["metadata"]["annotations"][RECORD_ANNOTATION] = text
    assert Record.read(live(cluster)) is None
    assert abandoned(cluster) != []
    assert weights(cluster) == {"llm": 800}
    assert live(cluster)["spec"]["rules"][2:] == RULES[2:]
    cluster.tick()
    cluster.tick()
    nothing_left(cluster)


NEEDS = r"HTTPRoute chat needs more rights .* `kubectl apply -k deploy/gateway-api`"


def test_a_route_that_can_not_be_read_keeps_the_canary_and_is_named(cluster: FakeCluster, servers: Servers) -> None:
    cluster.forbidden.add("httproutes")
    writes = len(cluster.writes())
    for wanted in (plan(canary=True), plan(1, canary=True), plan()):
        for _ in range(3):
            status = make(cluster).apply(wanted)
            assert re.search(NEEDS, str(status.foreign))
            assert "the canary stays, since the route may send it requests" in str(status.foreign)
            assert not status.settled or wanted.canary
            cluster.tick()
    assert make(cluster).let_go()
    with pytest.raises(PortError, match=NEEDS):
        make(cluster).release()
    assert len(cluster.writes()) == writes
    assert len(canaries(cluster)) == 1
    cluster.forbidden.clear()
    until(cluster, servers, plan())
    as_before(cluster)
    nothing_left(cluster)


@pytest.mark.parametrize("plural", ["services", "httproutes"])
def test_a_right_to_write_that_is_missing_is_named_as_well(cluster: FakeCluster, servers: Servers, plural: str) -> None:
    if plural == "services":
        until(cluster, servers, plan())
        make(cluster).apply(plan(canary=True))

    def before(verb: str, resource: Any, name: str) -> None:
        if verb in ("create", "patch") and resource.plural == plural:
            raise Forbidden(verb.upper(), name, f'User "tunewright" cannot {verb}', status=403)

    cluster.before = before
    wanted = plan(canary=plural == "services")
    for _ in range(3):
        cluster.tick()
    if plural == "services":
        with pytest.raises(PortError, match=r"needs more rights .* cannot create"):
            make(cluster).apply(wanted)
    else:
        assert "needs more rights (User" in str(make(cluster).apply(wanted).foreign)
        assert weights(cluster)["llm-canary"] == 200
        assert make(cluster).let_go()
        assert deployment(cluster) is not None, "what the route sends requests to stays"
    cluster.before = lambda verb, resource, name: None
    until(cluster, servers, wanted)


def test_a_canary_of_a_tuning_of_before_says_where_it_is_to_be_taken_out(cluster: FakeCluster) -> None:
    found = deployment(cluster)
    assert found is not None
    found["metadata"]["annotations"]["tunewright.dev/tuning-uid"] = "uid-of-earlier"
    with pytest.raises(PortError, match="delete it; take it out of HTTPRoute chat first"):
        make(cluster).apply(plan(canary=True))
