"""One controller for all namespaces, with the rights that `deploy/cluster-wide` gives it and no others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from cluster_production import IMAGE, deployment, production
from kubernetes.client.configuration import Configuration
from kubernetes_store_cases import manifest

from cluster import wait_for
from tunewright.api.auth import Caller, Verb
from tunewright.api.kubernetes_auth import AccessReviewer, TokenReviewer
from tunewright.clock import SystemClock
from tunewright.cluster import LEASE, Cluster, ClusterSettings
from tunewright.kube.client import Json, Kube
from tunewright.kube.configuration import load_configuration
from tunewright.kube.errors import Forbidden
from tunewright.kube.lease import LeaderElection
from tunewright.kube.neighbours import scope_labels
from tunewright.kube.resources import EVENTS, LEASES, NAMESPACES, TUNINGS, Resource

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WIDE = Path(__file__).parents[2] / "deploy" / "cluster-wide"
RBAC = ("rbac.authorization.k8s.io", "v1")
SECRETS = Resource("", "v1", "secrets", "Secret")
ROLES = Resource(*RBAC, "roles", "Role")
ROLE_BINDINGS = Resource(*RBAC, "rolebindings", "RoleBinding")
CLUSTER_ROLES = Resource(*RBAC, "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(*RBAC, "clusterrolebindings", "ClusterRoleBinding", namespaced=False)


@pytest.fixture
def other(admin: Kube) -> Iterator[str]:
    """A namespace beside the controller's own."""
    name = f"test-{uuid4().hex[:8]}"
    admin.create(NAMESPACES, {"metadata": {"name": name}})
    try:
        yield name
    finally:
        admin.delete(NAMESPACES, name)


