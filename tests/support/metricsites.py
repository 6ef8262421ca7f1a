"""Small HTTP servers for tests of the metrics sources, closed by `with`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, bytes]


class Site(ThreadingHTTPServer):
    """Answers every GET with what `answer(path with query)` returns; keeps the paths and headers it was asked with."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str], Answer], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        status, body = self.server.answer(self.path)
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client's time-out was the point of the test

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def site(answer: Callable[[str], Answer], port: int = 0) -> Iterator[Site]:
    """A running site on a free port, or on a given one."""
    server = Site(answer, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
