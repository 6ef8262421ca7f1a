"""The client against a server on this machine: verbs, errors, tries, time-outs, pages and watches."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_kube import Answer, Drop, FakeKube, Request, client_of, fake_kube, refuse

from tunewright.kube.client import FIELD_MANAGER, WATCH_SECONDS, WATCH_SILENCE, Kube, PatchType
from tunewright.kube.configuration import load_configuration
from tunewright.kube.counting import asked
from tunewright.kube.errors import (
    AlreadyExists,
    Fenced,
    Forbidden,
    Gone,
    Invalid,
    KubeConflict,
    KubeError,
    NotFound,
    Unauthorized,
    Unavailable,
)
from tunewright.kube.resources import AUTOSCALERS, CONFIG_MAPS, NODES, POD_DISRUPTION_BUDGETS, PODS, TUNINGS
from tunewright.kube.transport import TimeOuts
from tunewright.ports import Conflict, PortError, Refused

NS = "team"
MAPS = CONFIG_MAPS.path(NS)


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"metadata": {"name": name}, "data": data}


def once(*answers: Exception) -> object:
    """Fails the first requests so, and lets the others through."""
    left = list(answers)

    def before(request: Request) -> None:
        if left:
            raise left.pop(0)

    return before


def test_an_object_comes_back_with_every_field_it_had(kube: Kube) -> None:
    body = config_map("a", x="1") | {"unknownField": {"deep": [1, None, {"y": "z"}]}}
    kube.create(CONFIG_MAPS, body, NS)
    found = kube.get(CONFIG_MAPS, "a", NS)
    assert found["unknownField"] == {"deep": [1, None, {"y": "z"}]}
    assert found["apiVersion"] == "v1"
    assert found["kind"] == "ConfigMap"


def test_every_write_names_its_field_manager(fake: FakeKube, kube: Kube) -> None:
    made = kube.create(CONFIG_MAPS, config_map("a"), NS)
    kube.replace(CONFIG_MAPS, made, NS)
    kube.patch(CONFIG_MAPS, "a", {"data": {"x": "1"}}, NS, dry_run=True)
    kube.apply(CONFIG_MAPS, config_map("a", y="2"), NS, force=True)
    writes = [request for request in fake.requests if request.method != "GET"]
    assert [request.query["fieldManager"] for request in writes] == [FIELD_MANAGER] * 4
    assert writes[2].query["dryRun"] == "All"
    assert writes[2].headers["Content-Type"] == "application/merge-patch+json"
    assert writes[3].headers["Content-Type"] == "application/apply-patch+yaml"
    assert writes[3].query["force"] == "true"
    assert writes[3].body["kind"] == "ConfigMap"


def test_a_delete_carries_its_preconditions(fake: FakeKube, kube: Kube) -> None:
    made = kube.create(CONFIG_MAPS, config_map("a"), NS)
    with pytest.raises(KubeConflict):
        kube.delete(CONFIG_MAPS, "a", NS, uid="another")
    assert kube.delete(CONFIG_MAPS, "a", NS, uid=made["metadata"]["uid"], propagation="Foreground", grace_seconds=0)
    assert fake.requests[-1].body["propagationPolicy"] == "Foreground"
    assert fake.requests[-1].body["gracePeriodSeconds"] == 0
    assert kube.delete(CONFIG_MAPS, "a", NS) is False


def test_delete_all_never_empties_a_namespace(kube: Kube) -> None:
    with pytest.raises(ValueError, match="labels"):
        kube.delete_all(CONFIG_MAPS, NS, labels="")


def test_a_list_is_read_page_by_page(fake: FakeKube, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewright.kube.client.PAGE", 2)
    for name in "abcde":
        kube.create(CONFIG_MAPS, config_map(name), NS)
    found = kube.list(CONFIG_MAPS, NS)
    assert [item["metadata"]["name"] for item in found.items] == list("abcde")
    assert fake.count("GET") == 3


def test_a_list_whose_pages_ran_out_starts_anew(fake: FakeKube, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewright.kube.client.PAGE", 2)
    for name in "abc":
        kube.create(CONFIG_MAPS, config_map(name), NS)
    expired = [refuse(410, "Expired")]

    def before(request: Request) -> None:
        if "continue" in request.query and expired:
            raise expired.pop()

    fake.before = before
    assert len(kube.list(CONFIG_MAPS, NS).items) == 3


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", KubeConflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Gone),
        (422, "Invalid", Invalid),
        (500, "InternalError", Unavailable),
        (504, "Timeout", Unavailable),
        (418, "", KubeError),
    ],
)
def test_errors_say_what_was_asked_and_what_to_do(
    fake: FakeKube, kube: Kube, status: int, reason: str, kind: type[KubeError]
) -> None:
    def before(request: Request) -> None:
        raise refuse(status, reason, "the server's own words")

    fake.before = before
    with pytest.raises(kind) as caught:
        kube.get(CONFIG_MAPS, "a", NS)
    assert type(caught.value) is kind
    assert isinstance(caught.value, PortError)
    assert f"GET {MAPS}/a: the server's own words ({status}" in str(caught.value)
    assert str(caught.value).endswith(kind.advice)


def test_a_conflict_is_the_ports_conflict() -> None:
    assert issubclass(KubeConflict, Conflict)


def test_invalid_names_the_fields(fake: FakeKube, kube: Kube) -> None:
    causes = [{"field": "spec.slo", "message": "must be a string", "reason": "FieldValueInvalid"}]
    fake.before = once(refuse(422, "Invalid", "bad", causes))
    with pytest.raises(Invalid) as caught:
        kube.create(CONFIG_MAPS, config_map("a"), NS)
    assert [(cause.field, cause.message) for cause in caught.value.causes] == [("spec.slo", "must be a string")]


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"", b"[]", b'"text"', b'{"details": 3}'])
def test_an_error_that_is_no_status_is_an_error_too(fake: FakeKube, kube: Kube, body: bytes) -> None:
    def before(request: Request) -> None:
        raise Answer(502, body)

    fake.before = before
    with pytest.raises(Unavailable, match="502"):
        kube.get(CONFIG_MAPS, "a", NS)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"cut": '])
def test_an_answer_that_is_no_object_is_an_error(fake: FakeKube, kube: Kube, body: bytes) -> None:
    fake.before = once(Answer(200, body))
    with pytest.raises(KubeError, match="JSON"):
        kube.get(CONFIG_MAPS, "a", NS)


def test_secrets_in_messages_are_hidden(fake: FakeKube, kube: Kube) -> None:
    fake.before = once(refuse(403, "Forbidden", "no access with Bearer abc.def.ghi"))
    with pytest.raises(Forbidden) as caught:
        kube.get(CONFIG_MAPS, "a", NS)
    assert "abc.def" not in str(caught.value)


# --- tries ---


def test_a_read_is_tried_again_after_a_dropped_connection_and_a_5xx(fake: FakeKube, kube: Kube) -> None:
    kube.create(CONFIG_MAPS, config_map("a"), NS)
    fake.before = once(Drop(), refuse(503, "ServiceUnavailable"))
    assert kube.get(CONFIG_MAPS, "a", NS)["metadata"]["name"] == "a"
    assert fake.count("GET") == 3


def test_tries_are_bounded(fake: FakeKube, kube: Kube) -> None:
    def before(request: Request) -> None:
        raise refuse(500, "InternalError")

    fake.before = before
    with pytest.raises(Unavailable):
        kube.get(CONFIG_MAPS, "a", NS)
    assert fake.count("GET") == TimeOuts().tries


@pytest.mark.parametrize("fault", [Drop(), refuse(500, "InternalError")])
def test_a_create_is_never_sent_twice_when_it_may_have_been_done(fake: FakeKube, kube: Kube, fault: Exception) -> None:
    fake.after = once(fault)
    with pytest.raises(Unavailable):
        kube.create(CONFIG_MAPS, config_map("a"), NS)
    assert fake.count("POST") == 1


def test_a_json_patch_is_never_sent_twice(fake: FakeKube, kube: Kube) -> None:
    fake.before = once(Drop())
    patch = [{"op": "add", "path": "/data/-", "value": "x"}]
    with pytest.raises(Unavailable):
        kube.patch(CONFIG_MAPS, "a", patch, NS, type=PatchType.JSON)
    assert fake.count("PATCH") == 1
    assert fake.requests[0].body == patch


def test_too_many_requests_are_tried_again_when_the_server_says_so(fake: FakeKube) -> None:
    slept: list[float] = []
    fake.before = once(Answer(429, {"kind": "Status", "reason": "TooManyRequests"}, {"Retry-After": "3"}))
    with client_of(fake.url, sleep=slept.append) as kube:
        kube.create(CONFIG_MAPS, config_map("a"), NS)  # thrown away unread: also a create may be sent again
    assert slept == [3.0]
    assert fake.count("POST") == 2


def test_a_wait_longer_than_the_time_left_is_not_waited(fake: FakeKube) -> None:
    slept: list[float] = []
    fake.before = once(Answer(429, {}, {"Retry-After": "600"}))
    with client_of(fake.url, sleep=slept.append) as kube, pytest.raises(Unavailable) as caught:
        kube.get(CONFIG_MAPS, "a", NS)
    assert slept == []
    assert caught.value.retry_after == 600


def test_nothing_listens(fake: FakeKube) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with client_of(f"http://127.0.0.1:{port}") as kube, pytest.raises(Unavailable, match="refused"):
            kube.create(CONFIG_MAPS, config_map("a"), NS)


@contextmanager
def black_hole() -> Iterator[str]:
    """Takes connections, and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_black_hole_is_given_up() -> None:
    quick = TimeOuts(connect=0.1, read=0.1, total=0.5, tries=2)
    with black_hole() as url, client_of(url, time_outs=quick) as kube, pytest.raises(Unavailable, match="timed out"):
        kube.get(CONFIG_MAPS, "a", NS)


