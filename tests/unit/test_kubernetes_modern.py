"""Objects as current API servers (1.30 and later) return them: what 1.20 did not know is carried, and understood."""

import copy
import json
from typing import Any

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import ARGS, BASELINE, NEW, OWNER, REF, Servers, container, deployment, production

from tunewright.domain.state import FailureKind
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.kube.client import Json
from tunewright.kube.errors import Forbidden, NotAdmitted, from_answer
from tunewright.kube.resources import DEPLOYMENTS, POD_DISRUPTION_BUDGETS, PODS
from tunewright.platform.kubernetes import fields, pods
from tunewright.platform.kubernetes.inquiry import ImageInquiry
from tunewright.platform.kubernetes.loadpod import KubernetesLoadTest, LoadPodSettings
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.spare import KubernetesSpare
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import Overrides
from tunewright.ports import LoadRequest, PortError, Refused, ServerPhase, TargetPlan

POD = "chat-001-x-1"

MODERN: Json = {
    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "roce"}],
    "resources": {"limits": {"cpu": "16", "memory": "64Gi"}},  # of the pod, 1.34
    "hostUsers": False,
    "schedulerName": "default-scheduler",
    "securityContext": {
        "appArmorProfile": {"type": "RuntimeDefault"},
        "supplementalGroupsPolicy": "Strict",
        "fsGroupChangePolicy": "OnRootMismatch",
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": "llm"}},
            "matchLabelKeys": ["pod-template-hash"],
            "nodeTaintsPolicy": "Honor",
        }
    ],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 1,
                    "podAffinityTerm": {
                        "topologyKey": "zone",
                        "matchLabelKeys": ["app"],
                        "mismatchLabelKeys": ["tier"],
                    },
                }
            ]
        }
    },
    "volumes": [
        {"name": "weights", "image": {"reference": "registry.example.com/weights:1", "pullPolicy": "IfNotPresent"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}},
    ],
    "initContainers": [
        {"name": "fetch", "image": "fetch:1", "args": ["weights"]},
        {
            "name": "proxy",
            "image": "proxy:1",
            "restartPolicy": "Always",
            "startupProbe": {"httpGet": {"path": "/ready", "port": 15021}},
            "lifecycle": {"preStop": {"sleep": {"seconds": 30}}},
        },
    ],
}


def modern(**more: Any) -> Json:
    """A pod of today: a sidecar among the init containers, claims for devices, resizing, volumes from images."""
    mine = container(
        resources={"limits": {"nvidia.com/gpu": "1"}, "claims": [{"name": "nic", "request": "vf"}]},
        resizePolicy=[{"resourceName": "memory", "restartPolicy": "RestartContainer"}],
        restartPolicy="Always",
        restartPolicyRules=[{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}],
        livenessProbe={"grpc": {"port": 9000, "service": "x"}},
        lifecycle={"stopSignal": "SIGINT", "preStop": {"sleep": {"seconds": 10}}},
        volumeMounts=[{"name": "weights", "mountPath": "/w", "readOnly": True, "recursiveReadOnly": "IfPossible"}],
    )
    return copy.deepcopy(MODERN) | {"containers": [mine | more]}


def spare_of(cluster: FakeCluster, **more: Any) -> KubernetesSpare:
    return KubernetesSpare(cluster, OWNER, REF, cluster.clock, start_timeout=100.0, sleep=cluster.clock.sleep, **more)


# --- what is copied ---


def test_a_rendered_template_is_production_s_but_for_the_knob() -> None:
    given = {"metadata": {"labels": {"app": "llm"}}, "spec": modern()}
    rendered = PodTemplate(given).render(NEW)
    assert rendered["spec"]["containers"][0]["args"] != ARGS
    rendered["spec"]["containers"][0]["args"] = ARGS
    assert rendered == given


