"""The load test as a pod, on a cluster in memory; and the block that carries its result through a log."""

import json
import re

import pytest
from fake_cluster import NAMESPACE, Clock, FakeCluster
from fake_production import OWNER
from restapi import measured

from tunewright.domain.answers import Answer
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.kube.errors import Unavailable
from tunewright.kube.resources import CONFIG_MAPS, PODS
from tunewright.loadtest.job import LoadJob, LoadResult, Progress
from tunewright.platform.kubernetes import deliver
from tunewright.platform.kubernetes.loadpod import LOG_LIMIT, PENDING_LIMIT, KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.podtemplate import SecretKey
from tunewright.ports import LoadPhase, LoadRequest, PortError, Refused

NAME = "chat-001-x-1-load"
WORKLOAD = Workload(concurrency=2, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=4))
FAILED = LoadResult(failure="the server is gone", content_seed=7)

ANSWERS = (Answer(prompt="p", text="a b", tokens=("a", "b"), top=({"a": -0.1},)),)


def make(cluster: FakeCluster, **more) -> KubernetesLoadTest:
    settings = LoadPodSettings(image="tunewright:1")
    return KubernetesLoadTest(
        cluster, OWNER, NAMESPACE, settings, cluster.clock, sleep=lambda seconds: cluster.tick(seconds), **more
    )


def request(**more) -> LoadRequest:
    given = {"duration": 10.0, "max_warmup": 20.0, "seed": 1, "slo": Slo(), "model": None, "workload": WORKLOAD, **more}
    return LoadRequest(url="http://10.0.0.9:8000", **given)


def end(cluster: FakeCluster, log: str, code: int = 0, reason: str = "Completed") -> None:
    cluster.logs_of[NAME] = log
    cluster.crash(cluster.edit(PODS, NAME), code, reason)


def test_it_runs_tells_its_progress_and_its_result_comes_back_whole(cluster):
    measurement = measured(100.0, 0.2)
    tests = make(cluster)
    assert tests.poll("001-x-1").phase is LoadPhase.ABSENT
    tests.start("001-x-1", request())
    tests.start("001-x-1", request())
    assert tests.poll("001-x-1").phase is LoadPhase.RUNNING
    cluster.tick()
    news = Progress(share=0.5, detail="half")
    cluster.logs_of[NAME] = f"x\ntunewright-progress {news.model_dump_json()}\ntunewright-progress {{"
    status = make(cluster).poll("001-x-1")
    assert (status.phase, status.progress, status.detail) == (LoadPhase.RUNNING, 0.5, "half")
    result = LoadResult(measurement=measurement, answers=ANSWERS, content_seed=1, notes=("n",))
    end(cluster, f"noise\n{deliver.pack(result)}\nmore noise")
    status = tests.poll("001-x-1")
    assert (status.phase, status.measurement, status.detail) == (LoadPhase.DONE, measurement, "n")
    assert status.answers == ANSWERS
    assert make(cluster).poll("001-x-1") == status
    cluster.delete(PODS, NAME, NAMESPACE)
    cluster.tick()
    assert tests.poll("001-x-1") == status, "what was read is kept"
    tests.start("001-x-1", request())
    assert cluster.pods() == []
    tests.cancel("001-x-1")
    assert tests.poll("001-x-1").phase is LoadPhase.ABSENT


def test_its_pod_is_ours_alone_and_has_no_rights(cluster):
    make(cluster).start("001-x-1", request())
    pod, config = cluster.edit(PODS, NAME), cluster.edit(CONFIG_MAPS, NAME)
    for each in (pod, config):
        assert each["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid
    job = LoadJob.model_validate_json(config["data"]["request.json"])
    assert (job.url, job.api_key_file, config["immutable"]) == ("http://10.0.0.9:8000", None, True)
    spec = pod["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] >= job.hard_limit
    assert spec["securityContext"]["runAsNonRoot"] is True
    context = spec["containers"][0]["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["capabilities"]) == (True, {"drop": ["ALL"]})


def test_an_api_key_is_mounted_from_where_it_lies(cluster):
    make(cluster, api_key=lambda: SecretKey("keys", "vllm")).start("001-x-1", request(api_key_file="/run/key"))
    pod = cluster.edit(PODS, NAME)
    assert {"secretName": "keys", "items": [{"key": "vllm", "path": "key"}]} in [
        v.get("secret") for v in pod["spec"]["volumes"]
    ]
    job = json.loads(cluster.edit(CONFIG_MAPS, NAME)["data"]["request.json"])
    assert job["apiKeyFile"] == "/etc/tunewright/key/key"
    with pytest.raises(Refused, match="secretKeyRef"):
        make(cluster).start("002-x-1", request(api_key_file="/run/key"))


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", r"its log holds no result; it wrote: \(nothing\)"),
        ("Traceback: boom", "no result; it wrote: Traceback: boom"),
        (deliver.pack(FAILED).rpartition("\n")[0], "cut off in the result"),
        (deliver.pack(FAILED).replace("\nH4s", "\nH5s"), "damaged"),
        (deliver.pack(FAILED).replace("\nH4s", "\n*4s"), "damaged"),
    ],
)
def test_a_result_that_is_missing_cut_off_or_damaged_is_never_a_number(cluster, log, reason):
    tests = make(cluster)
    tests.start("001-x-1", request())
    cluster.tick()
    end(cluster, log, 1, "Error")
    status = tests.poll("001-x-1")
    assert (status.phase, status.measurement) == (LoadPhase.FAILED, None)
    assert re.search(reason, status.detail), status.detail
    assert "status 1 (Error)" in status.detail


def test_a_run_without_a_measurement_says_why(cluster):
    tests = make(cluster)
    tests.start("001-x-1", request())
    cluster.tick()
    end(cluster, deliver.pack(FAILED), 1)
    assert tests.poll("001-x-1").detail == "the server is gone"


def test_eviction_deadline_and_deletion_are_told(cluster):
    for status, reason in (
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "Evicted): disk"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "DeadlineExceeded"),
        ({"phase": "Unknown"}, "node node1 does not answer"),
    ):
        tests = make(cluster)
        tests.start("001-x-1", request())
        cluster.tick()
        cluster.edit(PODS, NAME)["status"] |= status
        found = tests.poll("001-x-1")
        assert found.phase is LoadPhase.FAILED
        assert reason in found.detail
        tests.cancel("001-x-1")
    tests.start("001-x-1", request())
    cluster.delete(PODS, NAME, NAMESPACE)
    assert "deleted by somebody else" in tests.poll("001-x-1").detail
    assert tests.poll("001-x-1").phase is LoadPhase.FAILED


