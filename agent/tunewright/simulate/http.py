"""A small HTTP/1.1 server: asyncio protocol and httptools, one write for each chunk, no framework.

The bytes are those of vLLM's uvicorn: header order, chunk framing, and the last chunk with [DONE].
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import httptools

DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
MAX_BODY = 64 * 2**20


@dataclass
class HttpRequest:
    method: str
    target: str
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    started: float = 0.0

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


def _date() -> str:
    return formatdate(time.time(), usegmt=True)


def response(status: int, body: bytes, content_type: str = "application/json", close: bool = False) -> bytes:
    """A whole response with a body of known length."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {_date()}\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n"
    )
    if close:
        head += "connection: close\r\n"
    return head.encode() + b"\r\n" + body


def stream_head() -> bytes:
    """The head of a streamed response; chunks follow."""
    return (
        f"HTTP/1.1 200 OK\r\ndate: {_date()}\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "vary: Origin\r\ntransfer-encoding: chunked\r\n\r\n"
    ).encode()


def event(data: str) -> bytes:
    """One server-sent event in its own chunk."""
    payload = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(payload), payload)


Handler = Callable[["Connection", HttpRequest], None]


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other; the handler must call `reply` or `end_stream`."""

    def __init__(self, handler: Handler, clock: Callable[[], float], connections: set[Connection]) -> None:
        self._handler, self._clock, self._connections = handler, clock, connections
        self._parser: Any = httptools.HttpRequestParser(self)
        self._request: HttpRequest | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._pending: deque[HttpRequest] = deque()
        self.current: HttpRequest | None = None
        self.transport: asyncio.Transport | None = None
        self.peer = "-"
        self.on_lost: Callable[[], None] | None = None  # called when the client goes away in mid-answer
        self.sent = 0

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "-"

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._connections.discard(self)
        self.transport = None
        self._pending.clear()
        if self.on_lost is not None:
            lost, self.on_lost = self.on_lost, None
            lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(501)
        except httptools.HttpParserError:
            self._refuse(400)

    def _refuse(self, status: int) -> None:
        if self.transport is not None:
            self.transport.write(response(status, b"Invalid HTTP request received.", "text/plain", close=True))
            self.transport.close()

    # -- httptools -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._request, self._parts, self._size = HttpRequest("", "", started=self._clock()), [], 0

    def on_url(self, url: bytes) -> None:
        if self._request is not None:
            self._request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is not None:
            self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        headers = self._request.headers if self._request is not None else {}
        if headers.get(b"expect", b"").lower() == b"100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            self._refuse(413)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return
        request.method = self._parser.get_method().decode()
        request.body = b"".join(self._parts)
        self._request = None
        self._pending.append(request)
        if self.current is None:
            self._next()

    # -- answers ---------------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._pending and self.current is None and self.transport is not None:
            self.current, self.sent = self._pending.popleft(), 0
            self._handler(self, self.current)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.sent += len(data)
            self.transport.write(data)

    def reply(self, data: bytes) -> None:
        """Sends a whole response and goes on with the next request of this connection."""
        self.write(data)
        self.complete()

    def complete(self) -> None:
        """The current answer is complete."""
        self.on_lost = None
        request, self.current = self.current, None
        if request is not None and request.headers.get(b"connection", b"").lower() == b"close":
            self.close()
        self._next()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
