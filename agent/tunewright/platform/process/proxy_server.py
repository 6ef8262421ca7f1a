"""The proxy's connection to a server: one exchange at a time, then kept alive for the next."""

import asyncio

import httptools

from tunewright.platform.process.proxy_exchange import Client, Exchange, Headers, Proxy
from tunewright.platform.process.routing import Backend


class ServerConnection(asyncio.Protocol):
    """A connection to a server, with one exchange on it, or kept alive for the next."""

    def __init__(self, proxy: Proxy, backend: Backend, exchange: Exchange) -> None:
        self._proxy = proxy
        self._backend = backend
        self._exchange: Exchange | None = exchange
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._headers: Headers = []
        self._out: list[bytes] = []
        self._until_close = False  # the body ends where the connection does
        self._done = False
        self._reusable = False
        self._reused = False
        self.heard = self._loop.time()

    # --- what asyncio tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        exchange = self._exchange
        if exchange is None or exchange.client is None:
            self.drop()
        else:
            self.send(exchange)

    def send(self, exchange: Exchange) -> None:
        """Send this request."""
        self._reused = self._exchange is None
        self._exchange, exchange.server = exchange, self
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._reason = [], b""
        self._done = self._reusable = self._until_close = False
        self.heard = self._loop.time()
        self._transport.write(exchange.encode())

    def usable(self) -> bool:
        """Whether it may still be sent a request; closed if it was idle for too long."""
        if self._transport.is_closing():
            return False
        if self._loop.time() - self.heard < self._proxy.limits.backend_idle:
            return True
        self._transport.close()
        return False

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        exchange = self._exchange
        if exchange is None or exchange.client is None:
            self._transport.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._flush(exchange.client)
            self._transport.abort()  # connection_lost tells the client
            return
        self._flush(exchange.client)
        if self._done:
            self._finish(exchange, exchange.client)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._backend.idle:
            self._backend.idle.remove(self)
        exchange = self._exchange
        if exchange is None or exchange.client is None:
            return
        client = exchange.client
        self._exchange = None
        if exchange.answered and self._until_close and exc is None:
            client.write(client.end_frame())
            exchange.release()
            client.finished(exchange)
        elif exchange.answered:
            self._backend.connection_errors += 1
            exchange.release()
            exchange.server = None
            client.broken()
        else:
            client.unanswered(exchange, stale=self._reused)

    # --- what the parser tells ---

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        exchange = self._exchange
        if status < 200 or exchange is None or exchange.client is None:
            return
        if status >= 500:
            self._backend.server_errors += 1
        names = {name.lower() for name, _ in self._headers}
        self._until_close = not names & {b"content-length", b"transfer-encoding"} and status not in (204, 304)
        self._out.append(exchange.client.begin(exchange, status, self._reason, self._headers))
        if exchange.method == b"HEAD":
            self._done = True

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.client is not None:
            self._out.append(exchange.client.frame(body))

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and its like: the answer is still to come
            self._headers, self._reason = [], b""
        elif not self._done:
            self._done = True
            self._reusable = bool(self._parser.should_keep_alive())
            exchange = self._exchange
            if exchange is not None and exchange.client is not None:
                self._out.append(exchange.client.end_frame())

    def _flush(self, client: Client) -> None:
        if self._out:
            client.write(b"".join(self._out))
            self._out.clear()

    def _finish(self, exchange: Exchange, client: Client) -> None:
        self._exchange, exchange.server = None, None
        exchange.release()
        # After HEAD the parser waits for a body that does not come, and the connection is not used again.
        if self._reusable and self._backend.weight > 0 and not self._transport.is_closing():
            self._transport.resume_reading()
            self._backend.idle.append(self)
        else:
            self._transport.close()
        client.finished(exchange)

    # --- what the client's side asks ---

    def pause(self) -> None:
        """The client reads slower than the server writes."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """It caught up."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def drop(self) -> None:
        """Break off; nobody waits for this answer."""
        self._exchange = None
        self._transport.abort()

    def close_if_idle(self, now: float) -> None:
        """Close a connection kept alive for too long."""
        if self._exchange is None and now - self.heard > self._proxy.limits.backend_idle:
            self._transport.close()
