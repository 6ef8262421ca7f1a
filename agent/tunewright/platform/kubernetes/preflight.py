"""What would stop a rollout, found before anything moves; and what whoever approves it should know."""

from collections.abc import Callable, Iterator

from tunewright.domain.candidate import Candidate
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Forbidden, Invalid, KubeConflict
from tunewright.kube.resources import AUTOSCALERS, DEPLOYMENTS, POD_DISRUPTION_BUDGETS
from tunewright.platform.kubernetes.canary import Canary
from tunewright.platform.kubernetes.capacity import gpu_shortage
from tunewright.platform.kubernetes.fields import (
    HOLD_SECONDS,
    Note,
    body,
    leaves_for,
    own_variables,
    owned_elsewhere,
    owners,
)
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.routeshare import RouteShare
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides, own_pods, selects, tie_to_node, tied_node
from tunewright.ports import Refused

ROOM = 1.5
"""Probes and deadlines must leave room for this many times the cold start."""

_HELM = "meta.helm.sh/release-name"


class Preflight:
    """Reads, and applies dry; writes nothing."""

    def __init__(
        self,
        kube: Kube,
        owner: Owner,
        target: DeploymentRef,
        canary: Canary,
        share: RouteShare,
        overrides: Overrides,
        take_over: bool,
        cold_start: Callable[[Candidate], float | None],
        longest_answer: Callable[[], float | None],
    ) -> None:
        self._kube, self._owner, self._target, self._canary, self._share = kube, owner, target, canary, share
        self._overrides, self._take_over = overrides, take_over
        self._cold_start, self._longest_answer = cold_start, longest_answer

    def obstacles(self, deployment: Json, template: PodTemplate, candidate: Candidate) -> list[str]:
        """Why it can't be rolled out; empty when nothing is known against it."""
        found = [
            *owned_elsewhere(deployment),
            *_shape(deployment),
            *self._other_rollout(deployment),
            *_probes(template, self._cold_start(candidate)),
            *self._budgets(deployment),
            *self._share.obstacles(deployment),
        ]
        if not self._canary.services(deployment) and not self._canary.labels:
            found.append(
                f"no Service selects the pods of {self._target.name}: a canary would get no requests; where a router "
                "finds its servers by labels, name those: promotion.canary.labels"
            )
        if self._selected(deployment):
            found.append(
                f"with promotion.canary.labels the canary has all labels that {self._target.name} itself selects, so "
                "an autoscaler would count it in: leave one out"
            )
        try:
            conflicts = self._dry_apply(deployment, template, candidate)
            if conflicts and not self._take_over:
                told = "; ".join(conflicts)
                found.append(f"{told}: with promotion.takeOver: true these fields alone are taken over from them")
            shortage = self._shortage(deployment, template, candidate)
        except Refused as refused:
            return [*found, str(refused)]
        return [*found, *([shortage] if shortage else [])]

    def notes(self, deployment: Json, template: PodTemplate, candidate: Candidate) -> list[str]:
        """What is no obstacle, and should be known."""
        found = [
            f"{each}; its next apply will set it back or be refused"
            for each in self._taken(deployment, template, candidate)
        ]
        release = (deployment["metadata"].get("annotations") or {}).get(_HELM)
        if release:
            found.append(
                f"Helm release {release} made it: put the change into its values, or the next upgrade undoes it"
            )
        try:
            found += [
                f"HorizontalPodAutoscaler {name} scales it: the roll waits while it does"
                for name in self._scalers(deployment)
            ]
        except Forbidden as error:
            found.append(f"whether an autoscaler scales it is not known: {error}")
        found += _times(deployment, template, self._cold_start(candidate), self._longest_answer())
        try:
            if self._shortage(deployment, template, candidate) is None:
                found.append(
                    "whether a GPU is free for the canary is not known: nodes may not be read; its deadline decides"
                )
        except Refused as refused:
            found.append(str(refused))
        if not (template.container.get("lifecycle") or {}).get("preStop"):
            found.append(
                f"container {template.name} has no preStop hook: requests may be refused while a replica ends; "
                "`sleep 10` there lets every node forget it first"
            )
        if not set(deployment["spec"]["selector"].get("matchLabels") or {}) - {
            key for service in self._canary.services(deployment) for key in service["spec"]["selector"]
        }:
            found.append("the Service selects all that the Deployment selects, so an autoscaler counts the canary in")
        return [*found, *self._share.notes(deployment)]

    # --- each of them ---

    def _selected(self, deployment: Json) -> bool:
        """Whether it is the labels of ours that make the canary one of the target's own pods."""
        selector = set((deployment["spec"]["selector"].get("matchLabels") or {}).items())
        labels = set(self._canary.production_labels(deployment).items())
        return selector <= labels and not selector <= labels - set(self._canary.labels.items())

    def _other_rollout(self, deployment: Json) -> Iterator[str]:
        note = Note.read(deployment)
        if note is not None and note.active and note.uid != self._owner.uid:
            yield f"Tuning {note.tuning} is rolling it out, or left it half-way: let it end, or undo it by hand"
        found = self._canary.find()
        if found is not None:
            yield f"Deployment {self._canary.name} is still there from an earlier rollout"

    def _budgets(self, deployment: Json) -> Iterator[str]:
        served = self._kube.served(*POD_DISRUPTION_BUDGETS)
        if served is None:
            return
        labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
        try:
            budgets = self._kube.list(served, self._target.namespace).items
        except Forbidden as error:
            yield f"whether a PodDisruptionBudget forbids the roll is not known: {error}"
            return
        for budget in budgets:
            selector = budget["spec"].get("selector")
            # Empty, it is about every pod since `policy/v1`, and was about none before; left out, it is about none.
            if selector is None or not (selector or served.version == "v1") or not selects(selector, labels):
                continue
            allowed = (budget.get("status") or {}).get("disruptionsAllowed")
            if not allowed:
                yield (
                    f"PodDisruptionBudget {budget['metadata']['name']} allows no replica to be away "
                    f"(disruptionsAllowed {allowed}): loosen it, or add a replica"
                )

    def _scalers(self, deployment: Json) -> list[str]:
        served = self._kube.served(*AUTOSCALERS)
        if served is None:
            return []
        found = self._kube.list(served, self._target.namespace).items
        wanted = (deployment["metadata"]["name"], DEPLOYMENTS.kind)
        return [
            each["metadata"]["name"]
            for each in found
            if (each["spec"]["scaleTargetRef"]["name"], each["spec"]["scaleTargetRef"]["kind"]) == wanted
        ]

    def _taken(self, deployment: Json, template: PodTemplate, candidate: Candidate) -> list[str]:
        try:
            return self._dry_apply(deployment, template, candidate) if self._take_over else []
        except Refused:
            return []  # an obstacle, told as such

    def _dry_apply(self, deployment: Json, template: PodTemplate, candidate: Candidate) -> list[str]:
        """Apply all that the roll will write, without writing: who owns it already. Raises `Refused`."""
        note = Note.of(self._owner, deployment, template)
        ours = own_variables(deployment, template.name)
        leaves = leaves_for(template, candidate, note, ours)
        whole = body(self._target.name, note, leaves, paused=True, hold_seconds=HOLD_SECONDS, rolling=True)
        try:
            self._kube.apply(DEPLOYMENTS, whole, self._target.namespace, dry_run=True, force=True)
        except (Invalid, Forbidden) as error:
            raise Refused(f"the API server would refuse the change: {error}") from error
        try:
            self._kube.apply(DEPLOYMENTS, whole, self._target.namespace, dry_run=True)
        except KubeConflict as conflict:
            return owners(conflict)
        return []

    def _shortage(self, deployment: Json, template: PodTemplate, candidate: Candidate) -> str | None:
        spec = template.render(candidate)["spec"]
        self._overrides.put_on(spec, template.index)
        tie_to_node(spec, tied_node(self._kube, self._target.namespace, spec, own_pods(self._kube, deployment)))
        wanted = PodTemplate({"spec": spec}, template.name).gpus()
        return gpu_shortage(self._kube, spec, *wanted) if wanted and wanted[1] else ""


