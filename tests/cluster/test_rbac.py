"""The shipped Role is enough for a trial, its load test and a rollout; and what is granted is used."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cluster_production import BASELINE, IMAGE, NEW, deployment, own, production
from kubernetes.client.configuration import Configuration

from cluster import wait_for
from tunewright.domain.candidate import Candidate
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.kube.client import Json, Kube
from tunewright.kube.configuration import load_configuration
from tunewright.kube.errors import Forbidden
from tunewright.kube.resources import PODS, Resource
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import LoadPhase, LoadRequest, ServerPhase, TargetPlan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROLE = Path(__file__).parents[2] / "deploy" / "base" / "role.yaml"
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 4, "gpu_memory_utilization": 0.05})
OTHERS = {"tunewright.dev", "coordination.k8s.io"}
"""Groups that the store and the lease use, which have their own tests."""


class SystemClock:
    """Real time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


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


@pytest.fixture
def limited(kubeconfig: Path, admin: Kube, namespace: str, token: Callable[..., str]) -> Recorded:
    """A client that may do what the shipped Role says."""
    role = yaml.safe_load(ROLE.read_text())
    admin.create(ROLES, {"metadata": {"name": "tunewright"}, "rules": role["rules"]}, namespace)
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


def test_the_shipped_role_is_enough_and_not_too_much(limited: Recorded, admin: Kube, namespace: str) -> None:
    production(admin, namespace, deployment(1))
    owner, ref, clock = own(admin, namespace), DeploymentRef(namespace, "llm"), SystemClock()
    spare = KubernetesSpare(limited, owner, ref, clock, start_timeout=60.0)
    spare.sweep([])
    spare.start("000-x-1", NEW)
    wait_for(lambda: spare.poll("000-x-1").phase is ServerPhase.READY, "the trial is up")
    tests = KubernetesLoadTest(limited, owner, namespace, LoadPodSettings(IMAGE, cpu="100m", memory="64Mi"), clock)
    workload = Workload(concurrency=2, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=8))
    url = str(spare.poll("000-x-1").url)
    tests.start("000-x-1", LoadRequest(url, workload, None, Slo(), duration=1.0, max_warmup=1.0, seed=1))
    wait_for(lambda: tests.poll("000-x-1").phase is LoadPhase.DONE, "the load test is done")
    tests.cancel("000-x-1")
    spare.log_tail("000-x-1")
    spare.cancel("000-x-1")
    wait_for(lambda: spare.poll("000-x-1").phase is ServerPhase.ABSENT, "the trial is gone")
    spare.start("001-y-1", OUT_OF_MEMORY)
    wait_for(lambda: spare.poll("001-y-1").phase is ServerPhase.FAILED, "the start fails")
    spare.cancel("001-y-1")
    wait_for(lambda: spare.poll("001-y-1").phase is ServerPhase.ABSENT, "the trial is gone")
    fresh = KubernetesSpare(limited, owner, ref, clock, start_timeout=60.0)
    assert "gpu_memory_utilization" in fresh.log_tail("001-y-1", 1000)
    target = DeploymentTarget(limited, owner, ref, clock, take_over=True, drain_timeout=10.0, hold_seconds=1)
    assert target.preflight(NEW) == []
    assert target.notes(NEW)
    for plan in (
        TargetPlan(BASELINE, NEW, 0, True, 0.5),
        TargetPlan(BASELINE, NEW, 1, True),
        TargetPlan(BASELINE, NEW, 0),
    ):
        wait_for(lambda plan=plan: target.apply(plan).settled, f"{plan}")
    idle = [
        f"{verb} {rule['resources']}"
        for rule in yaml.safe_load(ROLE.read_text())["rules"]
        for verb in rule["verbs"]
        if not OTHERS & set(rule["apiGroups"])
        and verb != "watch"
        and rule["resources"] not in (["pods/log"], ["events"], ["persistentvolumeclaims"])
        and not used(limited.asked, rule, verb)
    ]
    assert idle == ["list ['deployments']"], "that one is the watch's"
