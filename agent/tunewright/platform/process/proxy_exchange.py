"""One request on its way through the proxy, and the HTTP/1.1 heads it is given on either side."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tunewright.platform.process.routing import Backend, Table

Headers = list[tuple[bytes, bytes]]
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
)


@dataclass(frozen=True)
class Limits:
    """Time-outs in seconds, sizes in bytes."""

    connect: float = 2.0
    receive: float = 60.0  # a request that stops coming
    keep_alive: float = 75.0  # a client's connection without a request
    stalled: float = 120.0  # a client that does not read its answer
    silence: float = 1800.0  # a server that sends nothing: a long completion without streaming does so
    backend_idle: float = 3.0  # below the 5 s after which uvicorn closes a connection under our hands
    head: int = 64 * 1024
    body: int = 256 * 1024 * 1024
    pipelined: int = 8


class Proxy(Protocol):
    """What connections share."""

    table: Table
    limits: Limits
    closing: bool
    unrouted: int

    def health(self) -> bytes:
        """The proxy's own health, as JSON."""
        ...

    def opened(self, client: "Checked") -> None:
        """A client connected."""
        ...

    def closed(self, client: "Checked") -> None:
        """It is gone."""
        ...


class Checked(Protocol):
    """A client's connection, as the proxy's clock sees it."""

    def check(self, now: float) -> None:
        """Called every second: what takes too long ends."""
        ...

    def close_if_idle(self) -> None:
        """The proxy ends: close, unless a request is being answered."""
        ...


class Client(Protocol):
    """A client's connection, as a server's connection sees it."""

    def begin(self, exchange: "Exchange", status: int, reason: bytes, headers: Headers) -> bytes:
        """The head of the server's answer, for this client."""
        ...

    def frame(self, data: bytes) -> bytes:
        """A piece of the body, as this client is sent it."""
        ...

    def end_frame(self) -> bytes:
        """What ends the body."""
        ...

    def write(self, data: bytes) -> None:
        """Send it."""
        ...

    def finished(self, exchange: "Exchange") -> None:
        """The answer is whole."""
        ...

    def broken(self) -> None:
        """The server broke off in mid-answer."""
        ...

    def unanswered(self, exchange: "Exchange", stale: bool) -> None:
        """The server broke off before it answered; `stale`: on a connection that had been kept alive."""
        ...


class Server(Protocol):
    """A server's connection, as a client's connection sees it."""

    heard: float

    def pause(self) -> None:
        """The client reads slower than the server writes."""
        ...

    def resume(self) -> None:
        """It caught up."""
        ...

    def drop(self) -> None:
        """Break off; nobody waits for this answer."""
        ...


@dataclass(eq=False)
class Exchange:
    """One request, and where it is."""

    method: bytes = b""
    target: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    head_size: int = 0
    head_done: bool = False
    http11: bool = True
    keep_alive: bool = True
    client: Client | None = None  # None once it went away
    backend: Backend | None = None
    server: Server | None = None
    connecting: "asyncio.Task[None] | None" = None
    answered: bool = False  # the first byte has gone to the client: it can't be sent again
    renewed: bool = False  # sent again on a new connection to the same server
    broke: set[Backend] = field(default_factory=set)
    """Servers that broke off before they answered it."""
    tried: set[Backend] = field(default_factory=set)

    def encode(self) -> bytes:
        """The request for the server."""
        kept = [header for header in end_to_end(self.headers) if header[0].lower() != b"content-length"]
        if not any(name.lower() == b"host" for name, _ in kept) and self.backend is not None:
            kept.append((b"Host", f"{self.backend.host}:{self.backend.port}".encode()))
        if self.body or self.method in (b"POST", b"PUT", b"PATCH"):
            kept.append((b"Content-Length", str(len(self.body)).encode()))
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (self.method, self.target, lines(kept), bytes(self.body))

    def release(self) -> None:
        """It is no longer in flight at its server."""
        if self.backend is not None:
            self.backend.in_flight -= 1
            self.backend = None

    def abandon(self) -> None:
        """The client is gone: break off, so that the server stops generating for nobody."""
        self.client = None
        if self.connecting is not None:
            self.connecting.cancel()
        if self.backend is not None:
            self.backend.aborted += 1
        if self.server is not None:
            self.server.drop()
        self.release()


def end_to_end(headers: Headers) -> Headers:
    """The headers that are for the other end, not for this connection."""
    named = {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)
