"""The manifests: kustomize and Helm say the same, both say what the program needs, and the samples are valid."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tunewright.cli.app import app
from tunewright.cluster import LEASE
from tunewright.domain.tuning import Tuning
from tunewright.kube import crds
from tunewright.platform.kubernetes.podtemplate import PodTemplate

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "tunewright"
SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
Json = dict[str, Any]


def documents(text: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(text) if document]


def files(folder: Path) -> list[Json]:
    """What a kustomization names, read as it is: the base transforms nothing."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = []
    for name in kustomization.get("resources", []):
        found += documents((folder / name).read_text())
    return found


def key(found: Json) -> str:
    return f"{found['kind']} {found['metadata'].get('namespace', '')}/{found['metadata']['name']}"


def comparable(
    found: list[Json], *, without: tuple[str, ...] = ("Namespace", "CustomResourceDefinition")
) -> dict[str, Json]:
    """By kind and name, without what only one of the tools writes."""
    kept = json.loads(json.dumps([each for each in found if each["kind"] not in without]))
    for each in kept:
        for label in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            each["metadata"].get("labels", {}).pop(label, None)
    return {key(each): each for each in kept}


def chart(values: Json | None = None, name: str = "tunewright", namespace: str = "tunewright") -> list[Json]:
    """The chart as Helm renders it."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    rendered = helm.Chart.load(str(CHART)).render(values or {}, name=name, namespace=namespace)
    return [each for path, text in rendered.items() if path.endswith(".yaml") for each in documents(text)]


def kustomize(folder: Path) -> list[Json]:
    """A folder as kubectl renders it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_chart_and_base_are_equal() -> None:
    assert comparable(chart()) == comparable(files(DEPLOY / "base"))


def test_chart_and_all_that_is_optional_are_equal() -> None:
    options = {"capacity": {"enabled": True}, "gatewayApi": {"enabled": True}, "monitoring": {"enabled": True}}
    both = [each for folder in ("base", "capacity", "gateway-api", "monitoring") for each in files(DEPLOY / folder)]
    assert comparable(chart(options)) == comparable(both)


ALL = {
    "capacity": {"enabled": True},
    "gatewayApi": {"enabled": True},
    "monitoring": {"enabled": True, "vllm": {"matchLabels": {"app": "llm"}}},
}


@pytest.mark.parametrize("options", [{}, ALL], ids=["alone", "with all that is optional"])
def test_chart_and_the_overlay_for_all_namespaces_are_equal(options: Json) -> None:
    folders = ("capacity", "gateway-api/cluster-wide", "monitoring", "monitoring/vllm") if options else ()
    whole = [*kustomize(DEPLOY / "cluster-wide"), *(each for folder in folders for each in files(DEPLOY / folder))]
    for each in whole:
        if each["metadata"]["name"].startswith("tunewright-vllm"):
            each["spec"]["namespaceSelector"] = {"any": True}  # as its first line says
    assert comparable(chart(options | {"clusterWide": True})) == comparable(whole)


def test_chart_and_monitors_of_vllm_are_equal() -> None:
    folders = ("base", "capacity", "gateway-api", "monitoring", "monitoring/vllm")
    both = [each for folder in folders for each in files(DEPLOY / folder)]
    assert comparable(chart(ALL)) == comparable(both)


def test_labels_that_an_operator_wants_are_on_all_that_it_reads() -> None:
    monitoring = {"enabled": True, "labels": {"release": "prom"}, "vllm": {"matchLabels": {"app": "llm"}}}
    found = [each for each in chart({"monitoring": monitoring}) if "monitoring.coreos.com" in each["apiVersion"]]
    assert len(found) == 5
    assert all(each["metadata"]["labels"]["release"] == "prom" for each in found)


