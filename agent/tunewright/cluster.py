"""The controller of a namespace, or of all: loop, watches and lease, put together with the adapters of a cluster."""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tunewright.controller.context import Context
from tunewright.controller.decisions import go_back
from tunewright.controller.manager import Manager
from tunewright.controller.reconcile import reconcile
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TERMINAL
from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.knobs.facts import ModelFacts
from tunewright.kube.client import Json, Kube
from tunewright.kube.lease import LeaderElection, Role
from tunewright.kube.neighbours import Neighbours, scope_labels
from tunewright.kube.resources import TUNINGS
from tunewright.kube.wakes import Wakes
from tunewright.observe.prometheus import PrometheusSource
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides
from tunewright.ports import Clock, Key, Refused
from tunewright.propose.proposer import OptunaProposer
from tunewright.store.kubernetes import KubernetesStore
from tunewright.store.namespaces import KubernetesStores
from tunewright.telemetry.metrics import Metrics
from tunewright.telemetry.source import WatchedSource

_log = logging.getLogger(__name__)

LEASE = "tunewright"
PASS = 1.0
"""Seconds between two passes of one tuning at least, but where a step asks to go on at once."""
NEIGHBOUR = 10.0
"""Seconds between two looks whether another controller still drives a tuning."""
TRIALS_LAST = 30.0
"""Seconds for which the loop, which alone writes trials, takes them from memory."""


@dataclass(frozen=True)
class ClusterSettings:
    """What the Deployment of the controller says. `image` is that of load-test pods: our own.

    `namespace` is the controller's own, where its Lease is; with `all_namespaces` it serves the others too.
    """

    namespace: str
    image: str
    identity: str = ""
    image_pull_policy: str = "IfNotPresent"
    load_cpu: str = "1"
    all_namespaces: bool = False


class Cluster:
    """Use `run`: it ends with `stop`, or when another holder of the lease was seen."""

    def __init__(self, settings: ClusterSettings, clock: Clock, connect: Callable[..., Kube] = Kube.connect) -> None:
        self.settings, self.clock = settings, clock
        own, everywhere = settings.namespace, settings.all_namespaces
        me = settings.identity or f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
        self.reviews = connect()
        self.election = LeaderElection(
            self.reviews,
            clock,
            namespace=own,
            name=LEASE,
            identity=me,
            labels=scope_labels(everywhere=everywhere),
        )
        self.kube = connect(may_write=lambda: self.election.acting)
        self.stores = KubernetesStores(self.kube, own, clock, everywhere=everywhere, trials_last=TRIALS_LAST)
        # The API's own view: it writes decisions, which need no lease, and never the record.
        self.api_stores = KubernetesStores(self.reviews, own, clock, everywhere=everywhere)
        self.neighbours = Neighbours(self.reviews, clock, own=own, lease=LEASE) if everywhere else None
        self.metrics = Metrics(self.api_stores, clock)
        self.metrics.instruments.leads(lambda: self.election.acting)
        self.manager = Manager(
            self._keys,
            self._step,
            clock,
            may_act=lambda: self.election.acting,
            observe=self.metrics.instruments.reconciled,
        )
        self.wakes = Wakes(self.reviews, self.manager.queue.add, clock, namespace=self.stores.scope)
        for resource, watcher in self.wakes.watchers.items():
            self.metrics.instruments.watches(resource, watcher.silent_for)
        self._contexts: dict[Key, tuple[str, Context]] = {}
        self._left: dict[str, str] = {}
        self._released = False

    def run(self, stop: threading.Event) -> bool:
        """Until `stop` (True), or until the leadership is lost for good (False)."""
        self.wakes.start(stop)
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
        return self.wakes.trouble()

    # --- one pass ---

    def _keys(self) -> list[Key]:
        found = self.kube.list(TUNINGS, self.stores.scope).items
        if not self._released:  # when this process begins to lead: what tunings deleted meanwhile left half-way
            self._release_abandoned(self.stores.scope, found)
            self._released = True
        keys = [(str(each["metadata"]["namespace"]), str(each["metadata"]["name"])) for each in found]
        self.stores.keep(keys)
        return keys

    def _step(self, key: Key) -> float | None:
        namespace, name = key
        store = self.stores.of(namespace)
        if store is None:
            return None
        if self._is_left(key):
            return NEIGHBOUR if store.load(name) is not None else None
        store.acknowledge(name)
        record = store.load(name)
        if record is None:
            self._let_go(key)
            return None
        try:
            context = self._context(namespace, record, store)
        except Refused as refusal:
            return self._cannot_be_run(record, store, refusal)
        again = reconcile(name, context)
        if again is None or again == 0.0:
            return again
        return max(PASS, again)

    def _is_left(self, key: Key) -> bool:
        """Whether another controller drives this tuning; told once for each namespace and change."""
        namespace = key[0]
        other = self.neighbours.instead(namespace) if self.neighbours is not None else None
        if self._left.get(namespace) != other:
            told = f"left to {other}" if other else "served from here now"
            _log.warning("namespace %s: its tunings are %s", namespace, told)
        if other is None:
            self._left.pop(namespace, None)
            return False
        self._left[namespace] = other
        self._contexts.pop(key, None)
        return True

    def _let_go(self, key: Key) -> None:
        """The tuning was deleted: what it owned goes by its owner references; production is left able to roll."""
        namespace = key[0]
        known = self._contexts.get(key)
        if known is None:  # never looked at by this process: the one before may have left its rollout half-way
            self._release_abandoned(namespace, self.kube.list(TUNINGS, namespace).items)
        elif isinstance(known[1].target, DeploymentTarget):
            try:
                left = known[1].target.release()
            except Refused as refusal:
                left = f"its target is left as it is: {refusal}"
            if left:
                _log.warning("%s/%s was deleted: %s", *key, left)
        self._contexts.pop(key, None)

    def _release_abandoned(self, namespace: str | None, tunings: Sequence[Json]) -> None:
        live = {str(each["metadata"]["uid"]) for each in tunings}
        for told in release_abandoned(self.kube, namespace, live, self.clock):
            _log.warning(told)

    def _cannot_be_run(self, record: TuningRecord, store: KubernetesStore, refusal: Refused) -> float | None:
        """What asks for the impossible is ended at once, with the reason; an edit of the spec starts it anew."""
        if record.phase in TERMINAL:
            return None
        store.save(go_back(record, str(refusal).rstrip("."), self.clock.now()))
        return None

    def _context(self, namespace: str, record: TuningRecord, store: KubernetesStore) -> Context:
        uid = str(self.kube.get(TUNINGS, record.name, namespace)["metadata"]["uid"])
        shape, key = f"{uid}{record.tuning.spec.model_dump_json()}", (namespace, record.name)
        known = self._contexts.get(key)
        if known is None or known[0] != shape:
            known = (shape, self._make_context(namespace, record.tuning, Owner(record.name, uid), store))
            self._contexts[key] = known
        return replace(known[1], store=store)

    def _make_context(self, namespace: str, tuning: Tuning, owner: Owner, store: KubernetesStore) -> Context:
        spec = tuning.spec
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
