"""The client against a real API server: what a fake can't vouch for."""

import threading
from typing import Any

import pytest

from cluster import wait_for
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.errors import AlreadyExists, Gone, Invalid, KubeConflict, NotFound
from tunewright.kube.resources import (
    AUTOSCALERS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    LEASES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICE_ACCOUNTS,
)
from tunewright.kube.watch import Key, Watcher

pytestmark = pytest.mark.cluster


def config_map(name: str, **data: str) -> Json:
    return {"metadata": {"name": name}, "data": data}


def deployment(image: str) -> Json:
    container = {"name": "main", "image": image, "imagePullPolicy": "Never"}
    template = {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [container]}}
    return {
        "metadata": {"name": "d"},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "d"}}, "template": template},
    }


def managers(found: Json) -> set[str]:
    return {entry["manager"] for entry in found["metadata"]["managedFields"]}


def test_create_get_replace_patch_delete(kube: Kube, namespace: str) -> None:
    made = kube.create(CONFIG_MAPS, config_map("a", x="1"), namespace)
    assert managers(made) == {"tunewright"}
    with pytest.raises(AlreadyExists):
        kube.create(CONFIG_MAPS, config_map("a"), namespace)
    newer = kube.replace(CONFIG_MAPS, {**made, "data": {"x": "2"}}, namespace)
    with pytest.raises(KubeConflict):
        kube.replace(CONFIG_MAPS, made, namespace)
    assert newer["data"] == {"x": "2"}
    kube.patch(CONFIG_MAPS, "a", {"data": {"y": "3"}}, namespace)
    patch = [{"op": "test", "path": "/data/y", "value": "3"}, {"op": "remove", "path": "/data/x"}]
    patched = kube.patch(CONFIG_MAPS, "a", patch, namespace, type=PatchType.JSON)
    assert patched["data"] == {"y": "3"}
    with pytest.raises(Invalid):
        kube.patch(CONFIG_MAPS, "a", patch, namespace, type=PatchType.JSON)
    with pytest.raises(KubeConflict):
        kube.delete(CONFIG_MAPS, "a", namespace, uid="00000000-0000-0000-0000-000000000000")
    assert kube.delete(CONFIG_MAPS, "a", namespace, uid=made["metadata"]["uid"])
    assert not kube.delete(CONFIG_MAPS, "a", namespace)
    with pytest.raises(NotFound):
        kube.get(CONFIG_MAPS, "a", namespace)


def test_dry_runs_change_nothing(kube: Kube, namespace: str) -> None:
    kube.create(CONFIG_MAPS, config_map("a"), namespace, dry_run=True)
    kube.apply(CONFIG_MAPS, config_map("b"), namespace, dry_run=True)
    kube.create(CONFIG_MAPS, config_map("c"), namespace)
    assert kube.delete(CONFIG_MAPS, "c", namespace, dry_run=True)
    names = {each["metadata"]["name"] for each in kube.list(CONFIG_MAPS, namespace).items}
    assert names & {"a", "b", "c"} == {"c"}


def test_apply_names_who_owns_what_it_would_take(kube: Kube, namespace: str) -> None:
    kube.apply(DEPLOYMENTS, deployment("one:1"), namespace, manager="somebody-else")
    with pytest.raises(KubeConflict) as caught:
        kube.apply(DEPLOYMENTS, deployment("two:2"), namespace, dry_run=True)
    (cause,) = caught.value.causes
    assert "somebody-else" in cause.message
    assert cause.field == '.spec.template.spec.containers[name="main"].image'
    forced = kube.apply(DEPLOYMENTS, deployment("two:2"), namespace, force=True)
    assert forced["spec"]["template"]["spec"]["containers"][0]["image"] == "two:2"
    assert managers(forced) >= {"somebody-else", "tunewright"}


