"""A namespace of its own for each test, in the cluster of `$KUBECONFIG`, with the CRDs as they are generated."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from cluster import wait_for
from tunewright.kube import crds
from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import CRDS, NAMESPACES, SERVICE_ACCOUNTS

# The store's contract stands beside the other adapters' tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    """The file of somebody who may do everything."""
    named = os.environ.get("KUBECONFIG")
    if not named:
        pytest.skip("needs a cluster: set KUBECONFIG")
    return Path(named)


@pytest.fixture(scope="session")
def admin(kubeconfig: Path) -> Iterator[Kube]:
    """A client that may do everything, with the CRDs installed."""
    kube = Kube.connect(kubeconfig)
    for document in crds.documents().values():
        kube.apply(CRDS, document, force=True)
    for document in crds.documents().values():
        wait_for(lambda name=document["metadata"]["name"]: _established(kube, name), "the CRD is established")
    yield kube
    kube.close()


def _established(kube: Kube, name: str) -> bool:
    conditions = kube.get(CRDS, name).get("status", {}).get("conditions", [])
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


@pytest.fixture
def kube(admin: Kube) -> Kube:
    """The client."""
    return admin


@pytest.fixture
def namespace(admin: Kube) -> Iterator[str]:
    """A fresh namespace, deleted at the end."""
    name = f"test-{uuid4().hex[:8]}"
    admin.create(NAMESPACES, {"metadata": {"name": name}})
    try:
        yield name
    finally:
        admin.delete(NAMESPACES, name)


@pytest.fixture
def token(admin: Kube, namespace: str) -> Callable[..., str]:
    """Makes a ServiceAccount and a token of it for some audience."""

    def make(name: str, audience: str = "tunewright") -> str:
        if name not in {each["metadata"]["name"] for each in admin.list(SERVICE_ACCOUNTS, namespace).items}:
            admin.create(SERVICE_ACCOUNTS, {"metadata": {"name": name}}, namespace)
        spec: Json = {"spec": {"audiences": [audience], "expirationSeconds": 600}}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", **spec}
        made = admin.create(SERVICE_ACCOUNTS, body, namespace, name=name, subresource="token")
        return str(made["status"]["token"])

    return make
