"""What a pod's status says, in words: why it waits, how its container ended, whether something outside ended it."""

from dataclasses import dataclass

from tunewright.domain.state import Failure, FailureKind
from tunewright.knobs import failures
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Invalid, KubeError, NotFound

_LINES = 1500
_BYTES = 4 * 2**20
_STUCK = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
     "CreateContainerError", "RunContainerError"}
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a container ended. `code` as a shell tells it."""

    code: int
    reason: str
    message: str


def name_of(pod: Json) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


def phase(pod: Json) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def ending(pod: Json) -> bool:
    """Whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_ready(pod: Json) -> bool:
    """Whether Kubernetes sends it requests."""
    return _condition(pod, "Ready").get("status") == "True" and not ending(pod)


def address(pod: Json) -> str | None:
    """The pod's IP as it stands in a URL."""
    found = (pod.get("status") or {}).get("podIP")
    return (f"[{found}]" if ":" in found else str(found)) if found else None


def waiting_for(pod: Json, container: str) -> str | None:
    """Why the container does not run yet; None when it runs or has run."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"no node takes the pod: {scheduled.get('message') or scheduled.get('reason') or 'no reason given'}"
    state = (container_status(pod, container) or {}).get("state") or {}
    if "running" in state or "terminated" in state:
        return None
    sidecars = _sidecars(pod)
    for status in _statuses(pod, "initContainerStatuses"):
        init = status.get("state") or {}
        if "waiting" in init:
            return f"init container {status['name']} waits: {_told(init['waiting'])}"
        if "running" in init and not (status["name"] in sidecars and status.get("started")):
            return f"init container {status['name']} runs"
    return f"container {container} waits: {_told(state.get('waiting') or {})}"


def stuck(pod: Json, container: str) -> bool:
    """Whether it waits for something that seldom comes by itself: an image, a Secret, a command."""
    state = (container_status(pod, container) or {}).get("state") or {}
    return str((state.get("waiting") or {}).get("reason")) in _STUCK


def container_status(pod: Json, container: str) -> Json | None:
    """The status of one container."""
    return next((each for each in _statuses(pod, "containerStatuses") if each.get("name") == container), None)


def restarts(pod: Json, container: str) -> int:
    """How often the container was started again."""
    return int((container_status(pod, container) or {}).get("restartCount") or 0)


def ended(pod: Json, container: str) -> Ended | None:
    """How the container ended (or its last run did, when it was started again)."""
    status = container_status(pod, container) or {}
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        found = state.get("terminated")
        if found:
            code = int(found.get("exitCode") or 0)
            return Ended(code, str(found.get("reason") or ""), str(found.get("message") or ""))
    return None


def started_at(pod: Json, container: str) -> str | None:
    """When the container's process began, RFC 3339."""
    state = (container_status(pod, container) or {}).get("state") or {}
    for each in ("running", "terminated"):
        if each in state:
            found = state[each].get("startedAt")
            return str(found) if found else None
    return None


def unready_since(pod: Json, container: str) -> str | None:
    """Since when it may be waited for, RFC 3339: its process' start, or when it was ready last if that was later."""
    begun, ready = started_at(pod, container), _condition(pod, "Ready")
    lost = str(ready.get("lastTransitionTime") or "") if ready.get("status") == "False" else ""
    return max(begun, lost) if begun and lost else begun


def taken_away(pod: Json) -> str | None:
    """Why the pod, not the program in it, came to its end; None when nothing outside ended it."""
    status = pod.get("status") or {}
    reason = str(status.get("reason") or "")
    if reason in ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "DeadlineExceeded"):
        return f"the pod was ended ({reason}): {status.get('message') or 'no message'}"
    disruption = _condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return f"the pod was ended ({disruption.get('reason')}): {disruption.get('message') or 'no message'}"
    if phase(pod) == "Unknown":
        return f"node {pod['spec'].get('nodeName')} does not answer"
    sidecars = _sidecars(pod)  # these end after the server, by SIGTERM: that explains nothing
    failed_init = next(
        (
            each
            for each in _statuses(pod, "initContainerStatuses")
            if each["name"] not in sidecars and ((each.get("state") or {}).get("terminated") or {}).get("exitCode")
        ),
        None,
    )
    if failed_init is not None and phase(pod) == "Failed":
        return f"init container {failed_init['name']} failed: {_told(failed_init['state']['terminated'])}"
    if phase(pod) == "Failed" and not _statuses(pod, "containerStatuses"):
        return f"the pod failed before it ran: {_told(status)}"
    return None


def explain(
    kube: Kube, pod: Json, container: str, *, under_load: bool = False, hung: bool = False
) -> tuple[Failure, str]:
    """Why the server in it failed, and the end of its log. What ended the pod from outside is never the candidate's."""
    log = log_of(kube, pod, container, previous=restarts(pod, container) > 0 and not hung)
    outside = taken_away(pod)
    if outside:
        advice = "Something outside ended it: it is tried again."
        return Failure(kind=FailureKind.KILLED, cause=outside, advice=advice), log
    end = ended(pod, container)
    failure = failures.explain(end.code if end else None, log, "", under_load=under_load, hung=hung)
    if end is not None and end.reason == "OOMKilled":
        kind = FailureKind.OUT_OF_MEMORY_UNDER_LOAD if under_load else FailureKind.OUT_OF_MEMORY
        limits = _container(pod, container).get("resources", {}).get("limits", {})
        return Failure(
            kind=kind,
            cause=f"the container used more than its memory limit ({limits.get('memory', 'none; the node was full')})",
            advice="Not the GPU's memory but the host's: raise resources.limits.memory, or use less of it.",
            exit_code=end.code,
        ), log
    if end is not None and end.code == 0 and failure.kind is FailureKind.CRASHED:
        cause = "it ended in good order, as vLLM does when it is asked to by a signal"
        return failure.model_copy(update={"kind": FailureKind.KILLED, "cause": cause}), log
    return failure, log


def log_of(kube: Kube, pod: Json, container: str, *, previous: bool = False, lines: int = _LINES) -> str:
    """The end of a container's log, both streams as it wrote them; empty where there is none."""
    metadata = pod["metadata"]
    try:
        return kube.logs(
            metadata["name"],
            metadata["namespace"],
            container=container,
            tail_lines=lines,
            limit_bytes=_BYTES,
            previous=previous,
        )
    except NotFound:
        return ""
    except Invalid:  # the container has not run (any more)
        return log_of(kube, pod, container, lines=lines) if previous else ""
    except KubeError as error:
        # The kubelet is away: that the log can't be read must not hide how the container ended.
        return f"(the log can't be read: {error})"


def _container(pod: Json, name: str) -> Json:
    return next((each for each in pod["spec"]["containers"] if each["name"] == name), {})


def _condition(pod: Json, kind: str) -> Json:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), {})


def _sidecars(pod: Json) -> frozenset[str]:
    """The init containers that run for as long as the pod does (`restartPolicy: Always`, by default since 1.29)."""
    found = (pod.get("spec") or {}).get("initContainers") or []
    return frozenset(str(each["name"]) for each in found if each.get("restartPolicy") == "Always")


def _statuses(pod: Json, field: str) -> list[Json]:
    return (pod.get("status") or {}).get(field) or []


def _told(state: Json) -> str:
    reason, message, code = state.get("reason"), state.get("message"), state.get("exitCode")
    how = f"exit code {code}" if code is not None else ""
    return ", ".join(str(each) for each in (reason, how, message) if each) or "no reason given"
