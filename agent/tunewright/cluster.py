"""The controller of one namespace: the loop, its watches and its lease, put together with the adapters of a cluster."""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunewright.controller.context import Context
from tunewright.controller.decisions import go_back
from tunewright.controller.manager import Key, Manager
from tunewright.controller.reconcile import reconcile
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TERMINAL
from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.knobs.facts import ModelFacts
from tunewright.kube.client import Json, Kube
from tunewright.kube.lease import LeaderElection, Role
from tunewright.kube.resources import DEPLOYMENTS, PODS, TUNING_LABEL, TUNINGS
from tunewright.kube.watch import Watcher
from tunewright.observe.prometheus import PrometheusSource
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides
from tunewright.ports import Clock, Refused
from tunewright.propose.proposer import OptunaProposer
from tunewright.store.kubernetes import KubernetesStore
from tunewright.telemetry.metrics import Metrics
from tunewright.telemetry.source import WatchedSource

_log = logging.getLogger(__name__)

LEASE = "tunewright"
PASS = 1.0
"""Seconds between two passes of one tuning at least, but where a step asks to go on at once."""
SILENT = 70.0
"""Seconds after which a silent watch makes the controller unready."""
TRIALS_LAST = 30.0


@dataclass(frozen=True)
class ClusterSettings:
    """What the Deployment of the controller says. `image` is that of load-test pods: our own."""

    namespace: str
    image: str
    identity: str = ""
    image_pull_policy: str = "IfNotPresent"
    load_cpu: str = "1"


