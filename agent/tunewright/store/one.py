"""One store as all that a program serves."""

from tunewright.ports import Key, Store


class OneStore:
    """Implements `ports.Stores` by the store of one namespace, or of none outside of Kubernetes."""

    everywhere = False

    def __init__(self, store: Store, namespace: str = "") -> None:
        self.own, self._store = namespace, store

    def of(self, namespace: str) -> Store | None:
        """The store, for its own namespace alone."""
        return self._store if namespace == self.own else None

    def tunings(self) -> list[Key]:
        """Every tuning, sorted."""
        return [(self.own, name) for name in self._store.names()]
