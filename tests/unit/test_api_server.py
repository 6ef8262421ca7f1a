"""The server in its thread: bound to this machine, deadlines on slow callers, and an end."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from restapi import Rest

from tunewright.api import server
from tunewright.api.server import ApiServer

LIMIT = 20.0


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path)


@pytest.fixture
def api(rest: Rest) -> Iterator[ApiServer]:
    with ApiServer(rest.app) as running:
        yield running


def talk(api: ApiServer, *parts: bytes) -> bytes:
    """Send raw bytes, and read until the server hangs up."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def test_serves_reads_and_decisions(rest: Rest, api: ApiServer) -> None:
    headers = {"Authorization": f"Bearer {rest.token}"}
    with httpx.Client(base_url=api.url, headers=headers, timeout=LIMIT) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        bind = client.get("/api/v1alpha1/tunings/demo/promotion").json()["bind"]
        answer = client.post("/api/v1alpha1/tunings/demo/approve", json=bind | {"reason": "fine"})
        assert answer.status_code == 202
        assert "server" not in answer.headers
    assert [d.action for d in rest.store.decisions("demo")] == ["approve"]


def test_binds_to_this_machine_alone(api: ApiServer) -> None:
    assert api.port > 0
    assert api.url == f"http://127.0.0.1:{api.port}"
    assert api._socket.getsockname()[0] == "127.0.0.1"


def test_forwarded_headers_change_nothing(rest: Rest, api: ApiServer) -> None:
    headers = {"Host": "evil.example", "X-Forwarded-Host": "127.0.0.1", "Authorization": f"Bearer {rest.token}"}
    assert httpx.get(f"{api.url}/api/v1alpha1/tunings", headers=headers, timeout=LIMIT).status_code == 421


@pytest.mark.parametrize("start", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_caller_that_never_finishes_its_head_is_hung_up_on(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT", 0.05)
    assert talk(api, start) == b""


def test_a_second_head_has_its_deadline_too(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(65536)
        monkeypatch.setattr(server, "HEAD_TIMEOUT", 0.05)
        connection.sendall(b"GET /healthz HT")
        while connection.recv(65536):
            pass


def test_a_slow_answer_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for the head alone: it must not hit a request that is being worked on."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT", 0.05)
    asked, go_on = threading.Event(), threading.Event()

    def ready() -> str | None:
        asked.set()
        go_on.wait(LIMIT)
        return None

    with ApiServer(Rest(tmp_path, ready=ready).app) as api:
        answers: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: answers.append(httpx.get(f"{api.url}/readyz", timeout=LIMIT)))
        caller.start()
        assert asked.wait(LIMIT)
        assert talk(api, b"GET") == b"", "a deadline has passed meanwhile"
        go_on.set()
        caller.join(LIMIT)
        assert answers[0].status_code == 200


def test_too_large_a_head_is_refused(api: ApiServer) -> None:
    answer = talk(api, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * server.MAX_HEAD)
    assert answer.split(b" ")[1] == b"400"


def test_two_hosts_in_one_request(rest: Rest, api: ApiServer) -> None:
    token = rest.token.encode()
    head = b"GET /api/v1alpha1/tunings HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nConnection: close\r\n"
    answer = talk(api, head + b"Authorization: Bearer " + token + b"\r\n\r\n")
    assert answer.split(b" ")[1] in (b"400", b"421")


def test_a_body_of_unclear_length_is_refused(rest: Rest, api: ApiServer) -> None:
    """Content-Length beside Transfer-Encoding is how requests are smuggled past a proxy."""
    head = (
        f"POST /api/v1alpha1/tunings/demo/abort HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {rest.token}\r\n"
        "Content-Type: application/json\r\nContent-Length: 3\r\nContent-Length: 4\r\nConnection: close\r\n\r\n{}"
    )
    assert talk(api, head.encode()).split(b" ")[1] == b"400"
    assert rest.store.decisions("demo") == []


def test_an_address_that_is_taken_is_told(rest: Rest, api: ApiServer) -> None:
    with pytest.raises(OSError, match="in use"):
        ApiServer(rest.app, port=api.port)


def test_closing_gives_the_port_back(rest: Rest) -> None:
    api = ApiServer(rest.app)
    assert api.alive
    api.close()
    api.close()
    assert not api.alive
    with ApiServer(rest.app, port=api.port) as again:
        assert httpx.get(f"{again.url}/healthz", timeout=LIMIT).status_code == 200


def test_a_server_that_can_not_start_says_so(monkeypatch: pytest.MonkeyPatch, rest: Rest) -> None:
    def fails(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr("uvicorn.Server.run", fails)
    with pytest.raises(OSError, match="did not start"):
        ApiServer(rest.app)
