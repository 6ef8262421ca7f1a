"""The spare as pods, on a cluster in memory."""

import json
import re

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import NEW, OWNER, REF, container, production

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.kube.errors import Forbidden, Invalid
from tunewright.kube.resources import PODS
from tunewright.platform.kubernetes.names import PERSISTENT_VOLUME_CLAIMS, Owner, joined
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.spare import LOGS_KEPT, SILENCE, KubernetesSpare
from tunewright.platform.kubernetes.workload import HOSTNAME, Overrides
from tunewright.platform.process.probe import Health
from tunewright.ports import PortError, Refused, ServerPhase

START = 100.0
POD = "chat-001-x-1"


def make(cluster: FakeCluster, **more) -> KubernetesSpare:
    given = {"start_timeout": START, "sleep": cluster.clock.sleep, **more}
    return KubernetesSpare(cluster, OWNER, REF, cluster.clock, **given)


def pod_of(cluster: FakeCluster, name: str = POD) -> dict:
    return cluster.edit(PODS, name)


def started(cluster: FakeCluster, spare: KubernetesSpare, trial: str = "001-x-1", candidate: Candidate = NEW):
    spare.start(trial, candidate)
    cluster.tick()
    return spare.poll(trial)


def test_a_trial_comes_up_is_read_back_and_goes_without_a_trace(cluster, servers):
    production(cluster)
    spare = make(cluster)
    assert spare.poll("001-x-1").phase is ServerPhase.ABSENT
    spare.start("001-x-1", NEW)
    assert spare.poll("001-x-1").phase is ServerPhase.STARTING
    servers.health["10.0.0.7"] = Health.REFUSED
    cluster.tick()
    address = pod_of(cluster)["status"]["podIP"]
    servers.health[address] = Health.REFUSED
    assert "/health: refused" in spare.poll("001-x-1").detail
    servers.health.clear()
    cluster.tick(5.0)
    ready = spare.poll("001-x-1")
    assert ready.phase is ServerPhase.READY
    assert ready.url == f"http://{address}:8000"
    assert (ready.version, ready.start_seconds) == ("0.32.0", 5.0)
    again = make(cluster).poll("001-x-1")  # another controller
    assert again == ready
    cluster.logs_of[POD] = "one\ntwo\nthree"
    spare.cancel("001-x-1")
    spare.cancel("001-x-1")
    assert spare.poll("001-x-1").phase is ServerPhase.STOPPING
    cluster.tick()
    assert spare.poll("001-x-1").phase is ServerPhase.ABSENT
    assert spare.log_tail("001-x-1", 2) == "two\nthree"


