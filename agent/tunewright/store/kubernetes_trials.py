"""Trials as they came last, so that a pass need not list them.

An API server reads every Trial of a namespace to find those of one tuning. But the holder of the Lease alone writes
them: what it has read once, and all that it wrote since, is what there is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tunewright.domain.state import TrialRecord
from tunewright.kube.client import Json, ObjectList
from tunewright.kube.resources import TUNING_LABEL
from tunewright.ports import Key
from tunewright.store.kubernetes_status import read_record


@dataclass(frozen=True)
class _Held:
    """One Trial, packed as it came: unpacked it is ten times as large."""

    version: int
    owners: tuple[str, ...]
    packed: str


class TrialMemory:
    """Filled by `read` (a list), `heard` (a watch) and `wrote` (the answer to a write of ours); the newest counts.

    Keys are those of tunings. Thread-safe. Versions are compared as numbers, which those of custom resources are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Key, dict[str, _Held]] = {}
        self._tuning_of: dict[Key, str] = {}
        self._complete = False
        self._read: set[Key] = set()
        self._doubtful: set[Key] = set()
        self._changes: dict[Key, int] = {}

    def knows(self, key: Key) -> bool:
        """Whether `of` has all trials of this tuning."""
        with self._lock:
            return (self._complete or key in self._read) and key not in self._doubtful

    def of(self, key: Key, uid: str) -> list[TrialRecord]:
        """The trials of the Tuning with this uid, by number. Raises `Refused` for one that can't be read."""
        with self._lock:
            mine = [(name, held) for name, held in self._held.get(key, {}).items() if uid in held.owners]
        read = [read_record(TrialRecord, held.packed, f"Trial {name}") for name, held in mine]
        return sorted(read, key=lambda trial: (trial.number, trial.id))

    def changes(self, key: Key) -> int:
        """Counts what was heard or written of this tuning's trials."""
        return self._changes.get(key, 0)

    def read(self, key: Key, ask: Callable[[], ObjectList]) -> None:
        """List the trials of one tuning by `ask`. What is heard meanwhile counts, where it is newer."""
        with self._lock:
            self._doubtful.discard(key)
        listed = ask()
        fresh = {each["metadata"]["name"]: held for each in listed.items if (held := _hold(each)) is not None}
        with self._lock:
            self._replace(key, fresh, int(listed.resource_version))
            self._read.add(key)

    def read_all(self, pages: Iterator[ObjectList]) -> None:
        """List all trials there are by `pages`. What is heard meanwhile counts, where it is newer."""
        with self._lock:
            self._doubtful.clear()
        fresh: dict[Key, dict[str, _Held]] = {}
        version = 0
        for page in pages:
            version = int(page.resource_version)
            for each in page.items:
                key, held = _tuning(each), _hold(each)
                if key is not None and held is not None:
                    fresh.setdefault(key, {})[each["metadata"]["name"]] = held
        with self._lock:
            for key in self._held.keys() | fresh.keys():
                self._replace(key, fresh.get(key, {}), version)
            self._complete = True

    def listed(self) -> None:
        """A watch has told of all there are."""
        with self._lock:
            self._complete = True

    def wrote(self, key: Key, written: Json) -> None:
        """One trial as the API server answered our write."""
        held = _hold(written)
        with self._lock:
            if held is not None:
                self._put(key, written["metadata"]["name"], held)

    @contextmanager
    def changing(self, key: Key) -> Iterator[None]:
        """Around a write: where it fails, it may have been done all the same, and a list is to tell."""
        try:
            yield
        except BaseException:
            self.doubt(key)
            raise

    def doubt(self, key: Key) -> None:
        """Others may have changed the trials of this tuning unseen: a list is to tell."""
        with self._lock:
            self._doubtful.add(key)

    def heard(self, trial: Key, found: Json | None) -> None:
        """What a watch tells of one Trial; None: it is gone."""
        namespace, name = trial
        with self._lock:
            if found is None:
                tuning = self._tuning_of.pop(trial, None)
                if tuning is not None:
                    self._held[(namespace, tuning)].pop(name, None)
                    # Perhaps we have made one of this name again since.
                    self._doubtful.add((namespace, tuning))
                    self._count((namespace, tuning))
                return
            key, held = _tuning(found), _hold(found)
            if key is None or held is None:
                return
            known = self._held.get(key, {}).get(name)
            if known is None or held.version > known.version:  # else it is what we wrote ourselves, or older
                self._put(key, name, held)

    def forget(self, key: Key) -> None:
        """We deleted all trials of a tuning, or it is gone itself."""
        with self._lock:
            for name in self._held.pop(key, {}):
                self._tuning_of.pop((key[0], name), None)
            self._doubtful.discard(key)
            self._read.discard(key)
            self._count(key)

    # --- under the lock ---

    def _replace(self, key: Key, fresh: dict[str, _Held], version: int) -> None:
        """By what a list said at `version`."""
        for name, held in list(self._held.get(key, {}).items()):
            if held.version <= version and name not in fresh:
                del self._held[key][name]
                self._tuning_of.pop((key[0], name), None)
        for name, held in fresh.items():
            known = self._held.get(key, {}).get(name)
            if known is None or held.version > known.version:
                self._put(key, name, held)
        self._count(key)

    def _put(self, key: Key, name: str, held: _Held) -> None:
        self._held.setdefault(key, {})[name] = held
        self._tuning_of[(key[0], name)] = key[1]
        self._count(key)

    def _count(self, key: Key) -> None:
        self._changes[key] = self._changes.get(key, 0) + 1


def _hold(found: Json) -> _Held | None:
    """None for one that was made, but not written whole yet."""
    packed = (found.get("status") or {}).get("record")
    if not packed:
        return None
    metadata = found["metadata"]
    owners = tuple(str(owner.get("uid")) for owner in metadata.get("ownerReferences") or [])
    return _Held(int(metadata["resourceVersion"]), owners, packed)


def _tuning(found: Json) -> Key | None:
    """The key of the tuning that a Trial is of, by its label."""
    name = (found["metadata"].get("labels") or {}).get(TUNING_LABEL)
    return (str(found["metadata"]["namespace"]), str(name)) if name else None
