"""The verbs of the Kubernetes API on raw JSON objects: nothing is dropped that this program does not know."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kubernetes.client.configuration import Configuration

from tunewright.kube.configuration import load_configuration
from tunewright.kube.counting import Observer
from tunewright.kube.errors import Gone, KubeError, NotFound, Unavailable, from_answer
from tunewright.kube.resources import PODS, Resource
from tunewright.kube.transport import TimeOuts, Transport

Json = dict[str, Any]

FIELD_MANAGER = "tunewright"
"""Names our writes in every object's managedFields."""

PAGE = 250
WATCH_SECONDS = 45
"""The server ends a watch after this long."""
WATCH_SILENCE = 60.0
"""Seconds without a byte after which a watch is dead: the server should have ended it by then."""

_DISCOVERY_SECONDS = 600.0

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class PatchType(StrEnum):
    """How a patch is written. Lists are replaced by MERGE; STRATEGIC is for built-in kinds alone."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True)
class ObjectList:
    """All objects of a list, and the resource version to watch from."""

    items: list[Json]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Json


class Kube:
    """A client of one API server. Every call answers or raises a `KubeError` within its time-out. Thread-safe."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        namespace: str = "default",
        time_outs: TimeOuts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        may_write: Callable[[], bool] = lambda: True,
        observe: Observer = lambda _verb, _resource, _status: None,
        at_once: int | None = None,
    ) -> None:
        """`may_write` is asked before every try of a write, as `LeaderElection.acting`: False raises `Fenced`.

        `observe` is told of every request that was sent. `at_once` calls are under way at most (watches beside them);
        the others wait within their own time-out.
        """
        self.namespace = namespace
        self._transport = Transport(
            configuration,
            time_outs=time_outs,
            monotonic=monotonic,
            sleep=sleep,
            may_write=may_write,
            observe=observe,
            at_once=at_once,
        )
        self._monotonic = monotonic
        self._served: dict[str, tuple[float, frozenset[str]]] = {}

    @classmethod
    def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        *,
        may_write: Callable[[], bool] = lambda: True,
        observe: Observer = lambda _verb, _resource, _status: None,
        at_once: int | None = None,
    ) -> "Kube":
        """By kubeconfig or ServiceAccount, as `load_configuration` finds them. Raises `Refused`."""
        configuration, namespace = load_configuration(kubeconfig, context)
        return cls(configuration, namespace=namespace, may_write=may_write, observe=observe, at_once=at_once)

    def close(self) -> None:
        """Close idle connections."""
        self._transport.close()

    # --- reading ---

    def get(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        subresource: str = "",
        total: float | None = None,
    ) -> Json:
        """One object. Raises `NotFound`."""
        return self._json("GET", resource.path(namespace, name, subresource), total=total)

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int | None = None,
        metadata_only: bool = False,
    ) -> ObjectList:
        """All objects, `page` at a time; `namespace` None means all namespaces.

        With `metadata_only` the API server leaves out all but the metadata.
        """
        for _ in range(3):
            pages = self.pages(
                resource, namespace, labels=labels, fields=fields, page=page, metadata_only=metadata_only
            )
            try:
                found = [*pages]
            except Gone:
                continue  # the list ran out of time between two pages: from the start
            return ObjectList([item for each in found for item in each.items], found[-1].resource_version)
        raise Unavailable("GET", resource.path(namespace), "the list changed faster than its pages could be read")

    def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int | None = None,
        metadata_only: bool = False,
    ) -> Iterator[ObjectList]:
        """As `list`, but page by page, so that never all of it is held. Raises `Gone` when it must be begun again."""
        path, query = resource.path(namespace), {"limit": str(page or PAGE)} | _selectors(labels, fields)
        while True:
            found = self._json("GET", path, query, accept=_METADATA if metadata_only else "application/json")
            metadata = found.get("metadata") or {}
            yield ObjectList(found.get("items") or [], str(metadata.get("resourceVersion", "")))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        seconds: int = WATCH_SECONDS,
        silence: float = WATCH_SILENCE,
    ) -> Iterator[WatchEvent]:
        """Changes after `resource_version` until the server ends it (after `seconds`).

        Raises `Gone` when it must be listed again, `Unavailable` after `silence` seconds without a byte.
        """
        path = resource.path(namespace)
        query = {
            "watch": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        } | _selectors(labels, fields)
        for line in self._transport.stream(path, query, silence=silence):
            event = _parse(line, "WATCH", path)
            found = event.get("object")
            if not isinstance(found, dict):
                raise Unavailable("WATCH", path, "an event without an object")
            if event.get("type") == "ERROR":
                raise from_answer("WATCH", path, int(found.get("code") or 500), json.dumps(found).encode())
            yield WatchEvent(str(event.get("type")), found)

    def logs(
        self,
        pod: str,
        namespace: str,
        *,
        container: str = "",
        tail_lines: int = 200,
        limit_bytes: int = 2**20,
        previous: bool = False,
    ) -> str:
        """The end of a container's log, both streams as it wrote them."""
        query = {"tailLines": str(tail_lines), "limitBytes": str(limit_bytes)}
        query |= {"container": container} if container else {}
        query |= {"previous": "true"} if previous else {}
        path = PODS.path(namespace, pod, "log")
        return self._transport.call("GET", path, query=query, accept="*/*").decode("utf-8", "replace")

    def read(self, path: str, *, accept: str = "application/json") -> Json:
        """What is no object: `/version`, `/openapi/v2`, a table of objects."""
        return _parse(self._transport.call("GET", path, accept=accept), "GET", path)

    def served(self, *alternatives: Resource) -> Resource | None:
        """The first alternative that this API server serves; None when it serves none. Remembered for ten minutes."""
        return next((each for each in alternatives if each.plural in self._plurals(each.root)), None)

    def _plurals(self, root: str) -> frozenset[str]:
        now = self._monotonic()
        known = self._served.get(root)
        if known is not None and now - known[0] < _DISCOVERY_SECONDS:
            return known[1]
        try:
            found = self._json("GET", root).get("resources") or []
        except NotFound:
            found = []
        plurals = frozenset(str(each.get("name")) for each in found)
        self._served[root] = (now, plurals)
        return plurals

    # --- writing ---

    def create(
        self,
        resource: Resource,
        body: Json,
        namespace: str | None = None,
        *,
        name: str = "",
        subresource: str = "",
        dry_run: bool = False,
        total: float | None = None,
    ) -> Json:
        """Create it (with `name` and `subresource`: post to it, as `token` or `eviction`). Raises `AlreadyExists`.

        Never sent twice: when no answer came, read whether it is there. `total` bounds it in seconds.
        """
        path = resource.path(namespace, name, subresource)
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return self._json("POST", path, _writing(dry_run), whole, repeatable=False, total=total)

    def replace(
        self,
        resource: Resource,
        body: Json,
        namespace: str | None = None,
        *,
        subresource: str = "",
        dry_run: bool = False,
        total: float | None = None,
    ) -> Json:
        """Write it whole; with the `metadata.resourceVersion` that was read, raises `KubeConflict` if it changed."""
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return self._json("PUT", path, _writing(dry_run), whole, total=total)

    def patch(
        self,
        resource: Resource,
        name: str,
        patch: Json | Sequence[Json],
        namespace: str | None = None,
        *,
        type: PatchType = PatchType.MERGE,
        subresource: str = "",
        dry_run: bool = False,
        manager: str = FIELD_MANAGER,
    ) -> Json:
        """Change some fields. A JSON patch is sent once only: its operations may not bear repetition.

        With the `metadata.resourceVersion` that was read in it, raises `KubeConflict` if the object changed since.
        """
        path = resource.path(namespace, name, subresource)
        repeatable = type is not PatchType.JSON
        query = _writing(dry_run) | {"fieldManager": manager}
        return self._json("PATCH", path, query, patch, content_type=type, repeatable=repeatable)

    def apply(
        self,
        resource: Resource,
        body: Json,
        namespace: str | None = None,
        *,
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
        manager: str = FIELD_MANAGER,
    ) -> Json:
        """Server-side apply of exactly the fields in `body`.

        Raises `KubeConflict` with a cause for each field that another manager owns, unless `force`.
        """
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        query = _writing(dry_run) | {"fieldManager": manager, "force": "true" if force else "false"}
        return self._json("PATCH", path, query, whole, content_type="application/apply-patch+yaml")

    def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        propagation: str = "Background",
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        dry_run: bool = False,
    ) -> bool:
        """Delete it; False when it was not there. `uid` and `resource_version` are preconditions: `KubeConflict`."""
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {key: value for key, value in preconditions.items() if value is not None}
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        options |= {"preconditions": preconditions} if preconditions else {}
        options |= {"gracePeriodSeconds": grace_seconds} if grace_seconds is not None else {}
        options |= {"dryRun": ["All"]} if dry_run else {}
        try:
            self._json("DELETE", resource.path(namespace, name), {}, options)
        except NotFound:
            return False
        return True

    def delete_all(self, resource: Resource, namespace: str, *, labels: str) -> None:
        """Delete every object with these labels; none is no error. `labels` may not be empty."""
        if not labels:
            raise ValueError("delete_all needs labels: it never empties a namespace")
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self._json("DELETE", resource.path(namespace), {"labelSelector": labels}, options)

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        repeatable: bool = True,
        total: float | None = None,
    ) -> Json:
        data = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        answer = self._transport.call(
            method,
            path,
            query=query,
            body=data,
            content_type=content_type,
            accept=accept,
            repeatable=repeatable,
            total=total,
        )
        return _parse(answer, method, path)


def _parse(answer: bytes, method: str, path: str) -> Json:
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise Unavailable(method, path, f"the answer is no JSON: {answer[:100]!r}") from error
    if not isinstance(found, dict):
        raise KubeError(method, path, f"the answer is no JSON object: {answer[:100]!r}")
    return found


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _writing(dry_run: bool) -> dict[str, str]:
    return {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
