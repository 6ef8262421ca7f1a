"""The CRDs: structural as Kubernetes 1.20 wants it, complete, and as the files have it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from tunings import tuning

from tunewright.domain.tuning import TuningSpec
from tunewright.kube import crds
from tunewright.kube.schema import structural

FOLDER = Path(__file__).parents[2] / "deploy" / "crds"
ALLOWED = {
    "type", "description", "properties", "required", "items", "additionalProperties", "enum", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
    "default", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, node in schema.get("properties", {}).items():
        yield from nodes(node, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if word in schema:
            yield from nodes(schema[word], f"{path}[]")


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    (version,) = document["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


EVERY = [
    pytest.param(path, node, id=f"{name.split('_')[1]}{path}")
    for name, document in crds.documents().items()
    for path, node in nodes(schema_of(document))
]


@pytest.mark.parametrize(("path", "node"), EVERY)
def test_every_node_is_structural(path: str, node: dict[str, Any]) -> None:
    assert set(node) <= ALLOWED
    assert isinstance(node.get("type"), str) or node.get("x-kubernetes-preserve-unknown-fields")
    assert None not in node.get("enum", []), "kubectl refuses null in an enum"
    assert node.get("default") != "", "1.20 takes it for null"
    assert not ("properties" in node and "additionalProperties" in node)
    if ".spec." in path and not path.endswith("[]"):
        assert len(node.get("description", "")) > 10, f"{path} says nothing in kubectl explain"


def test_the_files_are_as_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert crds.main(["--check", "--out", str(FOLDER)]) == 0, capsys.readouterr().err


def test_check_notices_what_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crds.main(["--check", "--out", str(tmp_path)]) == 1
    assert "make generate" in capsys.readouterr().err
    assert crds.main(["--out", str(tmp_path)]) == 0
    assert crds.main(["--check", "--out", str(tmp_path)]) == 0
    file = next(tmp_path.iterdir())
    file.write_text(file.read_text() + "# by hand\n")
    assert crds.main(["--check", "--out", str(tmp_path)]) == 1
    assert file.name in capsys.readouterr().err


def test_they_can_be_applied_by_kubectl() -> None:
    for text in crds.render().values():
        assert len(text.encode()) < 250 * 1024
        assert yaml.safe_load(text)["apiVersion"] == "apiextensions.k8s.io/v1"


def test_every_field_of_the_model_is_there_and_no_other() -> None:
    def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
        for field in model.model_fields.values():
            yield f"{path}.{field.alias}"
            for kind in (field.annotation, *get_args(field.annotation)):  # a block, also one that may be left out
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    many = "[]" if get_origin(field.annotation) is tuple else ""
                    yield from fields(kind, f"{path}.{field.alias}{many}")

    said = {path for path, _ in nodes(structural(TuningSpec)) if path and not path.endswith("[]")}
    assert said == set(fields(TuningSpec))


def fill(schema: dict[str, Any], value: Any) -> Any:
    """Defaults as the API server fills them in."""
    if schema["type"] != "object" or "properties" not in schema:
        return value
    filled = dict(value)
    for name, node in schema["properties"].items():
        if name not in filled and "default" in node:
            filled[name] = node["default"]
        if name in filled:
            filled[name] = fill(node, filled[name])
    return filled


def test_what_the_api_server_fills_in_is_what_the_model_would() -> None:
    asked = {
        "target": {"command": ["vllm", "serve", "m", "--port", "{port}"]},
        "objective": {"maximize": "outputTokensPerSecond"},
    }
    filled = fill(structural(TuningSpec), asked)
    assert filled["promotion"]["canary"]["warmup"] == "1m"
    assert filled["slo"] == {"errorRate": "1%"}
    assert "default" not in structural(TuningSpec)["properties"]["objective"], "it is required, so never filled in"
    assert TuningSpec.model_validate(filled) == TuningSpec.model_validate(asked)
    assert TuningSpec.model_validate(filled).spec_hash == TuningSpec.model_validate(asked).spec_hash


def test_a_block_that_says_something_by_being_there_is_not_filled_in() -> None:
    load = structural(TuningSpec)["properties"]["load"]
    assert "default" in load
    assert "default" not in load["properties"]["lengths"]
    assert not re.search(r"&id\d|\*id\d", (FOLDER / "tunewright.dev_tunings.yaml").read_text()), "an alias"


def test_bounds_enums_and_patterns() -> None:
    spec = dict(nodes(structural(TuningSpec)))
    assert spec[".budget.trials"]["minimum"] == 1
    assert spec[".budget.gpuMinutes"] | {"description": ""} == {
        "type": "number", "minimum": 0, "exclusiveMinimum": True, "description": "",
    }  # fmt: skip
    assert spec[".promotion.mode"]["enum"] == ["recommend", "approve", "auto"]
    assert spec[".objective.maximize"]["enum"] == ["outputTokensPerSecond", "goodput", "tokensPerDollar"]
    assert re.match(spec[".slo.ttftP95"]["pattern"], "1m30s")
    assert not re.match(spec[".slo.ttftP95"]["pattern"], "2")
    assert spec[".target.command"]["items"] == {"type": "string"}
    assert spec[".search.pin"]["additionalProperties"] == {"type": "string"}
    assert structural(TuningSpec)["required"] == ["target", "objective"]


def test_the_printer_columns() -> None:
    document = crds.documents()["tunewright.dev_tunings.yaml"]
    columns = document["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [c["name"].upper() for c in columns if not c.get("priority")] == [
        "PHASE", "BEST", "GAIN", "TRIALS", "APPROVAL", "AGE",
    ]  # fmt: skip
    assert [c["name"].upper() for c in columns if c.get("priority")] == ["TARGET", "REASON"]
    assert document["spec"]["names"]["shortNames"] == ["tune"]
    assert document["spec"]["names"]["categories"] == ["all"]
    paths = {path for path, _ in nodes(schema_of(document))}
    assert {c["jsonPath"] for c in columns} - {".metadata.creationTimestamp"} <= paths


def test_a_written_tuning_keeps_to_the_schema() -> None:
    spec = structural(TuningSpec)
    written = tuning().model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]

    def check(node: dict[str, Any], value: Any, path: str) -> None:
        kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}
        assert isinstance(value, kinds[node["type"]]), path
        if "enum" in node:
            assert value in node["enum"]
        if "pattern" in node:
            assert re.search(node["pattern"], value), path
        for name, inner in (value if "properties" in node else {}).items():
            check(node["properties"][name], inner, f"{path}.{name}")

    check(spec, written, "spec")


class Union(BaseModel):
    """What can't be said."""

    value: int | str


class Any_(BaseModel):
    """What can't be said either."""

    value: Any


class Said(BaseModel):
    """What can."""

    one: Literal["x"]
    below: float = 1.0


@pytest.mark.parametrize("model", [Union, Any_])
def test_what_has_no_single_type_is_refused_by_name(model: type[BaseModel]) -> None:
    with pytest.raises(ValueError, match=r"spec\.value"):
        structural(model)


def test_a_single_literal_is_an_enum() -> None:
    assert structural(Said)["properties"]["one"] == {"type": "string", "enum": ["x"]}
