"""One controller for the Tunings of all namespaces: each is driven in its own, and what is gone leaves nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_cluster import Clock, FakeCluster, hear
from fake_production import Servers, deployment, node
from kubernetes_store_cases import manifest
from world import FakeMetrics, World

from tunewright import cluster as module
from tunewright.cluster import NEIGHBOUR, Cluster, ClusterSettings
from tunewright.kube.client import Json
from tunewright.kube.neighbours import LOOK
from tunewright.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    SERVICES,
    TRIALS,
    TUNINGS,
    Resource,
)
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.ports import PortError

OWN = "tunewright"
A, B = ("team-a", "chat"), ("team-b", "chat")


class Source:
    """Prometheus as it answers about two well-behaved servers; keeps what it was told to select."""

    selectors: ClassVar[set[str]] = set()

    tokens: ClassVar[set[Path | None]] = set()

    def __init__(self, url: str, selector: str, *, interval: float, bearer_token_file: Path | None) -> None:
        self.selectors.add(selector)
        self.tokens.add(bearer_token_file)
        self.fetch = FakeMetrics(World()).fetch
        self.describe = lambda: f"Prometheus at {url}"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(module, "PrometheusSource", Source)
    Source.selectors, Source.tokens = set(), set()
    Servers(monkeypatch)
    made = FakeCluster(Clock())
    made.put(NODES, node(16), None)
    return made


def tuned(fake: FakeCluster, namespace: str, name: str = "chat", **files: str) -> None:
    """Production of two servers in a namespace, and a Tuning of it; `files` are those that it names."""
    fake.put(DEPLOYMENTS, deployment(2), namespace)
    fake.put(SERVICES, {"metadata": {"name": "llm"}, "spec": {"selector": {"app": "llm"}}}, namespace)
    target = {"deployment": "llm"} | ({"apiKeyFile": files["key"]} if "key" in files else {})
    metrics = {"prometheus": "http://prometheus", "window": "60s"}
    metrics |= {"bearerTokenFile": files["token"]} if "token" in files else {}
    spec = manifest(target=target, metrics=metrics)["spec"]
    kind = {"apiVersion": TUNINGS.api_version, "kind": TUNINGS.kind}
    fake.put(TUNINGS, {**kind, "metadata": {"name": name}, "spec": spec}, namespace)
    for _ in range(4):
        fake.tick()


def controller(fake: FakeCluster, *, all_namespaces: bool = True, namespace: str = OWN, **more: Any) -> Cluster:
    settings = ClusterSettings(namespace, "tunewright:test", identity=namespace, all_namespaces=all_namespaces, **more)
    connect: Callable[..., Any] = lambda **_: fake  # noqa: E731
    return Cluster(settings, fake.clock, connect)


def drive(fake: FakeCluster, cluster: Cluster, until: Callable[[], object], seconds: int = 100) -> None:
    """Time passes until it is so."""
    for _ in range(seconds):
        cluster.election.step()
        hear(cluster.wakes.watchers.values())
        cluster.manager.resync()
        while cluster.manager.once(0.0):
            pass
        if until():
            return
        fake.tick()
    status = {key: found.get("status", {}).get("sentence") for key, found in fake.objects.items() if "tunings" in key}
    raise AssertionError(f"not reached: {status}")


def names(fake: FakeCluster, resource: Resource, namespace: str) -> list[str]:
    return [each["metadata"]["name"] for each in fake.list(resource, namespace).items]


def status(fake: FakeCluster, namespace: str) -> Json:
    found: Json = fake.get(TUNINGS, "chat", namespace).get("status") or {}
    return found


def load_runs(fake: FakeCluster, *namespaces: str) -> bool:
    pods = {where: fake.list(PODS, where, labels="tunewright.dev/role=load").items for where in namespaces}
    return all(pods.values())


def test_each_tuning_is_driven_in_its_own_namespace(fake: FakeCluster) -> None:
    tuned(fake, A[0])
    tuned(fake, B[0])
    cluster = controller(fake)
    drive(fake, cluster, lambda: load_runs(fake, A[0], B[0]))
    assert names(fake, LEASES, OWN) == ["tunewright"]
    assert len(fake.list(LEASES).items) == 1, "one Lease, in the controller's own namespace"
    for resource in (PODS, CONFIG_MAPS, EVENTS, TRIALS):
        assert names(fake, resource, OWN) == [], resource
    for namespace, other in ((A[0], B[0]), (B[0], A[0])):
        assert status(fake, namespace)["phase"] == "Baselining"
        roles = [pod["metadata"]["labels"].get("tunewright.dev/role") for pod in fake.list(PODS, namespace).items]
        assert sorted(roles, key=str) == [None, None, "facts", "load", "trial"], "production, and three pods"
        assert len(names(fake, CONFIG_MAPS, namespace)) == 1
        assert {event["involvedObject"]["namespace"] for event in fake.list(EVENTS, namespace).items} == {namespace}
        assert {event["reason"] for event in fake.list(EVENTS, namespace).items} >= {"Profiling", "Baselining"}
        uids = {each["metadata"]["uid"] for each in fake.list(TUNINGS, other).items}
        mine = [owner["uid"] for t in fake.list(TRIALS, namespace).items for owner in t["metadata"]["ownerReferences"]]
        assert mine
        assert not uids & set(mine)
    assert {selector.split(",")[0] for selector in Source.selectors} == {
        'namespace="team-a"', 'namespace="team-b"',
    }  # fmt: skip


@pytest.mark.parametrize("field", ["key", "token"])
def test_of_the_files_that_it_can_read_a_tuning_may_name_those_of_its_namespace_alone(
    fake: FakeCluster, tmp_path: Path, field: str
) -> None:
    """The controller would else send its own token, or another team's key, to whatever server a Tuning names."""
    for namespace in (A[0], B[0]):
        (tmp_path / namespace).mkdir()
        (tmp_path / namespace / "key").write_text("sesame")
    tuned(fake, A[0], **{field: f"{tmp_path}/{A[0]}/key"})
    tuned(fake, B[0], **{field: f"{tmp_path}/{A[0]}/key"})
    cluster = controller(fake, credentials=tmp_path)
    ended = lambda: status(fake, B[0]).get("phase") == "Failed" and len(status(fake, A[0]).get("phase", "")) > 7  # noqa: E731
    drive(fake, cluster, ended)
    named = {"key": "target.apiKeyFile", "token": "metrics.bearerTokenFile"}[field]
    sentence = status(fake, B[0])["sentence"]
    assert f"{named} names {tmp_path}/{A[0]}/key, but the controller reads only files in {tmp_path}/{B[0]}" in sentence
    assert Source.tokens == ({tmp_path / A[0] / "key"} if field == "token" else {None})
    assert names(fake, PODS, B[0]) == [each for each in names(fake, PODS, B[0]) if each.startswith("llm-")]


