"""Rights that are taken away in the middle of a rollout: at every write of it, of every object that it needs.

Forward movement stops; the way back goes as far as it can, says what is missing, and completes when that is there.
"""

from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import FakeCluster
from fake_production import BASELINE, Servers, new_cluster
from fake_route import (
    as_before,
    begin,
    canaries,
    deployment,
    make,
    nothing_is_refused,
    nothing_left,
    plan,
    weights,
)

from tunewright.kube.errors import Forbidden, KubeError, NotAdmitted, Unavailable
from tunewright.ports import PortError, TargetPlan, TargetStatus

Refused = Callable[[str, str, str], bool]
"""Whether a verb on a kind's object of that name is."""

FORWARD = [plan(canary=True), plan(1, canary=True), plan(2, canary=True), plan(2)]
WRITES = ("create", "patch", "apply", "delete")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


class Rights:
    """Takes rights away from write number `at` on, and notes what must never be."""

    def __init__(
        self, cluster: FakeCluster, at: int, refused: Callable[[str, str, str], bool], error: KubeError
    ) -> None:
        self.cluster, self.at, self.writes = cluster, at, 0
        self.refused, self.error = refused, error
        self.gone = False
        cluster.before = self

    def __call__(self, verb: str, resource: Any, name: str) -> None:
        if verb in WRITES:
            self.writes += 1
            self.gone = self.gone or self.writes == self.at
        if self.gone and self.refused(verb, resource.plural, name):
            raise self.error
        if (verb, name) == ("delete", "llm-canary"):
            assert "llm-canary" not in weights(self.cluster), "the route still sends it requests"

    def back(self) -> None:
        self.cluster.before = lambda verb, resource, name: None


def drive(cluster: FakeCluster, servers: Servers, wanted: TargetPlan, steps: int) -> tuple[TargetStatus | None, str]:
    """So many steps, or until it is settled: the last status, and what was said last of what holds it."""
    status, told = None, ""
    for _ in range(steps):
        try:
            status = make(cluster).apply(wanted)
            told = status.foreign or told
        except PortError as error:
            told = str(error)
        serves(cluster, servers)
        if status is not None and status.settled:
            return status, told
        cluster.tick()
        serves(cluster, servers)
    return status, told


def serves(cluster: FakeCluster, servers: Servers) -> None:
    """Nothing is refused, and a server answers behind the target's Service."""
    nothing_is_refused(cluster, servers)
    ready = [
        p for p in cluster.pods(app="llm") if p.get("status", {}).get("conditions", [{}])[0].get("status") == "True"
    ]
    assert ready, "no server is left"


def replicas(cluster: FakeCluster) -> list[str]:
    """What each replica runs."""
    found = [p for p in cluster.pods(tier="serving") if "deletionTimestamp" not in p["metadata"]]
    return ["baseline" if "--max-num-seqs 8" in " ".join(p["spec"]["containers"][0]["args"]) else "new" for p in found]


OF_THE_CANARY: dict[str, Refused] = {
    "to read routes": lambda _verb, plural, _name: plural == "httproutes",
    "to write routes": lambda verb, plural, _name: plural == "httproutes" and verb in WRITES,
    "to list services": lambda _verb, plural, _name: plural == "services",
    "to label pods": lambda verb, plural, _name: plural == "pods" and verb == "patch",
    "to change or delete the canary": lambda verb, _plural, name: name == "llm-canary" and verb in WRITES,
    "to list endpoints, budgets, autoscalers": lambda _verb, plural, _name: (
        plural in ("endpointslices", "poddisruptionbudgets", "horizontalpodautoscalers")
    ),
}
"""Rights without which the canary may be stuck, and the replicas need not be."""

NOT_NEEDED = {1: ["to list endpoints, budgets, autoscalers"]}
NOT_NEEDED[2] = [*NOT_NEEDED[1], "to list services"]
"""On the way back, by the number of replicas: a single one's stand-in must come behind its Service first."""