def test_a_trial_s_pod_differs_by_what_a_pod_that_is_not_restarted_must(cluster: FakeCluster, servers: Servers) -> None:
    production(cluster, pod=modern())
    spare_of(cluster).start("001-x-1", NEW)
    made, wanted = cluster.edit(PODS, POD)["spec"], modern()
    mine = wanted["containers"][0]
    # A policy to restart for a resize is refused in such a pod, and a container with its own one would come up again.
    for gone in ("resizePolicy", "restartPolicy", "restartPolicyRules", "livenessProbe", "readinessProbe"):
        del mine[gone]
    del mine["lifecycle"]["preStop"]
    wanted["initContainers"][1]["lifecycle"] = {}
    mine["args"] = made["containers"][0]["args"]
    assert made == wanted | {"restartPolicy": "Never", "terminationGracePeriodSeconds": 15}
    assert made["initContainers"][1]["startupProbe"], "what waits for a sidecar goes on waiting for it"


def test_a_claim_that_names_production_s_own_devices_is_refused(cluster: FakeCluster, servers: Servers) -> None:
    pod = modern()
    pod["resourceClaims"] = [{"name": "nic", "resourceClaimName": "the-gpu"}, {"name": "b", "resourceClaimName": "b"}]
    production(cluster, pod=pod)
    with pytest.raises(Refused, match=r"ResourceClaim the-gpu: a trial would run on production's own.*TemplateName"):
        spare_of(cluster).start("001-x-1", NEW)
    assert not cluster.pods(**{"tunewright.dev/role": "trial"})
    del pod["containers"][0]["resources"]["claims"]
    PodTemplate({"spec": pod})  # another container's


def test_overrides_leave_the_rest_as_it_is() -> None:
    pod = modern()
    Overrides(node_selector={"spare": "true"}, gpus=2).put_on(pod, 0)
    resources = pod["containers"][0]["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": "2"}, "claims": [{"name": "nic", "request": "vf"}]}
    pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1"
    assert pod == modern() | {"nodeSelector": {"spare": "true"}}


def test_the_pod_that_asks_the_image_waits_for_no_sidecar_and_takes_no_device(
    cluster: FakeCluster, servers: Servers
) -> None:
    production(cluster, pod=modern())
    ImageInquiry(cluster, OWNER, REF, cluster.clock).look()
    (made,) = cluster.pods(**{"tunewright.dev/role": "facts"})
    assert {"initContainers", "resourceClaims"}.isdisjoint(made["spec"])
    asking = made["spec"]["containers"][0]
    assert {"resizePolicy", "restartPolicy", "lifecycle"}.isdisjoint(asking)
    assert "claims" not in asking["resources"]


# --- what is read ---


