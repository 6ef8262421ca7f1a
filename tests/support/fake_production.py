"""A production of two vLLM replicas behind a Service, in memory, whose servers answer what is asked of them."""

from typing import Any

import pytest
from fake_cluster import NAMESPACE, Clock, FakeCluster

from tunewright.domain.candidate import Candidate
from tunewright.kube.client import Json
from tunewright.kube.resources import DEPLOYMENTS, NODES, SERVICES
from tunewright.platform.kubernetes import canary
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.platform.process import probe
from tunewright.platform.process.http import Answer, Unreachable
from tunewright.platform.process.probe import Health
from tunewright.ports import PortError

OWNER = Owner("chat", "uid-of-chat")
REF = DeploymentRef(NAMESPACE, "llm")
ARGS = ["serve", "some/model", "--port", "8000", "--max-num-seqs", "8", "--gpu-memory-utilization=0.90"]
BASELINE = Candidate(values={"max_num_seqs": 8, "gpu_memory_utilization": 0.9})
NEW = Candidate(values={"max_num_seqs": 64, "gpu_memory_utilization": 0.9})


def container(**more: Any) -> Json:
    """The container that runs vLLM."""
    probes = {"readinessProbe": {"httpGet": {"path": "/health", "port": 8000}}}
    found = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ARGS, **probes}
    return found | {"resources": {"limits": {"nvidia.com/gpu": "1"}}} | more


def deployment(replicas: int = 2, *, pod: Json | None = None, **spec: Any) -> Json:
    """Production as a user wrote it; the selector has one label more than the Service's."""
    labels = {"app": "llm", "tier": "serving"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container()], **(pod or {})}}
    return {
        "metadata": {"name": "llm"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
            "template": template,
            **spec,
        },
    }


class Servers:
    """What the pods' servers answer, by pod address; `silent` and `dead` name addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers_nothing: set[str] = set()
        self.health: dict[str, Health] = {}
        self.busy: set[str] = set()
        self.asked: list[str] = []
        self.cache: dict[str, str] = {}
        monkeypatch.setattr(probe, "health", lambda url: self.health.get(_host(url), Health.OK))
        monkeypatch.setattr(probe, "complete_one_token", self._complete)
        monkeypatch.setattr(probe, "version", lambda url: "0.32.0")
        monkeypatch.setattr(probe, "cache_config", lambda url: self.cache)
        monkeypatch.setattr(canary, "call", self._call)

    def _complete(self, url: str, model: str | None, headers: Any) -> None:
        self.asked.append(_host(url))
        if _host(url) in self.answers_nothing:
            raise PortError(f"{url} completes nothing")

    def _call(self, method: str, url: str, timeout: float) -> Answer:
        if _host(url) in self.answers_nothing:
            raise Unreachable("gone", refused=True)
        return Answer(200, f'vllm:num_requests_running{{model_name="m"}} {float(_host(url) in self.busy)}\n')


def _host(url: str) -> str:
    return url.split("//")[1].partition(":")[0]


def node(gpus: int) -> Json:
    """The one node, with so many GPUs."""
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "node1"}, "spec": {}, "status": status}


def production(cluster: FakeCluster, replicas: int = 2, **spec: Any) -> Json:
    """Put it there and let it come up."""
    cluster.put(NODES, node(replicas + 2), None)
    found = cluster.put(DEPLOYMENTS, deployment(replicas, **spec))
    cluster.put(SERVICES, {"metadata": {"name": "llm"}, "spec": {"selector": {"app": "llm"}}})
    for _ in range(4):
        cluster.tick()
    return found


def new_cluster() -> FakeCluster:
    """An empty one, on a clock of its own."""
    return FakeCluster(Clock())
