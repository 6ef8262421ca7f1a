"""What wakes the loop: changes of Tunings, of the pods made for them, and of the Deployments that they tune.

Beside them Trials are watched: they wake nobody.
"""

import threading
from collections.abc import Callable

from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, PODS, TRIALS, TUNING_LABEL, TUNINGS
from tunewright.kube.watch import Watcher
from tunewright.ports import Clock, Key

SILENT = 70.0
"""Seconds after which a silent watch is in trouble."""


TRIALS_PAGE = 50
"""Trials in one answer, so that even the largest fit into what the client takes."""


class Wakes:
    """Calls `wake` with the key of each tuning that a change may be about; `namespace` None: those of all namespaces.

    Each watch runs in a thread of its own, and `wake` is called from there.
    """

    def __init__(
        self,
        kube: Kube,
        wake: Callable[[Key], None],
        clock: Clock,
        *,
        namespace: str | None,
        on_tuning: Callable[[Key, Json | None], bool] = lambda _key, _found: True,
        on_trial: Callable[[Key, Json | None], None] = lambda _key, _found: None,
        on_trials_listed: Callable[[], None] = lambda: None,
        knows: Callable[[Key], bool] = lambda _key: True,
    ) -> None:
        """`on_tuning` is told of every change of a Tuning, and says whether it is to wake; `on_trial` of every Trial
        and its change, and `on_trials_listed` when all there are were told. `knows` says whether there is a Tuning:
        pods that go with theirs wake nobody."""
        self._wake, self._on_tuning, self._knows = wake, on_tuning, knows
        self._targets: dict[Key, Key] = {}
        self._lock = threading.Lock()
        monotonic = clock.monotonic
        self.watchers = {
            "tunings": Watcher(kube, TUNINGS, self._tuning, namespace=namespace, monotonic=monotonic),
            "trials": Watcher(
                kube, TRIALS, on_trial, namespace=namespace, page=TRIALS_PAGE, on_listed=on_trials_listed,
                monotonic=monotonic,
            ),
            "pods": Watcher(
                kube, PODS, self._pod, namespace=namespace, labels=TUNING_LABEL, monotonic=monotonic
            ),
            "deployments": Watcher(kube, DEPLOYMENTS, self._deployment, namespace=namespace, monotonic=monotonic),
        }  # fmt: skip
        """By the resource that is watched."""

    def start(self, stop: threading.Event) -> None:
        """Watch until `stop`."""
        for resource, watcher in self.watchers.items():
            threading.Thread(target=watcher.run, args=(stop,), name=f"watch-{resource}", daemon=True).start()

    def trouble(self) -> str | None:
        """Which watch does not work; None when all do."""
        for resource, watcher in self.watchers.items():
            silent = watcher.silent_for()
            if silent is None:
                return f"the watch of {resource} was never answered: the log says why, mostly rights that are missing"
            if silent > SILENT:
                return f"the watch of {resource} has been silent for {silent:.0f} s"
        return None

    def _tuning(self, key: Key, found: Json | None) -> None:
        target = (found or {}).get("spec", {}).get("target", {}).get("deployment")
        with self._lock:
            if target:
                self._targets[key] = (key[0], str(target))
            else:
                self._targets.pop(key, None)
        if self._on_tuning(key, found):
            self._wake(key)

    def _pod(self, key: Key, found: Json | None) -> None:
        name = (found or {}).get("metadata", {}).get("labels", {}).get(TUNING_LABEL)
        if name and self._knows((key[0], name)):
            self._wake((key[0], name))

    def _deployment(self, key: Key, _found: Json | None) -> None:
        with self._lock:
            tunings = [tuning for tuning, target in self._targets.items() if target == key]
        for tuning in tunings:
            self._wake(tuning)