def test_a_controller_of_one_namespace_reads_its_folder(fake: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    tuned(fake, A[0], token=f"{tmp_path}/token")
    cluster = controller(fake, all_namespaces=False, namespace=A[0], credentials=tmp_path)
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == "Baselining")
    assert Source.tokens == {tmp_path / "token"}
    tuned(fake, A[0], token="/var/run/secrets/kubernetes.io/serviceaccount/token")
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == "Failed")
    assert "the controller reads only files in" in status(fake, A[0])["sentence"]


def test_without_the_option_others_namespaces_are_never_looked_at(fake: FakeCluster) -> None:
    tuned(fake, A[0])
    tuned(fake, B[0])
    cluster = controller(fake, all_namespaces=False, namespace=A[0])
    drive(fake, cluster, lambda: load_runs(fake, A[0]))
    assert status(fake, B[0]) == {}
    assert cluster.api_stores.of(B[0]) is None
    assert cluster.api_stores.tunings() == [A]
    assert "team-b" not in cluster.metrics.exposition().decode()


def test_series_are_those_of_the_tunings_that_are_there(fake: FakeCluster) -> None:
    tuned(fake, A[0])
    tuned(fake, B[0])
    cluster = controller(fake)
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == status(fake, B[0]).get("phase") == "Baselining")
    hear(cluster.wakes.watchers.values())
    for namespace in (A[0], B[0]):
        told = cluster.metrics.exposition().decode()
        labels = f'namespace="{namespace}",phase="Baselining",tuning="chat"'
        assert f"tunewright_tuning_phase{{{labels}}} 1.0" in told
        assert f'tunewright_store_readable{{namespace="{namespace}"}} 1.0' in told
    assert f'tunewright_store_readable{{namespace="{OWN}"}} 1.0' in told
    fake.delete(TUNINGS, "chat", B[0])
    hear(cluster.wakes.watchers.values())
    told = cluster.metrics.exposition().decode()
    assert B[0] not in told
    assert f'namespace="{A[0]}"' in told


def test_a_deleted_tuning_leaves_nothing_behind_in_the_controller(fake: FakeCluster) -> None:
    tuned(fake, A[0])
    tuned(fake, B[0])
    cluster = controller(fake)
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == status(fake, B[0]).get("phase") == "Baselining")
    loop, api = cluster.stores.of(B[0]), cluster.api_stores.of(B[0])
    fake.delete(TUNINGS, "chat", B[0])
    cluster.manager.queue.add(B)
    drive(fake, cluster, lambda: True)
    cluster.api_stores.tunings()
    assert cluster.stores.of(B[0]) is not loop
    assert cluster.api_stores.of(B[0]) is not api
    fake.delete(TUNINGS, "chat", A[0])
    cluster.manager.queue.add(A)
    drive(fake, cluster, lambda: True)
    calls = len(fake.calls)
    for _ in range(200):
        fake.clock.time += 1
        cluster.election.step()
        assert not cluster.manager.once(0.0), "nobody asks for them any more"
    assert {plural for _, plural, _ in fake.calls[calls:]} == {"leases"}


