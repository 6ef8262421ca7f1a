"""Requests onto connections: kept alive and used again, opened where none is idle."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.protocol import Connection, PlainConnection, Server, TlsConnection, error_kind
from tunewright.loadtest.recording import Record, Recorder

Ended = Callable[[Record], None]


def _ignore(_: Record) -> None:
    pass


@dataclass
class _Attempt:
    payload: bytes
    again: bool = False


class Client:
    """Sends requests to one server and tells `ended` of each that has ended."""

    def __init__(self, server: Server, recorder: Recorder, run_name: str) -> None:
        self._server = server
        self._recorder = recorder
        self._run_name = run_name
        self._idle: list[Connection] = []
        self._busy: dict[Record, tuple[Connection, _Attempt]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self.ended: Ended = _ignore

    async def open(self, count: int) -> None:
        """Open `count` idle connections before the load. Raises `OSError`, `TimeoutError`."""
        for start in range(0, count, 128):  # below the usual backlog of a listening socket
            batch = [self._connect() for _ in range(min(128, count - start))]
            self._idle += await asyncio.gather(*batch)

    def submit(self, planned: Planned, intended_ns: int, ramp: bool = False) -> Record:
        """Send a request now, or as soon as a new connection for it stands."""
        record = Record(planned, intended_ns, ramp)
        self._recorder.begin(record)
        attempt = _Attempt(self._server.request(f"{self._run_name}-{planned.number}", planned.body))
        self._send(record, attempt)
        return record

    def close(self) -> None:
        """Close every connection; requests in flight are cut off, which the server sees as their abort."""
        for task in self._opening:
            task.cancel()
        for connection in [*self._idle, *(connection for connection, _ in self._busy.values())]:
            connection.close()
        self._idle.clear()
        self._busy.clear()

    def _send(self, record: Record, attempt: _Attempt) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                self._busy[record] = (connection, attempt)
                connection.send(record, attempt.payload)
                return
        task = asyncio.get_running_loop().create_task(self._open_and_send(record, attempt))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_send(self, record: Record, attempt: _Attempt) -> None:
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            if isinstance(error, ConnectionRefusedError):
                self._recorder.refused_in_a_row += 1
            self._recorder.end(record, time.time_ns(), error_kind(error))
            self.ended(record)
            return
        self._busy[record] = (connection, attempt)
        connection.send(record, attempt.payload)

    async def _connect(self) -> Connection:
        kind = TlsConnection if self._server.tls else PlainConnection
        return await kind.connect(self._server, self._recorder, self._done, self._lost)

    def _done(self, connection: Connection, record: Record) -> None:
        self._busy.pop(record, None)
        if connection.open:
            self._idle.append(connection)
        self.ended(record)

    def _lost(self, _: Connection, record: Record, reason: str, untouched: bool) -> None:
        _, attempt = self._busy.pop(record)
        if untouched and not attempt.again:  # the server closed an idle connection just as it was used again
            attempt.again = True
            self._send(record, attempt)
            return
        self._recorder.end(record, time.time_ns(), reason)
        self.ended(record)
