"""The canary's share by the weights of an HTTPRoute, on a cluster in memory: when it comes, and how it goes."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_cluster import NAMESPACE, FakeCluster, own_rules
from fake_production import BASELINE, NEW, OWNER, Servers, new_cluster
from fake_route import (
    RULES,
    SHARE,
    as_before,
    begin,
    canaries,
    deployment,
    endpoints,
    in_service,
    live,
    make,
    nothing_is_refused,
    nothing_left,
    plan,
    route_of,
    until,
    weights,
)

from tunewright.kube.client import Json
from tunewright.kube.resources import DEPLOYMENTS, HTTP_ROUTES, SERVICES
from tunewright.kube.times import format_time
from tunewright.platform.kubernetes import httproute
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.canary import ROUTE
from tunewright.platform.kubernetes.httproute import RECORD_ANNOTATION, Record
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.ports import Conflict, PortError, Refused

# --- what the route becomes -------------------------------------------------------------------------------------------


def test_the_canary_gets_its_share_of_what_goes_to_the_service_and_others_keep_theirs() -> None:
    found = httproute.split(route_of(), "llm", "llm-canary", 0.2)
    assert found[0] == [
        {"group": "", "kind": "Service", "name": "llm", "port": 80, "weight": 800},
        {"group": "", "kind": "Service", "name": "llm-canary", "port": 80, "weight": 200},
    ]
    filters = [{"type": "URLRewrite"}]
    assert found[1] == [
        {"name": "other", "port": 80, "weight": 1000},
        {"name": "llm", "port": 80, "weight": 2400, "filters": filters},
        {"name": "llm-canary", "port": 80, "weight": 600, "filters": filters},
    ]
    assert found[2:] == [RULES[2]["backendRefs"], []]


@pytest.mark.parametrize(("weight", "parts"), [(1, 1000), (100, 100_000), (1500, 999_000), (999_999, 999_999)])
def test_no_weight_grows_past_what_the_api_allows(weight: int, parts: int) -> None:
    (refs,) = httproute.split(route_of([{"backendRefs": [{"name": "llm", "weight": weight}]}]), "llm", "c", 0.25)
    assert sum(ref["weight"] for ref in refs) == parts
    assert refs[1]["weight"] == round(parts * 0.25)


@pytest.mark.parametrize(
    "ref",
    [
        {"name": "llm", "weight": 0},
        {"name": "llm", "namespace": "elsewhere"},
        {"name": "llm", "group": "inference.networking.k8s.io", "kind": "InferencePool"},
        {"name": "llm2"},
    ],
)
def test_what_sends_nothing_to_the_service_is_no_place_for_the_canary(ref: Json) -> None:
    with pytest.raises(Refused, match="no rule of HTTPRoute chat sends requests to Service llm"):
        httproute.split(route_of([{"backendRefs": [ref]}]), "llm", "c", 0.25)


def test_weights_that_can_not_be_split_to_a_percent_are_refused() -> None:
    refs = [{"name": "other", "weight": 1_000_000}, {"name": "llm", "weight": 3}]
    with pytest.raises(Refused, match="too far apart"):
        httproute.split(route_of([{"backendRefs": refs}]), "llm", "c", 0.25)


def test_the_way_back_leaves_what_somebody_else_changed() -> None:
    route = route_of()
    record = Record.of(OWNER, route, "llm", "llm-canary", SHARE)
    route["spec"]["rules"] = copy.deepcopy(httproute.rules_with(route, record.after))
    assert httproute.without(route, record) == record.before
    rules = route["spec"]["rules"]
    rules.insert(0, {"backendRefs": [{"name": "new"}]})
    assert httproute.without(route, record) == [[{"name": "new"}], *record.before], "in another place"
    rules[2]["backendRefs"][1]["weight"] = 7
    left = httproute.without(route, record)[2]
    assert left == [ref for ref in rules[2]["backendRefs"] if ref["name"] != "llm-canary"]
    assert "changed the backendRefs" in str(httproute.changed(route, record))
    assert httproute.stuck(route, record) is None
    rules[1]["backendRefs"][0]["weight"] = 0
    assert "send everything to the canary" in str(httproute.stuck(route, record))


def test_a_record_that_is_none_of_ours_is_no_record() -> None:
    for text in ("", "no json", "[]", '{"tuning": "chat"}'):
        assert Record.read({"metadata": {"annotations": {RECORD_ANNOTATION: text}}}) is None


# --- the way ----------------------------------------------------------------------------------------------------------


def test_the_whole_way_and_back(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    assert make(cluster).preflight(NEW) == []
    status = until(cluster, servers, plan(canary=True))
    assert [(r.ready, r.candidate_hash) for r in status.replicas if r.canary] == [(True, NEW.hash)]
    assert weights(cluster) == {"llm": 800, "llm-canary": 200}
    assert weights(cluster, 1) == {"other": 1000, "llm": 2400, "llm-canary": 600}
    (pod,) = canaries(cluster)
    assert not in_service(pod), "it gets nothing by replica share"
    assert endpoints(cluster, "llm") & {pod["metadata"]["name"]} == set()
    made = cluster.edit(SERVICES, "llm-canary")
    port = {"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http", "appProtocol": "h2c"}
    assert made["spec"] == {"selector": made["metadata"]["labels"], "ports": [port]}
    assert [each["uid"] for each in made["metadata"]["ownerReferences"]] == [deployment(cluster)["metadata"]["uid"]]
    cluster.calls.clear()
    until(cluster, servers, plan(1, canary=True))
    order = [(verb, name) for verb, plural, name in cluster.writes() if plural in ("httproutes", "deployments")]
    way = [("patch", "chat"), ("patch", "llm-canary"), ("apply", "llm")]
    assert order[:3] == way, "the route is given back, and the canary one as without a route, before a replica goes"
    assert [each["uid"] for each in deployment(cluster)["metadata"]["ownerReferences"]] == [OWNER.uid]
    assert ROUTE not in deployment(cluster)["metadata"]["annotations"]
    assert in_service(canaries(cluster)[0]), "and it carries traffic by the Service meanwhile"
    as_before(cluster)
    until(cluster, servers, plan(2, canary=True))
    until(cluster, servers, plan(2))
    nothing_left(cluster)
    until(cluster, servers, plan(0))
    nothing_left(cluster)
    as_before(cluster)


def test_a_single_replica_goes_only_when_the_canary_is_in_the_service(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster, 1)
    until(cluster, servers, plan(canary=True))
    assert weights(cluster) == {"llm": 800, "llm-canary": 200}

    def before(verb: str, resource: Any, name: str) -> None:
        if (verb, name) == ("apply", "llm"):
            assert in_service(canaries(cluster)[0])
            assert weights(cluster) == {"llm": 1}

    cluster.before = before
    until(cluster, servers, plan(1, canary=True))
    cluster.before = lambda verb, resource, name: None
    until(cluster, servers, plan(1))
    as_before(cluster)


def test_the_weight_comes_after_a_completion_and_a_known_endpoint(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    make(cluster).apply(plan(canary=True))
    cluster.tick()
    address = canaries(cluster)[0]["status"]["podIP"]
    servers.answers_nothing.add(address)
    for _ in range(5):
        cluster.tick()
        assert not make(cluster).apply(plan(canary=True)).settled
    as_before(cluster)
    servers.answers_nothing.clear()
    for _ in range(5):
        status = make(cluster).apply(plan(canary=True))
    assert (SERVICES.plural, NAMESPACE, "llm-canary") in cluster.objects
    assert not endpoints(cluster, "llm-canary"), "no tick: its endpoint is not known yet"
    as_before(cluster)
    assert not status.settled
    assert "gets no requests yet" in status.detail
    cluster.tick()
    assert make(cluster).apply(plan(canary=True)).settled
    assert weights(cluster)["llm-canary"] == 200


def test_a_service_of_an_earlier_canary_is_waited_for_and_one_of_nobody_is_named(
    cluster: FakeCluster, servers: Servers
) -> None:
    """It selects the new canary's pod as well, until the garbage collector takes it away under the weight."""
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    body = {key: copy.deepcopy(cluster.edit(SERVICES, "llm-canary")[key]) for key in ("metadata", "spec")}
    until(cluster, servers, plan())
    body["metadata"] |= {"uid": "uid-of-earlier"}
    cluster.put(SERVICES, body)
    for _ in range(6):
        assert not make(cluster).apply(plan(canary=True)).settled
        cluster.tick()
    assert endpoints(cluster, "llm-canary")
    as_before(cluster)
    cluster.edit(SERVICES, "llm-canary")["metadata"]["ownerReferences"] = []
    with pytest.raises(PortError, match="Service llm-canary is not of Tuning chat"):
        make(cluster).apply(plan(canary=True))
    cluster.delete(SERVICES, "llm-canary", NAMESPACE)
    until(cluster, servers, plan(canary=True))
    assert weights(cluster)["llm-canary"] == 200


