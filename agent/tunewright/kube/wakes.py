"""What wakes the loop: changes of Tunings, of the pods made for them, and of the Deployments that they tune."""

import threading
from collections.abc import Callable

from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, PODS, TUNING_LABEL, TUNINGS
from tunewright.kube.watch import Watcher
from tunewright.ports import Clock, Key

SILENT = 70.0
"""Seconds after which a silent watch is in trouble."""


class Wakes:
    """Calls `wake` with the key of each tuning that a change may be about; `namespace` None: those of all namespaces.

    Each watch runs in a thread of its own, and `wake` is called from there.
    """

    def __init__(self, kube: Kube, wake: Callable[[Key], None], clock: Clock, *, namespace: str | None) -> None:
        self._wake = wake
        self._targets: dict[Key, Key] = {}
        self._lock = threading.Lock()
        monotonic = clock.monotonic
        self.watchers = {
            "tunings": Watcher(kube, TUNINGS, self._tuning, namespace=namespace, monotonic=monotonic),
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
        self._wake(key)

    def _pod(self, key: Key, found: Json | None) -> None:
        name = (found or {}).get("metadata", {}).get("labels", {}).get(TUNING_LABEL)
        if name:
            self._wake((key[0], name))

    def _deployment(self, key: Key, _found: Json | None) -> None:
        with self._lock:
            tunings = [tuning for tuning, target in self._targets.items() if target == key]
        for tuning in tunings:
            self._wake(tuning)
