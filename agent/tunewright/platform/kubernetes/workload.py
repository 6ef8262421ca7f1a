"""The target's Deployment and its pods, read afresh each time as raw JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Forbidden, NotFound
from tunewright.kube.resources import DEPLOYMENTS, PODS, REPLICA_SETS
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.names import PERSISTENT_VOLUME_CLAIMS
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.ports import Refused

HOSTNAME = "kubernetes.io/hostname"


@dataclass(frozen=True)
class DeploymentRef:
    """Names the target. `container` beside sidecars; left out, the one that runs vLLM is found."""

    namespace: str
    name: str
    container: str | None = None

    def read(self, kube: Kube) -> Json:
        """The Deployment. Raises `Refused` when it is not there."""
        try:
            return kube.get(DEPLOYMENTS, self.name, self.namespace)
        except NotFound as error:
            raise Refused(f"there is no Deployment {self.name} in namespace {self.namespace}; name it right") from error

    def template(self, deployment: Json) -> PodTemplate:
        """Its pod template. Raises `Refused` with the reason when it can't be tuned."""
        try:
            return PodTemplate(deployment["spec"]["template"], self.container)
        except Refused as refused:
            raise Refused(f"Deployment {self.name}: {refused}") from None


@dataclass(frozen=True)
class Overrides:
    """What the spare's pods have that production's have not. Left out: as production."""

    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Json] = ()
    gpus: int | None = None
    cache_claim: str | None = None
    """A PersistentVolumeClaim for compiled kernels, so that not every trial starts cold."""
    cache_path: str = "/root/.cache/vllm"

    def put_on(self, pod: Json, container: int) -> None:
        """Change a pod's spec in place."""
        if self.node_selector:
            pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **self.node_selector}
        if self.tolerations:
            pod["tolerations"] = [*(pod.get("tolerations") or []), *self.tolerations]
        mine = pod["containers"][container]
        if self.gpus is not None:
            found = PodTemplate({"spec": pod}, mine["name"]).gpus()
            resource = found[0] if found else "nvidia.com/gpu"
            resources = dict(mine.get("resources") or {})
            for field in ("requests", "limits"):
                if field == "limits" or resource in (resources.get(field) or {}):
                    resources[field] = {**(resources.get(field) or {}), resource: str(self.gpus)}
            mine["resources"] = resources
        if self.cache_claim:
            volume = {"name": "tunewright-cache", "persistentVolumeClaim": {"claimName": self.cache_claim}}
            pod["volumes"] = [*(pod.get("volumes") or []), volume]
            mount = {"name": "tunewright-cache", "mountPath": self.cache_path}
            mine["volumeMounts"] = [*(mine.get("volumeMounts") or []), mount]


def label_selector(selector: Json) -> str:
    """A LabelSelector as the text that a list takes."""
    parts = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for each in selector.get("matchExpressions") or []:
        key, values = each["key"], ",".join(each.get("values") or [])
        parts.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[each["operator"]]
        )
    return ",".join(parts)


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector is about what has these labels; an empty one is about everything."""
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    if not wanted.items() <= labels.items():
        return False
    for each in selector.get("matchExpressions") or []:
        mine, values = labels.get(each["key"]), each.get("values") or []
        met = {
            "In": mine in values,
            "NotIn": mine not in values,
            "Exists": mine is not None,
            "DoesNotExist": mine is None,
        }
        if not met[each["operator"]]:
            return False
    return True


def own_pods(kube: Kube, deployment: Json) -> list[Json]:
    """The pods of a Deployment, by owner: labels alone would take in others' pods. By name."""
    namespace, selector = deployment["metadata"]["namespace"], label_selector(deployment["spec"]["selector"])
    uid = deployment["metadata"]["uid"]
    sets = {
        each["metadata"]["uid"]
        for each in kube.list(REPLICA_SETS, namespace, labels=selector).items
        if _controller(each) == uid
    }
    found = [pod for pod in kube.list(PODS, namespace, labels=selector).items if _controller(pod) in sets]
    return sorted(found, key=pods.name_of)


def tied_node(kube: Kube, namespace: str, pod: Json, users: Sequence[Json]) -> str | None:
    """The node that a pod must run on, because a ReadWriteOnce volume of it is in use there; None: any node.

    `users` are the pods that have the volumes now. Raises `Refused` naming the claim where it can't be shared at all.
    """
    nodes = sorted({str(each["spec"]["nodeName"]) for each in users if each["spec"].get("nodeName")})
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if not claim:
            continue
        modes = _modes(kube, namespace, claim)
        if modes is None or set(modes) & {"ReadWriteMany", "ReadOnlyMany"}:
            continue
        if "ReadWriteOncePod" in modes:
            raise Refused(
                f"the claim {claim} is ReadWriteOncePod: no second pod can have the model while production has it; "
                "use ReadOnlyMany or ReadWriteMany"
            )
        wanted = (pod.get("nodeSelector") or {}).get(HOSTNAME)
        if wanted and nodes and wanted not in nodes:
            raise Refused(
                f"the claim {claim} is ReadWriteOnce, in use on node {nodes[0]}, and the spare is to run on {wanted}: "
                "use ReadOnlyMany or ReadWriteMany, or a spare GPU of that node"
            )
        if nodes:
            return nodes[0]
    return None


def tie_to_node(pod: Json, node: str | None) -> None:
    """Let a pod's spec run on this node alone, without passing the scheduler by: it counts the GPUs."""
    if node:
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), HOSTNAME: node}


def _modes(kube: Kube, namespace: str, claim: str) -> list[str] | None:
    """Access modes of a claim; None when it can't be known: then the scheduler says what is wrong."""
    try:
        found = kube.get(PERSISTENT_VOLUME_CLAIMS, claim, namespace)
    except (NotFound, Forbidden):
        return None
    return list(found.get("spec", {}).get("accessModes") or [])


def _controller(found: Json) -> str | None:
    owners = found["metadata"].get("ownerReferences") or []
    return next((str(each["uid"]) for each in owners if each.get("controller")), None)
