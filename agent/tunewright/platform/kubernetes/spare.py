"""The spares as pods: one candidate at a time on each, in a pod made from the target's own pod template."""

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tunewright.domain.candidate import Candidate
from tunewright.domain.redact import HIDDEN, redact
from tunewright.domain.state import Failure, FailureKind, StartMemory
from tunewright.knobs import readback
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, Invalid, NotAdmitted, NotFound
from tunewright.kube.resources import CONFIG_MAPS, GROUP, PODS
from tunewright.kube.times import parse_time
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.names import TRIAL_ANNOTATION, Owner, joined
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides, own_pods, tie_to_node, tied_node
from tunewright.platform.process import probe
from tunewright.platform.process.probe import Health
from tunewright.ports import Clock, PortError, Refused, ServerPhase, ServerStatus

STOP_GRACE = 15
"""Seconds between SIGTERM and SIGKILL."""
SILENCE = 60.0
"""Seconds that a server that was ready may leave /health unanswered before it counts as hung."""
LOGS_KEPT = 50
LOG_BYTES = 32 * 1024

_LOOKS = 4
"""Half-second looks for how a container ended that does not answer any more."""

_TRIAL, _LOG = "trial", "log"
_READY_ANNOTATION = f"{GROUP}/ready"
_CANDIDATE_ANNOTATION = f"{GROUP}/candidate"
_SLOT_LABEL = f"{GROUP}/spare"
_SCRAPED = "prometheus.io/"


