"""A small API server on a free port, for tests: objects, resource versions, status, patches, watches, and faults."""

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client.configuration import Configuration

from tunewright.kube.client import Kube
from tunewright.kube.transport import TimeOuts

Json = dict[str, Any]


class Request:
    """One request as it came."""

    def __init__(self, method: str, path: str, query: dict[str, str], body: Any, headers: dict[str, str]) -> None:
        self.method, self.path, self.query, self.body, self.headers = method, path, query, body, headers


class Answer(Exception):
    """Ends a request: a status, and a body as JSON or as raw bytes."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


class Drop(Exception):
    """Ends a request without an answer: the connection is closed."""


def refuse(code: int, reason: str, message: str = "", causes: list[Json] | None = None) -> Answer:
    """A Kubernetes Status."""
    status = {"kind": "Status", "status": "Failure", "message": message or reason, "reason": reason, "code": code}
    return Answer(code, status | ({"details": {"causes": causes}} if causes else {}))


class FakeKube:
    """Keeps objects by path. `before` and `after` see each request: what they raise is the answer."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.events: list[tuple[int, str, str, Json]] = []
        self.requests: list[Request] = []
        self.before: Callable[[Request], None] = lambda request: None
        self.after: Callable[[Request], None] = lambda request: None
        self.oldest = 0
        self.silent = threading.Event()
        self.released = threading.Event()
        self.changed = threading.Condition()
        self._version = 100
        self.url = ""

    def count(self, method: str, part: str = "") -> int:
        """How many requests there were of this method, with this in their path."""
        return sum(request.method == method and part in request.path for request in self.requests)

    def handle(self, request: Request) -> Json:
        """The answer to anything but a watch."""
        with self.changed:
            self.before(request)
            answer = self._handle(request)
            self.after(request)
            return answer

    def _handle(self, request: Request) -> Json:
        parts = request.path.strip("/").split("/")
        at = 5 if "namespaces" in parts else 3  # where the plural ends, after apis/GROUP/VERSION or api/v1
        at -= parts[0] == "api"
        collection, name, subresource = "/".join(parts[: at + 1]), *[*parts[at + 1 :], "", ""][:2]
        key = f"{collection}/{name}"
        if request.method == "POST":
            return self._create(collection, request.body)
        if not name:
            found = [obj for path, obj in sorted(self.objects.items()) if _in(collection, path)]
            found = [obj for obj in found if _selected(obj, request.query)]
            if request.method == "DELETE":
                for obj in found:
                    self._remove(f"{collection}/{obj['metadata']['name']}")
                return {"kind": "Status", "status": "Success"}
            return self._page(found, request.query)
        if key not in self.objects:
            raise refuse(404, "NotFound", f'{parts[at]} "{name}" not found')
        old = self.objects[key]
        if request.method == "GET":
            return old
        if request.method == "DELETE":
            wanted = (request.body or {}).get("preconditions", {}).get("uid")
            if wanted and wanted != old["metadata"]["uid"]:
                raise refuse(409, "Conflict", "the uid is another")
            orphan = (request.body or {}).get("propagationPolicy") == "Orphan"
            return self._remove(key, orphan=orphan)
        body = request.body if request.method == "PUT" else _merge(old, request.body)
        version = body["metadata"].get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise refuse(409, "Conflict", "the object has been modified")
        new = copy.deepcopy(old)
        if subresource == "status":
            new["status"] = _pruned(body.get("status", {}))
        else:
            new |= {field: value for field, value in body.items() if field not in ("metadata", "status")}
            given = body["metadata"]
            new["metadata"] |= {field: given[field] for field in ("labels", "annotations") if field in given}
            new["metadata"]["generation"] += new.get("spec") != old.get("spec")
        return self._store(key, new, "MODIFIED") if new != old else old

    def _create(self, collection: str, body: Json) -> Json:
        name = body.get("metadata", {}).get("name", "")
        key = f"{collection}/{name}"
        if key in self.objects:
            raise refuse(409, "AlreadyExists", f"{name} already exists")
        parts = collection.split("/")
        uid = f"uid-{self._version + 1}"
        made = {"namespace": parts[-2], "uid": uid, "generation": 1, "creationTimestamp": "2026-01-02T03:04:05Z"}
        new = {**copy.deepcopy(body), "metadata": {**body.get("metadata", {}), **made}}
        if "tunewright.dev" in collection:
            new.pop("status", None)
        return self._store(key, new, "ADDED")

    def edit(self, path: str, **spec: Any) -> None:
        """Change an object's spec, as a person does with kubectl."""
        with self.changed:
            new = copy.deepcopy(self.objects[path.strip("/")])
            new["spec"] |= spec
            new["metadata"]["generation"] += 1
            self._store(path.strip("/"), new, "MODIFIED")

    def forget_events(self) -> None:
        """As after a compaction: whoever watches from an old version gets 410."""
        with self.changed:
            self.oldest = self._version
            self.events.clear()

    def _store(self, key: str, new: Json, kind: str) -> Json:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = new
        self._tell(key, kind, new)
        return new

    def _remove(self, key: str, *, orphan: bool = False) -> Json:
        old = self.objects.pop(key)
        for path, obj in [] if orphan else list(self.objects.items()):
            if any(o["uid"] == old["metadata"]["uid"] for o in obj["metadata"].get("ownerReferences", [])):
                self._remove(path)
        self._version += 1
        gone = copy.deepcopy(old)
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._tell(key, "DELETED", gone)
        return old

    def _tell(self, key: str, kind: str, obj: Json) -> None:
        self.events.append((self._version, key, kind, copy.deepcopy(obj)))
        self.changed.notify_all()

    def _page(self, found: list[Json], query: dict[str, str]) -> Json:
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 500)
        metadata = {"resourceVersion": str(self._version)}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        return {"kind": "List", "metadata": metadata, "items": found[start : start + limit]}

    def watch(self, request: Request) -> Iterator[Json]:
        """Events after the version that is asked for, until the time is up or the server is `released`."""
        since, collection = int(request.query["resourceVersion"]), request.path.strip("/")
        if since < self.oldest:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "old"}}
            return
        left = int(float(request.query["timeoutSeconds"]) * 20)
        while left:
            with self.changed:
                fresh = [event for event in self.events if event[0] > since]
                if not fresh and self.released.is_set():
                    return
                if not fresh:
                    self.changed.wait(0.05)
                    left -= 1
            for version, key, kind, obj in fresh:
                since = version
                if _in(collection, key) and _selected(obj, request.query):
                    yield {"type": kind, "object": obj}


