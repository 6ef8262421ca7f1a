"""The controller of a namespace, or of all: loop, watches and lease, put together with the adapters of a cluster."""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tunewright.controller.context import Context
from tunewright.controller.decisions import go_back
from tunewright.controller.manager import Manager
from tunewright.controller.reconcile import reconcile
from tunewright.domain.answers import QualityPrompt
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import BEFORE_CONFIRMING, TERMINAL
from tunewright.domain.state import TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import NotFound
from tunewright.kube.lease import LeaderElection, Role
from tunewright.kube.neighbours import Neighbours, scope_labels
from tunewright.kube.resources import CONFIG_MAPS, TRIALS, TUNINGS
from tunewright.kube.wakes import TRIALS_PAGE, Wakes
from tunewright.observe.prometheus import PrometheusSource
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.inquiry import ImageInquiry
from tunewright.platform.kubernetes.loadfile import LoadFiles
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides
from tunewright.ports import Clock, Key, Refused
from tunewright.promptsfile import QUALITY, parse_prompts
from tunewright.propose.proposer import OptunaProposer
from tunewright.store.kubernetes_pass import Pass
from tunewright.store.kubernetes_seen import SeenTunings
from tunewright.store.kubernetes_trials import TrialMemory
from tunewright.store.namespaces import KubernetesStores
from tunewright.telemetry.metrics import Metrics
from tunewright.telemetry.source import WatchedSource
from tunewright.tokenfile import credential

_log = logging.getLogger(__name__)

LEASE = "tunewright"
PASS = 1.0
"""Seconds between two passes of one tuning at least, but where a step asks to go on at once."""
NEIGHBOUR = 10.0
"""Seconds between two looks whether another controller still drives a tuning."""
CALLS = 16
"""Calls of the loop to the API server at once: more would only wait there."""
PROMPTS_KEY = "prompts.jsonl"
CREDENTIALS = Path("/etc/tunewright/credentials")
"""Where Secrets are mounted whose files a Tuning may name."""


@dataclass(frozen=True)
class ClusterSettings:
    """What the Deployment of the controller says. `image` is that of load-test pods: our own.

    `namespace` is the controller's own, where its Lease is; with `all_namespaces` it serves the others too. Only files
    in `credentials` are read for a Tuning; with `all_namespaces`, in its folder of the Tuning's namespace.
    """

    namespace: str
    image: str
    identity: str = ""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    load_cpu: str = "1"
    all_namespaces: bool = False
    credentials: Path = CREDENTIALS


