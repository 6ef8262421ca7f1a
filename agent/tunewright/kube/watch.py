"""List and watch one kind: a wake-up for every change, and a connection that died is noticed."""

import logging
from collections.abc import Callable

from tunewright.kube.client import WATCH_SECONDS, WATCH_SILENCE, Json, Kube
from tunewright.kube.errors import Gone, KubeError
from tunewright.kube.resources import Resource
from tunewright.ports import Key, Stop

MAX_BACKOFF = 30.0
"""Seconds between two tries while the API server does not answer."""
MAX_WAIT = 60.0
"""Seconds that a server which asks for patience (Retry-After) is given at most."""
SHORTEST = 1.0
"""Seconds between the beginnings of two watches at least, about."""
TOO_MANY = 429

_log = logging.getLogger(__name__)


class Watcher:
    """Calls `on_change(key, object)` for every object there is and every change; None for one that is gone.

    `on_listed` is called whenever all there are were told. It wakes, it is no truth: a change may be told twice, and
    several may be told as one.
    """

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        on_change: Callable[[Key, Json | None], None],
        *,
        namespace: str | None = None,
        labels: str = "",
        page: int | None = None,
        on_listed: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float],
        seconds: int = WATCH_SECONDS,
        silence: float = WATCH_SILENCE,
    ) -> None:
        self._kube, self._resource, self._on_change = kube, resource, on_change
        self._namespace, self._labels, self._page, self._on_listed = namespace, labels, page, on_listed
        self._monotonic = monotonic
        self._seconds, self._silence = seconds, silence
        self._known: dict[Key, str] = {}
        self._version = ""
        self._heard: float | None = None

    def silent_for(self) -> float | None:
        """Seconds since the API server last answered; None: it never did. Above some 70 the watch is in trouble."""
        return None if self._heard is None else self._monotonic() - self._heard

    def run(self, stop: Stop) -> None:
        """Watch until `stop`, which is noticed with the next event, at the latest after `silence` seconds."""
        failures = 0
        while not stop.is_set():
            began = self._monotonic()
            try:
                self.once(stop)
                failures = 0
                # A server, or a proxy before it, that ends each watch at once must not be asked without end.
                pause = 0.0 if self._monotonic() - began >= SHORTEST else SHORTEST
            except KubeError as error:
                failures += 1
                pause = max(min(MAX_BACKOFF, 0.5 * 2 ** min(failures - 1, 10)), min(MAX_WAIT, error.retry_after or 0.0))
                _log.warning("watching %s: %s (again in %gs)", self._resource.plural, error, pause)
            except Exception:  # noqa: BLE001  a thread that ended would leave the loop without this watch for good
                failures += 1
                pause, self._version = MAX_BACKOFF, ""
                _log.exception("watching %s: a mistake of ours (again in %gs)", self._resource.plural, pause)
            if pause:
                stop.wait(pause)

    def once(self, stop: Stop) -> None:
        """List unless a version to go on from is known, then one watch until the server ends it."""
        try:
            if not self._version:
                self._list()
            events = self._kube.watch(
                self._resource,
                self._namespace,
                resource_version=self._version,
                labels=self._labels,
                seconds=self._seconds,
                silence=self._silence,
            )
            for event in events:
                self._heard = self._monotonic()
                self._take(event.type, event.object)
                if stop.is_set():
                    return
            self._heard = self._monotonic()
        except Gone:
            self._version = ""  # too old to go on from: the next turn lists again
        except KubeError as error:
            # What was missed meanwhile is found by listing, however long it takes. But a server that asks for less
            # (429) is not sent a list: what it refused unread can be gone on from.
            if error.status != TOO_MANY:
                self._version = ""
            raise

    def _list(self) -> None:
        there: set[Key] = set()
        version = ""
        for page in self._kube.pages(self._resource, self._namespace, labels=self._labels, page=self._page):
            self._heard, version = self._monotonic(), page.resource_version
            for each in page.items:
                there.add(_key(each))
                self._remember(_key(each), each)
        for key in self._known.keys() - there:
            self._forget(key)
        self._version = version
        self._on_listed()

    def _take(self, kind: str, found: Json) -> None:
        if kind == "DELETED":
            self._forget(_key(found))
        elif kind != "BOOKMARK":
            self._remember(_key(found), found)
        self._version = found["metadata"]["resourceVersion"]

    def _remember(self, key: Key, found: Json) -> None:
        version = found["metadata"]["resourceVersion"]
        if self._known.get(key) != version:
            self._known[key] = version
            self._on_change(key, found)

    def _forget(self, key: Key) -> None:
        self._known.pop(key, None)
        self._on_change(key, None)


def _key(found: Json) -> Key:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