def test_its_pod_is_production_s_but_for_what_is_ours(cluster, servers):
    pod = {
        "containers": [
            container(
                livenessProbe={"x": 1}, startupProbe={"x": 1}, lifecycle={"preStop": 1, "postStart": 2}, novel={"a": 1}
            ),
            {"name": "log-shipper", "image": "x", "livenessProbe": {"x": 1}},
        ],
        "tolerations": [{"key": "gpu"}],
        "terminationGracePeriodSeconds": 600,
        "novelty": ["kept"],
        "hostIPC": True,
    }
    live = production(cluster, pod=pod)
    live["spec"]["template"]["metadata"]["annotations"] = {"prometheus.io/scrape": "true", "net/roce": "1"}
    make(cluster).start("001-x-1", NEW)
    made = pod_of(cluster)
    assert not made["metadata"]["labels"].items() & live["spec"]["selector"]["matchLabels"].items()
    assert {"app", "tier"}.isdisjoint(made["metadata"]["labels"])
    assert made["metadata"]["annotations"]["net/roce"] == "1"
    assert "prometheus.io/scrape" not in made["metadata"]["annotations"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid
    spec, mine = made["spec"], made["spec"]["containers"][0]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 15)
    assert (spec["novelty"], spec["tolerations"], spec["hostIPC"], mine["novel"]) == (
        ["kept"],
        [{"key": "gpu"}],
        True,
        {"a": 1},
    )
    assert "livenessProbe" not in mine
    assert "readinessProbe" not in mine
    assert "livenessProbe" not in spec["containers"][1]
    assert mine["lifecycle"] == {"postStart": 2}
    assert "64" in mine["args"]
    assert live["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] == {"x": 1}


def test_a_start_taken_twice_makes_one_pod_and_another_trial_waits(cluster, servers):
    production(cluster)
    make(cluster).start("001-x-1", NEW)
    make(cluster).start("001-x-1", NEW)
    assert len(cluster.pods(**{"tunewright.dev/role": "trial"})) == 1
    spare = make(cluster)
    with pytest.raises(PortError, match=r"trial 001-x-1 .* is still on the spare"):
        spare.start("002-y-1", NEW)
    spare.cancel("001-x-1")
    with pytest.raises(PortError, match="still being ended"):
        spare.start("001-x-1", NEW)
    with pytest.raises(PortError, match="still on the spare"):
        spare.start("002-y-1", NEW)
    cluster.tick()
    spare.start("002-y-1", NEW)


def test_each_of_several_spares_takes_one_trial(cluster, servers):
    production(cluster)
    spare = make(cluster, parallelism=2)
    spare.start("001-x-1", NEW, 0)
    spare.start("002-y-1", NEW, 1)
    labels = [pod_of(cluster, name)["metadata"]["labels"]["tunewright.dev/spare"] for name in (POD, "chat-002-y-1")]
    assert labels == ["0", "1"]
    cluster.tick(2)
    assert [spare.poll(trial).phase for trial in ("001-x-1", "002-y-1")] == [ServerPhase.READY] * 2
    for fresh in (spare, make(cluster, parallelism=2)):  # another controller
        with pytest.raises(PortError, match=r"trial 002-y-1 .* is still on spare 1"):
            fresh.start("003-z-1", NEW, 1)
    with pytest.raises(PortError, match=r"there is no spare 2: spare\.parallelism is 2"):
        spare.start("003-z-1", NEW, 2)
    spare.cancel("002-y-1")
    with pytest.raises(PortError, match="still on spare 1"):
        spare.start("003-z-1", NEW, 1)
    assert spare.sweep(["001-x-1", "003-z-1"]) == ["002-y-1"], "until its node says that it is gone"
    cluster.tick()
    spare.start("003-z-1", NEW, 1)
    assert spare.poll("001-x-1").phase is ServerPhase.READY
    assert spare.sweep([]) == ["001-x-1", "003-z-1"]


def test_a_pod_of_before_there_were_several_is_on_the_first_spare(cluster, servers):
    production(cluster)
    make(cluster).start("001-x-1", NEW)
    del pod_of(cluster)["metadata"]["labels"]["tunewright.dev/spare"]
    spare = make(cluster, parallelism=2)
    with pytest.raises(PortError, match="still on spare 0"):
        spare.start("002-y-1", NEW, 0)
    spare.start("002-y-1", NEW, 1)


def test_want_of_a_gpu_is_told_and_given_up_by_deadline_without_blame(cluster, servers):
    production(cluster)
    cluster.starts = lambda pod: "pending" if pod["metadata"]["name"] == POD else "ready"
    spare = make(cluster)
    status = started(cluster, spare)
    assert status.phase is ServerPhase.STARTING
    assert "no node takes the pod: 0/1 nodes: 1 Insufficient nvidia.com/gpu." in status.detail
    cluster.tick(START)
    status = spare.poll("001-x-1")
    assert status.phase is ServerPhase.FAILED
    assert status.failure is not None
    assert status.failure.kind is FailureKind.UNSCHEDULABLE
    assert status.failure.machine_fault
    assert "Insufficient nvidia.com/gpu" in status.failure.cause
    cluster.starts = lambda pod: "ready"


def test_the_wait_for_a_gpu_costs_nothing_of_the_start_s_deadline(cluster, servers):
    production(cluster)
    cluster.starts = lambda pod: "pending" if pod["metadata"]["name"] == POD else "ready"
    spare = make(cluster)
    started(cluster, spare)
    cluster.tick(START - 10)
    assert spare.poll("001-x-1").phase is ServerPhase.STARTING
    cluster.starts = lambda pod: "ready"
    cluster.tick()
    servers.health[pod_of(cluster)["status"]["podIP"]] = Health.SILENT
    cluster.tick(START - 10)
    assert spare.poll("001-x-1").phase is ServerPhase.STARTING
    cluster.tick(20)
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.HUNG


def test_a_failed_start_is_explained_and_its_log_outlives_the_pod(cluster, servers):
    production(cluster)
    spare = make(cluster)
    spare.start("001-x-1", NEW)
    cluster.tick()
    cluster.logs_of[POD] = "INFO x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    cluster.crash(pod_of(cluster), 1)
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.exit_code == 1
    assert make(cluster).poll("001-x-1").failure == failure
    spare.cancel("001-x-1")
    cluster.tick()
    fresh = make(cluster)
    assert fresh.poll("001-x-1").phase is ServerPhase.ABSENT
    assert "CUDA out of memory" in fresh.log_tail("001-x-1")


def test_the_logs_kept_are_bounded(cluster, servers):
    production(cluster)
    spare = make(cluster, parallelism=1000)
    for number in range(LOGS_KEPT + 3):
        trial = f"{number:03d}-x-1"
        spare.start(trial, NEW)
        cluster.tick()
        cluster.logs_of[f"chat-{trial}"] = "RuntimeError: boom"
        cluster.crash(pod_of(cluster, f"chat-{trial}"), 1)
        spare.poll(trial)
        spare.cancel(trial)
        cluster.tick()
    assert sum(plural == "configmaps" for plural, _, _ in cluster.objects) == LOGS_KEPT


@pytest.mark.parametrize(
    ("status", "kind", "cause"),
    [
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            FailureKind.KILLED,
            "Evicted.*low on memory",
        ),
        ({"phase": "Unknown"}, FailureKind.KILLED, "node node1 does not answer"),
        (
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    {"name": "fetch", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}
                ],
            },
            FailureKind.KILLED,
            "init container fetch failed: Error, exit code 2",
        ),
    ],
)
def test_what_ends_the_pod_from_outside_is_never_the_candidate_s(cluster, servers, status, kind, cause):
    production(cluster)
    spare = make(cluster)
    spare.start("001-x-1", NEW)
    cluster.tick()
    pod_of(cluster)["status"] |= status
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert (failure.kind, failure.machine_fault) == (kind, True)
    assert re.search(cause, failure.cause)


