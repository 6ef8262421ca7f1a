"""A namespace of its own for each test, in the cluster of `$KUBECONFIG`, with the CRDs as they are generated."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import yaml
from cluster_production import GPU, IMAGE
from cluster_story import NAMESPACE, kubectl, prometheus_of_pods, relative

from cluster import wait_for
from tunewright.kube import crds
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.errors import NotFound
from tunewright.kube.resources import CRDS, NAMESPACES, NODES, SERVICE_ACCOUNTS

DEPLOY = Path(__file__).parents[2] / "deploy"

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
    conditions = (kube.get(CRDS, name).get("status") or {}).get("conditions") or []  # null at first
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


@pytest.fixture(scope="session")
def gpus(admin: Kube) -> None:
    """Three GPUs that are none: two for production, one to spare."""
    node = admin.list(NODES).items[0]["metadata"]["name"]
    patch = {"status": {"capacity": {GPU: "3"}, "allocatable": {GPU: "3"}}}
    admin.patch(NODES, node, patch, type=PatchType.MERGE, subresource="status")


@pytest.fixture(scope="session")
def installed(admin: Kube, gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The controller as its manifests install it, in a namespace and with an image of the tests'."""
    with suppress(NotFound):  # of a run that was interrupted
        admin.delete(NAMESPACES, NAMESPACE)
    wait_for(lambda: NAMESPACE not in _names(admin), "the namespace of an earlier run is gone", 180)
    folder = tmp_path_factory.mktemp("overlay")
    name, _, tag = IMAGE.rpartition(":")
    overlay = {
        "namespace": NAMESPACE,
        "resources": [relative(DEPLOY / "base", folder), relative(DEPLOY / "capacity", folder)],
        "images": [{"name": "tunewright", "newName": name, "newTag": tag}],
        "patchesStrategicMerge": ["image.yaml"],
    }
    # Three tunings at once on two cores: a whole one for each load test would make them wait for each other.
    env = [{"name": "TUNEWRIGHT_IMAGE", "value": IMAGE}, {"name": "TUNEWRIGHT_LOAD_CPU", "value": "200m"}]
    spec = {"template": {"spec": {"containers": [{"name": "tunewright", "env": env}]}}}
    metadata = {"name": "tunewright", "namespace": "tunewright"}
    (folder / "image.yaml").write_text(
        yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    )
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl("apply", "-k", str(folder))
    kubectl("-n", NAMESPACE, "rollout", "status", "deployment/tunewright", "--timeout=120s", timeout=150)
    yield admin
    if NAMESPACE in _names(admin):  # one story deletes it
        print(kubectl("-n", NAMESPACE, "logs", "deployment/tunewright", "--tail=200"))
    kubectl("delete", "-k", str(folder), "--wait=false", "--ignore-not-found")
    with suppress(NotFound):
        admin.delete(NAMESPACES, NAMESPACE)


def _names(admin: Kube) -> set[str]:
    return {each["metadata"]["name"] for each in admin.list(NAMESPACES).items}


@pytest.fixture(scope="session")
def prometheus_server(
    kubeconfig: Path, installed: Kube, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real one: its process, and its URL as pods reach it. It listens where the API server does."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on the PATH")
    address = urlsplit(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]).hostname
    with prometheus_of_pods(tmp_path_factory.mktemp("prometheus"), installed, address) as found:
        yield found


@pytest.fixture(scope="session")
def prometheus(prometheus_server: tuple[subprocess.Popen[bytes], str]) -> str:
    """Its URL as pods reach it."""
    return prometheus_server[1]
