"""HTTP/1.1 streams on sockets of our own. The hot path: one read, one count of bytes, one time stamp per token.

The kernel stamps what it receives (SO_TIMESTAMPNS), so a busy process delays nothing that is measured. Over TLS, or
where the kernel gives no stamp, the time is when we saw the bytes; such reads are counted.
"""

import asyncio
import contextlib
import errno
import os
import re
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from tunewright.loadtest.recording import Record, Recorder, pack_stamp, unpack_stamp

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python's socket module does not name it
_READ = 65536
_ANCILLARY = socket.CMSG_SPACE(16)
_END = b"\r\n0\r\n\r\n"
_NEWLINE = 10
_KEEP = 2048  # bytes of an answer's end: the usage event, [DONE] and room for a long usage
CONNECT_TIMEOUT = 10.0

Done = Callable[["Connection", Record], None]
Lost = Callable[["Connection", Record, str, bool], None]


@dataclass(frozen=True)
class Server:
    """Where requests go: resolved once, so that no look-up is measured."""

    host: str
    port: int
    path: str
    family: int
    address: tuple[object, ...]
    head: bytes
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, path: str, api_key: str | None, tls: ssl.SSLContext | None) -> "Server":
        """Resolve `url`; raises `OSError` when its host is not known."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        full = parts.path.rstrip("/") + path
        head = f"POST {full} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        if api_key:
            head += f"Authorization: Bearer {api_key}\r\n"
        return cls(host, port, full, int(family), tuple(address), head.encode(), tls)

    def request(self, request_id: str, body: bytes) -> bytes:
        """The bytes of one request."""
        return self.head + f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def kernel_stamps() -> socket.socket | None:
    """A socket to be held for the whole run: the kernel only stamps packets once some socket has asked for it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        holder.close()
        return None
    return holder