def test_a_server_that_drips_is_given_up_by_the_deadline() -> None:
    """Each byte comes in time for the read time-out; the whole call still ends."""
    now = [0.0]

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            now[0] = 100.0
            connection.sendall(b"{")
            connection.recv(1)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with client_of(url, monotonic=lambda: now[0]) as kube, pytest.raises(Unavailable, match="in time"):
            kube.get(CONFIG_MAPS, "a", NS)
        thread.join(10)


def test_a_fence_holds_writes_back_and_lets_reads_through(fake: FakeKube) -> None:
    acting = [True]
    with client_of(fake.url, may_write=lambda: acting[0]) as kube:
        kube.create(CONFIG_MAPS, config_map("a"), NS)
        acting[0] = False
        assert kube.get(CONFIG_MAPS, "a", NS)["metadata"]["name"] == "a"
        for write in (
            lambda: kube.create(CONFIG_MAPS, config_map("b"), NS),
            lambda: kube.patch(CONFIG_MAPS, "a", {}, NS),
            lambda: kube.delete(CONFIG_MAPS, "a", NS),
        ):
            with pytest.raises(Fenced):
                write()
    assert fake.count("POST") == 1
    assert fake.count("PATCH") + fake.count("DELETE") == 0


def test_the_fence_is_asked_before_every_try(fake: FakeKube) -> None:
    asked = iter([True, False])
    fake.before = once(Drop())
    with client_of(fake.url, may_write=lambda: next(asked)) as kube, pytest.raises(Fenced):
        kube.patch(CONFIG_MAPS, "a", {}, NS)
    assert fake.count("PATCH") == 1


