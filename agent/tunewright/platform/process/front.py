"""The proxy's process as the agent sees it: started and adopted, told its routes, asked what is in flight."""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from tunewright.domain.model import Model
from tunewright.loadtest.files import write_atomic
from tunewright.platform.process import children, records, sockets
from tunewright.platform.process.http import Unreachable, call
from tunewright.platform.process.routing import BadRoutes, Route, Routes
from tunewright.ports import Clock, PortError

_STALE = 10.0
"""Seconds without a sign of life after which the proxy is asked itself."""

_GRACE = 30.0


class _Written(Model):
    """Hashes of the routes files that we wrote: the one in force, and the one before in case we died in between."""

    hashes: tuple[str, ...] = Field(default=())


class Front:
    """The proxy before the fleet, and its two files."""

    def __init__(self, directory: Path, listen: str, clock: Clock) -> None:
        self._directory = directory
        self._listen = listen
        self._clock = clock
        self._routes = directory / "routes.json"
        self._status = directory / "status.json"
        self._record = directory / "child.json"
        self._terminated_at: float | None = None
        self._seen: dict[int, float] = {}  # pid to when we first saw it: a young proxy has not written anything yet

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://{self._listen}"

    # --- the process ---

    def ensure(self) -> str | None:
        """Start it unless it runs; what is in the way, if anything."""
        child = children.load(self._record)
        if child is not None and children.alive(child):
            if self._listen not in child.command:
                return self._end(child, "the proxy listens on an address that is not the target's any more")
            seen = self._seen.setdefault(child.pid, self._clock.monotonic())
            if min(self._age(), self._clock.monotonic() - seen) > _STALE and not self._answers():
                children.kill_group(child)
                return "the proxy hung and was killed; it is started anew"
            return None if self._status_of(child) is not None else "the proxy is starting"
        if child is not None:
            children.end(child, grace=0.0)
        port = int(self._listen.rpartition(":")[2])
        if sockets.listening_sockets(port):
            return f"the proxy can't listen on {self._listen}: another process does; end it, or change target.listen"
        self._status.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "tunewright.platform.process.proxy", "--listen", self._listen]
        argv += ["--routes", str(self._routes), "--status", str(self._status)]
        log = self._directory / "proxy.log"
        children.spawn(argv, os.environ, Path.cwd(), log, log, self._record)
        return "the proxy is starting"

    def problem(self) -> str | None:
        """Why clients can't reach the fleet through it now; changes nothing."""
        child = children.load(self._record)
        if child is None or not children.alive(child):
            return "the proxy does not run"
        return None if self._status_of(child) is not None else "the proxy is starting"

    def stop(self) -> bool:
        """End it, after what is in flight; True once it is gone and its port is closed."""
        child = children.load(self._record)
        if child is not None and children.group_members(child):
            self._end(child, "")
            return False
        if child is not None:
            children.end(child, grace=0.0)
            self._record.unlink(missing_ok=True)
        self._terminated_at = None
        return True

    def _end(self, child: children.Child, reason: str) -> str:
        now = self._clock.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            children.terminate_group(child)
        elif now - self._terminated_at > _GRACE + 5.0:
            children.kill_group(child)
        return reason

    def _answers(self) -> bool:
        try:
            return call("GET", f"{self.url}/-/tunewright/health", 2.0).status == 200
        except Unreachable:
            return False

    # --- its routes ---

    def route(self, routes: Sequence[Route]) -> None:
        """Put these routes in force, if they are not. Raises `PortError`."""
        current = self._current()
        if current is not None and current.backends == tuple(routes) and not self.tampered():
            return
        generation = max(current.generation if current else 0, int(self._read_status().get("generation", 0))) + 1
        text = Routes(generation, tuple(routes)).to_json().encode()
        written = records.read(self._directory / "written.json", _Written) or _Written()
        before = written.hashes[-1:]
        records.write(self._directory / "written.json", _Written(hashes=(*before, _hash(text))))
        try:
            write_atomic(self._routes, text)
        except OSError as error:
            raise PortError(f"can't write {self._routes}: {error}; the proxy keeps its routes") from error

    def tampered(self) -> str | None:
        """Whether somebody else changed or removed the routes file."""
        written = records.read(self._directory / "written.json", _Written)
        if written is None:
            return None
        try:
            same = _hash(self._routes.read_bytes()) in written.hashes
        except OSError:
            same = len(written.hashes) < 2  # we may have died before the first one
        return None if same else f"{self._routes} was changed by somebody else; it is written anew at the next step"

    def drained(self, name: str) -> bool:
        """Whether the proxy has taken this server's new requests away, and none of its old ones is left."""
        if self.problem() == "the proxy does not run":
            return True
        status, current = self._read_status(), self._current()
        if current is None or self._age() > _STALE or status.get("generation") != current.generation:
            return False
        if any(route.name == name and route.weight > 0 for route in current.backends):
            return False  # we died before its requests were taken away
        return all(backend["name"] != name or backend["inFlight"] == 0 for backend in status["backends"])

    def in_force(self) -> bool:
        """Whether the proxy has taken up the last routes."""
        current = self._current()
        return current is not None and self._read_status().get("generation") == current.generation

    def _current(self) -> Routes | None:
        try:
            return Routes.from_json(self._routes.read_bytes())
        except (OSError, BadRoutes):
            return None

    # --- its status ---

    def _status_of(self, child: children.Child) -> dict[str, Any] | None:
        status = self._read_status()
        return status if status.get("pid") == child.pid else None

    def _age(self) -> float:
        """Seconds since its last sign of life; infinite if there was none."""
        at = self._read_status().get("at")
        return abs(self._clock.now() - at) if isinstance(at, float | int) else float("inf")

    def _read_status(self) -> dict[str, Any]:
        try:
            status = json.loads(self._status.read_bytes())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
