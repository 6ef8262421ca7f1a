"""The proxy's connection to a client. A request is read whole before a server is chosen, so that it can be sent again;
the answer is passed on as it comes, and nothing is held back.
"""

import asyncio
import json
from collections import deque

import httptools

from tunewright.platform.process.proxy_exchange import Exchange, Headers, Proxy, end_to_end, lines
from tunewright.platform.process.proxy_server import ServerConnection
from tunewright.platform.process.routing import DOWN_SECONDS, Backend

_REASONS = {
    400: "Bad Request", 405: "Method Not Allowed", 408: "Request Timeout", 413: "Content Too Large",
    431: "Request Header Fields Too Large", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


class ClientConnection(asyncio.Protocol):
    """A client. Requests that it sends ahead are answered in order."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._chunked = False
        self._paused_reading = False
        self._stalled_since: float | None = None
        self._heard = self._loop.time()

    # --- what asyncio tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._proxy.opened(self)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Nothing is upgraded: an offer (as of HTTP/2) may be ignored, and what follows is HTTP/1.1 again.
            if self._transport.is_closing():
                return
            self._parser = httptools.HttpRequestParser(self)
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP/1.1: {error}")

    def connection_lost(self, _: Exception | None) -> None:
        self._proxy.closed(self)
        self._waiting.clear()
        if self._current is not None:
            self._current.abandon()
            self._current = None

    def pause_writing(self) -> None:
        self._stalled_since = self._loop.time()
        if self._current is not None and self._current.server is not None:
            self._current.server.pause()

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._current is not None and self._current.server is not None:
            self._current.server.resume()

    # --- what the parser tells ---

    def on_message_begin(self) -> None:
        self._incoming = Exchange(client=self)

    def on_url(self, url: bytes) -> None:
        self._grow(url).target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._grow(name, value)
        if not exchange.head_done:  # what follows the body must not pass for a header
            exchange.headers.append((name, value))

    def on_headers_complete(self) -> None:
        exchange = self._incoming
        if exchange is None:
            return
        exchange.head_done = True
        exchange.method = self._parser.get_method()
        exchange.http11 = self._parser.get_http_version() == "1.1"
        if exchange.method == b"CONNECT":
            self._refuse(405, "CONNECT is not served")
        elif any(name.lower() == b"expect" for name, _ in exchange.headers) and self._current is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._incoming is not None:
            self._incoming.body += body
            if len(self._incoming.body) > self._proxy.limits.body:
                self._refuse(413, f"the body is longer than {self._proxy.limits.body} bytes")

    def on_message_complete(self) -> None:
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            return
        exchange.keep_alive = bool(self._parser.should_keep_alive())
        self._waiting.append(exchange)
        if len(self._waiting) > self._proxy.limits.pipelined and not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()
        self._next()

    def _grow(self, *parts: bytes) -> Exchange:
        exchange = self._incoming or Exchange()  # one that was refused is read into nothing
        exchange.head_size += sum(map(len, parts))
        if exchange.head_size > self._proxy.limits.head and exchange.client is not None:
            exchange.client = None
            self._refuse(431, f"the head is longer than {self._proxy.limits.head} bytes")
        return exchange

    # --- requests ---

    def _next(self) -> None:
        while self._current is None and self._waiting and not self._transport.is_closing():
            self._current = self._waiting.popleft()
            if self._paused_reading and len(self._waiting) <= self._proxy.limits.pipelined:
                self._paused_reading = False
                self._transport.resume_reading()
            if self._current.target == b"/-/tunewright/health":
                self._reply(200, self._proxy.health())
            else:
                self._dispatch(self._current)

    def _dispatch(self, exchange: Exchange) -> None:
        """Send it to the server whose turn it is, or answer that there is none."""
        backend = self._proxy.table.choose(exchange.tried, self._loop.time())
        if backend is None:
            if exchange.tried:
                self._fail(502, "no server could be reached, or each broke off before it answered")
            else:
                self._proxy.unrouted += 1
                self._fail(503, "no server is ready; try again")
            return
        self._send_to(exchange, backend)

    def _send_to(self, exchange: Exchange, backend: Backend) -> None:
        exchange.backend = backend
        backend.in_flight += 1
        backend.requests += 1
        while backend.idle:
            server: ServerConnection = backend.idle.pop()
            if server.usable():
                server.send(exchange)
                return
        exchange.connecting = self._loop.create_task(self._connect(exchange, backend))

    async def _connect(self, exchange: Exchange, backend: Backend) -> None:
        try:
            await asyncio.wait_for(
                self._loop.create_connection(
                    lambda: ServerConnection(self._proxy, backend, exchange), backend.host, backend.port
                ),
                self._proxy.limits.connect,
            )
        except (OSError, TimeoutError):
            if exchange.server is None:  # else it was connected after all, and its own end is told by itself
                self._try_another(exchange)
        finally:
            exchange.connecting = None

    def unanswered(self, exchange: Exchange, stale: bool) -> None:
        """The server broke off before it answered; `stale`: on a connection that had been kept alive."""
        exchange.server = None
        backend = exchange.backend
        if backend is None:
            return
        exchange.broke.add(backend)
        if len(exchange.broke) > 1:  # a request that crashes a server must not take down one after the other
            backend.connection_errors += 1
            exchange.release()
            self._fail(502, "two servers broke off before they answered this request")
            return
        if not stale or exchange.renewed:  # also one that is dying: it took the new connection and broke off again
            self._try_another(exchange)
            return
        exchange.renewed = True
        for connection in list(backend.idle):  # they are as old
            connection.close_if_idle(float("inf"))
        backend.idle.clear()
        exchange.release()
        self._send_to(exchange, backend)

    def _try_another(self, exchange: Exchange) -> None:
        backend = exchange.backend
        exchange.release()
        if backend is None or exchange.client is not self:
            return
        backend.connection_errors += 1
        backend.down_until = self._loop.time() + DOWN_SECONDS
        exchange.tried.add(backend)
        self._dispatch(exchange)

    # --- answers ---

    def begin(self, exchange: Exchange, status: int, reason: bytes, headers: Headers) -> bytes:
        """The head of the server's answer, for this client."""
        exchange.answered = True
        kept = end_to_end(headers)
        bodiless = status in (204, 304) or exchange.method == b"HEAD"
        self._chunked = False
        if not bodiless and not any(name.lower() == b"content-length" for name, _ in kept):
            if exchange.http11:
                self._chunked = True
                kept.append((b"Transfer-Encoding", b"chunked"))
            else:
                exchange.keep_alive = False
        exchange.keep_alive = exchange.keep_alive and not self._proxy.closing
        if not exchange.keep_alive:
            kept.append((b"Connection", b"close"))
        elif not exchange.http11:
            kept.append((b"Connection", b"keep-alive"))
        return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, lines(kept))

    def frame(self, data: bytes) -> bytes:
        """A piece of the body, as this client is sent it."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def end_frame(self) -> bytes:
        """What ends the body."""
        return b"0\r\n\r\n" if self._chunked else b""

    def write(self, data: bytes) -> None:
        """Send it."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def finished(self, exchange: Exchange) -> None:
        """The answer is whole."""
        self._heard = self._loop.time()
        self._current = None
        if exchange.keep_alive and not self._proxy.closing:
            self._next()
        else:
            self._transport.close()

    def broken(self) -> None:
        """The server broke off in mid-answer: so does this connection, or the client would take it for whole."""
        self._transport.abort()

    def _fail(self, status: int, message: str) -> None:
        """Answer the current request ourselves."""
        kind = "service_unavailable" if status >= 500 else "invalid_request_error"
        error = {"message": f"Tunewright proxy: {message}", "type": kind, "code": status}
        self._reply(status, json.dumps({"error": error}).encode())

    def _reply(self, status: int, body: bytes) -> None:
        exchange = self._current or Exchange(keep_alive=False)
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode())]
        if status == 503:
            headers.append((b"Retry-After", b"1"))
        head = self.begin(exchange, status, _REASONS.get(status, "OK").encode(), headers)
        self.write(head if exchange.method == b"HEAD" else head + body)
        self.finished(exchange)

    def _refuse(self, status: int, message: str) -> None:
        """This request can't be read on: answer and close, unless an answer is under way."""
        self._incoming = None
        self._waiting.clear()
        if self._current is None and not self._transport.is_closing():
            self._fail(status, message)
        else:
            self._transport.close()

    # --- deadlines ---

    def check(self, now: float) -> None:
        """Called every second: what takes too long ends."""
        limits = self._proxy.limits
        if self._stalled_since is not None and now - self._stalled_since > limits.stalled:
            self._transport.abort()
        elif self._current is not None:
            server = self._current.server
            if server is not None and self._stalled_since is None and now - server.heard > limits.silence:
                self._silent(self._current)
        elif self._incoming is not None and now - self._heard > limits.receive:
            self._refuse(408, "the request stopped coming")
        elif now - self._heard > limits.keep_alive:
            self._transport.close()

    def _silent(self, exchange: Exchange) -> None:
        if exchange.backend is not None:
            exchange.backend.connection_errors += 1
        if exchange.server is not None:
            exchange.server.drop()
        exchange.release()
        if exchange.answered:
            self.broken()
        else:
            self._fail(504, "the server sent nothing for too long")

    def close_if_idle(self) -> None:
        """The proxy ends: connections without a request close now, the others after their answer."""
        if self._current is None:
            self._transport.close()
