"""What the watches told last of the Tunings: who is there, what wakes the loop, and what /metrics shows.

Nothing is decided by it: it only says where to look.
"""

import threading
from collections.abc import Callable

from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.kube.client import Json
from tunewright.ports import Clock, Key, PortError
from tunewright.store.kubernetes import record_of
from tunewright.store.kubernetes_trials import TrialMemory


class SeenTunings:
    """The Tunings as a watch told them; their trials as `trials` remembers them. Thread-safe."""

    def __init__(self, own: str, trials: TrialMemory, clock: Clock, trouble: Callable[[], str | None]) -> None:
        """`own` is the controller's namespace. `trouble` tells why the watches can't be relied on; None: they can."""
        self.own = own
        self._trials, self._clock, self._trouble = trials, clock, trouble
        self._lock = threading.Lock()
        self._seen: dict[Key, Json] = {}

    def heard(self, key: Key, found: Json | None, written: int = 0) -> bool:
        """Take in what a watch tells. Whether the loop must look: not at the mere echo of its own writes.

        `written` is the version of the record that it wrote last.
        """
        with self._lock:
            before = self._seen.pop(key, None)
            if found is None:
                return True
            kept = {part: found.get(part) or {} for part in ("apiVersion", "kind", "spec", "status")}
            metadata = {k: v for k, v in found["metadata"].items() if k not in ("managedFields", "annotations")}
            self._seen[key] = {**kept, "metadata": metadata}
        if before is None or _asked(before) != _asked(found):
            return True
        return _version(found) > max(_version(before), written)

    def known(self) -> list[Key]:
        """All Tunings that there are, as far as the watch told."""
        with self._lock:
            return sorted(self._seen)

    def knows(self, key: Key) -> bool:
        """Whether there is this Tuning, as far as the watch told."""
        return key in self._seen

    # --- for /metrics ---

    def tunings(self) -> list[Key]:
        """As `known`, without those that are being deleted. Raises `PortError` while the watches are in trouble."""
        trouble = self._trouble()
        if trouble is not None:
            raise PortError(trouble)
        with self._lock:
            return sorted(key for key, found in self._seen.items() if not found["metadata"].get("deletionTimestamp"))

    def of(self, namespace: str) -> "SeenNamespace":
        """What was told of one namespace."""
        return SeenNamespace(self, namespace)

    def load(self, key: Key) -> TuningRecord | None:
        """The record; None as in `KubernetesStore.load`. Raises `Refused` for one that can't be read."""
        found = self._seen.get(key)
        return record_of(found, self._clock.now()) if found is not None else None

    def trials(self, key: Key) -> list[TrialRecord]:
        """The trials by number. Raises `Refused` for one that can't be read."""
        found = self._seen.get(key)
        return self._trials.of(key, found["metadata"]["uid"]) if found is not None else []

    def version(self, key: Key) -> object:
        """Equal for as long as neither the Tuning nor its trials changed."""
        found = self._seen.get(key)
        metadata = found["metadata"] if found is not None else {}
        return metadata.get("uid"), metadata.get("resourceVersion"), self._trials.changes(key)


class SeenNamespace:
    """One namespace of it."""

    def __init__(self, seen: SeenTunings, namespace: str) -> None:
        self._seen, self._namespace = seen, namespace

    def load(self, name: str) -> TuningRecord | None:
        """As `SeenTunings.load`."""
        return self._seen.load((self._namespace, name))

    def trials(self, name: str) -> list[TrialRecord]:
        """As `SeenTunings.trials`."""
        return self._seen.trials((self._namespace, name))

    def version(self, name: str) -> object:
        """As `SeenTunings.version`."""
        return self._seen.version((self._namespace, name))


def _asked(found: Json) -> tuple[object, ...]:
    """What people ask of the loop: another Tuning, another spec, the end, a decision."""
    metadata = found["metadata"]
    decisions = (found.get("status") or {}).get("decisions") or []
    return metadata["uid"], metadata["generation"], metadata.get("deletionTimestamp"), len(decisions)


def _version(found: Json) -> int:
    """Of the record; 0 where there is none yet."""
    return int((found.get("status") or {}).get("version") or 0)