def test_an_invalid_object_names_its_fields(kube: Kube, namespace: str) -> None:
    body = deployment("one:1")
    body["spec"]["replicas"] = -1
    with pytest.raises(Invalid) as caught:
        kube.create(DEPLOYMENTS, body, namespace)
    assert [cause.field for cause in caught.value.causes] == ["spec.replicas"]


def test_pages_and_selectors(kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewright.kube.client.PAGE", 3)
    for number in range(8):
        labels = {"metadata": {"name": f"m{number}", "labels": {"half": str(number % 2)}}}
        kube.create(CONFIG_MAPS, labels, namespace)
    assert len([m for m in kube.list(CONFIG_MAPS, namespace).items if m["metadata"]["name"].startswith("m")]) == 8
    assert len(kube.list(CONFIG_MAPS, namespace, labels="half=1").items) == 4
    assert len(kube.list(CONFIG_MAPS, namespace, fields="metadata.name=m3").items) == 1
    kube.delete_all(CONFIG_MAPS, namespace, labels="half=1")
    assert len(kube.list(CONFIG_MAPS, namespace, labels="half").items) == 4


def test_discovery(kube: Kube) -> None:
    budgets = kube.served(*POD_DISRUPTION_BUDGETS)
    scalers = kube.served(*AUTOSCALERS)
    assert budgets is not None
    assert scalers is not None
    assert kube.list(budgets).items == []
    assert kube.list(scalers).items == []
    assert kube.served(LEASES) == LEASES


def test_the_log_of_a_pod_that_is_not_there(kube: Kube, namespace: str) -> None:
    with pytest.raises(NotFound):
        kube.logs("nothing", namespace)
    wait_for(lambda: kube.list(SERVICE_ACCOUNTS, namespace).items, "the namespace has its ServiceAccount")
    spec = {
        "nodeName": "nowhere",
        "automountServiceAccountToken": False,
        "containers": [{"name": "c", "image": "i"}],
    }
    kube.create(PODS, {"metadata": {"name": "p"}, "spec": spec}, namespace)
    with pytest.raises(Exception, match="nowhere"):
        kube.logs("p", namespace)


def test_a_watch_ends_by_itself(kube: Kube, namespace: str) -> None:
    version = kube.list(CONFIG_MAPS, namespace).resource_version
    kube.create(CONFIG_MAPS, config_map("w"), namespace)
    events = list(kube.watch(CONFIG_MAPS, namespace, resource_version=version, seconds=1))
    seen = [(e.type, e.object["metadata"]["name"]) for e in events if e.type != "BOOKMARK"]
    assert ("ADDED", "w") in seen


def test_a_version_that_is_too_old_is_gone(kube: Kube, namespace: str) -> None:
    """A young API server still knows all of them, and tells what happened since the first."""
    kube.create(CONFIG_MAPS, config_map("w"), namespace)
    try:
        events = list(kube.watch(CONFIG_MAPS, namespace, resource_version="1", seconds=1))
    except Gone:
        return
    assert ("ADDED", "w") in [(e.type, e.object["metadata"]["name"]) for e in events if e.type != "BOOKMARK"]


def test_a_watcher_sees_what_happens(kube: Kube, namespace: str) -> None:
    told: list[tuple[str, bool]] = []
    stop, gone = threading.Event(), threading.Event()

    def on_change(key: Key, found: Any) -> None:
        told.append((key[1], found is not None))
        if key[1] == "b" and found is None:
            gone.set()

    kube.create(CONFIG_MAPS, config_map("a"), namespace)
    watcher = Watcher(kube, CONFIG_MAPS, on_change, namespace=namespace, monotonic=lambda: 0.0, seconds=2)
    thread = threading.Thread(target=watcher.run, args=(stop,), daemon=True)
    thread.start()
    kube.create(CONFIG_MAPS, config_map("b"), namespace)
    kube.delete(CONFIG_MAPS, "b", namespace)
    try:
        assert gone.wait(60)
    finally:
        stop.set()
        thread.join(60)
    assert ("a", True) in told
    assert told[-1] == ("b", False)
