"""Serves the API from a thread of this process, so that the loop can go on beside it."""

import asyncio
import socket
import time
from threading import Thread
from types import TracebackType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10.0
"""Seconds in which the head of a request must have arrived, so that a slow or silent caller holds no connection."""

KEEP_ALIVE = 5
"""Seconds that a connection without a request is kept."""

MAX_CONNECTIONS = 100
"""More at once are answered with 503."""

MAX_HEAD = 16 * 1024
"""Bytes of a request's head."""

START_TIMEOUT = 10.0
STOP_TIMEOUT = 5
"""Seconds for requests under way to end, once it is told to stop."""


class ApiServer:
    """Serves `app` from construction until `close`; port 0 asks for any free one, which `port` then tells.

    It binds to this machine alone unless another `host` is named. Raises OSError when the address can't be had.
    """

    def __init__(self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._host = f"[{host}]" if ":" in host else host
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=STOP_TIMEOUT,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="api", daemon=True)
        self._thread.start()
        self._await_start()

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise OSError(f"the API did not start at {self.url}: see the log")
            time.sleep(0.01)

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://{self._host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Let requests under way end, then stop, and give the port back. May be called again."""
        self._server.should_exit = True
        self._thread.join(timeout=STOP_TIMEOUT + 1)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(timeout=STOP_TIMEOUT)
        self._socket.close()

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Protocol(H11Protocol):
    """Uvicorn's, with a deadline for the head of each request, which it has not."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Awaiting a head: the clock runs from the first moment on, and more bytes do not turn it back."""
        awaiting = self.cycle is None or self.cycle.response_complete
        if not awaiting:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