# --- watches ---


def test_a_watch_tells_changes_until_the_server_ends_it(fake: FakeKube, kube: Kube) -> None:
    kube.create(CONFIG_MAPS, config_map("a"), NS)
    version = kube.list(CONFIG_MAPS, NS).resource_version
    kube.create(CONFIG_MAPS, config_map("b"), NS)
    kube.delete(CONFIG_MAPS, "a", NS)
    events = list(kube.watch(CONFIG_MAPS, NS, resource_version=version, seconds=1))
    assert [(event.type, event.object["metadata"]["name"]) for event in events] == [("ADDED", "b"), ("DELETED", "a")]
    assert fake.requests[-1].query["allowWatchBookmarks"] == "true"


def test_a_version_that_is_too_old_is_gone(fake: FakeKube, kube: Kube) -> None:
    fake.forget_events()
    with pytest.raises(Gone):
        list(kube.watch(CONFIG_MAPS, NS, resource_version="1", seconds=1))
    fake.before = once(refuse(410, "Expired"))
    with pytest.raises(Gone):
        list(kube.watch(CONFIG_MAPS, NS, resource_version="1", seconds=1))


def test_a_silent_watch_is_noticed(fake: FakeKube, kube: Kube) -> None:
    fake.silent.set()
    with pytest.raises(Unavailable, match="timed out"):
        list(kube.watch(CONFIG_MAPS, NS, resource_version="100", silence=0.1))