class Cluster:
    """Use `run`: it ends with `stop`, or when another holder of the lease was seen."""

    def __init__(self, settings: ClusterSettings, clock: Clock, connect: Callable[..., Kube] = Kube.connect) -> None:
        self.settings, self.clock = settings, clock
        identity = settings.identity or f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
        self.reviews = connect()
        self.election = LeaderElection(self.reviews, clock, namespace=settings.namespace, name=LEASE, identity=identity)
        self.kube = connect(may_write=lambda: self.election.acting)
        # The API's own view: it writes decisions, which need no lease, and never the record.
        self.api_store = KubernetesStore(self.reviews, settings.namespace, clock)
        self.metrics = Metrics({settings.namespace: self.api_store}, clock)
        self.metrics.instruments.leads(lambda: self.election.acting)
        self.manager = Manager(
            self._keys,
            self._step,
            clock,
            may_act=lambda: self.election.acting,
            observe=self.metrics.instruments.reconciled,
        )
        self._contexts: dict[str, tuple[str, Context]] = {}
        self._stores = threading.local()
        self._watchers = [
            Watcher(self.reviews, TUNINGS, self._woken, namespace=settings.namespace, monotonic=clock.monotonic),
            Watcher(
                self.reviews,
                PODS,
                self._woken_by_label,
                namespace=settings.namespace,
                labels=TUNING_LABEL,
                monotonic=clock.monotonic,
            ),
            Watcher(
                self.reviews,
                DEPLOYMENTS,
                self._woken_by_target,
                namespace=settings.namespace,
                monotonic=clock.monotonic,
            ),
        ]
        for resource, watcher in zip(("tunings", "pods", "deployments"), self._watchers, strict=True):
            self.metrics.instruments.watches(resource, watcher.silent_for)
        self._targets: dict[str, set[str]] = {}
        self._released = False

    def run(self, stop: threading.Event) -> bool:
        """Until `stop` (True), or until the leadership is lost for good (False)."""
        for watcher in self._watchers:
            threading.Thread(target=watcher.run, args=(stop,), name="watch", daemon=True).start()
        worker = threading.Thread(target=self.manager.run, args=(stop,), name="manager", daemon=True)
        worker.start()
        self.election.run(stop)
        lost = self.election.role is Role.LOST
        stop.set()
        worker.join(timeout=60.0)
        return not lost

    def unready(self) -> str | None:
        """Why the controller is not ready; None when it is. One that waits for the lease is: it answers reads."""
        if self.election.role is Role.LEADER and not self.election.acting:
            return "the lease could not be renewed: nothing is done until it is"
        for watcher in self._watchers:
            silent = watcher.silent_for()
            if silent is not None and silent > SILENT:
                return f"a watch has been silent for {silent:.0f} s"
        return None

    # --- what wakes the loop ---

    def _woken(self, key: Key, found: Json | None) -> None:
        if found is not None:
            target = found.get("spec", {}).get("target", {}).get("deployment")
            if target:
                self._targets.setdefault(target, set()).add(key[1])
        self.manager.queue.add(key)

    def _woken_by_label(self, key: Key, found: Json | None) -> None:
        name = (found or {}).get("metadata", {}).get("labels", {}).get(TUNING_LABEL)
        if name:
            self.manager.queue.add((key[0], name))

    def _woken_by_target(self, key: Key, _found: Json | None) -> None:
        for name in self._targets.get(key[1], ()):
            self.manager.queue.add((key[0], name))

    # --- one pass ---

    def _keys(self) -> list[Key]:
        found = self.kube.list(TUNINGS, self.settings.namespace).items
        if not self._released:  # when this process begins to lead: what tunings deleted meanwhile left half-way
            self._release_abandoned(found)
            self._released = True
        return [(self.settings.namespace, str(each["metadata"]["name"])) for each in found]

    def _store(self) -> KubernetesStore:
        """One per thread: it remembers what it read last, and is not made for several at once."""
        store: KubernetesStore | None = getattr(self._stores, "store", None)
        if store is None:
            store = KubernetesStore(self.kube, self.settings.namespace, self.clock, trials_last=0.0)
            self._stores.store = store
        return store

    def _step(self, key: Key) -> float | None:
        name, store = key[1], self._store()
        store.acknowledge(name)
        record = store.load(name)
        if record is None:
            return self._let_go(name)
        try:
            context = self._context(record, store)
        except Refused as refusal:
            return self._cannot_be_run(record, store, refusal)
        again = reconcile(name, context)
        if again is None or again == 0.0:
            return again
        return max(PASS, again)

    def _let_go(self, name: str) -> float | None:
        """The tuning was deleted: what it owned goes by its owner references; production is left able to roll."""
        known = self._contexts.get(name)
        if known is None:  # never looked at by this process: the one before may have left its rollout half-way
            self._release_abandoned(self.kube.list(TUNINGS, self.settings.namespace).items)
        elif isinstance(known[1].target, DeploymentTarget) and (left := known[1].target.release()):
            _log.warning("%s/%s was deleted: %s", self.settings.namespace, name, left)
        self._contexts.pop(name, None)
        return None

    def _release_abandoned(self, tunings: Sequence[Json]) -> None:
        live = {str(each["metadata"]["uid"]) for each in tunings}
        for told in release_abandoned(self.kube, self.settings.namespace, live, self.clock):
            _log.warning(told)

    def _cannot_be_run(self, record: TuningRecord, store: KubernetesStore, refusal: Refused) -> float | None:
        """What asks for the impossible is ended at once, with the reason; an edit of the spec starts it anew."""
        if record.phase in TERMINAL:
            return None
        store.save(go_back(record, str(refusal).rstrip("."), self.clock.now()))
        return None

    def _context(self, record: TuningRecord, store: KubernetesStore) -> Context:
        uid = str(self.kube.get(TUNINGS, record.name, self.settings.namespace)["metadata"]["uid"])
        shape = f"{uid}{record.tuning.spec.model_dump_json()}"
        known = self._contexts.get(record.name)
        if known is None or known[0] != shape:
            known = (shape, self._make_context(record.tuning, Owner(record.name, uid), store))
            self._contexts[record.name] = known
        made = known[1]
        return Context(
            clock=made.clock,
            store=store,
            metrics=made.metrics,
            spare=made.spare,
            load=made.load,
            target=made.target,
            proposer=made.proposer,
        )

    def _make_context(self, tuning: Tuning, owner: Owner, store: KubernetesStore) -> Context:
        spec, namespace = tuning.spec, self.settings.namespace
        if spec.target.deployment is None:
            raise Refused(
                "spec.target.deployment must name a Deployment: processes and urls belong to `tunewright tune`"
            )
        if spec.metrics.prometheus is None:
            raise Refused(
                "spec.metrics.prometheus must name Prometheus' URL: a cluster's pods are not scraped directly"
            )
        ref = DeploymentRef(namespace, spec.target.deployment, spec.target.container)
        overrides = Overrides(
            node_selector=spec.spare.node_selector or None,
            gpus=spec.spare.gpus,
            cache_claim=spec.spare.cache_claim,
            cache_path=spec.spare.cache_path,
        )
        prober = Prober(spec.target.model, spec.target.api_key_file)
        settings = LoadPodSettings(self.settings.image, self.settings.image_pull_policy, cpu=self.settings.load_cpu)
        target = DeploymentTarget(
            self.kube,
            owner,
            ref,
            self.clock,
            take_over=spec.promotion.take_over,
            start_timeout=spec.target.start_timeout,
            drain_timeout=spec.target.drain_timeout,
            overrides=overrides,
            prober=prober,
            cold_start=lambda candidate: first_start(store.trials(tuning.metadata.name), candidate),
        )
        return Context(
            clock=self.clock,
            store=store,
            metrics=WatchedSource(
                PrometheusSource(
                    spec.metrics.prometheus,
                    spec.metrics.selector or default_selector(namespace, spec.target.deployment),
                    interval=spec.metrics.interval,
                ),
                self.metrics.instruments,
            ),
            spare=KubernetesSpare(
                self.kube,
                owner,
                ref,
                self.clock,
                start_timeout=spec.spare.start_timeout,
                overrides=overrides,
                prober=prober,
                parallelism=spec.spare.parallelism,
            ),
            load=KubernetesLoadTest(self.kube, owner, namespace, settings, self.clock, api_key=target.api_key),
            target=target,
            proposer=OptunaProposer(spec.search, ModelFacts(), spec.load),
        )


def first_start(trials: Sequence[TrialRecord], candidate: Candidate) -> float | None:
    """Seconds that a candidate took to start in its first trial: nothing of it was cached then."""
    return next((t.start_seconds for t in trials if t.candidate.hash == candidate.hash and t.start_seconds), None)


def default_selector(namespace: str, deployment: str) -> str:
    """The series of the target's pods and of its canary's, and of nobody else's whose name begins alike."""
    return f'namespace="{namespace}",pod=~"{deployment}(-canary)?-[a-z0-9]+-[a-z0-9]{{5}}"'