def _shape(deployment: Json) -> Iterator[str]:
    spec, status = deployment["spec"], deployment.get("status") or {}
    replicas = 1 if spec.get("replicas") is None else spec["replicas"]
    if replicas < 1:
        yield "it is scaled to 0 replicas"
    if spec.get("paused"):
        yield "its rollout is paused by somebody: `kubectl rollout resume` it first"
    if (spec.get("strategy") or {}).get("type") == "Recreate":
        yield "its strategy is Recreate, which ends every replica at once: use RollingUpdate"
    if int(status.get("observedGeneration") or 0) < int(deployment["metadata"]["generation"]):
        yield "Kubernetes has not taken up its last change yet"
    elif not status.get("updatedReplicas") == status.get("readyReplicas") == status.get("replicas") == replicas:
        told = {key: status.get(key) or 0 for key in ("replicas", "updatedReplicas", "readyReplicas")}
        yield f"another rollout or scaling is in progress, or replicas are not ready: {replicas} wanted, {told}"


def _times(
    deployment: Json, template: PodTemplate, cold_start: float | None, longest_answer: float | None
) -> Iterator[str]:
    """Times that are too short and stop nothing: what comes of it. Both in seconds."""
    deadline = int(deployment["spec"].get("progressDeadlineSeconds") or 600)
    if cold_start is not None and deadline < ROOM * cold_start:
        yield (
            f"its progressDeadlineSeconds are {deadline}, and the winner took {cold_start:.0f} s cold: whoever waits "
            f"for the roll (helm --wait, Argo CD) may call it failed; {ROOM * cold_start:.0f} leave room"
        )
    grace = template.pod_spec.get("terminationGracePeriodSeconds", 30)
    if longest_answer is not None and grace < longest_answer:
        yield (
            f"its terminationGracePeriodSeconds are {grace}, and answers took up to {longest_answer:.0f} s: those "
            "under way longer are cut off when a replica ends; allow more"
        )


def _probes(template: PodTemplate, cold_start: float | None) -> Iterator[str]:
    container = template.container
    if not container.get("readinessProbe"):
        yield f"container {template.name} has no readinessProbe: it would get requests while it loads the model"
    probe = container.get("startupProbe") or container.get("livenessProbe")
    if probe is None or cold_start is None:
        return
    room = probe.get("initialDelaySeconds", 0) + probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if room < ROOM * cold_start:
        kind = "startupProbe" if "startupProbe" in container else "livenessProbe"
        yield (
            f"its {kind} kills a server that is not up after {room} s, and the winner took {cold_start:.0f} s cold: "
            f"allow {ROOM * cold_start:.0f} s"
        )
