"""Failed starts and deaths of production servers: how often, when to try again, and when to stop trying."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from tunewright.domain.model import Model
from tunewright.domain.state import Failure, FailureKind
from tunewright.platform.process import records
from tunewright.ports import Clock

MAX_ATTEMPTS = 3
"""Failures of one place under a configuration that is not production's own, after which it is not tried again."""

_FIRST_WAIT = 5.0
_LONGEST_WAIT = 300.0
_FORGET = 3600.0


class Entry(Model):
    """What went wrong with one configuration in one place."""

    slot: str
    candidate: str
    count: int = 0
    at: float = 0.0
    failure: Failure


class _Entries(Model):
    entries: tuple[Entry, ...] = Field(default=())


class Attempts:
    """The entries, kept in a file."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock

    def failed(self, slot: str, candidate: str, failure: Failure) -> None:
        """Count one more."""
        entries = self._read()
        old = next((entry for entry in entries if (entry.slot, entry.candidate) == (slot, candidate)), None)
        now = self._clock.now()
        count = old.count if old is not None and now - old.at < _FORGET else 0
        new = Entry(slot=slot, candidate=candidate, count=count + 1, at=now, failure=failure)
        self._write([entry for entry in entries if entry is not old] + [new])

    def may_start(self, slot: str, candidate: str, bounded: bool) -> bool:
        """Whether another attempt is due; `bounded`: only so many in all."""
        entry = self._find(slot, candidate)
        if entry is None:
            return True
        if bounded and entry.count >= MAX_ATTEMPTS:
            return False
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(entry.count - 1, 10))
        return not 0 <= self._clock.now() - entry.at < wait

    def failure_of(self, candidate: str) -> Failure | None:
        """Why this configuration failed; what the machine is to blame for only once it was tried often enough."""
        for entry in self._read():
            told = not entry.failure.machine_fault or entry.count >= MAX_ATTEMPTS
            if entry.candidate == candidate and told:
                return entry.failure
        return None

    def killed(self, slots: Iterable[str]) -> str | None:
        """Which of these servers somebody else ended."""
        names = [e.slot for e in self._read() if e.slot in slots and e.failure.kind is FailureKind.KILLED]
        return f"{', '.join(names)} was ended by somebody else" if names else None

    def keep_only(self, candidates: Iterable[str]) -> None:
        """Forget what is about other configurations."""
        entries, wanted = self._read(), set(candidates)
        kept = [entry for entry in entries if entry.candidate in wanted]
        if len(kept) < len(entries):
            self._write(kept)

    def _find(self, slot: str, candidate: str) -> Entry | None:
        return next((e for e in self._read() if (e.slot, e.candidate) == (slot, candidate)), None)

    def _read(self) -> list[Entry]:
        stored = records.read(self._path, _Entries)
        return list(stored.entries) if stored is not None else []

    def _write(self, entries: list[Entry]) -> None:
        records.write(self._path, _Entries(entries=tuple(entries)))
