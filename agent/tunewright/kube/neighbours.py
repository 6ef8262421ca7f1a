"""Other controllers of the cluster, known by their Leases: no tuning is to be driven by two."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from tunewright.kube.client import Kube
from tunewright.kube.lease import LeaseTimes
from tunewright.kube.resources import GROUP, LEASES
from tunewright.ports import Clock

LOOK = 5.0
"""Seconds for which what was seen of the Leases is not looked at again."""

_SCOPE_LABEL = f"{GROUP}/scope"
_CLUSTER, _NAMESPACE = "cluster", "namespace"


def scope_labels(*, everywhere: bool) -> Mapping[str, str]:
    """What a Lease tells of its holder: whether it serves all namespaces, or that of the Lease alone."""
    return {_SCOPE_LABEL: _CLUSTER if everywhere else _NAMESPACE}


@dataclass(frozen=True)
class _Sight:
    """A held Lease as it was seen last, since when unchanged by our own clock, and how long it holds."""

    holder: str
    version: str
    everywhere: bool
    since: float
    duration: float


class Neighbours:
    """For a controller of all namespaces: who drives the tunings of a namespace instead of it. Thread-safe.

    The controller of a single namespace goes before it there; of several for all namespaces, the one acts whose own
    namespace sorts first. A Lease counts until it was seen unchanged for its duration: the clocks of two machines are
    never compared, so one that a dead controller left is waited out.
    """

    def __init__(self, kube: Kube, clock: Clock, *, own: str, lease: str) -> None:
        self._kube, self._clock, self._own, self._lease = kube, clock, own, lease
        self._seen: dict[str, _Sight] = {}
        self._looked: float | None = None
        self._lock = threading.Lock()

    def instead(self, namespace: str) -> str | None:
        """Who drives the tunings of `namespace` instead of us, for people; None: nobody.

        Raises `KubeError` when that can't be found out: then nobody may act on them.
        """
        if namespace == self._own:
            return None
        with self._lock:
            now = self._clock.monotonic()
            if self._looked is None or now - self._looked >= LOOK:
                self._look()
                now = self._looked = self._clock.monotonic()
            live = {where: sight for where, sight in self._seen.items() if now - sight.since <= sight.duration}
        if namespace in live:
            return f"{live[namespace].holder}, the controller of namespace {namespace}"
        before = min((where for where, sight in live.items() if sight.everywhere), default=self._own)
        if before < self._own:
            return f"{live[before].holder}, which serves all namespaces from {before}"
        return None

    def _look(self) -> None:
        found = self._kube.list(LEASES, fields=f"metadata.name={self._lease}").items
        now = self._clock.monotonic()
        seen = {}
        for lease in found:
            metadata, spec = lease["metadata"], lease.get("spec") or {}
            where, holder = str(metadata["namespace"]), str(spec.get("holderIdentity") or "")
            if not holder or where == self._own or metadata["name"] != self._lease:
                continue
            old, version = self._seen.get(where), str(metadata.get("resourceVersion"))
            same = old is not None and (old.holder, old.version) == (holder, version)
            seen[where] = _Sight(
                holder,
                version,
                everywhere=(metadata.get("labels") or {}).get(_SCOPE_LABEL) == _CLUSTER,
                since=old.since if old is not None and same else now,
                duration=max(float(spec.get("leaseDurationSeconds") or 0), float(LeaseTimes().duration)),
            )
        self._seen = seen
