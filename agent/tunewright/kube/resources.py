"""Where each kind of object lives in the API. Only kinds that are used are named here."""

from dataclasses import dataclass
from urllib.parse import quote

GROUP = "tunewright.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True)
class Resource:
    """One kind of object at one version. `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As objects carry it: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def owner(self, name: str, uid: str) -> dict[str, object]:
        """The owner reference of what the garbage collector is to take away with one object.

        Without `blockOwnerDeletion`: no deletion must wait for anything of ours.
        """
        return {"apiVersion": self.api_version, "kind": self.kind, "name": name, "uid": uid, "controller": True}

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The path of one object, or of the collection; `namespace` None means all namespaces (or cluster-scoped)."""
        parts = [self.root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        elif self.namespaced and name:
            raise ValueError(f"a {self.kind} is named by its namespace too")
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
EVENTS = Resource("", "v1", "events", "Event")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
HTTP_ROUTES = Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
TUNINGS = Resource(GROUP, VERSION, "tunings", "Tuning")
TRIALS = Resource(GROUP, VERSION, "trials", "Trial")

ENDPOINT_SLICES = (
    Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    Resource("discovery.k8s.io", "v1beta1", "endpointslices", "EndpointSlice"),
)
"""Newest first: `discovery.k8s.io/v1` came with 1.21, `v1beta1` went with 1.25."""

POD_DISRUPTION_BUDGETS = (
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("policy", "v1beta1", "poddisruptionbudgets", "PodDisruptionBudget"),
)
"""Newest first: `policy/v1` came with 1.21, `v1beta1` went with 1.25."""

AUTOSCALERS = (
    Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    Resource("autoscaling", "v2beta2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    Resource("autoscaling", "v1", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
)
"""Newest first: `autoscaling/v2` came with 1.23, `v2beta2` went with 1.26; `v1` is everywhere."""

TUNING_LABEL = f"{GROUP}/tuning"
"""On everything we create: the name of the tuning that it belongs to."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "tunewright"}
