"""The pods of production as one step sees them: what runs in each, whether it serves, and why it does not."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.state import Failure, FailureKind
from tunewright.kube.client import Json, Kube
from tunewright.kube.times import parse_time
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.canary import Canary
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.workload import DeploymentRef, own_pods
from tunewright.ports import Clock, Refused, Replica

_NO_REQUESTS = "gets no requests yet"
"""A canary that answers and has not been let in, or not any more: its own doing it is not."""


@dataclass(frozen=True)
class Server:
    """One pod of production, read once per step."""

    pod: Json
    template: PodTemplate | None  # None: what runs in it can't be read
    trouble: str  # why it does not serve; empty when it does
    canary: bool

    @property
    def candidate(self) -> str | None:
        """The hash of what runs in it; None: that can't be read."""
        return self.template.candidate.hash if self.template else None

    @property
    def answers(self) -> bool:
        """Whether it is ready and has completed a token, given requests or not."""
        return self.trouble in ("", _NO_REQUESTS)

    def replica(self, version: str | None) -> Replica:
        """As the port tells of it."""
        created = self.pod["metadata"]["creationTimestamp"]
        return Replica(
            name=pods.name_of(self.pod),
            candidate_hash=self.candidate,
            ready=not self.trouble,
            canary=self.canary,
            labels={"pod": pods.name_of(self.pod)},
            since=parse_time(str((self.pod.get("status") or {}).get("startTime") or created)),
            version=version,
        )


class Servers:
    """Sees them. Stateless but for what was asked in vain: another process asks anew."""

    def __init__(
        self, kube: Kube, target: DeploymentRef, canary: Canary, prober: Prober, clock: Clock, start_timeout: float
    ) -> None:
        self._kube, self._target, self._canary = kube, target, canary
        self._prober, self._clock, self._start_timeout = prober, clock, start_timeout
        self._asked: dict[str, float] = {}  # when this process first asked a pod in vain, by uid

    def see(self, deployment: Json, canary_pods: Sequence[Json]) -> list[Server]:
        """Those of the Deployment, then the canary's."""
        found = [self._server(pod, canary=False) for pod in own_pods(self._kube, deployment) if _counts(pod)]
        return found + [self._server(pod, canary=True) for pod in canary_pods if _counts(pod)]

    def failure(self, server: Server) -> Failure | None:
        """Why it died or can't start; None while it may still come, and where what runs in it can't be read."""
        pod, template, trouble = server.pod, server.template, server.trouble
        if template is None:
            return None
        if pods.restarts(pod, template.name) or pods.ended(pod, template.name):
            return pods.explain(self._kube, pod, template.name)[0]
        if trouble in ("", _NO_REQUESTS):
            return None
        waiting = pods.waiting_for(pod, template.name)
        begun = pods.unready_since(pod, template.name) if waiting is None else pod["metadata"]["creationTimestamp"]
        since = parse_time(str(begun or pod["metadata"]["creationTimestamp"]))
        waited = self._clock.now() - max(since, self._asked.get(str(pod["metadata"]["uid"]), 0.0))
        if waited <= self._start_timeout:
            return None
        if waiting is not None:
            return Failure(
                kind=FailureKind.UNSCHEDULABLE,
                cause=f"given up after {waited:.0f} s: {waiting}",
                advice="Free a GPU or correct what is named, then start again.",
            )
        return pods.explain(self._kube, pod, template.name, hung=True)[0]

    def _server(self, pod: Json, *, canary: bool) -> Server:
        try:
            template = PodTemplate(pod, self._target.container)
        except Refused as refused:
            return Server(pod, None, str(refused), canary)
        trouble = pods.waiting_for(pod, template.name) or ("" if pods.is_ready(pod) else "not ready")
        trouble = trouble or self._unproven(pod, template)
        if not trouble and canary and not self._canary.serves(pod):
            trouble = _NO_REQUESTS
        return Server(pod, template, trouble, canary)

    def _unproven(self, pod: Json, template: PodTemplate) -> str:
        """Why a ready pod has not completed a token yet; a new process asks each again, and that may take its time."""
        trouble, uid = self._prober.unproven(pod, template), str(pod["metadata"]["uid"])
        if trouble is None:
            self._asked.pop(uid, None)
            return ""
        self._asked.setdefault(uid, self._clock.now())
        return trouble


def _counts(pod: Json) -> bool:
    """Not those that end, nor what is left of evicted ones: their successors count."""
    return not pods.ending(pod) and pods.phase(pod) not in ("Succeeded", "Failed")
