"""The store as one pass over one tuning sees it: the Tuning is read once, afresh, when the pass begins."""

from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.ports import Objection, no_objection
from tunewright.store.kubernetes import KubernetesStore, decisions_of


class Pass:
    """Implements `ports.Store` for a single tuning, for as long as one pass takes.

    What is decided rests on one sight of the Tuning, and is written only where that still holds or was changed by
    others than the loop (a decision, an edit), which the next pass takes up.
    """

    def __init__(self, store: KubernetesStore, name: str) -> None:
        """Reads the Tuning, and says in its status that its spec was seen. Raises `PortError`."""
        self._store, self._name = store, name
        self._found = store.find(name)
        if self._found is not None:
            self._found, _ = store.acknowledge_found(self._found)
        self._record = store.record_of(self._found) if self._found is not None else None

    @property
    def uid(self) -> str:
        """The Tuning's; empty when it is not there."""
        return str(self._found["metadata"]["uid"]) if self._found is not None else ""

    def names(self) -> list[str]:
        """This one."""
        return [self._name]

    def load(self, name: str) -> TuningRecord | None:
        """The record as it was read or written last in this pass."""
        self._only(name)
        return self._record

    def save(self, record: TuningRecord) -> TuningRecord:
        """As `KubernetesStore.save`."""
        self._only(record.name)
        self._record, self._found = self._store.write(record, self._found)
        return self._record

    def trials(self, name: str) -> list[TrialRecord]:
        """As `KubernetesStore.trials`."""
        self._only(name)
        return self._store.trials(name)

    def save_trial(self, name: str, trial: TrialRecord) -> None:
        """As `KubernetesStore.save_trial`."""
        self._only(name)
        self._store.save_trial(name, trial)

    def clear_trials(self, name: str) -> None:
        """As `KubernetesStore.clear_trials`."""
        self._only(name)
        self._store.clear_trials(name)

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        """As `KubernetesStore.decide`."""
        self._only(name)
        self._store.decide(name, decision, unless)

    def decisions(self, name: str) -> list[Decision]:
        """The decisions as they were when the pass began."""
        self._only(name)
        return decisions_of(self._found) if self._found is not None else []

    def delete(self, name: str) -> None:
        """As `KubernetesStore.delete`."""
        self._only(name)
        self._store.delete(name)

    def _only(self, name: str) -> None:
        if name != self._name:
            raise ValueError(f"this pass is over {self._name}, not {name}")
