"""Attacks: nothing but the user's own client gets through, and what is turned away decides nothing."""

import asyncio
import json
import logging
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from restapi import API, Rest, call, problem

from tunewright.api import guard
from tunewright.api.auth import Caller, OwnerMayAll, Unavailable, Verb, own_name
from tunewright.ports import PortError

APPROVE = f"{API}/tunings/demo/approve"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Rest:
    """For tests that change nothing."""
    return Rest(tmp_path_factory.mktemp("rest"))


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path)


def attack(rest: Rest, headers: dict[str, str], **options: Any) -> Any:
    """An approval that is right in everything but what the attack changes; nothing may be decided by it."""
    body = options.pop("content", None) or json.dumps(rest.binding() | {"reason": "fine"})
    usual = {"Content-Type": "application/json"}
    answer = rest.call("POST", APPROVE, headers=usual | headers, content=body, **options)
    assert rest.store.decisions("demo") == []
    return answer


def test_the_very_same_approval_without_an_attack_is_kept(rest: Rest) -> None:
    body = json.dumps(rest.binding() | {"reason": "fine"})
    headers = {"Content-Type": "application/json; charset=utf-8", "Origin": "http://127.0.0.1:8321"}
    assert rest.call("POST", APPROVE, headers=headers, content=body).status_code == 202
    assert len(rest.store.decisions("demo")) == 1


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8321",
        "127.0.0.1.evil.example",
        "localhost.",
        "127.0.0.1@evil",
        "127.0.0.1:x",
        "::1",
        " ",
    ],
)
def test_dns_rebinding(shared: Rest, host: str) -> None:
    problem(attack(shared, {"Host": host}), 421, "wrong-host")
    problem(shared.call("GET", f"{API}/tunings", headers={"Host": host}), 421, "wrong-host")
    problem(shared.call("GET", "/healthz", headers={"Host": host}), 421, "wrong-host")


def test_two_host_headers(shared: Rest) -> None:
    headers = [("Host", "127.0.0.1"), ("Host", "evil.example"), ("Authorization", f"Bearer {shared.token}")]
    problem(call(shared.app, "GET", f"{API}/tunings", headers=headers), 421, "wrong-host")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8321", "LOCALHOST", "[::1]:8321"])
def test_own_names(shared: Rest, host: str) -> None:
    assert shared.call("GET", f"{API}/tunings", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://127.0.0.1",
        "file://",
        "http://[",
        "",
        "ws://127.0.0.1:8321",
    ],
)
def test_cross_origin(shared: Rest, origin: str) -> None:
    headers = [("Origin", origin), ("Host", "127.0.0.1:8321"), ("Authorization", f"Bearer {shared.token}")]
    json_headers = [*headers, ("Content-Type", "application/json")]
    body = json.dumps(shared.binding() | {"reason": "fine"})
    problem(call(shared.app, "POST", APPROVE, headers=json_headers, content=body), 403, "cross-origin")
    answer = call(shared.app, "GET", f"{API}/tunings", headers=headers)
    problem(answer, 403, "cross-origin")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert shared.store.decisions("demo") == []


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_it_comes_from_another_site(shared: Rest, site: str) -> None:
    problem(attack(shared, {"Sec-Fetch-Site": site}), 403, "cross-origin")


def test_a_preflight_gets_no_permission(shared: Rest) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST", "Authorization": ""}
    answer = shared.call("OPTIONS", APPROVE, headers=headers)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "media",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp"],
)
def test_what_a_form_can_send(shared: Rest, media: str) -> None:
    problem(attack(shared, {"Content-Type": media}), 415, "not-json")


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "Bearer \xff"]
)
def test_without_the_token(shared: Rest, given: str) -> None:
    value = given.format(token=shared.token).encode("latin-1")
    headers = [(b"Host", b"127.0.0.1"), *([(b"Authorization", value)] if given else [])]
    for path in (f"{API}/tunings", f"{API}/nothing", "/metrics", "/", "/healthz/", "/docs/../metrics"):
        answer = call(shared.app, "GET", path, headers=headers)
        problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    body = json.dumps(shared.binding() | {"reason": "fine"})
    headers.append((b"Content-Type", b"application/json"))
    problem(call(shared.app, "POST", APPROVE, headers=headers, content=body), 401, "unauthenticated")
    assert shared.store.decisions("demo") == []


def test_two_tokens_are_none(shared: Rest) -> None:
    headers = [("Host", "127.0.0.1"), ("Authorization", f"Bearer {shared.token}"), ("Authorization", "Bearer x")]
    problem(call(shared.app, "GET", f"{API}/tunings", headers=headers), 401, "unauthenticated")


def test_a_token_in_the_address_or_a_cookie_is_none(shared: Rest) -> None:
    headers = {"Authorization": "", "Cookie": f"token={shared.token}"}
    problem(shared.call("GET", f"{API}/tunings?token={shared.token}", headers=headers), 401, "unauthenticated")


def test_probes_and_documentation_need_no_token(shared: Rest) -> None:
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert shared.call("GET", path, headers={"Authorization": ""}).status_code == 200


def test_metrics_can_be_made_public(tmp_path: Path) -> None:
    answer = Rest(tmp_path, public_metrics=True).call("GET", "/metrics", headers={"Authorization": ""})
    assert (answer.status_code, answer.text) == (200, "tunewright_up 1\n")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_token_file_that_others_can_read_lets_nobody_in(rest: Rest, caplog: pytest.LogCaptureFixture) -> None:
    rest.token_file.chmod(0o640)
    found = problem(rest.get("/tunings"), 503, "unavailable")
    assert str(rest.token_file) not in json.dumps(found), "the path is for the log, not for strangers"
    assert str(rest.token_file) in caplog.text
    rest.token_file.chmod(0o600)
    assert rest.get("/tunings").status_code == 200