OF_PRODUCTION: dict[str, Refused] = {
    "to see pods": lambda verb, plural, _name: plural == "pods" and verb == "list",
    "to see ReplicaSets": lambda _verb, plural, _name: plural == "replicasets",
    "to write the Deployment": lambda verb, _plural, name: name == "llm" and verb == "apply",
    "to see Deployments": lambda _verb, plural, _name: plural == "deployments",
}
"""Rights without which nothing can be done, and nothing may be."""

ERRORS = {
    "403": Forbidden("GET", "/it", 'User "tunewright" cannot do it', status=403),
    "not admitted": NotAdmitted("PATCH", "/it", "a webhook says no", status=403),
    "time-out": Unavailable("GET", "/it", "no answer in 10 s"),
}


@pytest.mark.parametrize("replicas_wanted", [1, 2])
@pytest.mark.parametrize("right", [*OF_THE_CANARY, *OF_PRODUCTION])
def test_rights_that_go_at_any_write_hold_it_and_it_completes_when_they_return(
    servers: Servers, right: str, replicas_wanted: int
) -> None:
    """Each time some steps more forward, then back without the right, then with it."""
    refused, at, done = (OF_THE_CANARY | OF_PRODUCTION)[right], 0, False
    error = [*ERRORS.values()][len(right) % len(ERRORS)]
    held = 0
    while not done:
        at += 1
        cluster = new_cluster()
        begin(cluster, replicas_wanted)
        rights = Rights(cluster, at, refused, error)
        for wanted in forward(replicas_wanted):
            status, _ = drive(cluster, servers, wanted, 25)
            if status is None or not status.settled:
                break
        done = not rights.gone
        status, told = drive(cluster, servers, plan(), 60)
        if status is None or not status.settled:
            held += 1
            assert error.message in told, "what holds it is named"
            if right in OF_THE_CANARY and replicas_wanted > 1:
                assert replicas(cluster) == ["baseline"] * replicas_wanted, f"at write {at}: {told}"
        rights.back()
        status, told = drive(cluster, servers, plan(), 150)
        assert status is not None
        assert status.settled, f"at write {at}: {told}: {status}"
        assert status.foreign is None
        assert {r.candidate_hash for r in status.replicas} == {BASELINE.hash}
        as_before(cluster)
        nothing_left(cluster)
    assert at > 5
    assert bool(held) == (right not in NOT_NEEDED[replicas_wanted]), "it can be held at all"


def forward(replicas_wanted: int) -> list[TargetPlan]:
    return FORWARD if replicas_wanted > 1 else [FORWARD[0], FORWARD[1], plan(1)]


def test_once_the_roll_began_the_route_is_not_needed_any_more(servers: Servers) -> None:
    """It was given back before: whoever takes the rights away then holds neither way."""
    for back in (False, True):
        cluster = new_cluster()
        begin(cluster)
        for wanted in FORWARD[:2]:
            drive(cluster, servers, wanted, 100)
        as_before(cluster)
        cluster.forbidden.add("httproutes")
        for wanted in [plan()] if back else [*FORWARD[2:], plan()]:
            status, told = drive(cluster, servers, wanted, 100)
            assert status is not None
            assert status.settled, told
            assert status.foreign is None
        nothing_left(cluster)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_bad_canary_is_taken_back_as_far_as_it_goes_and_let_go_leaves_what_gets_requests(
    servers: Servers, deleted: bool
) -> None:
    """The hold's end: production is left as it is, and what a route may send requests to with it, until it may go."""
    cluster = new_cluster()
    begin(cluster)
    drive(cluster, servers, FORWARD[0], 100)
    cluster.forbidden.add("httproutes")
    if deleted:
        cluster.objects.pop(("httproutes", "prod", "chat"))
    assert make(cluster).let_go()
    assert deployment(cluster) is not None
    cluster.forbidden.clear()
    assert make(cluster).let_go()
    for _ in range(3):
        cluster.tick()
    assert canaries(cluster) == []
    if not deleted:
        assert "llm-canary" not in weights(cluster)
