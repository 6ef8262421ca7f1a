"""A store in memory, with the manners of the durable ones."""

import threading

from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.ports import Conflict, Objected, Objection, Refused, no_objection


class MemoryStore:
    """Every record goes through JSON once, so that what can't be stored elsewhere fails here too; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._tunings: dict[str, TuningRecord] = {}
        self._trials: dict[str, dict[str, TrialRecord]] = {}
        self._decisions: dict[str, list[Decision]] = {}

    def names(self) -> list[str]:
        """Names of all tunings, sorted."""
        with self._lock:
            return sorted(self._tunings)

    def load(self, name: str) -> TuningRecord | None:
        """The tuning's record."""
        with self._lock:
            return self._tunings.get(name)

    def save(self, record: TuningRecord) -> TuningRecord:
        """Write it if its version is the stored one; the record with its new version."""
        with self._lock:
            name, there = record.name, record.name in self._tunings
            if record.version != (self._versions[name] if there else 0):
                raise Conflict(f"the tuning {name} was written by somebody else; read it again")
            # A deleted name goes on counting: an old reader must not take the new record for the one it read.
            saved = record.model_copy(update={"version": self._versions.get(name, 0) + 1})
            self._tunings[name] = TuningRecord.model_validate_json(saved.model_dump_json())
            self._versions[name] = saved.version
            return saved

    def trials(self, name: str) -> list[TrialRecord]:
        """The tuning's trials by number."""
        with self._lock:
            return sorted(self._trials.get(name, {}).values(), key=lambda trial: (trial.number, trial.id))

    def save_trial(self, name: str, trial: TrialRecord) -> None:
        """Write one trial, over the one of the same id."""
        with self._lock:
            if name not in self._tunings:
                raise Conflict(f"the tuning {name} is not there (any more); read again")
            self._trials.setdefault(name, {})[trial.id] = TrialRecord.model_validate_json(trial.model_dump_json())

    def clear_trials(self, name: str) -> None:
        """Forget the trials of a tuning that starts anew."""
        with self._lock:
            self._trials.pop(name, None)

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        """Keep a person's decision; raises `Refused` when there is no such tuning, `Objected` by `unless`."""
        with self._lock:
            if name not in self._tunings:
                raise Refused(f"there is no tuning {name}; there are: {', '.join(sorted(self._tunings)) or 'none'}")
            kept = self._decisions.setdefault(name, [])
            if (why := unless(kept)) is not None:
                raise Objected(why)
            kept.append(decision)

    def decisions(self, name: str) -> list[Decision]:
        """Every decision ever taken on this tuning, oldest first."""
        with self._lock:
            return list(self._decisions.get(name, ()))

    def delete(self, name: str) -> None:
        """Forget the tuning and all that belongs to it."""
        with self._lock:
            for table in (self._tunings, self._trials, self._decisions):
                table.pop(name, None)
