"""`python -m tunewright.platform.process.proxy`: the reverse proxy before the production servers.

A process of its own, so that clients are served while the agent is restarted. It reads its routes from one file and
tells what it sees in another; it has no other interface, but answers `/-/tunewright/health` itself.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from tunewright.platform.process.proxy_client import ClientConnection
from tunewright.platform.process.proxy_exchange import Checked, Limits
from tunewright.platform.process.routing import RoutesFile, StatusFile, Table

ROUTES_INTERVAL = 0.1  # seconds
STATUS_INTERVAL = 0.2


class ReverseProxy:
    """All that the connections share."""

    def __init__(self, routes: Path, status: Path, listen: str, limits: Limits) -> None:
        self.table = Table()
        self.limits = limits
        self.closing = False
        self.unrouted = 0
        self._clients: set[Checked] = set()
        self._routes = RoutesFile(routes)
        self._status = StatusFile(status, {"pid": os.getpid(), "listen": listen})
        self._complaint = ""

    def health(self) -> bytes:
        """Whether it serves, and the routes in force."""
        routed = sum(backend.weight > 0 for backend in self.table.backends)
        return json.dumps({"status": "ok", "generation": self.table.generation, "backends": routed}).encode()

    def opened(self, client: Checked) -> None:
        """A client connected."""
        self._clients.add(client)

    def closed(self, client: Checked) -> None:
        """It is gone."""
        self._clients.discard(client)

    async def serve(self, host: str, port: int, grace: float) -> None:
        """Serve until SIGTERM, then finish what is in flight, for at most `grace` seconds."""
        loop = asyncio.get_running_loop()
        self._read_routes()
        server = await loop.create_server(lambda: ClientConnection(self), host, port, backlog=1024)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        ticker = loop.create_task(self._tick())
        with contextlib.suppress(OSError):
            print(f"listening on {host}:{port}", flush=True)
        await stop.wait()
        self.closing = True
        server.close()
        for client in list(self._clients):
            client.close_if_idle()
        deadline = loop.time() + grace
        while self._clients and loop.time() < deadline:
            await asyncio.sleep(0.05)
        ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticker
        self._write_status()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        checked = written = loop.time()
        while True:
            now = loop.time()
            self._read_routes()
            if now - written >= STATUS_INTERVAL:
                self._write_status()
                written = now
            if now - checked >= 1.0:
                for client in list(self._clients):
                    client.check(now)
                for backend in self.table.backends:
                    for connection in list(backend.idle):
                        connection.close_if_idle(now)
                checked = now
            await asyncio.sleep(ROUTES_INTERVAL)

    def _read_routes(self) -> None:
        routes = self._routes.changed()
        if routes is not None:
            for backend in self.table.update(routes):
                for connection in list(backend.idle):
                    connection.close_if_idle(float("inf"))
        if self._routes.error:
            self._complain(self._routes.error)

    def _write_status(self) -> None:
        try:
            self._status.write(self.table, self.unrouted, self._routes.error)
        except OSError as error:  # a full disk must not end the traffic
            self._complain(f"can't write the status file: {error}")
        self.table.forget_drained()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            with contextlib.suppress(OSError):  # its log is on the disk that may be full
                print(f"{time.strftime('%FT%T%z')} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy; 1 when the address can't be listened on."""
    parser = argparse.ArgumentParser(prog="tunewright-proxy", description=__doc__)
    parser.add_argument("--listen", required=True, help="HOST:PORT that clients send their requests to")
    parser.add_argument("--routes", required=True, type=Path, help="file with the routes; replaced by the agent")
    parser.add_argument("--status", required=True, type=Path, help="file that the counts are written to")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish what is in flight after SIGTERM")
    parser.add_argument("--silence", type=float, default=Limits.silence, help="seconds a server may send nothing")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # two descriptors per request
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    proxy = ReverseProxy(options.routes, options.status, options.listen, Limits(silence=options.silence))
    try:
        uvloop.run(proxy.serve(host, int(port), options.grace))
    except OSError as error:
        print(f"can't listen on {options.listen}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