def test_for_all_namespaces_it_may_there_what_else_it_may_in_its_own_and_no_more() -> None:
    (role,) = [each for each in files(DEPLOY / "base") if each["kind"] == "Role"]
    (wide,) = [each for each in files(DEPLOY / "cluster-wide") if each["kind"] == "ClusterRole"]
    lease = [rule for rule in role["rules"] if rule["resources"] == ["leases"]]
    rest = [rule for rule in role["rules"] if rule not in lease]
    assert wide["rules"][: len(rest)] == rest
    (looks,) = wide["rules"][len(rest) :]
    assert (looks["resources"], looks["resourceNames"], looks["verbs"]) == (["leases"], [LEASE], ["list"])
    rendered = {key(each): each for each in kustomize(DEPLOY / "cluster-wide")}
    assert rendered["Role tunewright/tunewright"]["rules"] == lease


def test_the_overlay_asks_for_all_namespaces_by_the_variable_that_the_program_reads() -> None:
    (found,) = [each for each in kustomize(DEPLOY / "cluster-wide") if each["kind"] == "Deployment"]
    environment = {
        each["name"]: each.get("value") for each in found["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    (option,) = [each for each in SERVE.params if each.name == "all_namespaces"]
    assert environment[str(option.envvar)] == "true"
    assert not [each for each in files(DEPLOY / "base") if "TUNEWRIGHT_ALL_NAMESPACES" in json.dumps(each)]


@pytest.mark.parametrize(("given", "everywhere"), [("true", True), ("1", True), ("false", False), (None, False)])
def test_the_variable_is_read(monkeypatch: pytest.MonkeyPatch, given: str | None, everywhere: bool) -> None:
    monkeypatch.delenv("TUNEWRIGHT_ALL_NAMESPACES", raising=False)
    if given is not None:
        monkeypatch.setenv("TUNEWRIGHT_ALL_NAMESPACES", given)
    words = ["--namespace", "tunewright", "--image", "tunewright:test"]
    assert SERVE.make_context("serve", [*words]).params["all_namespaces"] is everywhere
    assert SERVE.make_context("serve", [*words, "--all-namespaces"]).params["all_namespaces"] is True


def test_a_controller_in_another_namespace_takes_nothing_from_the_first() -> None:
    """Copies of the base shared its ClusterRoleBinding: the second took the first one's right to ask who calls.

    And the namespace was among what `kubectl delete -k` deletes, with the production that is in it.
    """
    base, own = ({key(each): each for each in kustomize(DEPLOY / folder)} for folder in ("base", "own-namespace"))
    shared = {"CustomResourceDefinition", "ClusterRole"}  # the same for all
    assert {name.split()[0] for name in base.keys() & own.keys()} == shared
    assert all(own[name] == base[name] for name in base.keys() & own.keys())
    assert not [name for name in own if name.startswith("Namespace")]
    places = {name.split()[1].split("/")[0] for name in own if name.split()[0] not in shared}
    assert places == {"", "prod"}  # "" is the ClusterRoleBinding's
    subjects = [each["subjects"] for each in own.values() if "subjects" in each]
    assert subjects == [[{"kind": "ServiceAccount", "name": "tunewright", "namespace": "prod"}]] * 2
    assert len(own) == len(base) - 1


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_each_kustomization_can_be_read_by_kubectl_1_20(path: Path) -> None:
    """Its kustomize, 2.0.3, knows no `components`, `replacements` and `patches`, and takes folders as bases alone."""
    found = yaml.safe_load(path.read_text())
    known = {"apiVersion", "kind", "namespace", "bases", "resources", "patchesStrategicMerge", "patchesJson6902"}
    assert found.keys() <= known
    assert all((path.parent / name).is_file() for name in found.get("resources", []))
    assert all((path.parent / name / "kustomization.yaml").is_file() for name in found.get("bases", []))


def test_kubectl_renders_the_base_as_it_is_with_the_crds() -> None:
    rendered = kustomize(DEPLOY / "base")
    assert comparable(rendered) == comparable(files(DEPLOY / "base"))
    assert {each["metadata"]["name"] for each in rendered if each["kind"] == "CustomResourceDefinition"} == {
        document["metadata"]["name"] for document in crds.documents().values()
    }


@pytest.mark.parametrize("folder", ["crds", "helm/tunewright/crds"])
def test_the_crds_are_as_generated(folder: str) -> None:
    assert {path.name: path.read_text() for path in (DEPLOY / folder).glob("tunewright.dev_*")} == crds.render()


def test_a_release_of_another_name_may_be_called_by_its_service() -> None:
    found = {each["kind"]: each for each in chart(name="lab", namespace="a")}
    container = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["TUNEWRIGHT_SERVICE"] == found["Service"]["metadata"]["name"] == "lab-tunewright"


def test_two_releases_are_kept_apart() -> None:
    for wide in (False, True):
        names = {key(each) for each in chart({"userRoles": {"create": False}}, "a-tunewright", "a")}
        assert not names & {key(each) for each in chart({"clusterWide": wide}, "tunewright", "b")}


def test_the_chart_refuses_values_that_it_does_not_know() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    loaded = helm.Chart.load(str(CHART))
    loaded.validate_schema({})
    loaded.validate_schema({**ALL, "clusterWide": True})
    for wrong in (
        {"capacities": True},
        {"image": {"repository": ""}},
        {"capacity": {"enabled": "yes"}},
        {"gatewayApi": {"enabled": "yes"}},
        {"clusterWide": "yes"},
        {"monitoring": {"vllm": {"port": "8000/tcp"}}},
        {"monitoring": {"vllm": {"labels": {}}}},
    ):
        with pytest.raises(helm.HelmError):
            loaded.validate_schema(wrong)


def test_secrets_that_tunings_may_name_and_those_that_pull_images_reach_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "imagePullSecrets": [{"name": "a"}, {"name": "b"}],
        "credentials": [{"secret": "llm-key", "folder": "prod/llm"}, {"secret": "thanos", "folder": "prod/thanos"}],
    }
    (found,) = [each for each in chart(given) if each["kind"] == "Deployment"]
    pod = found["spec"]["template"]["spec"]
    container = pod["containers"][0]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each.get("value", "tunewright"))
    read = SERVE.make_context("serve", []).params
    assert read["image_pull_secret"] == ["a", "b"]
    assert pod["imagePullSecrets"] == given["imagePullSecrets"]
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"] if each.get("readOnly")}
    volumes = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert {volumes[name]: path for name, path in mounted.items()} == {
        "llm-key": f"{read['credentials']}/prod/llm",
        "thanos": f"{read['credentials']}/prod/thanos",
    }
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    for wrong in ([{"secret": "x"}], [{"secret": "x", "folder": "../x"}], [{"secret": "x", "folder": "/x"}], ["x"]):
        with pytest.raises(helm.HelmError):
            helm.Chart.load(str(CHART)).validate_schema({"credentials": wrong})