class Connection(ABC):
    """One connection, with one request at a time. Subclasses move the bytes."""

    def __init__(self, recorder: Recorder, done: Done, lost: Lost) -> None:
        self._recorder = recorder
        self._done = done
        self._lost = lost
        self.record: Record | None = None
        self.used = False
        self.open = True
        self._unsent = b""
        self._reset()

    def send(self, record: Record, payload: bytes) -> None:
        """Send a request; its send time is taken just before the first byte goes."""
        self._reset()
        self.record = record
        record.sent_ns = time.time_ns()
        self._write(payload)

    @abstractmethod
    def close(self) -> None:
        """Close it; a request in flight is left to its owner."""

    @abstractmethod
    def _write(self, payload: bytes) -> None: ...

    def _reset(self) -> None:
        self._head = b""
        self._streaming = False
        self._body_left: int | None = None
        self._until_close = False
        self._status = 0
        self._keep_alive = True
        self._last = 0
        self._tail = bytearray()

    def _received(self, data: bytes, stamp: bytes) -> None:
        record = self.record
        if record is None:  # nothing was asked: the server's own goodbye
            self.close()
            return
        if not self._streaming:
            data = self._read_head(data)
            if self._head:  # still incomplete, or the answer is not a stream
                return
            if not data:
                return
        tail = self._tail
        tail += data
        events = data.count(b"\n\n")
        if self._last == _NEWLINE and data[0] == _NEWLINE:
            events += 1
        self._last = data[-1]
        if events:
            if events > 1:
                record.merged.append((record.reads, events))
            record.reads += 1
            record.stamps += stamp
            self._recorder.events += events
            if record.reads == 1:
                self._first(record, stamp)
        if tail.endswith(_END):
            self._finish(record)
        elif len(tail) > 4 * _KEEP and not record.whole:
            del tail[:-_KEEP]

    def _first(self, record: Record, stamp: bytes) -> None:
        recorder = self._recorder
        recorder.refused_in_a_row = 0
        arrived = unpack_stamp(stamp)
        recorder.first_tokens.append((arrived, (arrived - record.intended_ns) / 1e9))

    def _read_head(self, data: bytes) -> bytes:
        """Read the head of an answer; what follows it, if it is a stream. Whole answers are collected in `_head`."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        if not self._status:
            lines = head.lower()
            self._status = int(match[1]) if (match := re.match(rb"http/1\.[01] (\d{3})", lines)) else -1
            self._keep_alive = b"\r\nconnection: close" not in lines and not lines.startswith(b"http/1.0")
            length = re.search(rb"\r\ncontent-length: *(\d+)", lines)
            self._body_left = int(length[1]) if length else None
            chunked = b"\r\ntransfer-encoding: chunked" in lines
            self._until_close = not chunked and length is None
            if self._status == 200 and length is None:
                self._streaming = True
                self._head = b""
                self._last = 0
                self._tail += b"\r\n"  # so that the end of an empty stream is known
                return rest
        whole = len(rest) >= self._body_left if self._body_left is not None else self._head.endswith(_END)
        if whole:
            self._fail_by_answer(rest)
        return b""

    def _fail_by_answer(self, body: bytes) -> None:
        record = self.record
        if record is None:
            return
        record.ending = body[:_KEEP]
        self._recorder.refused_in_a_row = 0
        error = f"http {self._status}" if self._status > 0 else "not http"
        self._end(record, "the answer is no stream" if self._status == 200 else error)

    def _finish(self, record: Record) -> None:
        record.ending = bytes(self._tail[-_KEEP:])
        if record.whole:
            record.body = bytes(self._tail)
        self._end(record, None)

    def _end(self, record: Record, error: str | None) -> None:
        self.record = None
        self.used = True
        if not self._keep_alive or self._unsent:  # answered before it had read all: the rest must not follow
            self.close()
        now = unpack_stamp(record.stamps[-16:]) if record.reads and error is None else time.time_ns()
        self._recorder.end(record, now, error)
        self._done(self, record)

    def _closed(self, reason: str) -> None:
        """The other side closed or the connection broke."""
        self.close()
        record = self.record
        if record is None:
            return
        if self._streaming and self._until_close and b"[DONE]" in self._tail:
            self._keep_alive = False
            self._finish(record)
            return
        if self._until_close and self._status > 0 and not self._streaming:
            self._fail_by_answer(self._head.partition(b"\r\n\r\n")[2])
            return
        self.record = None
        untouched = self.used and not self._head and not self._streaming
        self._lost(self, record, reason, untouched)


class PlainConnection(Connection):
    """A TCP socket, read when the loop says so, with the kernel's time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, recorder: Recorder, done: Done, lost: Lost
    ) -> None:
        super().__init__(recorder, done, lost)
        self._loop = loop
        self._socket = sock
        self._receive = sock.recvmsg
        loop.add_reader(sock, self._readable)

    @classmethod
    async def connect(cls, server: Server, recorder: Recorder, done: Done, lost: Lost) -> "PlainConnection":
        """Connect; raises `OSError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(server.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # not this kernel: such reads are counted
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await loop.sock_connect(sock, server.address)
        except BaseException:
            sock.close()
            raise
        return cls(loop, sock, recorder, done, lost)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._receive(_READ, _ANCILLARY)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._closed(_kind(error))
            return
        if not data:
            self._closed("connection closed early")
            return
        if ancillary:
            stamp = ancillary[0][2]
        else:
            stamp = pack_stamp(time.time_ns())
            self._recorder.unstamped_reads += 1
        self._received(data, stamp)

    def _write(self, payload: bytes) -> None:
        try:
            sent = self._socket.send(payload)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            # Told from the loop, not from inside the caller, who is still setting this request up.
            self._loop.call_soon(self._closed, _kind(error))
            return
        if sent < len(payload):
            self._unsent = payload[sent:]
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._closed(_kind(error))
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)


class TlsConnection(Connection, asyncio.Protocol):
    """The same over TLS, where only the loop can read: times are those of user space, and counted."""

    _transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, server: Server, recorder: Recorder, done: Done, lost: Lost) -> "TlsConnection":
        """Connect and shake hands; raises `OSError` (also for a certificate) or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, connection = await loop.create_connection(
                lambda: cls(recorder, done, lost),
                *(str(server.address[0]), server.port),
                ssl=server.tls,
                server_hostname=server.host,
            )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's TLS transport is one in all but its class

    def data_received(self, data: bytes) -> None:
        self._recorder.unstamped_reads += 1
        self._received(data, pack_stamp(time.time_ns()))

    def eof_received(self) -> None:
        self._closed("connection closed early")

    def connection_lost(self, error: Exception | None) -> None:
        self._closed(_kind(error) if isinstance(error, OSError) else "connection closed early")

    def close(self) -> None:
        if self.open and self._transport is not None:
            self._transport.close()
        self.open = False

    def _write(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(payload)


def error_kind(error: BaseException) -> str:
    """A connection error in few words, the same for the same cause."""
    if isinstance(error, TimeoutError):
        return "connecting timed out"
    return _kind(error) if isinstance(error, OSError) else type(error).__name__


def _kind(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    known = {
        errno.ECONNREFUSED: "connection refused",
        errno.ECONNRESET: "connection reset",
        errno.EPIPE: "connection reset",
        errno.EMFILE: "no file descriptors left",
    }
    number = error.errno or 0
    return known.get(number) or (os.strerror(number).lower() if number else str(error))
