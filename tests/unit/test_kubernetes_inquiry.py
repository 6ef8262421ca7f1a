"""Asking the target's image for its flags and the model for its facts, on a cluster in memory."""

import json
from pathlib import Path

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import OWNER, REF, container, node, production

from tunewright.knobs import asking
from tunewright.knobs.knob import Family
from tunewright.kube.errors import Unavailable
from tunewright.kube.resources import CONFIG_MAPS, DEPLOYMENTS, NODES, PODS
from tunewright.platform.kubernetes.inquiry import EVERY, LIMIT, SELDOM, ImageInquiry
from tunewright.platform.kubernetes.workload import Overrides

HELP = (Path(__file__).parents[1] / "fixtures/vllm/vllm-0.32-serve-help.txt").read_text(encoding="utf-8")
CONFIG = {"architectures": ["NemotronH"], "num_hidden_layers": 52, "hybrid_override_pattern": "MEM*",
          "n_routed_experts": 128}  # fmt: skip
ROLE = {"tunewright.dev/role": "facts"}


def inquiry(cluster: FakeCluster, **overrides) -> ImageInquiry:
    return ImageInquiry(cluster, OWNER, REF, cluster.clock, Overrides(**overrides))


def answered(cluster: FakeCluster, answer: dict, code: int = 0) -> None:
    """Its pod runs, prints, and ends."""
    cluster.tick()
    (pod,) = cluster.pods(**ROLE)
    cluster.logs_of[pod["metadata"]["name"]] = f"a word of the image\n{asking.pack(answer)}" if answer else "no python"
    cluster.crash(pod, code)
    cluster.tick(EVERY)


def ask(cluster: FakeCluster, answer: dict, **overrides):
    asked = inquiry(cluster, **overrides)
    asked.look()
    answered(cluster, answer)
    return asked.look()


def test_the_image_tells_its_flags_and_the_model_its_facts(cluster):
    production(cluster)
    asked = inquiry(cluster)
    first = asked.look()
    assert (first.flags, first.gpu_count) == (None, 1)
    assert "not answered yet" in first.flags_unknown
    assert asked.look() is first  # at most one look in so many seconds
    answered(cluster, {"help": {"text": HELP}, "config": CONFIG})
    facts = asked.look()
    assert facts.flags.has("--max-num-seqs")
    assert (facts.family, facts.layers, facts.experts, facts.flags_unknown) == (Family.HYBRID, 52, 128, "")
    cluster.tick()
    assert cluster.pods(**ROLE) == []  # nothing is left of it


def test_it_is_asked_once_per_image(cluster):
    production(cluster)
    ask(cluster, {"help": {"text": HELP}, "config": CONFIG})
    cluster.tick()
    again = inquiry(cluster)  # another controller, or another tuning of this Deployment
    assert again.look().flags.has("--max-num-seqs")
    assert cluster.pods(**ROLE) == []
    kept = next(found for (plural, _, name), found in cluster.objects.items() if plural == CONFIG_MAPS.plural
                and name.startswith("llm-facts-"))  # fmt: skip
    live = cluster.edit(DEPLOYMENTS, "llm")
    assert kept["immutable"]
    assert [owner["uid"] for owner in kept["metadata"]["ownerReferences"]] == [live["metadata"]["uid"]]
    for pod in cluster.pods(app="llm"):  # the same name, another digest: an image that moved
        pod["status"]["containerStatuses"][0]["imageID"] = "docker.io/vllm@sha256:other"
    cluster.tick(EVERY)
    assert inquiry(cluster).look().flags is None
    assert len(cluster.pods(**ROLE)) == 1


def test_its_pod_takes_no_gpu_no_secret_and_no_sidecar(cluster):
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    mount = {"name": "models", "mountPath": "/models"}
    pod = {
        "containers": [
            {"name": "log-shipper", "image": "x"},
            container(
                args=["serve", "/models/m", "--download-dir=/d"],
                env=[key, {"name": "HF_HOME", "value": "/hf"}, {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}],
                volumeMounts=[mount], livenessProbe={"x": 1}, envFrom=[{"secretRef": {"name": "s"}}],
            ),
        ],
        "initContainers": [{"name": "download", "image": "y"}],
        "tolerations": [{"key": "gpu"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "models", "emptyDir": {}}],
    }  # fmt: skip
    production(cluster, pod=pod)
    inquiry(cluster, node_selector={"spare": "yes"}, gpus=1).look()
    (made,) = cluster.pods(**ROLE)
    spec = made["spec"]
    (mine,) = spec["containers"]
    assert "nvidia.com/gpu" not in json.dumps(mine["resources"])
    assert {each["name"]: each.get("value") for each in mine["env"]} == {
        "HF_HOME": "/hf", "NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    assert "envFrom" not in mine
    assert "livenessProbe" not in mine
    assert "args" not in mine
    assert mine["volumeMounts"] == [{**mount, "readOnly": True}]
    assert mine["image"] == "vllm/vllm-openai:v0.32.0"
    question = json.loads(mine["command"][-1])
    assert question["model"] == "/models/m"
    assert question["download_dir"] == "/d"
    assert question["commands"][0] == ["vllm", "serve", "--help=all"]
    assert "initContainers" not in spec
    assert (spec["tolerations"], spec["imagePullSecrets"]) == ([{"key": "gpu"}], [{"name": "registry"}])
    assert spec["nodeSelector"] == {"spare": "yes"}
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", LIMIT)
    assert made["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({}, "no python"),
        ({"help": {"error": "`vllm serve` ended with status 1: no device"}, "config": CONFIG}, "no device"),
        ({"help": {"text": "usage"}}, "no help text"),
    ],
)
def test_an_image_that_can_t_answer_leaves_the_flags_unknown_and_says_why(cluster, answer, told):
    production(cluster)
    asked = inquiry(cluster)
    asked.look()
    answered(cluster, answer, code=0 if answer else 127)
    facts = asked.look()
    assert facts.flags is None
    assert told in facts.flags_unknown
    assert facts.family is (Family.HYBRID if "config" in answer else None)
    cluster.tick(LIMIT)
    asked.look()
    cluster.tick()
    assert cluster.pods(**ROLE) == []  # neither left over nor asked again