GONE = {
    "policy/v1beta1", "autoscaling/v2beta1", "autoscaling/v2beta2", "apiextensions.k8s.io/v1beta1",
    "rbac.authorization.k8s.io/v1beta1", "coordination.k8s.io/v1beta1", "batch/v1beta1", "extensions/v1beta1",
    "apps/v1beta1", "apps/v1beta2",
}  # fmt: skip


def test_nothing_that_current_versions_dropped_is_shipped() -> None:
    """Up to 1.34: what is gone, and what does nothing any more."""
    all_of_it = {"clusterWide": True, "credentials": [{"secret": "s", "folder": "s"}], **ALL}
    shipped = chart(all_of_it) + [
        each
        for path in sorted(DEPLOY.rglob("*.yaml")) if "helm" not in path.parts
        for each in documents(path.read_text()) if isinstance(each, dict)
    ]  # fmt: skip
    assert len(shipped) > 30
    for each in shipped:
        text = json.dumps(each)
        assert each.get("apiVersion") not in GONE, each
        assert each.get("kind") not in ("PodSecurityPolicy", "Endpoints", "Secret"), each
        for dropped in (
            "seccomp.security.alpha", "apparmor.security.beta", "kubernetes.io/service-account-token",
            "node-role.kubernetes.io/master", "beta.kubernetes.io", '"serviceAccount":', "topologyKeys",
        ):  # fmt: skip
            assert dropped not in text, each