def test_the_shipped_times_notice_silence_within_seventy_seconds() -> None:
    assert WATCH_SECONDS < WATCH_SILENCE <= 70


@pytest.mark.parametrize("line", [b"no json\n", b"{}\n", b"[]\n", b'{"type": "ADDED", "object": 1}\n'])
def test_a_garbled_watch_is_an_error(fake: FakeKube, kube: Kube, line: bytes) -> None:
    fake.before = once(Answer(200, line))
    with pytest.raises(KubeError):
        list(kube.watch(CONFIG_MAPS, NS, resource_version="100"))


def test_an_error_event_is_raised_as_what_it_is(fake: FakeKube, kube: Kube) -> None:
    status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no longer"}
    fake.before = once(Answer(200, json.dumps({"type": "ERROR", "object": status}).encode()))
    with pytest.raises(Forbidden, match="no longer"):
        list(kube.watch(CONFIG_MAPS, NS, resource_version="100"))


# --- paths, discovery, configuration ---


def test_every_request_is_counted_in_the_words_of_rbac(fake: FakeKube) -> None:
    sent: list[tuple[str, str, int | None]] = []
    with client_of(fake.url, observe=lambda *request: sent.append(request)) as kube:
        kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, NS)
        kube.get(CONFIG_MAPS, "a", NS)
        kube.list(CONFIG_MAPS, NS)
        kube.patch(CONFIG_MAPS, "a", {"status": {"x": 1}}, NS, subresource="status")
        kube.replace(CONFIG_MAPS, kube.get(CONFIG_MAPS, "a", NS), NS)
        list(kube.watch(CONFIG_MAPS, NS, resource_version="1000", seconds=0))
        kube.delete(CONFIG_MAPS, "a", NS)
        kube.delete_all(CONFIG_MAPS, NS, labels="a=b")
        with pytest.raises(NotFound):
            kube.get(CONFIG_MAPS, "a", NS)
    assert sent == [
        ("create", "configmaps", 200),
        ("get", "configmaps", 200),
        ("list", "configmaps", 200),
        ("patch", "configmaps/status", 200),
        ("get", "configmaps", 200),
        ("update", "configmaps", 200),
        ("watch", "configmaps", 200),
        ("delete", "configmaps", 200),
        ("deletecollection", "configmaps", 200),
        ("get", "configmaps", 404),
    ]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/version", ("get", "other")),
        ("/apis/apps/v1", ("get", "other")),
        ("/api/v1/namespaces", ("list", "namespaces")),
        ("/api/v1/namespaces/team", ("get", "namespaces")),
        ("/api/v1/namespaces/team/pods/a/log", ("get", "pods/log")),
        ("/apis/tunewright.dev/v1alpha1/tunings", ("list", "tunings")),
    ],
)
def test_what_is_asked_is_told_by_its_path(path: str, told: tuple[str, str]) -> None:
    assert asked("GET", path, {}) == told


def test_a_request_without_an_answer_is_counted_for_each_try(fake: FakeKube) -> None:
    sent: list[tuple[str, str, int | None]] = []
    fake.before = lambda request: (_ for _ in ()).throw(Drop())
    with client_of(fake.url, observe=lambda *request: sent.append(request)) as kube, pytest.raises(Unavailable):
        kube.get(CONFIG_MAPS, "a", NS)
    assert sent == [("get", "configmaps", None)] * TimeOuts().tries


def test_metadata_alone_can_be_asked_for(fake: FakeKube, kube: Kube) -> None:
    kube.list(CONFIG_MAPS, NS, metadata_only=True)
    assert "as=PartialObjectMetadataList" in fake.requests[-1].headers["Accept"]
    kube.list(CONFIG_MAPS, NS)
    assert fake.requests[-1].headers["Accept"] == "application/json"


def test_pages_come_one_by_one(fake: FakeKube, kube: Kube) -> None:
    for name in "abc":
        kube.create(CONFIG_MAPS, config_map(name), NS)
    fake.requests.clear()
    pages = kube.pages(CONFIG_MAPS, NS, page=2)
    first = next(pages)
    assert (len(first.items), len(fake.requests)) == (2, 1), "the next is asked for when it is wanted"
    second = next(pages)
    assert [each["metadata"]["name"] for each in second.items] == ["c"]
    assert list(pages) == []