def test_memory_of_the_host_is_told_apart_from_a_kill(cluster, servers):
    production(cluster)
    spare = make(cluster)
    assert started(cluster, spare).phase is ServerPhase.READY
    cluster.crash(pod_of(cluster), 137, "OOMKilled")
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY_UNDER_LOAD
    assert "memory limit" in failure.cause


def test_a_pod_that_somebody_deleted_is_a_machine_fault(cluster, servers):
    production(cluster)
    spare = make(cluster)
    assert started(cluster, spare).phase is ServerPhase.READY
    cluster.delete(PODS, POD, NAMESPACE)
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.KILLED
    cluster.tick()
    assert spare.poll("001-x-1").failure == failure
    spare.cancel("001-x-1")
    assert spare.poll("001-x-1").phase is ServerPhase.ABSENT
    spare.start("001-x-1", NEW)


def test_a_death_under_load_is_noticed_and_explained_by_the_log(cluster, servers):
    production(cluster)
    spare = make(cluster)
    status = started(cluster, spare)
    address = pod_of(cluster)["status"]["podIP"]
    servers.health[address] = Health.DEAD
    cluster.logs_of[POD] = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    failure = spare.poll("001-x-1").failure
    assert status.phase is ServerPhase.READY
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY_UNDER_LOAD


def test_silence_is_borne_for_a_while_then_it_hangs(cluster, servers):
    production(cluster)
    spare = make(cluster)
    started(cluster, spare)
    servers.health[pod_of(cluster)["status"]["podIP"]] = Health.SILENT
    assert spare.poll("001-x-1").phase is ServerPhase.READY
    cluster.clock.time += SILENCE + 1
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.HUNG


def test_health_without_a_completion_is_not_ready(cluster, servers):
    production(cluster)
    spare = make(cluster)
    spare.start("001-x-1", NEW)
    cluster.tick()
    servers.answers_nothing.add(pod_of(cluster)["status"]["podIP"])
    status = spare.poll("001-x-1")
    assert status.phase is ServerPhase.STARTING
    assert "completes nothing" in status.detail


def test_a_server_that_is_not_as_launched_is_no_measurement(cluster, servers):
    production(cluster)
    servers.cache = {"gpu_memory_utilization": "0.5"}
    failure = started(cluster, make(cluster)).failure
    assert failure is not None
    assert failure.kind is FailureKind.NOT_AS_LAUNCHED


def test_a_sweep_ends_the_others_and_leaves_what_is_kept(cluster, servers):
    production(cluster)
    make(cluster).start("001-x-1", NEW)
    cluster.tick()
    spare = make(cluster)
    assert spare.sweep(["001-x-1"]) == []
    assert spare.poll("001-x-1").phase is ServerPhase.READY
    assert spare.sweep(["002-y-1"]) == ["001-x-1"]
    assert spare.sweep(["002-y-1"]) == ["001-x-1"], "until it is gone"
    cluster.tick()
    assert spare.sweep(["002-y-1"]) == []


