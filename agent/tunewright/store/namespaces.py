"""The stores of a cluster: one for each namespace that has Tunings, or that of one namespace alone."""

import threading
from collections.abc import Iterable

from tunewright.kube.client import Kube
from tunewright.kube.resources import TUNINGS
from tunewright.ports import Clock, Key
from tunewright.store.kubernetes import KubernetesStore
from tunewright.store.kubernetes_trials import TrialMemory


class KubernetesStores:
    """Implements `ports.Stores` on custom resources.

    A store is made when its namespace is asked for, and dropped once that has no Tunings any more. Whoever still works
    with a dropped one is safe: a record is only ever written to the very Tuning that it was read from.
    """

    def __init__(
        self, kube: Kube, own: str, clock: Clock, *, everywhere: bool = False, trials: TrialMemory | None = None
    ) -> None:
        """`trials` is that of `KubernetesStore`."""
        self.own, self.everywhere = own, everywhere
        self._kube, self._clock, self._trials = kube, clock, trials
        self._stores: dict[str, KubernetesStore] = {}
        self._lock = threading.Lock()

    @property
    def scope(self) -> str | None:
        """The namespace to list and watch; None: all of them."""
        return None if self.everywhere else self.own

    def of(self, namespace: str) -> KubernetesStore | None:
        """The store of one namespace; None where its Tunings are not served here."""
        if not self.everywhere and namespace != self.own:
            return None
        with self._lock:
            store = self._stores.get(namespace)
            if store is None:
                store = KubernetesStore(self._kube, namespace, self._clock, trials=self._trials)
                self._stores[namespace] = store
            return store

    def tunings(self) -> list[Key]:
        """Every Tuning that is not being deleted, sorted: one list of the API server's."""
        found = (each["metadata"] for each in self._kube.list(TUNINGS, self.scope, metadata_only=True).items)
        keys = sorted((str(each["namespace"]), str(each["name"])) for each in found if "deletionTimestamp" not in each)
        self.keep(keys)
        return keys

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget what is remembered of all other Tunings: they are gone."""
        there: dict[str, set[str]] = {}
        for namespace, name in keys:
            there.setdefault(namespace, set()).add(name)
        with self._lock:
            self._stores = {namespace: store for namespace, store in self._stores.items() if namespace in there}
            for namespace, store in self._stores.items():
                store.keep(there[namespace])
