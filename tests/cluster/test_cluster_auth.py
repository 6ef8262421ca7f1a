"""Tokens and rights of real ServiceAccounts."""

from collections.abc import Callable, Iterator

import pytest
from kubernetes.client.configuration import Configuration

from tunewright.api.auth import Unauthenticated, Unavailable, Verb
from tunewright.api.kubernetes_auth import AccessReviewer, TokenReviewer
from tunewright.kube.client import Kube
from tunewright.kube.configuration import load_configuration
from tunewright.kube.resources import Resource

pytestmark = pytest.mark.cluster

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")

MayToken = Callable[..., str]


def allow(kube: Kube, namespace: str, account: str, resource: str, *verbs: str) -> None:
    name = f"{account}-{resource}".replace("/", "-")
    rules = [{"apiGroups": ["tunewright.dev"], "resources": [resource], "verbs": list(verbs)}]
    kube.create(ROLES, {"metadata": {"name": name}, "rules": rules}, namespace)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    kube.create(BINDINGS, {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}, namespace)


def test_a_token_for_our_audience_names_its_account(kube: Kube, namespace: str, token: MayToken) -> None:
    caller = TokenReviewer(kube).authenticate(f"Bearer {token('ana')}")
    assert caller.name == f"system:serviceaccount:{namespace}:ana"
    assert f"system:serviceaccounts:{namespace}" in caller.groups


def test_tokens_of_others_prove_nothing(kube: Kube, namespace: str, token: MayToken) -> None:
    reviewer = TokenReviewer(kube)
    for wrong in (
        token("ana", audience="https://kubernetes.default.svc"),
        token("ana", audience="somebody-else"),
        token("ana")[:-4] + "AAAA",
        "not-a-token",
    ):
        with pytest.raises(Unauthenticated):
            reviewer.authenticate(f"Bearer {wrong}")


def test_rights_are_those_of_rbac(kube: Kube, namespace: str, token: MayToken) -> None:
    reader, approver, stranger = (TokenReviewer(kube).authenticate(f"Bearer {token(n)}") for n in ("r", "a", "s"))
    allow(kube, namespace, "r", "tunings", "get", "list")
    allow(kube, namespace, "a", "tunings/approval", "update")
    access = AccessReviewer(kube, namespace)
    assert access.allows(reader, Verb.READ, None, "demo")
    assert access.allows(reader, Verb.READ, None, None)
    assert not access.allows(reader, Verb.DECIDE, None, "demo")
    assert access.allows(approver, Verb.DECIDE, None, "demo")
    assert not access.allows(approver, Verb.READ, None, "demo")
    assert not access.allows(stranger, Verb.READ, None, "demo")
    assert not access.allows(stranger, Verb.DECIDE, None, "demo")
    assert not AccessReviewer(kube, "default").allows(approver, Verb.DECIDE, None, "demo"), "in its own namespace alone"


def test_who_may_write_tunings_may_not_approve(kube: Kube, namespace: str, token: MayToken) -> None:
    editor = TokenReviewer(kube).authenticate(f"Bearer {token('e')}")
    allow(kube, namespace, "e", "tunings", "*")
    assert not AccessReviewer(kube, namespace).allows(editor, Verb.DECIDE, None, "demo")


@pytest.fixture
def powerless(kubeconfig: object, token: MayToken) -> Iterator[Kube]:
    """A client with a ServiceAccount that may ask for no review."""
    admin, _ = load_configuration()
    configuration = Configuration(host=admin.host, ssl_ca_cert=admin.ssl_ca_cert)
    configuration.api_key = {"authorization": f"Bearer {token('powerless', 'https://kubernetes.default.svc')}"}
    kube = Kube(configuration)
    yield kube
    kube.close()


def test_without_the_right_to_ask_nobody_gets_in(powerless: Kube, token: MayToken, kube: Kube) -> None:
    given = f"Bearer {token('ana')}"
    with pytest.raises(Unavailable):
        TokenReviewer(powerless).authenticate(given)
    ana = TokenReviewer(kube).authenticate(given)
    with pytest.raises(Unavailable):
        AccessReviewer(powerless, "default").allows(ana, Verb.DECIDE, None, "demo")
