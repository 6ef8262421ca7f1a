"""A client of a real cluster that may do what shipped Roles say, and what of it it asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from kubernetes.client.configuration import Configuration

from cluster import wait_for
from tunewright.kube.client import Json, Kube
from tunewright.kube.configuration import load_configuration
from tunewright.kube.errors import Forbidden
from tunewright.kube.resources import PODS, Resource

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")


class Recorded(Kube):
    """A client that keeps what it asked for."""

    asked: set[tuple[str, str]]

    def _json(self, method: str, path: str, *args: object, **more: object) -> Json:
        self.asked.add((method, path))
        return super()._json(method, path, *args, **more)


def used(asked: set[tuple[str, str]], rule: Json, verb: str) -> bool:
    """Whether a granted verb was asked for."""
    method = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "update": "PUT", "delete": "DELETE"}[
        verb
    ]
    for sent, path in asked:
        parts = path.split("/")
        if sent != method or "namespaces" not in parts:
            continue
        plural, *name = parts[parts.index("namespaces") + 2 :]
        if plural in rule["resources"] and bool(name) == (verb in ("get", "patch", "update", "delete")):
            return True
    return False


def shipped(path: str) -> list[Json]:
    """The rules of the Role in a file of `deploy`."""
    (role,) = [each for each in yaml.safe_load_all((DEPLOY / path).read_text()) if each["kind"] == "Role"]
    found: list[Json] = role["rules"]
    return found


def client_with(
    rules: Sequence[Json], kubeconfig: Path, admin: Kube, namespace: str, token: Callable[..., str]
) -> Recorded:
    """A client with these rules in one namespace, once they are in force."""
    admin.create(ROLES, {"metadata": {"name": "tunewright"}, "rules": list(rules)}, namespace)
    subject = {"kind": "ServiceAccount", "name": "tunewright", "namespace": namespace}
    reference = {"apiGroup": ROLES.group, "kind": "Role", "name": "tunewright"}
    binding = {"metadata": {"name": "tunewright"}, "roleRef": reference, "subjects": [subject]}
    admin.create(BINDINGS, binding, namespace)
    theirs, _ = load_configuration(kubeconfig)
    configuration = Configuration(host=theirs.host)
    configuration.ssl_ca_cert = theirs.ssl_ca_cert
    audience = "https://kubernetes.default.svc"
    configuration.api_key = {"authorization": f"Bearer {token('tunewright', audience)}"}
    kube = Recorded(configuration, namespace=namespace)
    kube.asked = set()
    wait_for(lambda: _may(kube, namespace), "the Role is in force")
    return kube


def _may(kube: Kube, namespace: str) -> bool:
    try:
        kube.list(PODS, namespace)
    except Forbidden:
        return False
    return True
