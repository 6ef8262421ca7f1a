"""A small HTTP server for `/metrics` and `/healthz`, for the command line that has no REST API running."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import ClassVar

from prometheus_client import CONTENT_TYPE_LATEST

from tunewright.telemetry.metrics import Metrics

REQUEST_TIMEOUT = 10.0
"""Seconds after which a connection that says nothing is closed, so that it can't hold a thread for ever."""


class MetricsServer:
    """Serves from construction until `close`; `port` is the one it got where 0 was asked for.

    `unhealthy` answers why this process is not well, or None; `/healthz` answers 503 with that text. Raises OSError
    when the address can't be had.
    """

    def __init__(
        self,
        metrics: Metrics,
        host: str = "127.0.0.1",
        port: int = 0,
        unhealthy: Callable[[], str | None] = lambda: None,
    ) -> None:
        handler = type("Handler", (_Handler,), {"metrics": metrics, "unhealthy": staticmethod(unhealthy)})
        self._server = _Server((host, port), handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where Prometheus is to scrape."""
        return f"http://{self._server.server_address[0]!s}:{self.port}/metrics"

    def close(self) -> None:
        """Stop, and give the port back. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=REQUEST_TIMEOUT)
        self._server.server_close()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a scraper that keeps its connection open must not hold up the end of the process


class _Handler(BaseHTTPRequestHandler):
    metrics: ClassVar[Metrics]
    unhealthy: ClassVar[Callable[[], str | None]]
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:
        """Answer one request."""
        match self.path.split("?", 1)[0]:
            case "/metrics":
                self._answer(200, self.metrics.exposition(), CONTENT_TYPE_LATEST)
            case "/healthz":
                reason = type(self).unhealthy()
                self._answer(503 if reason else 200, f"{reason or 'ok'}\n".encode())
            case _:
                self._answer(404, b"There are /metrics and /healthz here.\n")

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: a line per scrape would drown the terminal's own."""