@contextmanager
def bound_everywhere(admin: Kube, role: str, namespace: str, account: str) -> Iterator[None]:
    """A ClusterRoleBinding, meanwhile."""
    name = f"{namespace}-{account}-{role.replace(':', '-')}"
    reference = {"apiGroup": RBAC[0], "kind": "ClusterRole", "name": role}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    admin.create(CLUSTER_ROLE_BINDINGS, {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
    try:
        yield
    finally:
        admin.delete(CLUSTER_ROLE_BINDINGS, name)


@pytest.fixture
def limited(
    kubeconfig: Path, admin: Kube, namespace: str, token: Callable[..., str]
) -> Iterator[Callable[..., Kube]]:  # fmt: skip
    """Makes clients that may do what the shipped ClusterRole and the Role beside it say."""
    wide, _ = yaml.safe_load_all((WIDE / "clusterrole.yaml").read_text())
    own = yaml.safe_load((WIDE / "role.yaml").read_text())
    name = f"{namespace}-wide"
    admin.create(CLUSTER_ROLES, {"metadata": {"name": name}, "rules": wide["rules"]})
    admin.create(ROLES, {"metadata": {"name": "tunewright"}, "rules": own["rules"]}, namespace)
    reference = {"apiGroup": RBAC[0], "kind": "Role", "name": "tunewright"}
    subject = {"kind": "ServiceAccount", "name": "tunewright", "namespace": namespace}
    binding = {"metadata": {"name": "tunewright"}, "roleRef": reference, "subjects": [subject]}
    admin.create(ROLE_BINDINGS, binding, namespace)
    theirs, _ = load_configuration(kubeconfig)
    configuration = Configuration(host=theirs.host)
    configuration.ssl_ca_cert = theirs.ssl_ca_cert
    bearer = token("tunewright", "https://kubernetes.default.svc")
    configuration.api_key = {"authorization": f"Bearer {bearer}"}

    def connect(**more: Any) -> Kube:
        return Kube(configuration, namespace=namespace, **more)

    with (
        bound_everywhere(admin, name, namespace, "tunewright"),
        bound_everywhere(admin, "system:auth-delegator", namespace, "tunewright"),
    ):
        wait_for(lambda: _may(connect()), "the ClusterRole is in force")
        yield connect
    admin.delete(CLUSTER_ROLES, name)


def _may(kube: Kube) -> bool:
    try:
        kube.list(TUNINGS)
    except Forbidden:
        return False
    return True


@contextmanager
def running(connect: Callable[..., Kube], namespace: str) -> Iterator[Cluster]:
    """The controller, in this process."""
    cluster = Cluster(ClusterSettings(namespace, IMAGE, all_namespaces=True), SystemClock(), connect)
    stop = threading.Event()
    thread = threading.Thread(target=cluster.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: cluster.election.acting, "it leads")
        yield cluster
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def apply(kube: Kube, namespace: str, name: str, target: str) -> None:
    """A Tuning; there is no Prometheus under this address."""
    spec = manifest(target={"deployment": target}, metrics={"prometheus": "http://127.0.0.1:9", "window": "60s"})[
        "spec"
    ]
    kube.create(TUNINGS, {"metadata": {"name": name}, "spec": spec}, namespace)


def status(kube: Kube, namespace: str, name: str) -> Json:
    found: Json = kube.get(TUNINGS, name, namespace).get("status") or {}
    return found


def test_tunings_of_other_namespaces_come_into_a_phase_with_a_reason(
    admin: Kube, namespace: str, other: str, limited: Callable[..., Kube]
) -> None:
    production(admin, other, deployment(1))
    with running(limited, namespace) as cluster:
        wait_for(lambda: cluster.unready() is None, "every watch was answered")
        apply(admin, other, "chat", "llm")
        apply(admin, other, "wrong", "nothing")
        apply(admin, namespace, "chat", "llm")
        wait_for(lambda: "Prometheus" in status(admin, other, "chat").get("sentence", ""), "its traffic is looked at")
        assert status(admin, other, "chat")["phase"] == "Profiling"
        for where, name, deployment_name in ((other, "wrong", "nothing"), (namespace, "chat", "llm")):
            wait_for(lambda where=where, name=name: status(admin, where, name).get("phase") == "Failed", name)
            assert f"no Deployment {deployment_name} in namespace {where}" in status(admin, where, name)["sentence"]
        told = {(each["involvedObject"]["name"], each["reason"]) for each in admin.list(EVENTS, other).items}
        assert {("chat", "Profiling"), ("wrong", "Failed")} <= told
        assert [each["metadata"]["name"] for each in admin.list(LEASES, other).items] == []
        text = cluster.metrics.exposition().decode()
        assert f'tunewright_tuning_phase{{namespace="{other}",phase="Profiling",tuning="chat"}} 1.0' in text
        assert f'tunewright_tuning_phase{{namespace="{namespace}",phase="Failed",tuning="chat"}} 1.0' in text
        admin.delete(TUNINGS, "wrong", other)
        wait_for(lambda: 'tuning="wrong"' not in cluster.metrics.exposition().decode(), "its series go")


def test_a_namespace_with_its_own_controller_is_left_to_it(
    admin: Kube, namespace: str, other: str, limited: Callable[..., Kube]
) -> None:
    theirs = LeaderElection(
        admin,
        SystemClock(),
        namespace=other,
        name=LEASE,
        identity="theirs",
        labels=scope_labels(everywhere=False),
    )
    stop = threading.Event()
    thread = threading.Thread(target=theirs.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: theirs.acting, "theirs leads")
        with running(limited, namespace):
            apply(admin, other, "chat", "nothing")
            apply(admin, namespace, "chat", "nothing")
            wait_for(lambda: status(admin, namespace, "chat").get("phase") == "Failed", "its own is driven")
            assert status(admin, other, "chat") == {}
            stop.set()  # it gives its Lease back, as a controller that is uninstalled
            thread.join(30)
            wait_for(lambda: status(admin, other, "chat").get("phase") == "Failed", "the other goes on")
    finally:
        stop.set()
        thread.join(30)


def test_it_may_not_read_secrets_nor_the_leases_of_others(limited: Callable[..., Kube], other: str) -> None:
    kube = limited()
    with pytest.raises(Forbidden):
        kube.list(SECRETS)
    with pytest.raises(Forbidden):
        kube.list(LEASES)
    with pytest.raises(Forbidden):
        kube.get(LEASES, LEASE, other)
    kube.list(LEASES, fields=f"metadata.name={LEASE}")


def test_rights_to_read_and_decide_are_those_of_the_tuning_s_namespace(
    admin: Kube, namespace: str, other: str, limited: Callable[..., Kube], token: Callable[..., str]
) -> None:
    reviewer = AccessReviewer(limited(), namespace, everywhere=True)
    ana = TokenReviewer(limited()).authenticate(f"Bearer {token('ana')}")
    _grant(admin, other, namespace, "ana")
    may = {
        (verb, where, tuning): reviewer.allows(ana, verb, where, tuning)
        for verb, where, tuning in (
            (Verb.READ, other, "chat"),
            (Verb.READ, other, None),
            (Verb.DECIDE, other, "chat"),
            (Verb.READ, namespace, "chat"),
            (Verb.DECIDE, namespace, "chat"),
            (Verb.READ, None, "chat"),
            (Verb.READ, None, None),
        )
    }
    assert [key for key, allowed in may.items() if allowed] == [
        (Verb.READ, other, "chat"), (Verb.READ, other, None), (Verb.DECIDE, other, "chat"),
    ]  # fmt: skip
    assert not reviewer.allows(Caller("nobody"), Verb.READ, other, "chat")
    reads = {"metadata": {"name": f"{namespace}-reads"}, "rules": [_rule("tunings", "get", "list")]}
    admin.create(CLUSTER_ROLES, reads)
    try:
        with bound_everywhere(admin, f"{namespace}-reads", namespace, "ana"):
            wait_for(lambda: reviewer.allows(ana, Verb.READ, None, None), "she may list the whole cluster")
            assert not reviewer.allows(ana, Verb.DECIDE, namespace, "chat")
    finally:
        admin.delete(CLUSTER_ROLES, f"{namespace}-reads")


def _rule(resource: str, *verbs: str) -> Json:
    return {"apiGroups": [TUNINGS.group], "resources": [resource], "verbs": list(verbs)}


def _grant(admin: Kube, namespace: str, home: str, account: str) -> None:
    """What the shipped `tunewright-approve` grants, in one namespace."""
    rules = [_rule("tunings", "get", "list", "watch"), _rule("tunings/approval", "update")]
    admin.create(ROLES, {"metadata": {"name": "approve"}, "rules": rules}, namespace)
    reference = {"apiGroup": RBAC[0], "kind": "Role", "name": "approve"}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": home}
    binding = {"metadata": {"name": "approve"}, "roleRef": reference, "subjects": [subject]}
    admin.create(ROLE_BINDINGS, binding, namespace)
