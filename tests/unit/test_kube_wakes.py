"""What wakes the loop, in one namespace and in all of them."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_kube import FakeKube, Request, client_of, fake_kube, refuse
from kubernetes_store_cases import manifest
from world import FakeClock

from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, PODS, TRIALS, TUNING_LABEL, TUNINGS
from tunewright.kube.wakes import SILENT, Wakes
from tunewright.ports import Key

A, B = ("team-a", "chat"), ("team-b", "chat")


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        running.released.set()  # every watch ends at once with what there is to tell
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


class Woken:
    """The watches, and who was woken since they were asked last."""

    def __init__(self, kube: Kube, namespace: str | None = None, **more: Any) -> None:
        self.keys: list[Key] = []
        self.clock = FakeClock()
        self.wakes = Wakes(kube, self.keys.append, self.clock, namespace=namespace, **more)

    def by(self, resource: str) -> list[Key]:
        self.keys.clear()
        self.wakes.watchers[resource].once(threading.Event())  # lists, or goes on from what it saw
        return sorted(self.keys)


def tuning(kube: Kube, key: Key, deployment: str = "llm") -> None:
    body: Json = manifest(target={"deployment": deployment})
    kube.create(TUNINGS, {**body, "metadata": {"name": key[1]}}, key[0])


def produce(kube: Kube, namespace: str, name: str = "llm") -> None:
    kube.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": {}}, namespace)


def test_tunings_of_all_namespaces_wake_themselves(kube: Kube) -> None:
    tuning(kube, A)
    tuning(kube, B)
    woken = Woken(kube)
    assert woken.by("tunings") == [A, B]
    tuning(kube, ("team-b", "other"))
    kube.delete(TUNINGS, "chat", "team-a")
    assert woken.by("tunings") == [A, ("team-b", "other")]


def test_of_one_namespace_nobody_else_is_woken(kube: Kube) -> None:
    tuning(kube, A)
    tuning(kube, B)
    woken = Woken(kube, "team-a")
    assert woken.by("tunings") == [A]
    tuning(kube, ("team-b", "other"))
    assert woken.by("tunings") == []


def test_a_deployment_wakes_the_tunings_of_its_own_namespace_that_tune_it(kube: Kube) -> None:
    tuning(kube, A)
    tuning(kube, B)
    tuning(kube, ("team-b", "second"), "llm")
    tuning(kube, ("team-b", "third"), "embed")
    woken = Woken(kube)
    woken.by("tunings")
    produce(kube, "team-a")
    assert woken.by("deployments") == [A]
    produce(kube, "team-b")
    assert woken.by("deployments") == [B, ("team-b", "second")]
    produce(kube, "team-b", "nobodys")
    assert woken.by("deployments") == []


def test_a_tuning_that_changed_its_target_or_is_gone_is_no_longer_woken_for_it(fake: FakeKube, kube: Kube) -> None:
    tuning(kube, A)
    tuning(kube, ("team-a", "second"))
    woken = Woken(kube)
    woken.by("tunings")
    fake.edit(TUNINGS.path("team-a", "second"), target={"deployment": "embed"})
    kube.delete(TUNINGS, "chat", "team-a")
    woken.by("tunings")
    produce(kube, "team-a")
    assert woken.by("deployments") == []
    produce(kube, "team-a", "embed")
    assert woken.by("deployments") == [("team-a", "second")]


def test_a_pod_wakes_the_tuning_that_its_label_names(kube: Kube) -> None:
    for namespace, labels in (("team-a", {TUNING_LABEL: "chat"}), ("team-b", {"app": "llm"})):
        kube.create(PODS, {"metadata": {"name": "pod", "labels": labels}}, namespace)
    assert Woken(kube).by("pods") == [A]


def test_a_pod_of_no_tuning_that_is_there_wakes_nobody(kube: Kube) -> None:
    """Pods end one after the other with their Tuning."""
    kube.create(PODS, {"metadata": {"name": "pod", "labels": {TUNING_LABEL: "chat"}}}, "team-a")
    woken = Woken(kube, knows=lambda key: key != A)
    assert woken.by("pods") == []


def test_whoever_is_told_of_a_change_says_whether_it_wakes(kube: Kube) -> None:
    told: list[tuple[Key, bool]] = []

    def on_tuning(key: Key, found: Json | None) -> bool:
        told.append((key, found is not None))
        return key != A

    tuning(kube, A)
    tuning(kube, B)
    woken = Woken(kube, on_tuning=on_tuning)
    assert woken.by("tunings") == [B]
    kube.delete(TUNINGS, "chat", "team-a")
    assert woken.by("tunings") == []
    assert sorted(told) == [(A, False), (A, True), (B, True)]
    produce(kube, "team-b")
    assert woken.by("deployments") == [B], "its target is known even so"


def test_trials_are_told_of_and_wake_nobody(kube: Kube) -> None:
    told: list[str] = []
    woken = Woken(
        kube,
        on_trial=lambda key, found: told.append(f"{key[1]} {'there' if found else 'gone'}"),
        on_trials_listed=lambda: told.append("listed"),
    )
    kube.create(TRIALS, {"metadata": {"name": "a", "labels": {TUNING_LABEL: "chat"}}}, "team-a")
    assert woken.by("trials") == []
    kube.delete(TRIALS, "a", "team-a")
    assert woken.by("trials") == []
    assert told == ["a there", "listed", "a gone"]


def failing(part: str) -> Callable[[Request], None]:
    def before(request: Request) -> None:
        if part in request.path:
            raise refuse(403, "Forbidden", "cannot list resource at the cluster scope")

    return before


def test_a_watch_that_may_not_list_is_told_of(fake: FakeKube, kube: Kube) -> None:
    """As with the rights of one namespace where all are to be served: it must not look well."""
    woken = Woken(kube)
    fake.before = failing("deployments")
    for resource in ("tunings", "trials", "pods"):
        woken.by(resource)
    stop = threading.Event()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    woken.wakes.watchers["deployments"].run(stop)
    assert "deployments was never answered" in (woken.wakes.trouble() or "")
    fake.before = lambda request: None
    woken.by("deployments")
    assert woken.wakes.trouble() is None
    woken.clock.advance(SILENT + 1)
    assert "has been silent for 71 s" in (woken.wakes.trouble() or "")


def test_started_each_watch_runs_until_it_is_stopped(kube: Kube) -> None:
    tuning(kube, A)
    seen, stop = threading.Event(), threading.Event()
    before = threading.active_count()
    wakes = Wakes(kube, lambda key: seen.set(), FakeClock(), namespace=None)
    wakes.start(stop)
    assert seen.wait(10)
    stop.set()
    for thread in threading.enumerate():
        if thread.name.startswith("watch-"):
            thread.join(10)
    assert threading.active_count() <= before + 4, "only the fake's own threads may be left"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watch-")]