def test_calls_beyond_the_limit_wait_for_their_turn(fake: FakeKube) -> None:
    at_once, most, held = [0], [0], threading.Event()
    lock = threading.Lock()

    def before(_request: Request) -> None:
        fake.changed.release()  # so that the fake itself lets in several
        try:
            with lock:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
                if at_once[0] == 2:
                    held.set()
            held.wait(10.0)
            with lock:
                at_once[0] -= 1
        finally:
            fake.changed.acquire()

    fake.before = before
    with client_of(fake.url, at_once=2) as kube:
        threads = [threading.Thread(target=kube.list, args=(CONFIG_MAPS, NS)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    assert most[0] == 2
    assert fake.count("GET") == 8


def test_a_turn_that_does_not_come_in_time_is_an_error(fake: FakeKube) -> None:
    with client_of(fake.url, at_once=1) as kube:
        inside = threading.Event()
        over = threading.Event()

        def before(_request: Request) -> None:
            inside.set()
            over.wait(10.0)

        fake.before = before
        slow = threading.Thread(target=kube.list, args=(CONFIG_MAPS, NS))
        slow.start()
        assert inside.wait(10.0)
        with pytest.raises(Unavailable, match="too many other calls"):
            kube.get(CONFIG_MAPS, "a", NS, total=0.1)
        over.set()
        slow.join(30.0)


def test_a_fence_is_asked_after_the_turn_was_waited_for(fake: FakeKube) -> None:
    """The Lease may have been lost meanwhile."""
    acting, inside, over = [True], threading.Event(), threading.Event()

    def before(request: Request) -> None:
        if request.method == "GET":
            inside.set()
            over.wait(10.0)

    fake.before = before
    with client_of(fake.url, at_once=1, may_write=lambda: acting[0]) as kube:
        slow = threading.Thread(target=kube.list, args=(CONFIG_MAPS, NS))
        slow.start()
        assert inside.wait(10.0)
        errors: list[BaseException] = []

        def write() -> None:
            try:
                kube.create(CONFIG_MAPS, config_map("a"), NS)
            except Fenced as error:
                errors.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        acting[0] = False
        over.set()
        for thread in (slow, writer):
            thread.join(30.0)
    assert len(errors) == 1
    assert fake.count("POST") == 0


def test_paths() -> None:
    assert TUNINGS.path("n", "t", "status") == "/apis/tunewright.dev/v1alpha1/namespaces/n/tunings/t/status"
    assert PODS.path(None) == "/api/v1/pods"
    assert NODES.path(None, "a/b") == "/api/v1/nodes/a%2Fb"
    with pytest.raises(ValueError, match="namespace"):
        PODS.path(None, "a")


def test_the_newest_version_that_is_served_is_taken_and_remembered(fake: FakeKube) -> None:
    now = [0.0]
    served = {"/apis/policy/v1beta1": "poddisruptionbudgets", "/apis/autoscaling/v1": "horizontalpodautoscalers"}

    def before(request: Request) -> None:
        if request.path not in served:
            raise Answer(404, b"404 page not found\n")
        raise Answer(200, {"resources": [{"name": served[request.path]}]})

    fake.before = before
    with client_of(fake.url, monotonic=lambda: now[0]) as kube:
        for _ in range(2):
            assert kube.served(*POD_DISRUPTION_BUDGETS) == POD_DISRUPTION_BUDGETS[1]
            assert kube.served(*AUTOSCALERS) == AUTOSCALERS[2]
            assert kube.served(TUNINGS) is None
        asked = len(fake.requests)
        assert asked == 6
        served["/apis/policy/v1"] = "poddisruptionbudgets"
        now[0] = 1000.0
        assert kube.served(*POD_DISRUPTION_BUDGETS) == POD_DISRUPTION_BUDGETS[0]


def test_a_kubeconfig_that_is_not_there_says_so(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nothing"
    monkeypatch.setenv("KUBECONFIG", str(missing))
    with pytest.raises(Refused, match=f"{missing}.*kubectl"):
        load_configuration()


def test_a_kubeconfig_gives_server_token_and_namespace(tmp_path) -> None:
    file = tmp_path / "config"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": "https://example.test:6443"}}],
                "users": [{"name": "u", "user": {"token": "t0ken"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "blue"}}],
                "current-context": "x",
            }
        )
    )
    configuration, namespace = load_configuration(file)
    assert (configuration.host, namespace) == ("https://example.test:6443", "blue")
    (setting,) = configuration.auth_settings().values()
    assert setting["value"] == "Bearer t0ken"