def test_the_weight_is_gone_before_the_drain(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    (pod,) = canaries(cluster)
    servers.busy.add(pod["status"]["podIP"])
    cluster.calls.clear()
    make(cluster).apply(plan())
    assert [call[:2] for call in cluster.writes()] == [("patch", "httproutes")]
    as_before(cluster)
    make(cluster).apply(plan())
    make(cluster).apply(plan())
    assert "tunewright.dev/retired" in deployment(cluster)["metadata"]["annotations"]
    cluster.tick(10)
    assert "last requests" in make(cluster).apply(plan()).detail
    assert endpoints(cluster, "llm-canary"), "whoever has not heard of it yet is answered"
    assert not in_service(pod), "it never was a server of the target's Service"
    servers.busy.clear()
    until(cluster, servers, plan())
    nothing_left(cluster)


def test_a_canary_that_is_not_ready_loses_its_weight_and_gets_it_again(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    (pod,) = canaries(cluster)
    ready = copy.deepcopy(pod["status"]["conditions"])
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    status = make(cluster).apply(plan(canary=True))
    as_before(cluster)
    assert status.foreign is None
    pod["status"]["conditions"] = ready
    assert until(cluster, servers, plan(canary=True)).foreign is None
    assert weights(cluster)["llm-canary"] == 200


def test_another_pod_in_its_place_gets_the_weight_only_when_it_has_answered(
    cluster: FakeCluster, servers: Servers
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    (pod,) = canaries(cluster)
    pod["metadata"]["deletionTimestamp"] = format_time(cluster.clock.now())
    make(cluster).apply(plan(canary=True))
    as_before(cluster)
    cluster.tick()
    cluster.tick()
    until(cluster, servers, plan(canary=True))
    assert weights(cluster)["llm-canary"] == 200
    assert canaries(cluster)[0]["metadata"]["name"] != pod["metadata"]["name"]


def test_a_new_controller_that_gets_no_answer_at_once_takes_nothing_from_a_canary_that_serves(
    cluster: FakeCluster, servers: Servers
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    servers.answers_nothing.add(canaries(cluster)[0]["status"]["podIP"])
    make(cluster).apply(plan(canary=True))
    assert weights(cluster)["llm-canary"] == 200


def test_a_route_that_the_spec_names_no_more_is_given_back_all_the_same(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))

    def without(cluster: FakeCluster) -> DeploymentTarget:
        return make(cluster, http_route=None)

    until(cluster, servers, plan(), new_target=without)
    as_before(cluster)
    nothing_left(cluster)


# --- others who write -------------------------------------------------------------------------------------------------


def test_a_foreign_change_is_named_and_held_and_only_ours_is_taken_out(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    refs = live(cluster)["spec"]["rules"][0]["backendRefs"]
    refs[0]["weight"], refs[1]["weight"] = 500, 500
    own_rules(live(cluster), "kubectl-edit", format_time(cluster.clock.now()))
    theirs = copy.deepcopy(live(cluster)["spec"])
    for _ in range(3):
        status = make(cluster).apply(plan(canary=True))
        assert "changed the backendRefs of HTTPRoute chat" in str(status.foreign)
        assert "kubectl-edit" in str(status.foreign)
        assert live(cluster)["spec"] == theirs, "never fought"
        cluster.tick()
    status = until(cluster, servers, plan())
    assert status.foreign is None
    assert live(cluster)["spec"]["rules"] == [{**RULES[0], "backendRefs": refs[:1]}, *RULES[1:]]
    assert RECORD_ANNOTATION not in live(cluster)["metadata"]["annotations"]
    nothing_left(cluster)


@pytest.mark.parametrize("record_stays", [True, False])
def test_an_apply_that_takes_the_canary_out_is_named_and_not_undone(
    cluster: FakeCluster, servers: Servers, record_stays: bool
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    live(cluster)["spec"]["rules"] = copy.deepcopy(RULES)
    own_rules(live(cluster), "helm", format_time(cluster.clock.now()))
    if not record_stays:
        del live(cluster)["metadata"]["annotations"][RECORD_ANNOTATION]
    for _ in range(3):
        assert "somebody else" in str(make(cluster).apply(plan(canary=True)).foreign)
        cluster.tick()
    assert live(cluster)["spec"]["rules"] == RULES
    until(cluster, servers, plan())
    as_before(cluster)
    nothing_left(cluster)


def test_a_route_that_is_deleted_is_named_and_holds_nothing_up(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    del cluster.objects[(HTTP_ROUTES.plural, NAMESPACE, "chat")]
    assert "removed HTTPRoute chat" in str(make(cluster).apply(plan(canary=True)).foreign)
    for _ in range(60):
        if make(cluster).apply(plan()).settled:
            break
        cluster.tick()
    nothing_left(cluster)


def test_a_route_without_a_place_for_the_canary_ends_it_with_the_reason(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    make(cluster).apply(plan(canary=True))
    live(cluster)["spec"]["rules"] = RULES[2:]
    for _ in range(3):
        cluster.tick()
    with pytest.raises(Refused, match="no rule of HTTPRoute chat sends requests to Service llm"):
        make(cluster).apply(plan(canary=True))


def test_what_sends_everything_to_the_canary_keeps_it_and_is_named(cluster: FakeCluster, servers: Servers) -> None:
    """Taking it out would leave a rule that answers nobody."""
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    live(cluster)["spec"]["rules"][0]["backendRefs"][0]["weight"] = 0
    for _ in range(5):
        status = make(cluster).apply(plan())
        assert "send everything to the canary" in str(status.foreign)
        cluster.tick(100)
    assert make(cluster).let_go()
    assert weights(cluster)["llm-canary"] == 200
    assert "deletionTimestamp" not in deployment(cluster)["metadata"]
    live(cluster)["spec"]["rules"][0]["backendRefs"][0]["weight"] = 1
    until(cluster, servers, plan())
    assert weights(cluster) == {"llm": 1}
    nothing_left(cluster)


def test_letting_go_gives_the_route_back(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    assert make(cluster).let_go()
    as_before(cluster)
    assert make(cluster).let_go(), "it may be repeated"
    for _ in range(5):
        cluster.tick()
    nothing_left(cluster)


def test_a_write_between_reading_and_writing_is_a_conflict_and_comes_again(
    cluster: FakeCluster, servers: Servers
) -> None:
    begin(cluster)
    once = iter([True])

    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "patch" and resource is HTTP_ROUTES and next(once, False):
            live(cluster)["metadata"] |= {"resourceVersion": "0", "labels": {"team": "chat"}}

    cluster.before = before
    conflicts = 0
    for _ in range(10):
        try:
            make(cluster).apply(plan(canary=True))
        except Conflict:
            conflicts += 1
            as_before(cluster)
        cluster.tick()
    assert conflicts == 1
    assert weights(cluster)["llm-canary"] == 200
    assert live(cluster)["metadata"]["labels"] == {"team": "chat"}


# --- killed, deleted --------------------------------------------------------------------------------------------------


class Killed(PortError):
    """The process ended at a write."""


WRITES = ("create", "patch", "apply", "delete")


def killing(cluster: FakeCluster, at: int, *, after: bool) -> Iterator[int]:
    """Lets the cluster's write number `at` be the last of a process, with or without effect."""
    count = 0

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            if more.get("dry_run"):
                return method(*args, **more)
            count += 1
            if count == at and not after:
                raise Killed("before the write")
            answer = method(*args, **more)
            if count == at:
                raise Killed("after the write")
            return answer

        return call

    for verb in WRITES:
        setattr(cluster, verb, wrapped(getattr(cluster, verb)))
    while True:
        yield count


@pytest.mark.parametrize("after", [False, True], ids=["without effect", "with effect"])
@pytest.mark.parametrize("forward", [True, False], ids=["promoted", "sent back"])
def test_killed_at_any_write_it_comes_to_the_same_end(servers: Servers, after: bool, forward: bool) -> None:
    way = [plan(canary=True), plan(1, canary=True), plan(2, canary=True), plan(2)] if forward else [plan(canary=True)]
    at, done = 0, 0
    while at <= done:
        at += 1
        cluster = new_cluster()
        begin(cluster)
        writes = killing(cluster, at, after=after)
        next(writes)
        for wanted in (*way, plan()):
            until(cluster, servers, wanted)
        done = next(writes)
        as_before(cluster)
        nothing_left(cluster)
    assert done > 7


def test_a_tuning_deleted_in_the_canary_gives_the_route_back_before_the_canary_goes(
    cluster: FakeCluster, servers: Servers
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    assert "ownerReferences" not in deployment(cluster)["metadata"], "the garbage collector leaves it alone"
    for _ in range(3):
        cluster.tick()
        nothing_is_refused(cluster, servers)
    assert make(cluster).release() == "HTTPRoute chat is without the canary again"
    as_before(cluster)
    cluster.tick()
    cluster.tick()
    nothing_left(cluster)
    assert make(cluster).release() is None


def test_a_tuning_deleted_in_the_roll_brings_both_back(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    until(cluster, servers, plan(1, canary=True))
    assert make(cluster).release() == f"Deployment llm goes back to {BASELINE.hash}"
    cluster.delete(DEPLOYMENTS, "llm-canary", NAMESPACE)  # as the garbage collector does, by its owner reference
    for _ in range(60):
        cluster.tick()
    as_before(cluster)
    nothing_left(cluster)


def test_a_new_controller_gives_back_what_a_deleted_tuning_left_in_a_route(
    cluster: FakeCluster, servers: Servers
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    assert release_abandoned(cluster, NAMESPACE, {OWNER.uid}, cluster.clock) == []  # type: ignore[arg-type]
    assert weights(cluster)["llm-canary"] == 200
    conflicts = iter([True, True])

    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "patch" and resource is HTTP_ROUTES and next(conflicts, False):
            cluster._touched(live(cluster))

    cluster.before = before
    done = release_abandoned(cluster, NAMESPACE, set(), cluster.clock)  # type: ignore[arg-type]
    assert done == [f"HTTPRoute chat is without the canary again: Tuning {NAMESPACE}/chat was deleted half-way"]
    as_before(cluster)
    cluster.tick()
    cluster.tick()
    nothing_left(cluster)


def test_a_target_that_is_gone_as_well_leaves_nothing_of_the_canary(cluster: FakeCluster, servers: Servers) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    del cluster.objects[(DEPLOYMENTS.plural, NAMESPACE, "llm")]
    with pytest.raises(Refused, match="there is no Deployment llm"):
        make(cluster).release()
    as_before(cluster)
    assert deployment(cluster) is None


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_canary_that_somebody_deleted_is_taken_out_of_its_route(
    cluster: FakeCluster, servers: Servers, goes_on: bool
) -> None:
    begin(cluster)
    until(cluster, servers, plan(canary=True))
    cluster.delete(DEPLOYMENTS, "llm-canary", NAMESPACE)
    assert weights(cluster)["llm-canary"] == 200
    if goes_on:
        make(cluster).apply(plan(canary=True))
        as_before(cluster)
        until(cluster, servers, plan(canary=True))
        assert weights(cluster)["llm-canary"] == 200
    else:
        assert make(cluster).release() == "HTTPRoute chat is without the canary again"
        as_before(cluster)
        assert make(cluster).release() is None
