"""A Tuning that was deleted: whatever process takes the deletion up, production is left able to roll."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import ARGS, BASELINE, NEW, OWNER, REF, Servers, new_cluster, production
from tunings import tuning

from tunewright.cluster import Cluster, ClusterSettings
from tunewright.domain.state import TuningRecord
from tunewright.kube.resources import DEPLOYMENTS, TUNINGS
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.ports import PortError, TargetPlan


@pytest.fixture
def half_rolled(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """One replica of two runs the candidate."""
    Servers(monkeypatch)
    fake = new_cluster()
    production(fake)
    target = DeploymentTarget(fake, OWNER, REF, fake.clock, drain_timeout=60.0)  # type: ignore[arg-type]
    for wanted in (TargetPlan(BASELINE, NEW, 0, True, 0.25), TargetPlan(BASELINE, NEW, 1, True, 0.25)):
        for _ in range(60):
            if target.apply(wanted).settled:
                break
            fake.tick()
    return fake


def controller(fake: FakeCluster) -> Cluster:
    made: Callable[..., FakeCluster] = lambda **_: fake  # noqa: E731
    return Cluster(ClusterSettings(NAMESPACE, "tunewright:test"), fake.clock, connect=made)  # type: ignore[arg-type]


def test_a_process_that_never_looked_at_it_brings_production_back(half_rolled: FakeCluster) -> None:
    """The one before was killed while the deletion came, and this one had begun to lead already."""
    assert controller(half_rolled)._step((NAMESPACE, OWNER.name)) is None
    spec = half_rolled.edit(DEPLOYMENTS, "llm")["spec"]
    assert spec["template"]["spec"]["containers"][0]["args"] == ARGS
    assert "paused" not in spec
    assert "minReadySeconds" not in spec


def test_what_fails_once_is_tried_again(half_rolled: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    again = controller(half_rolled)
    target = DeploymentTarget(half_rolled, OWNER, REF, half_rolled.clock)  # type: ignore[arg-type]
    again._contexts[NAMESPACE, OWNER.name] = ("", SimpleNamespace(target=target))  # type: ignore[assignment]
    working = DeploymentTarget.release

    def fails(_self: DeploymentTarget) -> str | None:
        raise PortError("the API server does not answer")

    monkeypatch.setattr(DeploymentTarget, "release", fails)
    with pytest.raises(PortError):
        again._step((NAMESPACE, OWNER.name))
    monkeypatch.setattr(DeploymentTarget, "release", working)
    again._step((NAMESPACE, OWNER.name))
    assert half_rolled.edit(DEPLOYMENTS, "llm")["spec"]["template"]["spec"]["containers"][0]["args"] == ARGS
    assert again._contexts == {}


def test_one_that_was_deleted_and_made_again_between_two_looks_leaves_nothing(half_rolled: FakeCluster) -> None:
    """The new one has the old one's name, so that its absence was never seen."""
    spec = tuning(target={"deployment": "llm"}, metrics={"prometheus": "http://p:9090"})
    record = TuningRecord(tuning=spec, spec_hash=spec.spec.spec_hash, phase_since=0.0)
    again = controller(half_rolled)
    half_rolled.put(TUNINGS, {"metadata": {"name": "demo", "uid": OWNER.uid}})
    again._context(NAMESPACE, record, SimpleNamespace(uid=OWNER.uid))  # type: ignore[arg-type]
    assert half_rolled.edit(DEPLOYMENTS, "llm")["spec"]["template"]["spec"]["containers"][0]["args"] != ARGS
    half_rolled.put(TUNINGS, {"metadata": {"name": "demo", "uid": "uid-of-another"}})
    again._context(NAMESPACE, record, SimpleNamespace(uid="uid-of-another"))  # type: ignore[arg-type]
    assert half_rolled.edit(DEPLOYMENTS, "llm")["spec"]["template"]["spec"]["containers"][0]["args"] == ARGS