def test_another_tuning_of_this_name_is_not_taken_for_ours(cluster, servers):
    production(cluster)
    KubernetesSpare(cluster, Owner("chat", "an-earlier-one"), REF, cluster.clock, start_timeout=9).start("001-x-1", NEW)
    with pytest.raises(PortError, match="not of this tuning"):
        make(cluster).start("001-x-1", NEW)
    with pytest.raises(PortError, match="still on the spare"):
        make(cluster).start("002-y-1", NEW)
    assert make(cluster).sweep([]) == ["001-x-1"]


def volumes(*claims: str) -> list[dict]:
    return [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]


def claim(cluster: FakeCluster, name: str, *modes: str) -> None:
    cluster.put(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"name": name}, "spec": {"accessModes": list(modes)}})


@pytest.mark.parametrize(
    ("modes", "node"),
    [(["ReadWriteOnce"], "node1"), (["ReadWriteMany"], None), (["ReadWriteOnce", "ReadOnlyMany"], None)],
)
def test_a_volume_of_one_node_ties_the_trial_to_it(cluster, servers, modes, node):
    claim(cluster, "model", *modes)
    production(cluster, pod={"volumes": volumes("model")})
    make(cluster).start("001-x-1", NEW)
    assert (pod_of(cluster)["spec"].get("nodeSelector") or {}).get(HOSTNAME) == node


def test_a_volume_of_one_pod_or_of_another_node_is_refused_by_name(cluster, servers):
    claim(cluster, "model", "ReadWriteOncePod")
    production(cluster, pod={"volumes": volumes("model")})
    with pytest.raises(Refused, match="the claim model is ReadWriteOncePod"):
        make(cluster).start("001-x-1", NEW)
    claim(cluster, "model", "ReadWriteOnce")
    with pytest.raises(Refused, match="the claim model is ReadWriteOnce, in use on node node1"):
        make(cluster, overrides=Overrides({HOSTNAME: "node2"})).start("001-x-1", NEW)


def test_a_claim_that_may_not_be_read_is_left_to_the_scheduler(cluster, servers):
    production(cluster, pod={"volumes": volumes("model")})
    cluster.forbidden.add("persistentvolumeclaims")
    make(cluster).start("001-x-1", NEW)


def test_a_key_in_a_secret_is_asked_for_by_file_and_a_plain_one_refused(cluster, servers, tmp_path):
    by_reference = [{"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "vllm"}}}]
    production(cluster, pod={"containers": [container(env=by_reference)]})
    with pytest.raises(Refused, match="Secret keys, key vllm"):
        make(cluster).start("001-x-1", NEW)
    (tmp_path / "key").write_text("sesame\n")
    make(cluster, prober=Prober(api_key_file=str(tmp_path / "key"))).start("001-x-1", NEW)
    assert "sesame" not in json.dumps(pod_of(cluster))
    assert pod_of(cluster)["spec"]["containers"][0]["env"] == by_reference
    production(cluster, pod={"containers": [container(env=[{"name": "VLLM_API_KEY", "value": "sesame"}])]})
    with pytest.raises(Refused, match="as plain text"):
        make(cluster, parallelism=2).start("002-x-1", NEW, 1)


def test_what_the_api_server_refuses_is_refused_and_what_it_can_not_do_now_is_tried_again(cluster, servers):
    production(cluster)

    def refuse(error: Exception):
        def before(verb, resource, name):
            if verb == "create":
                raise error

        return before

    cluster.before = refuse(Invalid("POST", "/pods", "spec.x: wrong", status=422))
    with pytest.raises(Refused, match=r"spec\.x: wrong"):
        make(cluster).start("001-x-1", NEW)
    cluster.before = refuse(Forbidden("POST", "/pods", "exceeded quota", status=403))
    with pytest.raises(PortError, match="exceeded quota"):
        make(cluster).start("001-x-1", NEW)


def test_a_create_whose_answer_got_lost_is_no_second_pod(cluster, servers):
    production(cluster)
    spare = make(cluster)
    original = cluster.create

    def create(*args, **more):
        original(*args, **more)
        return original(*args, **more)

    cluster.create = create
    spare.start("001-x-1", NEW)
    assert len(cluster.pods(**{"tunewright.dev/role": "trial"})) == 1


def test_names_are_labels_of_dns_and_differ():
    assert joined("chat", "001-ab-1") == "chat-001-ab-1"
    long = joined("x" * 60, "001-ab-1")
    assert len(long) <= 63
    assert long != joined("x" * 60, "001-ab-2")
    assert joined("a", "B/ß") != joined("a", "b/ß")
    assert joined("a-b", "c.d") != joined("a", "b-c.d")
