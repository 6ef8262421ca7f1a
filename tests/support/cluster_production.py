"""Production on a real cluster: simulated vLLM servers behind a Service, and a Tuning that owns what is made beside."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from tunings import tuning

from cluster import wait_for
from tunewright.domain.candidate import Candidate
from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, SERVICES, TUNINGS
from tunewright.platform.kubernetes.names import Owner

IMAGE = os.environ.get("TUNEWRIGHT_IMAGE", "tunewright:test")
ARGS = ["simulate", "serve", "demo-model", "--port", "8000", "--sim-speed", "100", "--max-num-seqs", "4"]
BASELINE = Candidate(values={"max_num_seqs": 4})
NEW = Candidate(values={"max_num_seqs": 16})
GPU = "nvidia.com/gpu"


def container(args: list[str], **more: object) -> Json:
    """A simulated vLLM: ready by /health, forgotten by every node (a busy one takes seconds) before it ends."""
    return {
        "name": "vllm",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "args": args,
        "ports": [{"containerPort": 8000}],
        "resources": {"requests": {"cpu": "50m"}},
        # Patient: eight tunings on two cores make a probe wait, and without a ready pod requests are refused.
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": 8000},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 5,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "8"]}}},
        **more,
    }


def deployment(replicas: int, args: list[str] = ARGS, *, volumes: list[Json] | None = None, **more: object) -> Json:
    """As a user wrote it."""
    labels = {"app": "llm", "tier": "serving"}
    spec: Json = {"terminationGracePeriodSeconds": 30, "containers": [container(args, **more)]}
    spec |= {"volumes": volumes} if volumes else {}
    return {
        "metadata": {"name": "llm"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def own(kube: Kube, namespace: str, name: str = "chat") -> Owner:
    """A Tuning, so that the garbage collector leaves alone what it owns."""
    spec = tuning().model_dump(mode="json", by_alias=True, exclude_unset=True)["spec"]
    made = kube.create(TUNINGS, {"metadata": {"name": name}, "spec": spec}, namespace)
    return Owner(name, made["metadata"]["uid"])


def production(kube: Kube, namespace: str, body: Json, *, manager: str = "kubectl") -> str:
    """Apply it as `manager`, wait until it serves; the address that clients use."""
    kube.apply(DEPLOYMENTS, body, namespace, manager=manager)
    service = {
        "metadata": {"name": "llm"},
        "spec": {"selector": {"app": "llm"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    made = kube.create(SERVICES, service, namespace)
    wait_for(lambda: ready_replicas(kube, namespace) == body["spec"]["replicas"], "production serves")
    return routed(f"http://{made['spec']['clusterIP']}")


def routed(url: str) -> str:
    """The Service's address, once the node routes it: a busy one refuses it for a while after its pods are ready."""
    wait_for(lambda: answers(f"{url}/health"), f"{url} is routed")
    return url


def answers(url: str) -> bool:
    """With 200, at once."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ready_replicas(kube: Kube, namespace: str) -> int:
    """As the Deployment's status counts them."""
    return int((kube.get(DEPLOYMENTS, "llm", namespace).get("status") or {}).get("readyReplicas") or 0)


class Traffic:
    """Clients that ask all the time, each request on a connection of its own, as behind a load balancer."""

    def __init__(self, url: str, clients: int = 2) -> None:
        self._url = url
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.answered: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def address(self) -> str:
        """Where the next request goes."""
        return self._url

    def _ask(self) -> None:
        body = {"model": "demo-model", "prompt": "Hello", "max_tokens": 3}
        one_each = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(limits=one_each, timeout=30, trust_env=False) as client:
            while not self._stop.wait(0.1):
                try:
                    answer = client.post(f"{self.address()}/v1/completions", json=body)
                    if answer.status_code != 200 or not answer.json()["choices"]:
                        self._failed(f"{answer.status_code} {answer.text[:200]}")
                    self.answered["all"] += 1
                except (httpx.HTTPError, ValueError) as error:
                    self._failed(repr(error))

    def _failed(self, how: str) -> None:
        self.failures.append(f"{time.strftime('%H:%M:%S')} {how}")

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        """Ask until the block ends."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(40)