def test_a_token_file_that_is_gone_lets_nobody_in(rest: Rest) -> None:
    rest.token_file.unlink()
    problem(rest.get("/tunings"), 503, "unavailable")


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def authenticate(self, authorization: str | None) -> Caller:
        raise self.error

    def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:
        raise self.error


@pytest.mark.parametrize("part", ["authenticator", "authorizer"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(Unavailable("down"), 503), (PortError("no answer"), 503), (TimeoutError(), 503), (KeyError("a fault"), 500)],
)
def test_a_failing_check_is_a_no(tmp_path: Path, part: str, error: Exception, status: int) -> None:
    rest = Rest(tmp_path, **{part: Failing(error)})
    answer = rest.post("/tunings/demo/abort", {"reason": "x"})
    problem(answer, status, "unavailable" if status == 503 else "internal")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert rest.store.decisions("demo") == []


def test_a_check_that_hangs_is_a_no_and_piles_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "AUTH_TIMEOUT", 0.02)
    release, calls = Event(), []

    class Hanging:
        def authenticate(self, authorization: str | None) -> Caller:
            calls.append(authorization)
            release.wait(60)
            return Caller(own_name())

    rest = Rest(tmp_path, authenticator=Hanging())
    try:
        for _ in range(guard.MAX_AUTH + 5):
            problem(rest.post("/tunings/demo/abort", {"reason": "x"}), 503, "unavailable")
        assert len(calls) <= guard.MAX_AUTH
        assert rest.store.decisions("demo") == []
    finally:
        release.set()


def test_reading_and_deciding_are_allowed_apart(tmp_path: Path) -> None:
    asked = []

    class MayRead:
        def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:
            asked.append((caller.name, verb, namespace, tuning))
            return verb is Verb.READ

    rest = Rest(tmp_path, authorizer=MayRead())
    assert rest.get("/tunings").status_code == 200
    assert rest.get("/tunings/demo").status_code == 200
    found = problem(rest.post("/tunings/demo/abort", {"reason": "x"}), 403, "forbidden")
    assert "decide" in found["detail"]
    assert rest.store.decisions("demo") == []
    me, one = own_name(), (None, "demo")
    assert asked == [(me, Verb.READ, None, None), (me, Verb.READ, *one), (me, Verb.DECIDE, *one)]


def test_on_one_machine_only_its_own_user_may() -> None:
    assert OwnerMayAll().allows(Caller(own_name()), Verb.DECIDE, None, "demo")
    assert not OwnerMayAll().allows(Caller("somebody-else"), Verb.READ, None, None)


def test_oversized_bodies(shared: Rest) -> None:
    huge = json.dumps(shared.binding() | {"reason": "x" * guard.MAX_BODY})
    problem(attack(shared, {}, content=huge), 413, "too-large")

    async def endless() -> Any:
        for _ in range(guard.MAX_BODY // 1024 + 2):
            yield b" " * 1024

    problem(attack(shared, {}, content=endless()), 413, "too-large")
    problem(attack(shared, {"Content-Length": "-1"}), 400, "bad-request")
    problem(attack(shared, {"Content-Length": "9" * 30}), 400, "bad-request")


def test_a_body_that_never_ends(shared: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.02)
    status: list[int] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        status.append(message.get("status", 0))

    scope = {
        "type": "http",
        "method": "POST",
        "path": APPROVE,
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {shared.token}".encode()),
        ],
    }
    asyncio.run(shared.app(scope, never, send))
    assert status[0] == 408


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc",
        "demo%00",
        "demo%0a",
        "DEMO",
        "-demo",
        "d" * 64,
        "demo'--",
        "%F0%9F%92%A5",
        "demo ",
        "*",
    ],
)
def test_hostile_names(shared: Rest, name: str) -> None:
    for method, rest_of_path in (("GET", ""), ("GET", "/promotion"), ("GET", "/report"), ("POST", "/abort")):
        path = f"{API}/tunings/{name}{rest_of_path}"
        answer = shared.call(method, path, json={"reason": "x"} if method == "POST" else None)
        assert answer.status_code in (404, 405, 422), (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
    assert shared.store.decisions("demo") == []


def test_every_answer_forbids_scripts_frames_and_caches(shared: Rest) -> None:
    answers = [
        shared.get("/tunings"),
        shared.get("/tunings/demo/report"),
        shared.get("/nothing"),
        shared.call("GET", "/docs"),
        shared.call("GET", f"{API}/tunings", headers={"Authorization": ""}),
        shared.call("GET", f"{API}/tunings", headers={"Host": "evil.example"}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_documentation_holds_no_script(shared: Rest) -> None:
    page = shared.call("GET", "/docs").text
    assert "<script" not in page
    assert "http://" not in page.replace("http://…", "")
    for path in shared.app.openapi()["paths"]:
        assert path in page


def test_what_is_turned_away_is_logged_on_one_line(shared: Rest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shared.call("POST", f"{API}/tunings/x%0aforged/approve", headers={"Authorization": ""}, json={})
    (record,) = [r for r in caplog.records if r.name == "tunewright.api.guard"]
    assert "\n" not in record.getMessage()
    assert "401" in record.getMessage()
    assert shared.token not in caplog.text