def with_sidecar(main: Json, sidecar: Json, phase: str = "Running", **more: Any) -> Json:
    """A pod as its node reports it."""
    done = {"name": "fetch", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    status = {
        "phase": phase,
        "initContainerStatuses": [done, {"name": "proxy", **sidecar}],
        "containerStatuses": [{"name": "vllm", "restartCount": 0, "state": main}],
        **more,
    }
    return {"metadata": {"name": "x"}, "spec": modern(), "status": status}


RUNS: Json = {"running": {"startedAt": "2026-01-02T03:04:05Z"}}
WAITS: Json = {"waiting": {"reason": "PodInitializing"}}


@pytest.mark.parametrize(
    ("main", "sidecar", "told"),
    [
        (RUNS, {"state": RUNS, "started": True}, None),
        (RUNS, {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}, None),
        (WAITS, {"state": RUNS, "started": True}, "container vllm waits: PodInitializing"),
        (WAITS, {"state": RUNS, "started": False}, "init container proxy runs"),
        (WAITS, {"state": {"waiting": {"reason": "ImagePullBackOff"}}}, "init container proxy waits: ImagePullBackOff"),
    ],
)
def test_a_sidecar_that_runs_is_nothing_to_wait_for(main: Json, sidecar: Json, told: str | None) -> None:
    assert pods.waiting_for(with_sidecar(main, sidecar), "vllm") == told


def test_an_init_container_that_runs_is(cluster: FakeCluster) -> None:
    pod = with_sidecar(WAITS, {"state": WAITS})
    pod["status"]["initContainerStatuses"][0] = {"name": "fetch", "started": True, "state": RUNS}
    assert pods.waiting_for(pod, "vllm") == "init container fetch runs"


def test_a_sidecar_s_end_does_not_hide_the_server_s(cluster: FakeCluster, servers: Servers) -> None:
    """Sidecars are ended after the containers, by SIGTERM: 143 in a pod whose server ran out of memory."""
    production(cluster, pod=modern())
    spare = spare_of(cluster)
    spare.start("001-x-1", NEW)
    cluster.tick()
    pod = cluster.edit(PODS, POD)
    pod["status"]["initContainerStatuses"] = [{"name": "proxy", "started": True, "state": RUNS}]
    assert spare.poll("001-x-1").phase is ServerPhase.READY
    cluster.crash(pod, 137, "OOMKilled")
    ended = {"terminated": {"exitCode": 143, "reason": "Error"}}
    pod["status"]["initContainerStatuses"] = [{"name": "proxy", "started": False, "state": ended}]
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY_UNDER_LOAD
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": ended}]
    failure = spare.poll("001-x-1").failure
    assert failure is not None
    assert "init container fetch failed" in failure.cause


def test_pods_that_were_debugged_or_resized_are_read_as_before() -> None:
    pod = with_sidecar(RUNS, {"state": RUNS, "started": True})
    pod["spec"]["ephemeralContainers"] = [{"name": "debugger", "image": "busybox", "targetContainerName": "vllm"}]
    pod["status"] |= {
        "ephemeralContainerStatuses": [{"name": "debugger", "state": {"terminated": {"exitCode": 1}}}],
        "conditions": [
            {"type": "PodReadyToStartContainers", "status": "True"},
            {"type": "PodResizeInProgress", "status": "True"},
            {"type": "Ready", "status": "True", "observedGeneration": 1},
        ],
        "observedGeneration": 1,
        "resize": "",
    }
    assert PodTemplate(pod).name == "vllm"
    assert pods.waiting_for(pod, "vllm") is None
    assert pods.taken_away(pod) is None
    assert pods.ended(pod, "vllm") is None
    assert pods.is_ready(pod)


def test_a_pod_that_is_held_by_a_gate_says_so() -> None:
    """As queues (Kueue) hold pods: the deadline runs."""
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    pod = with_sidecar(WAITS, {"state": WAITS}, "Pending", conditions=[gated])
    assert pods.waiting_for(pod, "vllm") == "no node takes the pod: SchedulingGated"


def test_an_eviction_is_known_by_its_condition() -> None:
    by = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "by a drain"}
    pod = with_sidecar(RUNS, {"state": RUNS, "started": True}, conditions=[by])
    assert pods.taken_away(pod) == "the pod was ended (EvictionByEvictionAPI): by a drain"


# --- who owns what ---

KEY = 'k:{"name":"vllm"}'


def entry(manager: str, operation: str, env: str, subresource: str = "") -> Json:
    held = {"f:env": {".": {}, f'k:{{"name":"{env}"}}': {".": {}, "f:name": {}, "f:value": {}}}}
    fields_of = {"f:spec": {"f:template": {"f:spec": {"f:containers": {KEY: {".": {}, "f:args": {}, **held}}}}}}
    found = {"manager": manager, "operation": operation, "apiVersion": "apps/v1", "fieldsType": "FieldsV1"}
    found |= {"time": "2026-01-02T03:04:05Z", "fieldsV1": fields_of}
    return found | ({"subresource": subresource} if subresource else {})


