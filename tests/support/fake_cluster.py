"""A cluster in memory behind the client's own interface: objects, field owners, and the controllers that we lean on.

`tick()` lets the Deployment controller and the nodes take one step. `Servers` answers what is asked of pods.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fake_apply import server_side_apply

from tunewright.kube.client import FIELD_MANAGER, Json, ObjectList, PatchType
from tunewright.kube.errors import AlreadyExists, Forbidden, Gone, Invalid, KubeConflict, NotFound
from tunewright.kube.resources import CONFIG_MAPS, ENDPOINT_SLICES, PODS, REPLICA_SETS, Resource
from tunewright.kube.times import format_time
from tunewright.kube.watch import Watcher

NAMESPACE = "prod"


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FakeCluster:
    """Has the methods of `Kube` that the adapters use. `before` sees each call, and may raise what it likes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.objects: dict[tuple[str, str | None, str], Json] = {}
        self.logs_of: dict[str, str] = {}
        self.previous_logs_of: dict[str, str] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.before: Callable[[str, Resource, str], None] = lambda verb, resource, name: None
        self.forbidden: set[str] = set()
        self.unserved: set[str] = set()
        self.starts: Callable[[Json], str] = lambda pod: "ready"
        self._version = 0
        self._serial = 0

    # --- the client's interface ---

    def get(self, resource: Resource, name: str, namespace: str | None = None, **_: Any) -> Json:
        self._called("get", resource, name)
        return copy.deepcopy(self._find(resource, name, namespace))

    def list(self, resource: Resource, namespace: str | None = None, *, labels: str = "", **_: Any) -> ObjectList:
        self._called("list", resource, "")
        found = [
            copy.deepcopy(each)
            for (plural, where, _), each in sorted(self.objects.items(), key=lambda item: str(item[0]))
            if plural == resource.plural and namespace in (None, where) and _selected(each, labels)
        ]
        return ObjectList(found, str(self._version))

    def pages(self, resource: Resource, namespace: str | None = None, **more: Any) -> Iterator[ObjectList]:
        yield self.list(resource, namespace, **more)

    def watch(self, resource: Resource, namespace: str | None = None, **_: Any) -> Iterator[Any]:
        """Not to be watched: whoever wants to is told to list again."""
        raise Gone("WATCH", resource.plural, "list again", status=410)

    def logs(self, pod: str, namespace: str, *, previous: bool = False, tail_lines: int = 200, **_: Any) -> str:
        self._called("logs", PODS, pod)
        self._find(PODS, pod, namespace)
        text = (self.previous_logs_of if previous else self.logs_of).get(pod, "")
        return "\n".join(text.splitlines()[-tail_lines:])

    def served(self, *alternatives: Resource) -> Resource | None:
        return next((each for each in alternatives if each.plural not in self.unserved), None)

    def create(
        self, resource: Resource, body: Json, namespace: str | None = None, *, dry_run: bool = False, **_: Any
    ) -> Json:  # fmt: skip
        name = body["metadata"]["name"]
        self._called("dry-create" if dry_run else "create", resource, name)
        if (resource.plural, namespace, name) in self.objects:
            raise AlreadyExists("POST", name, "it exists", status=409)
        return copy.deepcopy(body if dry_run else self.put(resource, body, namespace))

    def patch(
        self, resource: Resource, name: str, patch: Any, namespace: str | None = None, *,
        type: PatchType = PatchType.MERGE, dry_run: bool = False, manager: str = FIELD_MANAGER, **_: Any,
    ) -> Json:  # fmt: skip
        self._called("dry-patch" if dry_run else "patch", resource, name)
        assert type is PatchType.MERGE
        found = self._find(resource, name, namespace)
        if (patch.get("metadata") or {}).get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
            raise KubeConflict("PATCH", name, "the object has been modified", status=409)
        new = _merge(found, patch)
        if new.get("spec") != found.get("spec") and "rules" in new.get("spec", {}):
            own_rules(new, manager, format_time(self.clock.now()))
        if dry_run:
            return copy.deepcopy(new)
        found.update(new)
        return copy.deepcopy(self._touched(found))

    def replace(
        self, resource: Resource, body: Json, namespace: str | None = None, *, subresource: str = "", **_: Any
    ) -> Json:  # fmt: skip
        name = body["metadata"]["name"]
        self._called("replace", resource, name)
        found = self._find(resource, name, namespace)
        if body["metadata"].get("resourceVersion", "") != found["metadata"]["resourceVersion"]:
            raise KubeConflict("PUT", name, "the object has been modified", status=409)
        found |= {"status": copy.deepcopy(body["status"])} if subresource else copy.deepcopy(body)
        return copy.deepcopy(self._touched(found))

    def delete_all(self, resource: Resource, namespace: str, *, labels: str) -> None:
        self._called("deletecollection", resource, "")
        for found in self.list(resource, namespace, labels=labels).items:
            self._remove(resource.plural, namespace, found["metadata"]["name"])

    def apply(
        self, resource: Resource, body: Json, namespace: str | None = None, *,
        force: bool = False, dry_run: bool = False, **_: Any,
    ) -> Json:  # fmt: skip
        name = body["metadata"]["name"]
        self._called("dry-apply" if dry_run else "apply", resource, name)
        live = self._find(resource, name, namespace)
        target = copy.deepcopy(live) if dry_run else live
        before = copy.deepcopy(target["spec"])
        server_side_apply(target, body, force=force)
        if target["spec"].get("progressDeadlineSeconds", 600) <= target["spec"].get("minReadySeconds", 0):
            raise Invalid("PATCH", name, "progressDeadlineSeconds must be greater than minReadySeconds", status=422)
        if target["spec"] != before:
            target["metadata"]["generation"] += 1
        return copy.deepcopy(target)

    def delete(
        self, resource: Resource, name: str, namespace: str | None = None, *, uid: str | None = None, **_: Any
    ) -> bool:
        self._called("delete", resource, name)
        found = self.objects.get((resource.plural, namespace, name))
        if found is None:
            return False
        if uid is not None and uid != found["metadata"]["uid"]:
            raise KubeConflict("DELETE", name, "another uid", status=409)
        if resource is PODS:
            found["metadata"].setdefault("deletionTimestamp", format_time(self.clock.now()))
        else:
            self._remove(resource.plural, namespace, name)
        return True

    # --- for tests ---

    def put(self, resource: Resource, body: Json, namespace: str | None = NAMESPACE) -> Json:
        """Put an object there, as another client does."""
        self._serial += 1
        found = copy.deepcopy(body)
        metadata = found.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{self._serial}")
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", format_time(self.clock.now()))
        metadata["namespace"] = namespace
        self._touched(found)
        self.objects[(resource.plural, namespace, metadata["name"])] = found
        return found

    def edit(self, resource: Resource, name: str, namespace: str | None = NAMESPACE) -> Json:
        """The live object, to be changed as another client would."""
        return self._find(resource, name, namespace)

    def pods(self, **labels: str) -> list[Json]:
        """All pods with these labels, by name."""
        chosen = ",".join(f"{key}={text}" for key, text in labels.items())
        return [
            each
            for (plural, _, _), each in sorted(self.objects.items(), key=lambda i: str(i[0]))
            if plural == "pods" and _selected(each, chosen)
        ]

    def writes(self, verbs: tuple[str, ...] = ("create", "patch", "apply", "delete")) -> list[tuple[str, str, str]]:
        """What was written so far."""
        return [call for call in self.calls if call[0] in verbs]

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes: the Deployment controller and the nodes each take a step."""
        self.clock.time += seconds
        for (plural, _, _), found in list(self.objects.items()):
            if plural == "deployments":
                self._roll(found)
        for pod in self.pods():
            self._run(pod)
        for (plural, _, _), found in list(self.objects.items()):
            if plural == "deployments":
                self._report(found)
            elif plural == "services":
                self._publish(found)

    # --- the controllers ---

    def _roll(self, deployment: Json) -> None:
        """As the real one does: the new ReplicaSet grows while the old ones shrink, within surge and unavailable."""
        spec, replicas = deployment["spec"], deployment["spec"].get("replicas", 1)
        deployment.setdefault("status", {})["observedGeneration"] = deployment["metadata"]["generation"]
        sets = self._sets(deployment)
        new = next((each for each in sets if each["spec"]["template"] == spec["template"]), None)
        if spec.get("paused") and (new is None or len(sets) > 1):
            self._scale_paused(sets, replicas)
            return
        if new is None:
            new = self._new_set(deployment)
        old = [pod for each in sets if each is not new for pod in self._pods_of(each)]
        mine = self._pods_of(new)
        rolling = (spec.get("strategy") or {}).get("rollingUpdate") or {}
        surge = _count(rolling.get("maxSurge", "25%"), replicas, up=True)
        unavailable = _count(rolling.get("maxUnavailable", "25%"), replicas, up=False)
        if (spec.get("strategy") or {}).get("type") == "Recreate":
            surge, unavailable = 0, replicas
        for pod in sorted(old, key=lambda each: self._available(each, spec)):
            left = sum(self._available(each, spec) for each in [*old, *mine]) - self._available(pod, spec)
            if left >= replicas - unavailable or not self._available(pod, spec):
                self._end(pod)
                old.remove(pod)
                break
        while len(mine) < replicas and len(mine) + len(old) < replicas + surge:
            mine.append(self._new_pod(new))
        for pod in mine[replicas:]:
            self._end(pod)

    def _scale_paused(self, sets: list[Json], replicas: int) -> None:
        """A paused Deployment follows its number of replicas all the same; the real one spreads that over its sets."""
        largest = max(sets, key=lambda each: len(self._pods_of(each)))
        everyone = [pod for each in sets for pod in self._pods_of(each)]
        for _ in range(replicas - len(everyone)):
            self._new_pod(largest)
        for pod in self._pods_of(largest)[: max(0, len(everyone) - replicas)]:
            self._end(pod)

    def _report(self, deployment: Json) -> None:
        sets, spec = self._sets(deployment), deployment["spec"]
        everyone = [pod for each in sets for pod in self._pods_of(each)]
        new = [p for each in sets if each["spec"]["template"] == spec["template"] for p in self._pods_of(each)]
        deployment["status"] |= {
            "replicas": len(everyone),
            "updatedReplicas": len(new),
            "readyReplicas": sum(_ready(each) for each in everyone),
        }

    def _publish(self, service: Json) -> None:
        """The endpoints of a Service: the ready pods that it selects."""
        metadata, selector = service["metadata"], service["spec"].get("selector") or {}
        chosen = ",".join(f"{key}={text}" for key, text in selector.items())
        found = [pod for pod in self.pods() if _selected(pod, chosen) and "deletionTimestamp" not in pod["metadata"]]
        endpoints = [
            {"conditions": {"ready": _ready(pod)}, "targetRef": {"kind": "Pod", "name": pod["metadata"]["name"]}}
            for pod in found
        ]
        known = self.objects.get((ENDPOINT_SLICES[0].plural, metadata["namespace"], metadata["name"]))
        if known is not None:
            known["endpoints"] = endpoints
            return
        labels = {"kubernetes.io/service-name": metadata["name"]}
        about = {"name": metadata["name"], "labels": labels, "ownerReferences": [_reference(service)]}
        self.put(ENDPOINT_SLICES[0], {"metadata": about, "endpoints": endpoints}, metadata["namespace"])

    def _sets(self, deployment: Json) -> list[Json]:
        return [
            each
            for (plural, _, _), each in self.objects.items()
            if plural == "replicasets" and _owner(each) == deployment["metadata"]["uid"]
        ]

    def _new_set(self, deployment: Json) -> Json:
        name = f"{deployment['metadata']['name']}-{self._serial:x}"
        template = copy.deepcopy(deployment["spec"]["template"])
        metadata = {
            "name": name,
            "labels": {**template["metadata"].get("labels", {})},
            "ownerReferences": [_reference(deployment)],
        }
        return self.put(
            REPLICA_SETS, {"metadata": metadata, "spec": {"template": template}}, deployment["metadata"]["namespace"]
        )

    def _pods_of(self, found: Json) -> list[Json]:
        return [
            pod
            for pod in self.pods()
            if _owner(pod) == found["metadata"]["uid"] and "deletionTimestamp" not in pod["metadata"]
        ]

    def _new_pod(self, replica_set: Json) -> Json:
        template = copy.deepcopy(replica_set["spec"]["template"])
        name = f"{replica_set['metadata']['name']}-{self._serial:x}"
        labels = {**template["metadata"].get("labels", {}), "pod-template-hash": replica_set["metadata"]["name"]}
        metadata = {
            "name": name,
            "labels": labels,
            "annotations": template["metadata"].get("annotations", {}),
            "ownerReferences": [_reference(replica_set)],
        }
        return self.put(PODS, {"metadata": metadata, "spec": template["spec"]}, replica_set["metadata"]["namespace"])

    def _available(self, pod: Json, spec: Json) -> bool:
        since = pod.get("ready_since")
        return _ready(pod) and since is not None and self.clock.time - since >= spec.get("minReadySeconds", 0)

    def _end(self, pod: Json) -> None:
        pod["metadata"].setdefault("deletionTimestamp", format_time(self.clock.now()))

    def _run(self, pod: Json) -> None:
        """A node: ends what is deleted, starts what is new; `starts` says how each start goes."""
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            if self.starts(pod) != "hangs":
                self._remove("pods", metadata["namespace"], metadata["name"])
            return
        container = pod["spec"]["containers"][-1 if self.starts(pod) == "sidecar" else 0]["name"]
        state = self.starts(pod)
        if state == "pending":
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "message": "0/1 nodes: 1 Insufficient nvidia.com/gpu.",
            }
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
            return
        if "podIP" not in (pod.get("status") or {}) and not self._mountable(pod):
            waiting = {"waiting": {"reason": "ContainerCreating"}}  # which one is missing is told by an Event alone
            pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": container, "state": waiting}]}
            return
        running = {"running": {"startedAt": format_time(self.clock.now())}}
        status = pod.setdefault("status", {})
        if "podIP" not in status:
            status |= {
                "phase": "Running",
                "podIP": f"10.0.0.{int(metadata['uid'].removeprefix('uid-'))}",
                "startTime": format_time(self.clock.now()),
                "containerStatuses": [{"name": container, "state": running, "restartCount": 0}],
            }
            pod["spec"]["nodeName"] = pod["spec"].get("nodeName", "node1")
            return
        if state == "ready" and not _ready(pod) and status["phase"] == "Running":
            status["conditions"] = [{"type": "Ready", "status": "True"}]
            pod["ready_since"] = self.clock.time
        elif state == "crash":
            self.crash(pod, 1)

    def _mountable(self, pod: Json) -> bool:
        """Whether the ConfigMaps that it mounts are there; a kubelet waits for them for ever."""
        mounted = [each["configMap"] for each in pod["spec"].get("volumes") or [] if "configMap" in each]
        return all(
            each.get("optional") or (CONFIG_MAPS.plural, pod["metadata"]["namespace"], each["name"]) in self.objects
            for each in mounted
        )

    def crash(self, pod: Json, code: int, reason: str = "Error") -> None:
        """Its container ends; a Deployment's is started again."""
        status = pod["status"]
        ended = {"terminated": {"exitCode": code, "reason": reason}}
        mine = status["containerStatuses"][0]
        status["conditions"] = [{"type": "Ready", "status": "False"}]
        if pod["spec"].get("restartPolicy") == "Never":
            mine["state"] = ended
            status["phase"] = "Failed" if code else "Succeeded"
        else:
            mine |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
            mine["restartCount"] += 1

    # --- small things ---

    def _called(self, verb: str, resource: Resource, name: str) -> None:
        self.before(verb, resource, name)
        self.calls.append((verb, resource.plural, name))
        if resource.plural in self.forbidden:
            raise Forbidden(verb, resource.plural, "not allowed", status=403)

    def _find(self, resource: Resource, name: str, namespace: str | None) -> Json:
        found = self.objects.get((resource.plural, namespace, name))
        if found is None:
            raise NotFound("GET", f"{resource.plural}/{name}", "not found", status=404, reason="NotFound")
        return found

    def _touched(self, found: Json) -> Json:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        return found

    def _remove(self, plural: str, namespace: str | None, name: str) -> None:
        gone = self.objects.pop((plural, namespace, name))
        for key, found in list(self.objects.items()):
            if _owner(found) == gone["metadata"]["uid"]:
                if key[0] == "pods":
                    self._end(found)
                else:
                    self._remove(*key)


def own_rules(route: Json, manager: str, time: str) -> None:
    """An atomic list has one owner: whoever changed it last."""
    entry = {"manager": manager, "operation": "Update", "time": time, "fieldsV1": {"f:spec": {"f:rules": {}}}}
    others = [
        each for each in route["metadata"].get("managedFields", []) if "f:rules" not in each["fieldsV1"]["f:spec"]
    ]
    route["metadata"]["managedFields"] = [*others, entry]


def hear(watchers: Iterable[Watcher]) -> None:
    """Let watches tell of all that is there, and of what is gone."""
    for watcher in watchers:
        watcher.once(threading.Event())


def _merge(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merge(new.get(key), value)
    return new


def _selected(found: Json, labels: str) -> bool:
    mine = found["metadata"].get("labels") or {}
    return all(mine.get(key) == text for key, _, text in (each.partition("=") for each in labels.split(",") if each))


def _owner(found: Json) -> str | None:
    return next(
        (each["uid"] for each in found["metadata"].get("ownerReferences") or [] if each.get("controller")), None
    )


def _reference(owner: Json) -> Json:
    return {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"], "controller": True}


def _ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _count(value: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * replicas
    return -(-share // 100) if up else share // 100
