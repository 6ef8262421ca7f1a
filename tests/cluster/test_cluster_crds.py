"""The CRDs on a real API server: what it fills in, what it refuses, and what kubectl shows."""

from typing import Any

import pytest
from kubernetes_store_cases import NAME, manifest
from restapi import waiting
from tunings import tuning
from world import FakeClock

from tunewright.domain.tuning import Search, Tuning
from tunewright.kube import crds
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Invalid
from tunewright.kube.resources import CRDS, TUNINGS
from tunewright.store.kubernetes import KubernetesStore

pytestmark = pytest.mark.cluster


def small() -> Json:
    spec = {"target": {"command": ["v", "{port}"]}, "objective": {"maximize": "goodput"}}
    return {"metadata": {"name": NAME}, "spec": spec}


@pytest.mark.parametrize("name", ["tunings.tunewright.dev", "trials.tunewright.dev"])
def test_they_are_structural(kube: Kube, name: str) -> None:
    conditions = {c["type"]: c for c in kube.get(CRDS, name)["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert conditions["NamesAccepted"]["status"] == "True"
    assert conditions.get("NonStructuralSchema", {}).get("status") != "True"


def test_what_is_stored_is_what_was_generated(kube: Kube) -> None:
    """Nothing of the schema was dropped as unknown."""
    for document in crds.documents().values():
        stored = kube.get(CRDS, document["metadata"]["name"])["spec"]["versions"][0]["schema"]
        assert stored == document["spec"]["versions"][0]["schema"]


def test_defaults_are_the_models(kube: Kube, namespace: str) -> None:
    made = kube.create(TUNINGS, small(), namespace)
    assert made["spec"]["promotion"]["analysis"]["minDuration"] == "5m"
    assert made["spec"]["search"] == Search().model_dump(mode="json", by_alias=True, exclude_none=True)
    asked = {"apiVersion": "tunewright.dev/v1alpha1", "kind": "Tuning", **small()}
    filled = asked | {"spec": made["spec"]}
    assert Tuning.model_validate(filled) == Tuning.model_validate(asked)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"objective": {"maximize": "speed"}}, "spec.objective.maximize"),
        ({"slo": {"ttftP95": "2"}}, "spec.slo.ttftP95"),
        ({"slo": {"ttftP95": 2}}, "spec.slo.ttftP95"),
        ({"slo": {"errorRate": "0.01"}}, "spec.slo.errorRate"),
        ({"budget": {"trials": 0}}, "spec.budget.trials"),
        ({"budget": {"gpuMinutes": 0}}, "spec.budget.gpuMinutes"),
        ({"promotion": {"mode": "yolo"}}, "spec.promotion.mode"),
        ({"target": {"command": "vllm serve"}}, "spec.target.command"),
        ({"search": {"pin": {"max_num_seqs": 4}}}, "spec.search.pin"),
        ({"metrics": {"prometheus": "prometheus:9090"}}, "spec.metrics.prometheus"),
    ],
)
def test_what_the_schema_can_say_is_refused_at_once(
    kube: Kube, namespace: str, spec: dict[str, Any], field: str
) -> None:
    body = small()
    body["spec"] |= spec
    with pytest.raises(Invalid) as caught:
        kube.create(TUNINGS, body, namespace)
    assert any(cause.field.startswith(field) for cause in caught.value.causes), caught.value.causes


@pytest.mark.parametrize("missing", ["target", "objective"])
def test_what_is_required_is_asked_for(kube: Kube, namespace: str, missing: str) -> None:
    body = small()
    del body["spec"][missing]
    with pytest.raises(Invalid, match=f"spec.{missing}"):
        kube.create(TUNINGS, body, namespace)


@pytest.mark.parametrize("name", ["with.dots", "x" * 64])
def test_names_fit_into_labels(kube: Kube, namespace: str, name: str) -> None:
    with pytest.raises(Invalid, match=r"metadata\.name"):
        kube.create(TUNINGS, manifest() | {"metadata": {"name": name}}, namespace)


def test_status_is_written_by_its_subresource_alone(kube: Kube, namespace: str) -> None:
    made = kube.create(TUNINGS, small() | {"status": {"phase": "Promoted"}}, namespace)
    assert "status" not in made
    written = kube.replace(TUNINGS, {**made, "status": {"phase": "Promoted"}}, namespace)
    assert "status" not in written
    with pytest.raises(Invalid, match=r"status\.phase"):
        kube.replace(TUNINGS, {**written, "status": {"phase": "Done"}}, namespace, subresource="status")


def test_kubectl_get_shows_the_columns(kube: Kube, namespace: str) -> None:
    KubernetesStore(kube, namespace, FakeClock()).save(waiting())
    table = kube.read(TUNINGS.path(namespace), accept="application/json;as=Table;v=v1;g=meta.k8s.io")
    columns = [(c["name"], c["priority"]) for c in table["columnDefinitions"]]
    assert [name for name, priority in columns if not priority] == [
        "Name", "Phase", "Best", "Gain", "Trials", "Approval", "Age",
    ]  # fmt: skip
    cells = dict(zip([name for name, _ in columns], table["rows"][0]["cells"], strict=True))
    assert (cells["Phase"], cells["Gain"], cells["Trials"], cells["Approval"], cells["Target"], cells["Reason"]) == (
        "AwaitingApproval", "+98.0%", "0/4", "Waiting", "m", "Waiting for approval.",
    )  # fmt: skip


def test_kubectl_explain_has_a_type_and_a_text_for_every_field(kube: Kube) -> None:
    definitions = kube.read("/openapi/v2")["definitions"]
    spec = definitions["dev.tunewright.v1alpha1.Tuning"]["properties"]["spec"]
    bare: list[str] = []

    def walk(node: Json, path: str) -> None:
        for name, field in node.get("properties", {}).items():
            if not field.get("type") or not field.get("description"):
                bare.append(f"{path}.{name}")
            walk(field, f"{path}.{name}")

    walk(spec, "spec")
    assert bare == []
    assert spec["properties"]["slo"]["properties"]["ttftP95"]["description"].startswith("Time to first token")


def test_the_short_name_and_the_category(kube: Kube) -> None:
    (found,) = [r for r in kube.read("/apis/tunewright.dev/v1alpha1")["resources"] if r["name"] == "tunings"]
    assert (found["shortNames"], found["categories"]) == (["tune"], ["all"])


def test_the_whole_of_a_large_tuning_comes_back(kube: Kube, namespace: str) -> None:
    asked = tuning(target={"command": ["v", "{port}"], "environment": {f"VARIABLE_{n}": "x" * 50 for n in range(500)}})
    kube.create(TUNINGS, manifest(asked), namespace)
    record = KubernetesStore(kube, namespace, FakeClock()).load(NAME)
    assert record is not None
    assert record.tuning == asked