def test_a_pod_that_no_node_takes_is_given_up(cluster):
    production(cluster)
    cluster.starts = lambda pod: "pending"
    asked = inquiry(cluster)
    asked.look()
    cluster.tick(LIMIT)
    asked.look()
    assert len(cluster.pods(**ROLE)) == 1
    cluster.tick(100)
    assert "no node takes the pod" in asked.look().flags_unknown
    cluster.starts = lambda pod: "ready"
    cluster.tick()
    assert cluster.pods(**ROLE) == []


def test_an_api_server_that_does_not_answer_is_asked_again_less_often(cluster):
    production(cluster)
    asked, tries = inquiry(cluster), []

    def away(verb, resource, name):
        tries.append(verb)
        raise Unavailable(verb, name, "away")

    cluster.before = away
    for _ in range(600):
        assert "away" in asked.look().flags_unknown or not tries
        cluster.clock.time += 1.0
    assert 10 <= len(tries) <= 600 / SELDOM + 10
    cluster.before = lambda verb, resource, name: None
    cluster.clock.time += SELDOM
    asked.look()
    answered(cluster, {"help": {"text": HELP}})
    assert asked.look().flags is not None


GFD = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771",
       "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}  # fmt: skip


@pytest.mark.parametrize("case", ["labels", "none", "other kinds", "forbidden", "elsewhere"])
def test_the_gpu_is_known_by_its_node(cluster, case):
    production(cluster)
    cluster.edit(NODES, "node1", None)["metadata"]["labels"] = {} if case == "none" else dict(GFD)
    if case == "other kinds":
        cluster.put(NODES, node(1) | {"metadata": {"name": "n2", "labels": {**GFD, "nvidia.com/gpu.memory": "81559"}}},
                    None)  # fmt: skip
    if case == "forbidden":
        cluster.forbidden.add("nodes")
    selector = {"other kinds": {"nvidia.com/gpu.product": "NVIDIA-H200"}, "elsewhere": {"zone": "b"}}.get(case)
    facts = ask(cluster, {"help": {"text": HELP}}, node_selector=selector)
    assert facts.gpu_count == 1
    known = (facts.gpu_name, facts.gpu_memory_gib, facts.compute_capability)
    assert known == (("NVIDIA-H200", 140.4, 9.0) if case == "labels" else (None, None, None))


def test_a_machine_without_gpus_has_none(cluster):
    production(cluster, pod={"containers": [container(resources={})]})
    assert ask(cluster, {"help": {"text": HELP}}, gpus=0).gpu_count == 0


def test_its_pods_go_with_the_tuning_alone(cluster):
    production(cluster)
    inquiry(cluster).look()
    (made,) = cluster.pods(**ROLE)
    made["metadata"]["ownerReferences"] = []
    cluster.tick(EVERY)
    facts = inquiry(cluster).look()
    assert "earlier tuning" in facts.flags_unknown
    assert cluster.edit(PODS, made["metadata"]["name"], NAMESPACE)


def test_once_nobody_needs_the_answer_no_pod_is_left(cluster):
    production(cluster)
    asked = inquiry(cluster)
    assert asked.known().flags is None
    assert cluster.pods(**ROLE) == []  # only looking asks
    asked.look()
    cluster.tick()
    assert len(cluster.pods(**ROLE)) == 1
    cluster.before = lambda verb, resource, name: (_ for _ in ()).throw(Unavailable(verb, name, "away"))
    asked.end()  # tried again
    cluster.before = lambda verb, resource, name: None
    inquiry(cluster).end()  # also by a controller that did not make it
    cluster.tick()
    assert cluster.pods(**ROLE) == []
    asked.end()
    calls = len(cluster.calls)
    asked.end()
    assert len(cluster.calls) == calls  # once is enough