def test_ours_is_what_we_applied_and_nothing_else() -> None:
    """Since 1.22 entries name a subresource; kubectl's own turn from `Update` to `Apply` when a person moves over."""
    live = deployment(pod=modern())
    live["metadata"]["managedFields"] = [
        entry("kubectl", "Apply", "A"),
        entry("kubectl-client-side-apply", "Update", "B"),
        entry("tunewright", "Update", "C"),
        entry("tunewright", "Apply", "D", subresource="status"),
        entry("kube-controller-manager", "Update", "E", subresource="status"),
        {"manager": "hpa", "operation": "Update", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "tunewright", "operation": "Apply", "apiVersion": "apps/v1"},
        entry("tunewright", "Apply", "VLLM_F"),
    ]
    assert fields.own_variables(live, "vllm") == {"VLLM_F"}
    assert fields.own_variables(live, "proxy") == frozenset()
    live["metadata"]["managedFields"] = None  # as with `--show-managed-fields=false`, or after they were cleared
    assert fields.own_variables(live, "vllm") == frozenset()


def test_a_rollout_of_today_s_deployment_is_planned_and_rolled(cluster: FakeCluster, servers: Servers) -> None:
    live = production(cluster, pod=modern(), revisionHistoryLimit=10, progressDeadlineSeconds=600)
    live["metadata"]["managedFields"] = [entry("kubectl", "Apply", "A")]
    live["status"]["terminatingReplicas"] = 0  # 1.33
    target = DeploymentTarget(cluster, OWNER, REF, cluster.clock, start_timeout=60.0, drain_timeout=5.0)
    assert target.baseline() == BASELINE
    assert target.preflight(NEW) == []
    wanted = modern()
    wanted["containers"][0]["args"] = [word if word != "8" else "64" for word in ARGS]
    for plan in (
        TargetPlan(BASELINE, NEW, 0, True, 0.5),
        TargetPlan(BASELINE, NEW, 2, True),
        TargetPlan(BASELINE, NEW, 2),
    ):
        status = target.apply(plan)
        for _ in range(100):
            if status.settled:
                break
            cluster.tick(5.0)
            status = target.apply(plan)
        assert status.settled, status.detail
        if plan.canary:
            assert cluster.edit(DEPLOYMENTS, "llm-canary")["spec"]["template"]["spec"] == wanted
    assert cluster.edit(DEPLOYMENTS, "llm")["spec"]["template"]["spec"] == wanted


@pytest.mark.parametrize(
    ("selector", "version", "stands_in_the_way"),
    [
        ({"matchLabels": {"app": "llm"}}, 0, True),
        ({"matchLabels": {"app": "other"}}, 0, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["llm", "x"]}]}, 0, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["llm"]}]}, 0, False),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, 0, True),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, 0, False),
        ({}, 0, True),
        ({}, 1, False),
        (None, 0, False),
    ],
)
def test_a_budget_is_about_the_pods_that_its_selector_takes_in(
    cluster: FakeCluster, servers: Servers, monkeypatch: pytest.MonkeyPatch, selector: Json, version: int,
    stands_in_the_way: bool,
) -> None:  # fmt: skip
    """Since `policy/v1` an empty selector takes in every pod of the namespace; in `v1beta1` it took in none."""
    production(cluster)
    served = POD_DISRUPTION_BUDGETS[version]
    monkeypatch.setattr(cluster, "served", lambda *them: served if served in them else None)
    cluster.put(served, {"metadata": {"name": "pdb"}, "spec": {"selector": selector}, "status": {}})
    target = DeploymentTarget(cluster, OWNER, REF, cluster.clock, start_timeout=60.0, drain_timeout=5.0)
    found = " ".join(target.preflight(NEW))
    assert ("PodDisruptionBudget pdb allows no replica" in found) is stands_in_the_way


# --- rules about pods ---

RESTRICTED = (
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container '
    '"vllm" must set securityContext.allowPrivilegeEscalation=false), seccompProfile (pod or container "vllm" must set '
    'securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")'
)
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 2, limited: 2'
NO_RIGHT = (
    'pods is forbidden: User "system:serviceaccount:prod:tunewright" cannot create resource "pods" in API group "" in '
    'the namespace "prod"'
)