class Cluster:
    """Use `run`: it ends with `stop`, or when another holder of the lease was seen."""

    def __init__(self, settings: ClusterSettings, clock: Clock, connect: Callable[..., Kube] = Kube.connect) -> None:
        self.settings, self.clock = settings, clock
        own, everywhere = settings.namespace, settings.all_namespaces
        me = settings.identity or f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
        self.reviews = connect(observe=self._sent)
        self.election = LeaderElection(
            self.reviews,
            clock,
            namespace=own,
            name=LEASE,
            identity=me,
            labels=scope_labels(everywhere=everywhere),
        )
        self.kube = connect(may_write=lambda: self.election.acting, observe=self._sent, at_once=CALLS)
        self.trials = TrialMemory()
        self.stores = KubernetesStores(self.kube, own, clock, everywhere=everywhere, trials=self.trials)
        # The API's own view: it writes decisions, which need no lease, and never the record.
        self.api_stores = KubernetesStores(self.reviews, own, clock, everywhere=everywhere, trials=self.trials)
        self.neighbours = Neighbours(self.reviews, clock, own=own, lease=LEASE) if everywhere else None
        self.seen = SeenTunings(own, self.trials, clock, lambda: self.wakes.trouble())
        self.metrics = Metrics(self.seen, clock)
        self.metrics.instruments.leads(lambda: self.election.acting)
        self.manager = Manager(
            self._keys,
            self._step,
            clock,
            may_act=lambda: self.election.acting,
            woken=lambda: self.wakes.trouble() is None,
            observe=self.metrics.instruments.reconciled,
        )
        self.wakes = Wakes(
            self.reviews,
            self.manager.queue.wake,
            clock,
            namespace=self.stores.scope,
            on_tuning=self._changed,
            on_trial=self.trials.heard,
            on_trials_listed=self.trials.listed,
            knows=self.seen.knows,
        )
        for resource, watcher in self.wakes.watchers.items():
            self.metrics.instruments.watches(resource, watcher.silent_for)
        self._contexts: dict[Key, tuple[str, Context, ImageInquiry]] = {}
        self._left: dict[str, str] = {}
        self._term, self._beginning = 0, threading.Lock()

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

    def _sent(self, verb: str, resource: str, status: int | None) -> None:
        self.metrics.instruments.sent(verb, resource, status)

    def _changed(self, key: Key, found: Json | None) -> bool:
        store = self.stores.of(key[0])
        return self.seen.heard(key, found, store.written(key[1]) if store is not None else 0)

    # --- one pass ---

    def _keys(self) -> list[Key]:
        self._begin_term()
        keys = (
            self.seen.known()
            if self.wakes.trouble() is None
            else [_key(each) for each in self._tunings(self.stores.scope)]
        )
        self.stores.keep(keys)
        return keys

    def _begin_term(self) -> None:
        """Once when this process begins to lead, before any pass: others may have written meanwhile."""
        with self._beginning:
            term = self.election.term
            if term == self._term:
                return
            self.trials.read_all(self.kube.pages(TRIALS, self.stores.scope, page=TRIALS_PAGE))
            self._release_abandoned(self.stores.scope)  # what tunings that were deleted meanwhile left half-way
            self._term = term

    def _tunings(self, namespace: str | None) -> list[Json]:
        """The metadata of all Tunings as they are now."""
        return [each["metadata"] for each in self.kube.list(TUNINGS, namespace, metadata_only=True).items]

    def _step(self, key: Key) -> float | None:
        self._begin_term()
        store = self.stores.of(key[0])
        if store is None:
            return None
        if self._is_left(key):
            return NEIGHBOUR if self.seen.knows(key) else None
        view = Pass(store, key[1])
        record = view.load(key[1])
        if record is None:
            if not view.uid:
                self._let_go(key)
            return None
        try:
            context = self._context(key[0], record, view)
        except Refused as refusal:
            return self._cannot_be_run(record, view, refusal)
        inquiry = self._contexts[key][2]
        if record.phase in BEFORE_CONFIRMING:  # asked long before the search wants to know, mostly
            inquiry.look()
        else:
            inquiry.end()
        again = reconcile(key[1], context)
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
        self.trials.doubt(key)  # the other one writes them
        return True

    def _let_go(self, key: Key) -> None:
        """The tuning was deleted: what it owned goes by its owner references, and a canary out of its HTTPRoute
        by us; production is left able to roll."""
        namespace = key[0]
        known = self._contexts.get(key)
        if known is None:  # never looked at by this process: the one before may have left its rollout half-way
            self._release_abandoned(namespace)
        elif isinstance(known[1].target, DeploymentTarget):
            try:
                left = known[1].target.release()
            except Refused as refusal:
                left = f"its target is left as it is: {refusal}"
            if left:
                _log.warning("%s/%s was deleted: %s", *key, left)
        self._contexts.pop(key, None)

    def _release_abandoned(self, namespace: str | None) -> None:
        live = {str(each["uid"]) for each in self._tunings(namespace)}
        for told in release_abandoned(self.kube, namespace, live, self.clock):
            _log.warning(told)

    def _cannot_be_run(self, record: TuningRecord, view: Pass, refusal: Refused) -> float | None:
        """What asks for the impossible is ended at once, with the reason; an edit of the spec starts it anew."""
        if record.phase in TERMINAL:
            return None
        view.save(go_back(record, str(refusal).rstrip("."), self.clock.now()))
        return None

    def _context(self, namespace: str, record: TuningRecord, view: Pass) -> Context:
        shape, key = f"{view.uid}{record.tuning.spec.model_dump_json()}", (namespace, record.name)
        known = self._contexts.get(key)
        if known is None or known[0] != shape:
            if known is not None and not known[0].startswith(view.uid):
                self._release_abandoned(namespace)  # deleted and made again between two looks at it
            owner = Owner(record.name, view.uid)
            known = (shape, *self._make_context(namespace, record.tuning, owner, view))
            self._contexts[key] = known
        return replace(known[1], store=view, others=self.stores.of(namespace))

    def _make_context(self, namespace: str, tuning: Tuning, owner: Owner, view: Pass) -> tuple[Context, ImageInquiry]:
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
        api_key_file = self._credential(namespace, spec.target.api_key_file, "target.apiKeyFile")
        prometheus_token = self._credential(namespace, spec.metrics.bearer_token_file, "metrics.bearerTokenFile")
        prober = Prober(spec.target.model, str(api_key_file) if api_key_file else None)
        settings = LoadPodSettings(
            self.settings.image,
            self.settings.image_pull_policy,
            self.settings.image_pull_secrets,
            cpu=self.settings.load_cpu,
        )
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
            canary_labels=spec.promotion.canary.labels,
            http_route=spec.promotion.canary.http_route,
            cold_start=lambda candidate: first_start(self.trials.of((namespace, owner.name), owner.uid), candidate),
            longest_answer=lambda: longest_answer(self.trials.of((namespace, owner.name), owner.uid)),
        )
        inquiry = ImageInquiry(self.kube, owner, ref, self.clock, overrides)
        context = Context(
            clock=self.clock,
            store=view,
            metrics=WatchedSource(
                PrometheusSource(
                    spec.metrics.prometheus,
                    spec.metrics.selector or default_selector(namespace, spec.target.deployment),
                    interval=spec.metrics.interval,
                    bearer_token_file=prometheus_token,
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
            proposer=OptunaProposer(spec.search, inquiry.known, spec.load),
            prompts=partial(config_map_prompts, self.kube, namespace, spec.quality.prompts_config_map),
            load_file=partial(LoadFiles(self.kube, owner, namespace).keep, spec.load),
        )
        return context, inquiry

    def _credential(self, namespace: str, named: str | None, field: str) -> Path | None:
        """The file with a token that a Tuning names. Raises `Refused` for one that is not for its namespace."""
        if named is None:
            return None
        folder = self.settings.credentials
        return credential(folder / namespace if self.settings.all_namespaces else folder, named, field)


def config_map_prompts(kube: Kube, namespace: str, name: str | None) -> Sequence[QualityPrompt]:
    """The prompts of the quality gate in the ConfigMap `name`; none without one. Raises `Refused` or `PortError`."""
    if name is None:
        return ()
    where = f"quality.promptsConfigMap: {PROMPTS_KEY} of ConfigMap {name}"
    try:
        found = kube.get(CONFIG_MAPS, name, namespace)
    except NotFound:
        raise Refused(f"quality.promptsConfigMap: there is no ConfigMap {name} in namespace {namespace}") from None
    text = (found.get("data") or {}).get(PROMPTS_KEY)
    if text is None:
        raise Refused(f"quality.promptsConfigMap: ConfigMap {name} has no key {PROMPTS_KEY}")
    return parse_prompts(text, where, QUALITY)


def first_start(trials: Sequence[TrialRecord], candidate: Candidate) -> float | None:
    """Seconds that a candidate took to start in its first trial: nothing of it was cached then."""
    return next((t.start_seconds for t in trials if t.candidate.hash == candidate.hash and t.start_seconds), None)


def longest_answer(trials: Sequence[TrialRecord]) -> float | None:
    """Seconds that the slowest hundredth of the answers took in any confirming run: near the longest of production."""
    runs = [t.measurement for t in trials if t.purpose is TrialPurpose.CONFIRM and t.measurement is not None]
    return max((run.e2e.p99 for run in runs), default=None)


def _key(metadata: Json) -> Key:
    return str(metadata["namespace"]), str(metadata["name"])


def default_selector(namespace: str, deployment: str) -> str:
    """The series of the target's pods and of its canary's, and of nobody else's whose name begins alike."""
    return f'namespace="{namespace}",pod=~"{deployment}(-canary)?-[a-z0-9]+-[a-z0-9]{{5}}"'
