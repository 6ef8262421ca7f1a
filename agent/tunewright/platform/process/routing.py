"""Which server gets the next request: the proxy's routes, read from a file that the agent replaces."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

DOWN_SECONDS = 1.0
"""How long a server that refused a connection is passed over while another one is there."""


class BadRoutes(ValueError):
    """The routes file can't be read; the message says why. The routes in use stay."""


@dataclass(frozen=True)
class Route:
    """One line of the routes file. `weight` 0: no new requests, the running ones end."""

    name: str
    url: str
    weight: float
    canary: bool


@dataclass(frozen=True)
class Routes:
    """The routes file. `generation` comes back in the status file once these routes are in force."""

    generation: int
    backends: tuple[Route, ...]

    def to_json(self) -> str:
        """As it is written to the file."""
        return json.dumps({"generation": self.generation, "backends": [vars(route) for route in self.backends]})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Routes":
        """Raises `BadRoutes`."""
        try:
            raw = json.loads(text)
            routes = cls(int(raw["generation"]), tuple(_route(entry) for entry in raw["backends"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRoutes(f"not a routes file: {error!r}") from error
        if len({route.name for route in routes.backends}) != len(routes.backends):
            raise BadRoutes("two backends have the same name")
        return routes


def _route(entry: dict[str, Any]) -> Route:
    route = Route(str(entry["name"]), str(entry["url"]), float(entry["weight"]), bool(entry["canary"]))
    parts = urlsplit(route.url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError(f"{route.url!r} is not http://HOST:PORT")
    if not 0 <= route.weight < float("inf"):
        raise ValueError(f"weight {route.weight} of {route.name} is not a number from 0 upwards")
    return route


@dataclass(eq=False)
class Backend:
    """A server as the proxy sees it, with what it has counted of it since it was first routed to."""

    name: str
    url: str
    weight: float = 0.0
    canary: bool = False
    in_flight: int = 0
    requests: int = 0
    server_errors: int = 0  # answers of 500 and above
    connection_errors: int = 0  # connections refused, timed out or broken before the answer was whole
    aborted: int = 0  # the client went away first
    down_until: float = 0.0
    credit: float = 0.0
    idle: list[Any] = field(default_factory=list)  # connections kept alive, the youngest last

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.host: str = parts.hostname or ""
        self.port: int = parts.port or 0

    def counts(self) -> dict[str, Any]:
        """Its entry in the status file."""
        return {
            "name": self.name,
            "url": self.url,
            "weight": self.weight,
            "canary": self.canary,
            "inFlight": self.in_flight,
            "requests": self.requests,
            "serverErrors": self.server_errors,
            "connectionErrors": self.connection_errors,
            "aborted": self.aborted,
        }


class Table:
    """The routes in force, and the choice between them.

    The canary gets exactly its share of the requests, evenly spread over time; among servers of a kind, the one with
    the fewest requests in flight for its weight gets the next.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.backends: list[Backend] = []
        self._removed: set[Backend] = set()
        self._canary_credit = 0.0

    def update(self, routes: Routes) -> list[Backend]:
        """Put `routes` in force; the backends that are no longer routed to (they stay until nothing is in flight)."""
        known = {(backend.name, backend.url): backend for backend in self.backends}
        wanted = {(route.name, route.url): route for route in routes.backends}
        for key, route in wanted.items():
            backend = known.setdefault(key, Backend(route.name, route.url))
            backend.weight, backend.canary = route.weight, route.canary
        removed = [backend for key, backend in known.items() if key not in wanted]
        for backend in removed:
            backend.weight = 0.0
        self.backends = list(known.values())
        self.generation = routes.generation
        self._removed = set(removed)
        return removed

    def forget_drained(self) -> None:
        """Drop the backends that are not routed to any more and have nothing in flight."""
        self.backends = [b for b in self.backends if b.in_flight or b not in self._removed]

    def choose(self, tried: set[Backend], now: float) -> Backend | None:
        """The server for one request that none of `tried` could take; None when there is no other."""
        routed = [b for b in self.backends if b.weight > 0 and b not in tried]
        able = [b for b in routed if b.down_until <= now] or routed
        canaries = [b for b in able if b.canary]
        stable = [b for b in able if not b.canary]
        if canaries and stable:
            share = _total(canaries) / _total(able)
            self._canary_credit += share
            if self._canary_credit >= 0.5:
                self._canary_credit -= 1.0
                return _least_loaded(canaries)
            return _least_loaded(stable)
        return _least_loaded(able) if able else None


def _total(backends: list[Backend]) -> float:
    return sum(backend.weight for backend in backends)


def _least_loaded(backends: list[Backend]) -> Backend:
    total = _total(backends)
    for backend in backends:
        backend.credit = min(1.0, backend.credit + backend.weight / total)
    best = min(backends, key=lambda b: (b.in_flight / b.weight, -b.credit))
    best.credit = max(-1.0, best.credit - 1.0)
    return best


class RoutesFile:
    """Notices that the routes file was replaced, without reading it each time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.error: str | None = None

    def changed(self) -> Routes | None:
        """The new routes if the file changed and is sound; `error` says why it is not."""
        try:
            stat = self._path.stat()
            mark = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if mark == self._seen:
                return None
            self._seen = mark
            routes = Routes.from_json(self._path.read_bytes())
        except (OSError, BadRoutes) as error:
            self.error = f"{self._path}: {error}; the routes of before stay in force"
            return None
        self.error = None
        return routes


class StatusFile:
    """What the proxy tells the agent, replaced as a whole. Not synced to disk: it is of no use after a crash."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._identity = identity
        self._last = ""
        self._written = 0.0

    def write(self, table: Table, unrouted: int, error: str | None) -> None:
        """Write it if it changed, and once a second in any case as a sign of life. Raises `OSError`."""
        body = {
            **self._identity,
            "generation": table.generation,
            "unrouted": unrouted,
            "error": error,
            "backends": [backend.counts() for backend in table.backends],
        }
        text = json.dumps(body)
        now = time.time()
        if text == self._last and 0 <= now - self._written < 1.0:
            return
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text(json.dumps({"at": now, **body}))
        part.replace(self._path)
        self._last, self._written = text, now