def refused(message: str, method: str = "POST") -> Exception:
    status = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": message, "code": 403}
    return from_answer(method, "/api/v1/namespaces/prod/pods", 403, json.dumps(status).encode())


def test_a_rule_that_refuses_is_told_apart_from_a_right_that_is_missing() -> None:
    for message in (RESTRICTED, QUOTA):
        error = refused(message)
        assert isinstance(error, NotAdmitted)
        assert "not a right that is missing" in str(error)
        assert "can-i" not in str(error)
    for error in (refused(NO_RIGHT), refused(QUOTA, "GET"), from_answer("POST", "/", 403, b"<html>a proxy")):
        assert type(error) is Forbidden
        assert "can-i" in str(error)


def test_pod_security_ends_it_with_the_reason_and_a_quota_is_waited_for(cluster: FakeCluster, servers: Servers) -> None:
    production(cluster, pod=modern())
    answers: list[Exception] = []

    def before(verb: str, resource: Any, name: str) -> None:
        if verb == "create" and answers:
            raise answers.pop()

    cluster.before = before
    answers.append(refused(RESTRICTED))
    with pytest.raises(Refused, match=r'violates PodSecurity "restricted:latest".*production\'s own pod template'):
        spare_of(cluster).start("001-x-1", NEW)
    for message in (QUOTA, NO_RIGHT):
        answers.append(refused(message))
        with pytest.raises(PortError):
            spare_of(cluster).start("001-x-1", NEW)
    spare_of(cluster).start("001-x-1", NEW)


def restricted(spec: Json) -> list[str]:
    """What the Pod Security standard `restricted` has against a pod's spec, as far as its fields are used here."""
    wrong = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    wrong += [each["name"] for each in spec.get("volumes") or [] if not kinds & each.keys()]
    pod = spec.get("securityContext") or {}
    for each in [*spec["containers"], *(spec.get("initContainers") or [])]:
        mine = pod | (each.get("securityContext") or {})
        wrong += ["privileged"] if mine.get("privileged") else []
        wrong += ["allowPrivilegeEscalation"] if mine.get("allowPrivilegeEscalation") is not False else []
        wrong += ["runAsNonRoot"] if mine.get("runAsNonRoot") is not True or mine.get("runAsUser") == 0 else []
        wrong += ["seccompProfile"] if (mine.get("seccompProfile") or {}).get("type") != "RuntimeDefault" else []
        capabilities = mine.get("capabilities") or {}
        wrong += ["capabilities"] if capabilities.get("drop") != ["ALL"] or capabilities.get("add") else []
        wrong += ["hostPort"] if any(port.get("hostPort") for port in each.get("ports") or []) else []
    return wrong


def test_the_load_test_s_pod_keeps_to_the_restricted_standard(cluster: FakeCluster) -> None:
    workload = Workload(concurrency=2, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=4))
    request = LoadRequest(
        url="http://10.0.0.9:8000", workload=workload, duration=10.0, max_warmup=20.0, seed=1, slo=Slo(), model=None
    )
    settings = LoadPodSettings(image="tunewright:1")
    KubernetesLoadTest(cluster, OWNER, NAMESPACE, settings, cluster.clock).start("001-x-1", request)
    assert restricted(cluster.edit(PODS, "chat-001-x-1-load")["spec"]) == []


def test_pods_of_a_template_that_keeps_to_it_keep_to_it_too(cluster: FakeCluster, servers: Servers) -> None:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    pod: Json = {
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 2000},
        "containers": [container(securityContext=context)],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    }
    assert restricted(pod) == []
    assert restricted(modern())
    production(cluster, pod=pod)
    spare_of(cluster, overrides=Overrides(cache_claim="cache")).start("001-x-1", NEW)
    ImageInquiry(cluster, OWNER, REF, cluster.clock).look()
    for role in ("trial", "facts"):
        (made,) = cluster.pods(**{"tunewright.dev/role": role})
        assert restricted(made["spec"]) == [], role
