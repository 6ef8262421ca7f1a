"""Production as a Deployment of a real cluster, changed under traffic without a failed request."""

import time
from collections.abc import Callable

import pytest
from cluster_production import ARGS, BASELINE, NEW, Traffic, deployment, own, production
from cluster_story import kubectl

from cluster import PATIENCE, wait_for
from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, PODS, TUNINGS
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import TargetPlan, TargetStatus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 4, "gpu_memory_utilization": 0.05})


class SystemClock:
    """Real time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


def target_of(kube: Kube, namespace: str, owner: Owner, **more: object) -> DeploymentTarget:
    """As a controller that was just started."""
    given: Json = {"take_over": True, "start_timeout": 60.0, "drain_timeout": 20.0, "hold_seconds": 4, **more}
    return DeploymentTarget(kube, owner, DeploymentRef(namespace, "llm"), SystemClock(), **given)


def plan(updated: int = 0, *, canary: bool = False, candidate: Candidate = NEW) -> TargetPlan:
    """From what production runs to `candidate`."""
    return TargetPlan(BASELINE, candidate, updated, canary, 0.25 if canary else 0.0)


def until(step: Callable[[], TargetStatus], reached: Callable[[TargetStatus], object]) -> TargetStatus:
    """Take steps until it is reached."""
    deadline = time.monotonic() + 3 * PATIENCE
    while not reached(status := step()):
        assert time.monotonic() < deadline, status
        time.sleep(0.3)
    return status


def settled(status: TargetStatus) -> bool:
    """Production is as planned."""
    return status.settled


def live(kube: Kube, namespace: str) -> Json:
    """The target's Deployment."""
    return kube.get(DEPLOYMENTS, "llm", namespace)


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_whole_way_and_back_under_traffic_without_a_failed_request(
    kube: Kube, namespace: str, replicas: int
) -> None:
    url = production(kube, namespace, deployment(replicas))
    owner = own(kube, namespace)
    before = live(kube, namespace)["spec"]
    assert target_of(kube, namespace, owner).baseline() == BASELINE
    assert target_of(kube, namespace, owner).preflight(NEW) == []

    def go(wanted: TargetPlan) -> TargetStatus:
        # Every step by a controller of its own would ask each pod for a token each time; three are enough.
        targets = [target_of(kube, namespace, owner) for _ in range(3)]
        turn = iter(range(10**6))
        return until(lambda: targets[next(turn) % 3].apply(wanted), settled)

    with Traffic(url).running() as clients:
        status = go(plan(canary=True))
        assert [(r.ready, r.candidate_hash) for r in status.replicas if r.canary] == [(True, NEW.hash)]
        assert live(kube, namespace)["spec"] == before
        for updated in range(1, replicas + 1):
            status = go(plan(updated, canary=True))
            assert sum(r.candidate_hash == NEW.hash and not r.canary for r in status.replicas) == updated
        status = go(plan(replicas))
        assert {(r.candidate_hash, r.canary) for r in status.replicas} == {(NEW.hash, False)}
        assert target_of(kube, namespace, owner).baseline() == NEW
        status = go(plan(0))
        assert {(r.candidate_hash, r.canary) for r in status.replicas} == {(BASELINE.hash, False)}
        seen = clients.answered.total()
        wait_for(lambda: clients.answered.total() > seen + 20, "requests are answered at the end")
    assert clients.failures == []
    assert live(kube, namespace)["spec"] == before, "the Deployment is as it was, to the byte"
    assert [d["metadata"]["name"] for d in kube.list(DEPLOYMENTS, namespace).items] == ["llm"]


def test_a_canary_that_can_not_start_is_explained_and_production_untouched(kube: Kube, namespace: str) -> None:
    url = production(kube, namespace, deployment(2))
    target = target_of(kube, namespace, own(kube, namespace))
    with Traffic(url).running() as clients:
        wanted = plan(canary=True, candidate=OUT_OF_MEMORY)
        failure = until(lambda: target.apply(wanted), lambda status: status.failure).failure
        assert failure is not None
        assert failure.kind in (FailureKind.KV_TOO_SMALL, FailureKind.OUT_OF_MEMORY), failure
        back = until(lambda: target.apply(plan(candidate=OUT_OF_MEMORY)), settled)
        assert back.failure is None
    assert clients.failures == []


