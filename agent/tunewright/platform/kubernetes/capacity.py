"""Whether a node has the GPUs for one more server. Only told where nodes and pods of the whole cluster may be read."""

from collections import Counter

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Forbidden
from tunewright.kube.resources import NODES, PODS
from tunewright.platform.kubernetes import pods


def gpu_shortage(kube: Kube, pod: Json, resource: str, count: int) -> str | None:
    """Why no node can take the pod's GPUs now; empty when one can; None when that can't be known.

    Affinities are left to the scheduler: this finds want of GPUs, not every reason.
    """
    try:
        nodes = kube.list(NODES).items
        used = _used(kube.list(PODS).items, resource)
    except Forbidden:
        return None
    free = {}
    for node in nodes:
        if _takes(node, pod):
            name = node["metadata"]["name"]
            allocatable = int((node.get("status") or {}).get("allocatable", {}).get(resource) or 0)
            free[name] = allocatable - used[name]
    if any(each >= count for each in free.values()):
        return ""
    told = ", ".join(f"{name}: {each}" for name, each in sorted(free.items())[:5]) or "no node fits"
    return f"the canary needs {count} × {resource}, and no node has them free ({told})"


def _used(all_pods: list[Json], resource: str) -> Counter[str]:
    used: Counter[str] = Counter()
    for pod in all_pods:
        node = pod["spec"].get("nodeName")
        if not node or pods.phase(pod) in ("Succeeded", "Failed"):
            continue
        for container in pod["spec"]["containers"]:
            used[node] += _asked(container, resource)
    return used


def _asked(container: Json, resource: str) -> int:
    resources = container.get("resources") or {}
    found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
    return int(found or 0)


def _takes(node: Json, pod: Json) -> bool:
    if node["spec"].get("unschedulable"):
        return False
    conditions = (node.get("status") or {}).get("conditions") or []
    if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
        return False
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != text for key, text in (pod.get("nodeSelector") or {}).items()):
        return False
    taints = [each for each in node["spec"].get("taints") or [] if each["effect"] in ("NoSchedule", "NoExecute")]
    return all(any(_tolerates(each, taint) for each in pod.get("tolerations") or []) for taint in taints)


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("operator") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint["key"]
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))