def test_the_controller_keeps_to_the_restricted_pod_security_standard() -> None:
    for found in (files(DEPLOY / "base"), chart({"credentials": [{"secret": "s", "folder": "s"}]})):
        (pod,) = [each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment"]
        (container,) = pod["containers"]
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 65532)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {kind for each in pod["volumes"] for kind in each if kind != "name"} <= {"emptyDir", "secret"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
        assert not any("hostPort" in port for port in container["ports"])


def test_the_notes_tell_the_next_command() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    rendered = helm.Chart.load(str(CHART)).render({}, name="tunewright", namespace="prod")
    notes = next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))
    assert "kubectl -n prod rollout status deployment/tunewright" in notes
    assert "kubectl -n prod apply -f my-tuning.yaml" in notes
    assert "/namespaces/prod/tunings/NAME/promotion" in notes
    rendered = helm.Chart.load(str(CHART)).render({"clusterWide": True}, name="tunewright", namespace="prod")
    notes = next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))
    assert "kubectl -n prod rollout status deployment/tunewright" in notes
    assert "watches the Tunings of all namespaces" in notes
    assert "kubectl -n NAMESPACE apply -f my-tuning.yaml" in notes
    assert "/namespaces/NAMESPACE/tunings/NAME/promotion" in notes


def test_the_controller_has_no_privilege_and_its_load_tests_its_own_image() -> None:
    found = next(each for each in files(DEPLOY / "base") if each["kind"] == "Deployment")
    pod = found["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["TUNEWRIGHT_IMAGE"] == container["image"]
    services = [each["metadata"]["name"] for each in files(DEPLOY / "base") if each["kind"] == "Service"]
    assert [environment["TUNEWRIGHT_SERVICE"]] == services
    assert {"readinessProbe", "livenessProbe", "resources"} <= container.keys()


def rules(found: list[Json], kind: str) -> list[Json]:
    return [rule for each in found if each["kind"] == kind for rule in each["rules"]]


def test_nobody_is_granted_secrets_or_everything() -> None:
    folders = ("base", "capacity", "cluster-wide", "gateway-api", "gateway-api/cluster-wide")
    everything = [each for folder in folders for each in files(DEPLOY / folder)]
    granted = rules(everything, "Role") + rules(everything, "ClusterRole")
    assert granted
    for rule in granted:
        assert not {"*", "secrets", "pods/exec", "serviceaccounts/token"} & {*rule["resources"], *rule["verbs"]}


def test_no_role_for_people_can_forge_a_measurement_or_a_decision() -> None:
    roles = {each["metadata"]["name"]: each for each in files(DEPLOY / "base") if each["kind"] == "ClusterRole"}
    assert set(roles) == {"tunewright-view", "tunewright-edit", "tunewright-approve"}
    for name, role in roles.items():
        for rule in role["rules"]:
            assert "tunings/status" not in rule["resources"]
            assert "trials/status" not in rule["resources"]
            assert ("tunings/approval" in rule["resources"]) <= (name == "tunewright-approve")
            assert name == "tunewright-view" or "trials" not in rule["resources"]
    labels = roles["tunewright-approve"]["metadata"]["labels"]
    assert not any("aggregate-to" in label for label in labels)


@pytest.mark.parametrize("sample", ["simulator.yaml", "gpu.yaml"])
def test_the_samples_are_valid_and_can_be_tuned(sample: str) -> None:
    found = {each["kind"]: each for each in documents((DEPLOY / "samples" / sample).read_text())}
    tuning = Tuning.model_validate(found["Tuning"])
    deployment = found["Deployment"]
    assert tuning.spec.target.deployment == deployment["metadata"]["name"]
    template = PodTemplate(deployment["spec"]["template"])
    assert template.container["readinessProbe"]
    assert template.container["lifecycle"]["preStop"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    chosen = found["Service"]["spec"]["selector"].items()
    assert chosen <= labels
    assert deployment["spec"]["selector"]["matchLabels"].items() - chosen, "the canary can be kept out of its selector"
