"""The shipped Role is enough for a trial, its load test and a rollout; and what is granted is used."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_production import BASELINE, IMAGE, NEW, deployment, own, production
from cluster_rights import Recorded, client_with, shipped, used

from cluster import wait_for
from tunewright.domain.candidate import Candidate
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.kube.client import Kube
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import LoadPhase, LoadRequest, ServerPhase, TargetPlan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 4, "gpu_memory_utilization": 0.05})
OTHERS = {"tunewright.dev", "coordination.k8s.io"}
"""Groups that the store and the lease use, which have their own tests."""


class SystemClock:
    """Real time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


@pytest.fixture
def limited(kubeconfig: Path, admin: Kube, namespace: str, token: Callable[..., str]) -> Recorded:
    """A client that may do what the shipped Role says."""
    return client_with(shipped("base/role.yaml"), kubeconfig, admin, namespace, token)


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
        for rule in shipped("base/role.yaml")
        for verb in rule["verbs"]
        if not OTHERS & set(rule["apiGroups"])
        and verb != "watch"
        and rule["resources"] not in (["pods/log"], ["events"], ["persistentvolumeclaims"])
        and not used(limited.asked, rule, verb)
    ]
    assert idle == ["list ['deployments']"], "that one is the watch's"