def test_production_of_a_deleted_tuning_is_brought_back_even_if_that_fails_at_first(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(fake, A[0])
    cluster = controller(fake)
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == "Baselining")
    answers = iter([PortError("no answer"), "Deployment llm goes back"])

    def release(target: DeploymentTarget) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(DeploymentTarget, "release", release)
    fake.delete(TUNINGS, "chat", A[0])
    cluster.manager.queue.add(A)
    for _ in range(10):
        cluster.election.step()
        while cluster.manager.once(0.0):
            pass
        fake.clock.time += 1
    assert next(answers, None) is None
    assert "team-a/chat was deleted: Deployment llm goes back" in caplog.text


def test_what_a_deleted_tuning_may_have_left_is_looked_for_in_its_own_namespace_alone(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in all of a cluster's Deployments, each time that a Tuning of anybody's is deleted."""
    cluster, asked = controller(fake), list[str | None]()

    def looked(_kube: object, namespace: str | None, *_rest: object) -> list[str]:
        asked.append(namespace)
        return []

    monkeypatch.setattr(module, "release_abandoned", looked)
    drive(fake, cluster, lambda: True)
    assert asked == [None], "once, when it begins to lead"
    cluster.manager.queue.add(B)
    drive(fake, cluster, lambda: True)
    assert asked == [None, B[0]]


def test_a_namespace_that_goes_with_its_deployment_is_no_fault(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(fake, A[0])
    cluster = controller(fake)
    drive(fake, cluster, lambda: status(fake, A[0]).get("phase") == "Baselining")
    for key in [key for key in fake.objects if key[1] == A[0]]:
        fake.objects.pop(key)
    cluster.manager.queue.add(A)
    while cluster.manager.once(0.0):
        pass
    assert "there is no Deployment llm" in caplog.text
    assert "trying again" not in caplog.text


def lease(fake: FakeCluster, namespace: str, holder: str, scope: str) -> None:
    """Another controller renews its Lease."""
    fake.objects.pop((LEASES.plural, namespace, "tunewright"), None)
    labels = {"tunewright.dev/scope": scope}
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": str(fake.clock.time)}
    fake.put(LEASES, {"metadata": {"name": "tunewright", "labels": labels}, "spec": spec}, namespace)


def test_a_namespace_with_a_controller_of_its_own_is_left_to_it_until_that_is_gone(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(fake, A[0])
    tuned(fake, B[0])
    cluster = controller(fake)

    def renewed() -> bool:
        lease(fake, B[0], "theirs", "namespace")
        return load_runs(fake, A[0])

    renewed()
    drive(fake, cluster, renewed)
    assert status(fake, B[0]) == {}
    assert caplog.text.count("namespace team-b: its tunings are left to theirs") == 1
    assert cluster.trials.knows(A)
    assert not cluster.trials.knows(B), "the other one writes its trials: they are read again"
    drive(fake, cluster, lambda: load_runs(fake, B[0]))
    assert "namespace team-b: its tunings are served from here now" in caplog.text


def test_a_tuning_that_is_deleted_while_another_drives_it_is_not_asked_for_any_more(fake: FakeCluster) -> None:
    tuned(fake, B[0])
    cluster = controller(fake)
    lease(fake, B[0], "theirs", "namespace")
    cluster.manager.queue.add(B)
    drive(fake, cluster, lambda: True)
    assert status(fake, B[0]) == {}
    assert len(cluster.manager.queue) == 1
    fake.delete(TUNINGS, "chat", B[0])
    hear(cluster.wakes.watchers.values())
    fake.clock.time += NEIGHBOUR
    cluster.election.step()
    assert cluster.manager.once(0.0)
    assert len(cluster.manager.queue) == 0


def test_one_that_comes_later_takes_over_at_once(fake: FakeCluster) -> None:
    tuned(fake, A[0])
    everywhere = controller(fake)
    drive(fake, everywhere, lambda: status(fake, A[0]).get("phase") == "Baselining")
    theirs = controller(fake, all_namespaces=False, namespace=A[0])
    theirs.election.step()
    fake.clock.time += LOOK
    everywhere.election.step()
    everywhere.manager.queue.add(A)
    writes = len(fake.writes(("replace", "create", "patch", "apply", "delete")))
    assert everywhere.manager.once(0.0)
    assert len(fake.writes(("replace", "create", "patch", "apply", "delete"))) == writes
    fake.clock.time += NEIGHBOUR - 1
    assert not everywhere.manager.once(0.0)
    fake.clock.time += 1
    assert everywhere.manager.once(0.0), "it goes on looking whether the other is still there"

    def both() -> bool:
        everywhere.election.step()
        while everywhere.manager.once(0.0):
            pass
        return load_runs(fake, A[0])

    drive(fake, theirs, both)
    assert [c["metadata"]["labels"]["tunewright.dev/scope"] for c in fake.list(LEASES).items] == [
        "namespace", "cluster",
    ]  # fmt: skip