def _in(collection: str, path: str) -> bool:
    """Whether an object is in a collection: of its namespace, or of all namespaces."""
    found = path.rpartition("/")[0]
    return found == collection or ("/namespaces/" not in collection and _everywhere(found) == collection)


@cache
def _everywhere(collection: str) -> str:
    """The path of a kind in all namespaces."""
    return re.sub(r"/namespaces/[^/]+", "", collection)


def _selected(obj: Json, query: dict[str, str]) -> bool:
    """By labels that must be equal or there, and by name; other fields are not looked at."""
    labels, (field, _, name) = obj["metadata"].get("labels", {}), query.get("fieldSelector", "").partition("=")
    parts = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return (field != "metadata.name" or name == obj["metadata"]["name"]) and all(
        labels.get(key) == value if equal else key in labels for key, equal, value in parts
    )


def _merge(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merge(new.get(key), value)
    return new


def _pruned(status: Json) -> Json:
    return {key: value for key, value in status.items() if value is not None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeKube

    def _do(self) -> None:
        url = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            self.command, url.path, dict(parse_qsl(url.query)), json.loads(text) if text else None, dict(self.headers)
        )
        self.fake.requests.append(request)
        try:
            if request.query.get("watch"):
                self._watch(request)
            else:
                raise Answer(200, self.fake.handle(request))
        except Answer as answer:
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for key, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
        except (Drop, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _watch(self, request: Request) -> None:
        self.fake.before(request)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.fake.silent.is_set():
            self.fake.released.wait(30)
            self.close_connection = True
            return
        for event in self.fake.watch(request):
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@contextmanager
def fake_kube() -> Iterator[FakeKube]:
    """A running fake, stopped at the end whatever happens."""
    fake = FakeKube()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def client_of(url: str, *, time_outs: TimeOuts | None = None, **more: Any) -> Iterator[Kube]:
    """A client that never goes through a proxy of the environment, and waits for nothing between its tries."""
    configuration = Configuration(host=url)
    configuration.proxy = None
    kube = Kube(configuration, time_outs=time_outs, **({"sleep": lambda seconds: None} | more))
    try:
        yield kube
    finally:
        kube.close()
