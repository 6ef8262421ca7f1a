"""The spare and the load test as pods of a real cluster."""

import base64
import gzip
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster_production import ARGS, GPU, IMAGE, NEW, deployment, own, production

from cluster import PATIENCE, wait_for
from tunewright.domain.candidate import Candidate
from tunewright.domain.load import Load, LoadMode
from tunewright.domain.state import FailureKind
from tunewright.domain.traffic import Trace
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload, given_profile, workload_for
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.resources import CONFIG_MAPS, NODES, PODS, TUNINGS
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.loadfile import LoadFiles
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides
from tunewright.ports import LoadPhase, LoadRequest, LoadStatus, PortError, Refused, ServerPhase, ServerStatus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WORKLOAD = Workload(concurrency=2, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=8))
REQUEST = LoadRequest("http://127.0.0.1:9", WORKLOAD, None, Slo(), duration=3.0, max_warmup=2.0, seed=1)
OUT_OF_MEMORY = Candidate(values={"max_num_seqs": 4, "gpu_memory_utilization": 0.05})


class SystemClock:
    """Real time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


def spare_of(kube: Kube, namespace: str, owner: Owner, **more: object) -> KubernetesSpare:
    """As a controller that was just started."""
    given: Json = {"start_timeout": 60.0, **more}
    return KubernetesSpare(kube, owner, DeploymentRef(namespace, "llm"), SystemClock(), **given)


def until(poll: Callable[[], ServerStatus], phase: ServerPhase) -> ServerStatus:
    """Poll until it is there."""
    deadline = time.monotonic() + PATIENCE
    while (status := poll()).phase is not phase:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def test_a_trial_with_its_load_test_from_start_to_nothing(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1))
    owner = own(kube, namespace)
    spare = spare_of(kube, namespace, owner)
    spare.start("000-x-1", NEW)
    spare.start("000-x-1", NEW)
    status = until(lambda: spare.poll("000-x-1"), ServerPhase.READY)
    assert status.effective["max_num_seqs"] == 16
    assert status.version is not None
    assert "+simulated" in status.version
    assert status.start_seconds is not None
    assert status.surprises == ()
    pod = kube.get(PODS, "chat-000-x-1", namespace)
    assert "app" not in pod["metadata"]["labels"]
    again = spare_of(kube, namespace, owner)
    assert again.poll("000-x-1").url == status.url

    tests = KubernetesLoadTest(
        kube, owner, namespace, LoadPodSettings(image=IMAGE, cpu="100m", memory="64Mi"), SystemClock()
    )
    request = replace(REQUEST, url=str(status.url), quality_prompts=2, quality_max_tokens=4)
    tests.start("000-x-1", request)
    tests.start("000-x-1", request)
    found = ended(tests, "000-x-1")
    assert found.phase is LoadPhase.DONE, found.detail
    assert found.measurement is not None
    assert found.measurement.completed > 0
    assert found.measurement.source == "simulated"
    assert len(found.answers) == 2
    fresh = KubernetesLoadTest(kube, owner, namespace, LoadPodSettings(image=IMAGE), SystemClock())
    assert fresh.poll("000-x-1") == found
    fresh.cancel("000-x-1")
    assert fresh.poll("000-x-1").phase is LoadPhase.ABSENT

    with pytest.raises(PortError, match="still on the spare"):
        again.start("001-y-1", NEW)
    again.cancel("000-x-1")
    until(lambda: again.poll("000-x-1"), ServerPhase.ABSENT)
    assert [p["metadata"]["name"][:3] for p in kube.list(PODS, namespace).items] == ["llm"]
    assert [c for c in kube.list(CONFIG_MAPS, namespace).items if c["metadata"]["name"].startswith("chat")] == []


def ended(tests: KubernetesLoadTest, run_id: str) -> LoadStatus:
    """Poll until it has ended."""
    deadline = time.monotonic() + PATIENCE
    while (status := tests.poll(run_id)).phase is LoadPhase.RUNNING:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def test_load_tests_read_a_trace_of_a_config_map_as_it_was_when_it_was_copied(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1))
    owner = own(kube, namespace)
    files = LoadFiles(kube, owner, namespace)
    load = Load(mode=LoadMode.TRACE, trace=Trace(config_map="monday"))
    with pytest.raises(PortError, match="there is no ConfigMap monday"):
        files.keep(load)
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:17:{at // 4:02}.{at % 4 * 25:02},16,4\n" for at in range(40)
    )
    packed = {"trace.csv.gz": base64.b64encode(gzip.compress(trace.encode())).decode()}
    kube.create(CONFIG_MAPS, {"metadata": {"name": "monday"}, "binaryData": packed}, namespace)
    kept = files.keep(load)
    assert kept is not None
    assert files.keep(load) == kept
    kube.delete(CONFIG_MAPS, "monday", namespace)
    tests = KubernetesLoadTest(
        kube, owner, namespace, LoadPodSettings(image=IMAGE, cpu="100m", memory="64Mi"), SystemClock()
    )
    (pod,) = kube.list(PODS, namespace).items
    url = f"http://{pods.address(pod)}:8000"
    given = given_profile(Load(concurrency=1, prompt_tokens=16, output_tokens=4), 0.0)
    request = replace(REQUEST, url=url, workload=workload_for(load.reading(kept.path), given), file=kept)
    tests.start("000-x-1", request)
    found = ended(tests, "000-x-1")
    assert found.phase is LoadPhase.DONE, found.detail
    assert f"{kept.path}: 40 requests, sha256 {kept.digest[:12]}" in found.detail
    copy = files.ensure(kept)
    kube.delete(CONFIG_MAPS, copy, namespace)
    with pytest.raises(Refused, match="no longer in ConfigMap monday"):
        tests.start("001-x-1", request)
    kube.create(CONFIG_MAPS, {"metadata": {"name": "monday"}, "binaryData": packed}, namespace)
    tests.start("002-x-1", request)
    assert ended(tests, "002-x-1").phase is LoadPhase.DONE
    assert files.ensure(kept) == copy


def test_a_failed_start_is_explained_and_its_log_is_kept(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1))
    owner = own(kube, namespace)
    spare = spare_of(kube, namespace, owner)
    spare.start("000-x-1", OUT_OF_MEMORY)
    failure = until(lambda: spare.poll("000-x-1"), ServerPhase.FAILED).failure
    assert failure is not None
    assert failure.kind in (FailureKind.KV_TOO_SMALL, FailureKind.OUT_OF_MEMORY), failure
    assert failure.exit_code == 1
    spare.cancel("000-x-1")
    until(lambda: spare.poll("000-x-1"), ServerPhase.ABSENT)
    assert "gpu_memory_utilization" in spare_of(kube, namespace, owner).log_tail("000-x-1", 1000)


def test_death_under_load_deletion_and_eviction_are_told_apart(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1))
    spare = spare_of(kube, namespace, own(kube, namespace))
    spare.start("000-x-1", NEW)
    until(lambda: spare.poll("000-x-1"), ServerPhase.READY)
    name = "chat-000-x-1"
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    kube.create(PODS, eviction, namespace, name=name, subresource="eviction")
    failure = until(lambda: spare.poll("000-x-1"), ServerPhase.FAILED).failure
    assert failure is not None
    assert failure.kind is FailureKind.KILLED
    spare.cancel("000-x-1")
    until(lambda: spare.poll("000-x-1"), ServerPhase.ABSENT)
    spare.start("000-x-2", NEW)
    until(lambda: spare.poll("000-x-2"), ServerPhase.READY)


def test_a_load_test_whose_pod_is_killed_is_failed_with_the_reason(kube: Kube, namespace: str) -> None:
    owner = own(kube, namespace)
    tests = KubernetesLoadTest(
        kube, owner, namespace, LoadPodSettings(image=IMAGE, cpu="100m", memory="64Mi"), SystemClock()
    )
    tests.start("000-x-1", REQUEST)
    status = ended(tests, "000-x-1")
    assert status.phase is LoadPhase.FAILED
    assert "127.0.0.1:9" in status.detail
    tests.start("001-x-1", REQUEST)
    kube.delete(PODS, "chat-001-x-1-load", namespace, grace_seconds=0)
    assert "deleted by somebody else" in ended(tests, "001-x-1").detail


def test_want_of_a_gpu_is_told_waited_for_and_given_up(kube: Kube, namespace: str) -> None:
    gpu = {"resources": {"limits": {GPU: "1"}}}
    with gpus(kube, 1):
        production(kube, namespace, deployment(1, **gpu))
        owner = own(kube, namespace)
        spare = spare_of(kube, namespace, owner, start_timeout=6.0)
        spare.start("000-x-1", NEW)
        wait_for(lambda: "Insufficient nvidia.com/gpu" in spare.poll("000-x-1").detail, "want of a GPU is told")
        failure = until(lambda: spare.poll("000-x-1"), ServerPhase.FAILED).failure
        assert failure is not None
        assert failure.kind is FailureKind.UNSCHEDULABLE
        spare.cancel("000-x-1")
        until(lambda: spare.poll("000-x-1"), ServerPhase.ABSENT)
        elsewhere = spare_of(kube, namespace, owner, overrides=Overrides(gpus=0))
        elsewhere.start("001-x-1", NEW)
        until(lambda: elsewhere.poll("001-x-1"), ServerPhase.READY)


def test_the_tuning_s_deletion_takes_everything_with_it(kube: Kube, namespace: str) -> None:
    production(kube, namespace, deployment(1))
    owner = own(kube, namespace)
    spare = spare_of(kube, namespace, owner)
    spare.start("000-x-1", NEW)
    until(lambda: spare.poll("000-x-1"), ServerPhase.READY)
    kube.delete(TUNINGS, owner.name, namespace)
    wait_for(lambda: len(kube.list(PODS, namespace).items) == 1, "the garbage collector takes the trial's pod")


@pytest.mark.parametrize(
    "form",
    [
        {"command": ["tunewright"], "args": ARGS},
        {"command": ["sh", "-c"], "args": ["exec tunewright " + " ".join(ARGS)]},
    ],
)
def test_other_forms_of_the_command_are_tuned_too(kube: Kube, namespace: str, form: Json) -> None:
    production(kube, namespace, deployment(1, **form))
    spare = spare_of(kube, namespace, own(kube, namespace))
    spare.start("000-x-1", NEW)
    assert until(lambda: spare.poll("000-x-1"), ServerPhase.READY).effective["max_num_seqs"] == 16


class gpus:
    """So many faked GPUs on the node while the block runs."""

    def __init__(self, kube: Kube, count: int) -> None:
        self._kube, self._count = kube, count

    def _set(self, count: int) -> None:
        node = self._kube.list(NODES).items[0]["metadata"]["name"]
        patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
        self._kube.patch(NODES, node, patch, type=PatchType.JSON, subresource="status")
        wait_for(lambda: self._allocatable() == str(count), "the node has its GPUs")

    def _allocatable(self) -> str:
        return str(self._kube.list(NODES).items[0]["status"]["allocatable"].get(GPU, "0"))

    def __enter__(self) -> None:
        self._set(self._count)

    def __exit__(self, *_: object) -> None:
        self._set(0)