def test_a_replica_that_fails_in_the_roll_goes_back_and_the_others_serve(kube: Kube, namespace: str) -> None:
    url = production(kube, namespace, deployment(2))
    target = target_of(kube, namespace, own(kube, namespace))
    with Traffic(url).running() as clients:
        wanted = plan(1, candidate=OUT_OF_MEMORY)
        assert until(lambda: target.apply(wanted), lambda status: status.failure).failure is not None
        until(lambda: target.apply(plan(candidate=OUT_OF_MEMORY)), settled)
    assert clients.failures == []


def test_owners_of_what_would_be_written_are_named(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1), manager="helm")
    owner = own(kube, namespace)
    told = " ".join(target_of(kube, namespace, owner, take_over=False).preflight(NEW))
    assert "helm owns .spec.template.spec.containers" in told
    assert ".args" in told
    before = live(kube, namespace)["metadata"]["resourceVersion"]
    status = target_of(kube, namespace, owner, take_over=False).apply(plan(1, canary=False))
    assert live(kube, namespace)["metadata"]["resourceVersion"] == before
    assert status.settled is False
    assert any("helm owns" in note for note in target_of(kube, namespace, owner).notes(NEW))


def test_an_edit_of_somebody_else_is_named_and_left(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(2))
    target = target_of(kube, namespace, own(kube, namespace))
    until(lambda: target.apply(plan(1)), settled)
    args = [*ARGS[:-1], "8"]
    kube.apply(
        DEPLOYMENTS,
        {
            "metadata": {"name": "llm"},
            "spec": {"template": {"spec": {"containers": [{"name": "vllm", "args": args}]}}},
        },
        namespace,
        force=True,
        manager="argocd",
    )
    for wanted in (plan(1), plan(2), plan(0)):
        status = target.apply(wanted)
        assert "--max-num-seqs 8" in str(status.foreign)
        assert "argocd" in str(status.foreign)
    assert live(kube, namespace)["spec"]["template"]["spec"]["containers"][0]["args"] == args


def test_a_tuning_deleted_half_way_leaves_no_canary_and_release_brings_the_target_back(
    kube: Kube, namespace: str
) -> None:
    url = production(kube, namespace, deployment(2))
    owner = own(kube, namespace)
    before = live(kube, namespace)["spec"]
    target = target_of(kube, namespace, owner)
    with Traffic(url).running() as clients:
        until(lambda: target.apply(plan(1, canary=True)), settled)
        assert live(kube, namespace)["spec"]["paused"] is True
        assert target.release() is not None
        wait_for(lambda: whole(live(kube, namespace)), "production is whole again")
    assert clients.failures == []
    assert live(kube, namespace)["spec"] == before
    kube.delete(TUNINGS, owner.name, namespace)
    wait_for(lambda: len(kube.list(PODS, namespace).items) == 2, "the garbage collector takes the canary")


def test_what_a_client_side_apply_owns_is_as_before_in_the_end(kube: Kube, namespace: str) -> None:
    """It owns the default strategy that was filled in for it, so that leaving ours out would leave ours there."""
    body = {"apiVersion": "apps/v1", "kind": "Deployment", **deployment(2)}
    kubectl("-n", namespace, "apply", "-f", "-", stdin=body)
    wait_for(lambda: whole(live(kube, namespace)), "production serves")
    before = live(kube, namespace)["spec"]
    target = target_of(kube, namespace, own(kube, namespace))
    until(lambda: target.apply(plan(1)), settled)
    assert live(kube, namespace)["spec"]["strategy"] != before["strategy"]
    assert target.release() is not None
    wait_for(lambda: whole(live(kube, namespace)), "production is whole again")
    assert live(kube, namespace)["spec"] == before
    until(lambda: target.apply(plan(2)), settled)
    after = live(kube, namespace)["spec"]
    assert after["strategy"] == before["strategy"]
    assert "minReadySeconds" not in after


def whole(deployment: Json) -> bool:
    """As `kubectl rollout status` sees it."""
    status, replicas = deployment["status"], deployment["spec"]["replicas"]
    seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return seen and status.get("updatedReplicas") == status.get("readyReplicas") == status.get("replicas") == replicas


def test_scaling_in_the_middle_is_followed(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(2))
    target = target_of(kube, namespace, own(kube, namespace))
    until(lambda: target.apply(plan(1)), settled)
    kube.patch(DEPLOYMENTS, "llm", {"spec": {"replicas": 3}}, namespace)
    until(lambda: target.apply(plan(1)), lambda s: s.desired == 3 and s.settled)
    until(lambda: target.apply(plan(3)), settled)