def test_a_log_out_of_reach_is_read_again_and_given_up_with_its_node(cluster):
    tests = make(cluster)
    tests.start("001-x-1", request())
    cluster.tick()
    end(cluster, deliver.pack(FAILED), 1, "Error")

    def away(verb, resource, name):
        if verb == "logs":
            raise Unavailable("GET", "/log", "dial tcp 10.0.0.1:10250: no route to host", status=500)

    cluster.before = away
    for _ in range(3):
        with pytest.raises(PortError, match="no route to host"):
            tests.poll("001-x-1")
        cluster.tick(60)
    cluster.before = lambda verb, resource, name: None
    assert make(cluster).poll("001-x-1").detail == "the server is gone", "nothing was lost by waiting"
    cluster.before = away
    cluster.tick(LOG_LIMIT)
    status = tests.poll("001-x-1")
    assert status.phase is LoadPhase.FAILED
    assert re.search(r"ended with status 1 \(Error\), and its log can't be read: .*no route to host", status.detail)


def test_names_of_secrets_to_pull_its_image_with_are_on_its_pod(cluster):
    settings = LoadPodSettings(image="tunewright:1", image_pull_secrets=("a", "b"))
    KubernetesLoadTest(cluster, OWNER, NAMESPACE, settings, Clock()).start("001-x-1", request())
    assert cluster.edit(PODS, NAME)["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_a_pod_that_finds_no_node_or_never_ends_is_given_up(cluster):
    tests = make(cluster)
    cluster.starts = lambda pod: "pending"
    tests.start("001-x-1", request())
    cluster.tick()
    assert "no node takes the pod" in tests.poll("001-x-1").detail
    cluster.tick(PENDING_LIMIT)
    assert tests.poll("001-x-1").phase is LoadPhase.FAILED
    tests.cancel("001-x-1")
    cluster.starts = lambda pod: "ready"
    tests.start("001-x-1", request())
    cluster.tick()
    limit = cluster.edit(PODS, NAME)["spec"]["activeDeadlineSeconds"] + PENDING_LIMIT
    cluster.tick(limit)
    assert "its node does not end it" in tests.poll("001-x-1").detail


def test_cancel_leaves_nothing_and_says_when_a_pod_does_not_go(cluster):
    tests = make(cluster)
    tests.start("001-x-1", request())
    cluster.tick()
    tests.cancel("001-x-1")
    tests.cancel("001-x-1")
    assert cluster.objects == {}
    tests.start("001-x-1", request())
    cluster.tick()
    cluster.starts = lambda pod: "hangs"
    with pytest.raises(PortError, match="does not end"):
        tests.cancel("001-x-1")


def test_what_an_earlier_tuning_of_this_name_left_is_waited_for(cluster):
    settings = LoadPodSettings(image="i")
    KubernetesLoadTest(cluster, Owner("chat", "old"), NAMESPACE, settings, Clock()).start("001-x-1", request())
    with pytest.raises(PortError, match="earlier tuning"):
        make(cluster).poll("001-x-1")


def test_a_large_result_is_carried_in_lines_that_no_runtime_splits():
    words = tuple(
        Answer(prompt=str(number), text="", tokens=tuple(f"{number}-{index}" for index in range(500)))
        for number in range(100)
    )
    result = LoadResult(failure="x", answers=words, content_seed=1)
    text = deliver.pack(result)
    assert max(map(len, text.splitlines())) <= 4100
    assert deliver.unpack(f"a\n{text}\nb") == result


def test_the_command_delivers_what_execute_found(tmp_path, capsys):
    job = LoadJob.of(request())
    job = job.model_copy(update={"url": "http://127.0.0.1:9"})
    (tmp_path / "request.json").write_text(job.model_dump_json())
    assert deliver.main([str(tmp_path / "request.json")]) == 1
    failure = deliver.unpack(capsys.readouterr().out).failure
    assert failure is not None
    assert "127.0.0.1:9" in failure
    (tmp_path / "request.json").write_text("{}")
    assert deliver.main([str(tmp_path / "request.json")]) == 2
    assert deliver.main([]) == 2
