"""The proxy on the wire: every server here is a script, so that each can break off exactly where it hurts."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from processes import first_port, nothing_left, wait_for

from tunewright.platform.process import children, http
from tunewright.platform.process.proxy import ReverseProxy
from tunewright.platform.process.proxy_client import ClientConnection
from tunewright.platform.process.proxy_exchange import Limits
from tunewright.platform.process.routing import Route, Routes

Script = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


class World:
    """A proxy and scripted servers in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.proxy = ReverseProxy(Path("/nonexistent/routes"), Path("/nonexistent/status"), "", limits)
        self.heads: dict[str, list[bytes]] = {}
        self.connections: dict[str, int] = {}
        self.hung_up: dict[str, int] = {}
        self._routes: list[Route] = []
        self._servers: list[asyncio.Server] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._serving: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ClientConnection(self.proxy), "127.0.0.1", 0)
        self._servers.append(server)
        self.port = server.sockets[0].getsockname()[1]

    async def server(self, name: str, script: Script, *, weight: float = 1.0, canary: bool = False) -> None:
        self.heads[name], self.connections[name], self.hung_up[name] = [], 0, 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections[name] += 1
            self._serving[writer] = asyncio.current_task()
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    self.heads[name].append(head)
                    await script(head, reader, writer)
            self.hung_up[name] += 1
            writer.close()

        made = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(made)
        self.route(name, made.sockets[0].getsockname()[1], weight, canary)

    def route(self, name: str, port: int, weight: float = 1.0, canary: bool = False) -> None:
        self._routes = [r for r in self._routes if r.name != name]
        self._routes.append(Route(name, f"http://127.0.0.1:{port}", weight, canary))
        self.proxy.table.update(Routes(len(self._routes), tuple(self._routes)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, request: bytes = GET) -> tuple[int, bytes]:
        """Status and body of one request on a connection of its own."""
        reader, writer = await self.connect()
        writer.write(request)
        return await answer(reader)

    def count(self, name: str) -> dict[str, Any]:
        return next(b.counts() for b in self.proxy.table.backends if b.name == name)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for server in self._servers:
            server.close()
        for writer in self._serving:
            writer.transport.abort()
        await asyncio.gather(*(task for task in self._serving.values() if task is not None))
        while self.proxy._clients:
            await asyncio.sleep(0.005)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"content-length: " in head:
        length = int(head.split(b"content-length: ")[1].split()[0])
        return status, await reader.readexactly(length)
    if b"transfer-encoding: chunked" not in head:
        return status, await reader.read()
    body = b""
    while size := int(await reader.readuntil(b"\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return status, body


async def ok(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


def run(test: Callable[[World], Coroutine[Any, Any, None]], limits: Limits | None = None) -> None:
    async def whole() -> None:
        world = World(limits or Limits())
        await world.start()
        try:
            await asyncio.wait_for(test(world), 60)
        finally:
            await world.close()

    asyncio.run(whole())


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.005)


def test_a_request_and_its_answer_pass_through() -> None:
    async def test(world: World) -> None:
        async def echo(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            body = await reader.readexactly(5)
            writer.write(b"HTTP/1.1 201 Made\r\nX-A: 1\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n" + body)

        await world.server("a", echo)
        reader, writer = await world.connect()
        writer.write(
            b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\nTE: trailers\r\nConnection: X-Hop\r\n"
            b"X-Hop: 1\r\nContent-Length: 5\r\n\r\nhello"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head == b"HTTP/1.1 201 Made\r\nX-A: 1\r\nContent-Length: 5\r\n\r\n"
        assert await reader.readexactly(5) == b"hello"
        sent = world.heads["a"][0]
        assert sent.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\n")
        assert b"X-Hop" not in sent
        assert b"TE:" not in sent

    run(test)


def test_events_are_passed_on_as_they_come() -> None:
    async def test(world: World) -> None:
        go_on = asyncio.Event()

        async def stream(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nfirst\n\r\n")
            await go_on.wait()
            writer.write(b"7\r\nsecond\n\r\n0\r\n\r\n")

        await world.server("a", stream)
        reader, writer = await world.connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"first\n\r\n") == b"6\r\nfirst\n\r\n"
        assert world.count("a")["inFlight"] == 1
        go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"7\r\nsecond\n\r\n0\r\n\r\n"
        await until(lambda: world.count("a")["inFlight"] == 0)

    run(test)


def test_connections_are_kept_on_both_sides() -> None:
    async def test(world: World) -> None:
        await world.server("a", ok)
        reader, writer = await world.connect()
        for _ in range(3):
            writer.write(GET)
            assert await answer(reader) == (200, b"ok")
        writer.write(GET * 3)  # sent ahead
        for _ in range(3):
            assert await answer(reader) == (200, b"ok")
        assert world.connections["a"] == 1

    run(test)


def test_a_server_that_refuses_costs_no_request() -> None:
    async def test(world: World) -> None:
        world.route("dead", 1)
        await world.server("b", ok)
        assert [await world.ask() for _ in range(6)] == [(200, b"ok")] * 6
        assert world.count("dead")["connectionErrors"] == 1, "it is passed over for a while"
        assert world.count("dead")["inFlight"] == 0

    run(test)


def test_a_server_that_breaks_off_before_answering_costs_no_request() -> None:
    async def test(world: World) -> None:
        async def die(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(2)
            writer.transport.abort()

        async def take(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readexactly(2) == b"{}"
            writer.write(OK)

        await world.server("a", die)
        await world.server("b", take)
        post = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
        assert [await world.ask(post) for _ in range(4)] == [(200, b"ok")] * 4
        assert world.count("a")["connectionErrors"] == 1

    run(test)


def test_a_request_that_kills_servers_takes_down_two_at_most() -> None:
    async def test(world: World) -> None:
        async def die(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        for name in "abcd":
            await world.server(name, die)
        status, body = await world.ask()
        assert status == 502
        assert "two servers" in json.loads(body)["error"]["message"]
        assert sum(len(heads) for heads in world.heads.values()) == 2
        assert all(world.count(name)["inFlight"] == 0 for name in "abcd")

    run(test)


def test_a_kept_connection_that_the_server_closes_under_our_hands_costs_nothing() -> None:
    async def test(world: World) -> None:
        async def once(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(world.heads["a"]) == 2:  # the second request on the kept connection
                writer.transport.abort()
            else:
                writer.write(OK)

        await world.server("a", once)
        assert await world.ask() == (200, b"ok")
        assert await world.ask() == (200, b"ok")
        assert len(world.heads["a"]) == 3
        assert world.count("a")["connectionErrors"] == 0

    run(test)


def test_a_server_that_is_being_killed_costs_no_request() -> None:
    """The kept connection breaks, a new one is still taken and breaks too: then it is another server's turn."""

    async def test(world: World) -> None:
        async def dying(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(world.heads["a"]) == 1:
                writer.write(OK)
            else:
                writer.transport.abort()

        await world.server("a", dying)
        assert await world.ask() == (200, b"ok")
        await world.server("b", ok, weight=0.01)
        assert [await world.ask() for _ in range(4)] == [(200, b"ok")] * 4
        assert len(world.heads["a"]) == 3
        assert world.count("a")["connectionErrors"] == 1
        assert world.count("a")["inFlight"] == 0

    run(test)


def test_an_answer_that_breaks_off_is_not_passed_for_whole() -> None:
    async def test(world: World) -> None:
        async def half(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
            await writer.drain()
            writer.close()

        await world.server("a", half)
        await world.server("b", ok, weight=0.0)
        reader, writer = await world.connect()
        writer.write(GET)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer(reader)
        assert world.count("a")["connectionErrors"] == 1
        assert world.heads["b"] == [], "an answer that has begun is never asked for again"

    run(test)


def test_a_client_that_goes_away_ends_the_generation() -> None:
    async def test(world: World) -> None:
        async def endless(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
            await reader.readexactly(1)  # nothing comes: it ends when the connection does

        await world.server("a", endless)
        reader, writer = await world.connect()
        writer.write(GET)
        await reader.readuntil(b"x\r\n")
        writer.close()
        await until(lambda: world.hung_up["a"] == 1)
        assert world.count("a")["inFlight"] == 0
        assert world.count("a")["aborted"] == 1

    run(test)


def test_without_a_server_it_says_so() -> None:
    async def test(world: World) -> None:
        status, body = await world.ask()
        assert status == 503
        assert json.loads(body)["error"]["code"] == 503
        assert world.proxy.unrouted == 1
        world.route("dead", 1)
        assert (await world.ask())[0] == 502

    run(test)


def test_its_own_health_is_its_own() -> None:
    async def test(world: World) -> None:
        await world.server("a", ok)
        status, body = await world.ask(b"GET /-/tunewright/health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        assert world.heads["a"] == []

    run(test)


def test_bodies_of_every_framing() -> None:
    async def test(world: World) -> None:
        async def until_close(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
            await writer.drain()
            writer.close()

        async def chunked(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")

        async def no_body(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" if b"HEAD" in head else OK)

        await world.server("a", until_close)
        assert await world.ask() == (200, b"until the end")
        world.route("a", 1, weight=0.0)
        await world.server("b", chunked)
        assert await world.ask() == (200, b"abc")
        assert await world.ask(b"GET / HTTP/1.0\r\n\r\n") == (200, b"abc")
        world.route("b", 1, weight=0.0)
        await world.server("c", no_body)
        reader, writer = await world.connect()
        writer.write(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b"Content-Length: 99" in await reader.readuntil(b"\r\n\r\n")
        writer.write(GET)
        assert await answer(reader) == (200, b"ok")

    run(test)


def test_a_chunked_request_and_one_that_waits_for_leave() -> None:
    async def test(world: World) -> None:
        async def echo(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            length = int(head.split(b"Content-Length: ")[1].split()[0])
            body = await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (length, body))

        await world.server("a", echo)
        chunked = (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\nX-T: 1\r\n\r\n"
        )
        assert await world.ask(chunked) == (200, b"abc")
        assert b"X-T" not in world.heads["a"][0], "a trailer is no header"
        reader, writer = await world.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert await answer(reader) == (200, b"hi")

    run(test)


def test_an_offer_to_upgrade_is_ignored() -> None:
    """Java's client offers HTTP/2 with every first request."""

    async def test(world: World) -> None:
        await world.server("a", ok)
        offer = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        offer += b"HTTP2-Settings: x\r\n\r\n"
        reader, writer = await world.connect()
        writer.write(offer + GET)
        assert await answer(reader) == (200, b"ok")
        assert await answer(reader) == (200, b"ok")
        assert b"Upgrade" not in world.heads["a"][0]

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
def test_requests_that_are_refused(request_bytes: bytes, status: int) -> None:
    async def test(world: World) -> None:
        await world.server("a", ok)
        assert (await world.ask(request_bytes))[0] == status
        assert world.heads["a"] == []

    run(test, Limits(body=1000))


def test_a_slow_reader_holds_its_server_back_and_nobody_else() -> None:
    async def test(world: World) -> None:
        sent = 0

        async def flood(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
                sent += 1

        await world.server("a", flood)
        reader, writer = await world.connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:  # until it moves no more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 64
        total = 0
        while total < 64 << 20:
            total += len(await reader.read(1 << 20))
        assert sent == 64

    run(test)


def test_deadlines() -> None:
    async def test(world: World) -> None:
        async def silent(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)

        await world.server("a", silent)
        loop = asyncio.get_running_loop()
        clients = [await world.connect() for _ in range(3)]
        clients[0][1].write(GET)
        clients[1][1].write(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nx")
        await until(lambda: world.count("a")["inFlight"] == 1 and len(world.proxy._clients) == 3)
        await asyncio.sleep(0.05)
        for client in list(world.proxy._clients):
            client.check(loop.time())
        assert len(world.proxy._clients) == 3
        for client in list(world.proxy._clients):
            client.check(loop.time() + 3600)
        assert (await answer(clients[0][0]))[0] == 504
        assert (await answer(clients[1][0]))[0] == 408
        assert await clients[2][0].read() == b""
        assert world.count("a")["inFlight"] == 0

    run(test)


def test_the_process_reads_its_routes_tells_its_counts_and_finishes_what_it_began(tmp_path: Path) -> None:
    port, server_port = first_port(), first_port() + 500
    routes, status = tmp_path / "routes.json", tmp_path / "status.json"
    routes.write_text(Routes(1, ()).to_json())
    module = [sys.executable, "-m", "tunewright.platform.process.proxy", "--listen", f"127.0.0.1:{port}"]
    fake = str(Path(__file__).parents[1] / "support" / "fake_vllm.py")
    slow = [sys.executable, "-S", fake, "serve", "fake", "--port", str(server_port), "--fake-token-seconds", "0.05"]
    with nothing_left(tmp_path):
        files = ["--routes", str(routes), "--status", str(status)]
        proxy = children.spawn(
            [*module, *files], os.environ, tmp_path, tmp_path / "log", tmp_path / "log", tmp_path / "p" / "child.json"
        )
        log = tmp_path / "log2"
        children.spawn(slow, os.environ, tmp_path, log, log, tmp_path / "s" / "child.json")
        url = f"http://127.0.0.1:{port}"

        def code(path: str, base: str = url) -> int:
            try:
                return http.call("GET", base + path, 2.0).status
            except http.Unreachable:
                return 0

        wait_for(lambda: code("/-/tunewright/health") == 200)
        assert code("/health") == 503
        wait_for(lambda: code("/health", f"http://127.0.0.1:{server_port}") == 200)
        part = tmp_path / "part"
        part.write_text(Routes(2, (Route("a", f"http://127.0.0.1:{server_port}", 1.0, False),)).to_json())
        part.replace(routes)
        wait_for(lambda: code("/health") == 200)
        wait_for(lambda: status.exists() and json.loads(status.read_bytes())["generation"] == 2)

        async def stream_through_the_end() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"stream": True, "max_tokens": 10}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            os.kill(proxy.pid, signal.SIGTERM)
            rest = await reader.read()
            writer.close()
            return head + rest

        text = asyncio.run(asyncio.wait_for(stream_through_the_end(), 30))
        assert text.count(b"data: ") == 11
        wait_for(lambda: not children.alive(proxy))
        assert children.exit_code(proxy) == 0
        told = json.loads(status.read_bytes())
        assert told["backends"][0]["inFlight"] == 0
        assert told["backends"][0]["requests"] >= 2
        assert told["unrouted"] >= 1


def test_a_full_disk_costs_its_log_and_its_status_and_no_request(tmp_path: Path) -> None:
    port, server_port = first_port(), first_port() + 500
    routes, full = tmp_path / "routes.json", Path("/dev/full")
    module = [sys.executable, "-m", "tunewright.platform.process.proxy", "--listen", f"127.0.0.1:{port}"]
    fake = str(Path(__file__).parents[1] / "support" / "fake_vllm.py")
    with nothing_left(tmp_path):
        files = ["--routes", str(routes), "--status", str(tmp_path / "no-such-folder" / "status.json")]
        children.spawn([*module, *files], os.environ, tmp_path, full, full, tmp_path / "p" / "child.json")
        log = tmp_path / "log"
        server = [sys.executable, "-S", fake, "serve", "fake", "--port", str(server_port)]
        children.spawn(server, os.environ, tmp_path, log, log, tmp_path / "s" / "child.json")

        def code() -> int:
            try:
                return http.call("GET", f"http://127.0.0.1:{port}/health", 2.0).status
            except http.Unreachable:
                return 0

        wait_for(lambda: code() == 503)
        part = tmp_path / "part"
        part.write_text(Routes(2, (Route("a", f"http://127.0.0.1:{server_port}", 1.0, False),)).to_json())
        part.replace(routes)
        wait_for(lambda: code() == 200)