class KubernetesSpare:
    """Implements `ports.Spare` for one tuning. Needs of the API: get, list, create, patch, delete pods; pods/log; the
    target's Deployment, ReplicaSets and claims to read; ConfigMaps to keep the logs of failed starts in.
    """

    def __init__(
        self,
        kube: Kube,
        owner: Owner,
        target: DeploymentRef,
        clock: Clock,
        *,
        start_timeout: float,
        overrides: Overrides | None = None,
        prober: Prober | None = None,
        parallelism: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`start_timeout` bounds the wait for a node, and then the start itself, in seconds each.

        A spare is what the scheduler gives a pod: `parallelism` bounds how many there are at a time.
        """
        self._kube, self._owner, self._target, self._clock = kube, owner, target, clock
        self._start_timeout, self._parallelism = start_timeout, parallelism
        self._overrides = overrides or Overrides()
        self._prober = prober or Prober()
        self._sleep = sleep
        self._launched: set[str] = set()
        self._begun: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._logs: dict[str, str] = {}

    # --- the port ---

    def start(self, trial_id: str, candidate: Candidate, slot: int = 0) -> None:
        """Create its pod on spare `slot` unless it is there.

        Raises `PortError` while something of another trial is still on that spare, or for one that we don't have.
        """
        if slot >= self._parallelism:
            raise PortError(f"there is no spare {slot}: spare.parallelism is {self._parallelism}")
        name = self._name(trial_id)
        there = self._pod(trial_id)
        if there is not None:
            if pods.ending(there):
                raise PortError(f"pod {name} is still being ended; poll it until it is absent, then start it")
            self._launched.add(trial_id)
            return
        self._refuse_while_others_are_there(trial_id, slot)
        pod = self._make(trial_id, candidate, slot)
        try:
            self._kube.create(PODS, pod, self._target.namespace)
        except AlreadyExists:
            if self._pod(trial_id) is None:
                raise
        except Invalid as error:
            raise Refused(f"pod {name} was refused: {error}") from error
        except NotAdmitted as error:
            if "violates PodSecurity" not in error.message:
                raise  # as a quota: it may have room later
            raise Refused(
                f"pod {name} was refused: {error.message}; it is production's own pod template: let that keep to the "
                "namespace's Pod Security standard, under which production could not be restarted either"
            ) from error
        self._launched.add(trial_id)

    def poll(self, trial_id: str) -> ServerStatus:
        """How it is; notices a death within a second, also under load. `ABSENT` when nothing is left of it."""
        pod = self._pod(trial_id)
        ours = trial_id in self._launched
        if pod is None and not ours:
            return ServerStatus(ServerPhase.ABSENT)
        if pod is None or (ours and pods.ending(pod)):
            return self._lost(trial_id, pod)
        if pods.ending(pod):
            detail = f"pod {pods.name_of(pod)} is being ended"
            if pods.phase(pod) == "Unknown" or self._elapsed(f"end/{trial_id}") > 4 * STOP_GRACE:
                detail += f"; node {pod['spec'].get('nodeName')} does not say that it is gone: look at that node"
            return ServerStatus(ServerPhase.STOPPING, detail=detail)
        template = self._template(pod)
        url = f"http://{pods.address(pod)}:{template.port}"
        ready = self._ready(pod)
        if pods.taken_away(pod) or pods.phase(pod) in ("Failed", "Succeeded") or pods.ended(pod, template.name):
            return self._failed(trial_id, pod, template, under_load=ready is not None)
        if ready is not None:
            return self._watch_ready(trial_id, pod, template, url, ready)
        return self._watch_start(trial_id, pod, template, url)

    def cancel(self, trial_id: str) -> None:
        """Delete its pod; `poll` answers `ABSENT` once the node says that it is gone, and its GPU with it."""
        self._launched.discard(trial_id)
        pod = self._pod(trial_id)
        if pod is None or pods.ending(pod):
            return
        self._keep_log(trial_id, pod, self._template(pod))
        self._kube.delete(PODS, pods.name_of(pod), self._target.namespace, uid=pod["metadata"]["uid"])

    def log_tail(self, trial_id: str, lines: int = 50) -> str:
        """The last lines of its log, without secrets; of a failed start also after the pod is gone."""
        pod = self._pod(trial_id)
        if pod is not None:
            template = self._template(pod)
            text = self._redacted(pods.log_of(self._kube, pod, template.name, lines=lines), template)
            if text:
                return "\n".join(text.splitlines()[-lines:])
        text = self._logs.get(trial_id) or self._stored_log(trial_id)
        return "\n".join(text.splitlines()[-lines:])

    def sweep(self, keep: Sequence[str]) -> list[str]:
        """Delete whatever pods belong to trials not in `keep`; the ids that were found, until nothing is left."""
        found = []
        for pod in self._trials():
            trial_id = _trial_of(pod)
            if trial_id in keep:
                continue
            found.append(trial_id)
            self._launched.discard(trial_id)
            if not pods.ending(pod):
                self._kube.delete(PODS, pods.name_of(pod), self._target.namespace, uid=pod["metadata"]["uid"])
        return sorted(found)

    # --- launching ---

    def _name(self, trial_id: str) -> str:
        if not trial_id:
            raise Refused("an empty id can't name a trial")
        return joined(self._owner.name, trial_id)

    def _refuse_while_others_are_there(self, trial_id: str, slot: int) -> None:
        others = [pod for pod in self._trials() if _trial_of(pod) != trial_id and _slot_of(pod) == slot]
        if others:
            told = ", ".join(f"{_trial_of(pod)} (pod {pods.name_of(pod)}, {pods.phase(pod)})" for pod in others)
            which = f"spare {slot}" if self._parallelism > 1 else "the spare"
            raise PortError(f"trial {told} is still on {which}")

    def _make(self, trial_id: str, candidate: Candidate, slot: int) -> Json:
        deployment = self._target.read(self._kube)
        template = self._target.template(deployment)
        self._prober.headers(template)
        rendered = template.render(candidate)
        spec = rendered["spec"]
        self._overrides.put_on(spec, template.index)
        for container in spec["containers"]:
            # A trial that hangs is ours to judge; and it is ready when it has answered, whatever a probe thinks.
            # An end is an end: 1.34 and later know containers with a restart policy of their own.
            for each in (
                "livenessProbe", "readinessProbe", "startupProbe", "restartPolicy", "restartPolicyRules",
            ):  # fmt: skip
                container.pop(each, None)
        for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
            # In a pod that is not restarted the API server takes no policy that restarts a container to resize it.
            container.pop("resizePolicy", None)
            (container.get("lifecycle") or {}).pop("preStop", None)
        spec["restartPolicy"] = "Never"
        spec["terminationGracePeriodSeconds"] = STOP_GRACE
        tie_to_node(spec, tied_node(self._kube, self._target.namespace, spec, own_pods(self._kube, deployment)))
        metadata = self._owner.metadata(self._name(trial_id), _TRIAL)
        metadata["labels"][_SLOT_LABEL] = str(slot)
        theirs = (rendered.get("metadata") or {}).get("annotations") or {}
        metadata["annotations"] = {
            **{key: text for key, text in theirs.items() if not key.startswith(_SCRAPED)},  # not production's series
            TRIAL_ANNOTATION: trial_id,
            _CANDIDATE_ANNOTATION: json.dumps(dict(candidate.values), sort_keys=True),
            f"{GROUP}/container": template.name,
        }
        return {"metadata": metadata, "spec": spec}

    # --- watching ---

    def _watch_start(self, trial_id: str, pod: Json, template: PodTemplate, url: str) -> ServerStatus:
        waiting = pods.waiting_for(pod, template.name)
        if waiting is not None:
            waited = self._since(f"wait/{pod['metadata']['uid']}", pod["metadata"].get("creationTimestamp"))
            if waited > self._start_timeout:
                advice = "It is not the candidate: free a GPU or correct what is named, then it is tried again."
                return _failure(
                    Failure(
                        kind=FailureKind.UNSCHEDULABLE, cause=f"given up after {waited:.0f} s: {waiting}", advice=advice
                    )
                )
            return ServerStatus(ServerPhase.STARTING, detail=f"waiting for {waited:.0f} s: {waiting}", waiting=True)
        begun = pods.started_at(pod, template.name)
        waited = self._since(f"start/{pod['metadata']['uid']}", begun)
        detail = f"starting for {waited:.0f} s"
        state = probe.health(url)
        if state is Health.OK:
            unproven = self._prober.unproven(pod, template)
            if unproven is None:
                return self._prove(trial_id, pod, template, url, waited)
            detail = f"{detail}; {unproven}"
        if waited > self._start_timeout:
            return self._failed(trial_id, pod, template, hung=True)
        detail = f"{detail}; /health: {state}"
        return ServerStatus(ServerPhase.STARTING, detail=detail, url=url, start_seconds=waited)

    def _prove(self, trial_id: str, pod: Json, template: PodTemplate, url: str, waited: float) -> ServerStatus:
        """It has completed a token: is it as launched? What is found is kept with the pod."""
        log = pods.log_of(self._kube, pod, template.name, lines=5000)
        effective = readback.effective(log, probe.cache_config(url))
        contradictions, surprises = readback.compare(_candidate_of(pod), effective)
        if contradictions:
            self._keep_log(trial_id, pod, template)
            advice = "The server does not run what was asked for: look at its log for what overrides it."
            return _failure(Failure(kind=FailureKind.NOT_AS_LAUNCHED, cause="; ".join(contradictions), advice=advice))
        memory = readback.start_memory(log)
        ready = {
            "seconds": round(waited, 3),
            "version": self._prober.version(pod, template),
            "effective": effective,
            "surprises": surprises,
            "memory": memory.model_dump() if memory is not None else None,
        }
        patch = {"metadata": {"annotations": {_READY_ANNOTATION: json.dumps(ready)}}}
        self._kube.patch(PODS, pods.name_of(pod), patch, self._target.namespace)
        return _is_ready(url, ready)

    def _watch_ready(self, trial_id: str, pod: Json, template: PodTemplate, url: str, ready: Json) -> ServerStatus:
        state = probe.health(url)
        if state is Health.SILENT:
            now = self._clock.monotonic()
            silent = now - self._silent.setdefault(trial_id, now)
            if silent > SILENCE:
                return self._failed(trial_id, pod, template, under_load=True, hung=True)
            return _is_ready(url, ready, f"/health has not answered for {silent:.0f} s")
        self._silent.pop(trial_id, None)
        if state in (Health.DEAD, Health.REFUSED):  # the engine is gone, and the pod is about to follow
            return self._failed(trial_id, self._settled(pod, template), template, under_load=True)
        return _is_ready(url, ready)

    def _settled(self, pod: Json, template: PodTemplate) -> Json:
        """The pod once its node has told how the container ended, if it does at once: that says most."""
        for _ in range(_LOOKS):
            if pods.ended(pod, template.name) or pods.taken_away(pod):
                break
            self._sleep(0.5)
            with suppress(NotFound):
                pod = self._kube.get(PODS, pods.name_of(pod), self._target.namespace)
        return pod

    def _failed(
        self, trial_id: str, pod: Json, template: PodTemplate, *, under_load: bool = False, hung: bool = False
    ) -> ServerStatus:
        failure, log = pods.explain(self._kube, pod, template.name, under_load=under_load, hung=hung)
        self._store_log(trial_id, self._redacted(log, template))
        found = {"cause": self._redacted(failure.cause, template)}
        if under_load and not hung and failure.kind is FailureKind.UNKNOWN:
            found = {"kind": FailureKind.KILLED, "cause": f"it is gone, and its log names no error: {found['cause']}"}
        return _failure(failure.model_copy(update=found))

    def _lost(self, trial_id: str, pod: Json | None) -> ServerStatus:
        reason = pods.taken_away(pod) if pod is not None else None
        name = self._name(trial_id)
        cause = reason or f"pod {name} was deleted by somebody else"
        advice = "Did somebody delete it, or was its node drained? It is tried again."
        return _failure(Failure(kind=FailureKind.KILLED, cause=cause, advice=advice))

    # --- what is there ---

    def _pod(self, trial_id: str) -> Json | None:
        try:
            pod = self._kube.get(PODS, self._name(trial_id), self._target.namespace)
        except NotFound:
            return None
        if not self._owner.owns(pod) or _trial_of(pod) != trial_id:
            raise PortError(f"pod {pods.name_of(pod)} is not of this tuning's trial {trial_id}; delete it")
        return pod

    def _trials(self) -> list[Json]:
        """Also those of an earlier tuning of this name that are about to go: their GPU is not free yet."""
        return self._kube.list(PODS, self._target.namespace, labels=self._owner.selector(_TRIAL)).items

    def _template(self, pod: Json) -> PodTemplate:
        return PodTemplate(pod, pod["metadata"]["annotations"].get(f"{GROUP}/container"))

    @staticmethod
    def _ready(pod: Json) -> Json | None:
        text = pod["metadata"]["annotations"].get(_READY_ANNOTATION)
        found: Json | None = json.loads(text) if text else None
        return found

    def _elapsed(self, what: str) -> float:
        now = self._clock.monotonic()
        return now - self._begun.setdefault(what, now)

    def _since(self, what: str, begun: str | None) -> float:
        """Seconds since a time of the API server's; the wall clock counts only for the time before we looked."""
        now, before = self._clock.monotonic(), 0.0
        if begun and what not in self._begun:
            before = max(0.0, self._clock.now() - parse_time(begun))
        return now - self._begun.setdefault(what, now - before)

    # --- logs ---

    def _redacted(self, text: str, template: PodTemplate) -> str:
        key = template.api_key
        return redact(text.replace(key, HIDDEN) if isinstance(key, str) else text)

    def _keep_log(self, trial_id: str, pod: Json, template: PodTemplate) -> None:
        text = self._redacted(pods.log_of(self._kube, pod, template.name, lines=200), template)
        self._logs[trial_id] = text[-LOG_BYTES:]
        while len(self._logs) > LOGS_KEPT:
            self._logs.pop(next(iter(self._logs)))

    def _store_log(self, trial_id: str, text: str) -> None:
        """Keep the end of a failed server's log: its pod is about to go."""
        name = joined(self._owner.name, trial_id, _LOG)
        if self._logs.get(trial_id) is not None or not text:
            return
        kept = text.encode()[-LOG_BYTES:].decode("utf-8", "ignore")
        body = {"metadata": self._owner.metadata(name, _LOG), "data": {"log": kept}}
        with suppress(AlreadyExists):
            self._kube.create(CONFIG_MAPS, body, self._target.namespace)
        self._logs[trial_id] = kept
        self._drop_old_logs()

    def _stored_log(self, trial_id: str) -> str:
        try:
            name = joined(self._owner.name, trial_id, _LOG)
            found = self._kube.get(CONFIG_MAPS, name, self._target.namespace)
        except NotFound:
            return ""
        return str((found.get("data") or {}).get("log") or "")

    def _drop_old_logs(self) -> None:
        found = self._kube.list(CONFIG_MAPS, self._target.namespace, labels=self._owner.selector(_LOG)).items
        found.sort(key=lambda each: str(each["metadata"].get("creationTimestamp")))
        for each in found[:-LOGS_KEPT]:
            self._kube.delete(CONFIG_MAPS, each["metadata"]["name"], self._target.namespace)


def _trial_of(pod: Json) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(TRIAL_ANNOTATION) or "")


def _slot_of(pod: Json) -> int:
    return int((pod["metadata"].get("labels") or {}).get(_SLOT_LABEL) or 0)


def _candidate_of(pod: Json) -> Candidate:
    return Candidate(values=json.loads(pod["metadata"]["annotations"][_CANDIDATE_ANNOTATION]))


def _failure(failure: Failure) -> ServerStatus:
    return ServerStatus(ServerPhase.FAILED, detail=failure.cause, failure=failure)


def _is_ready(url: str, ready: Json, detail: str = "ready") -> ServerStatus:
    return ServerStatus(
        ServerPhase.READY,
        detail=detail,
        url=url,
        version=ready["version"],
        start_seconds=ready["seconds"],
        effective=copy.deepcopy(ready["effective"]),
        surprises=tuple(ready["surprises"]),
        memory=StartMemory.model_validate(ready["memory"]) if ready.get("memory") else None,
    )
