import json
from pathlib import Path

import pytest
import yaml

from tunewright.domain.tuning import Tuning
from tunewright.domain.units import parse_duration, parse_share
from tunewright.telemetry.catalog import METRICS
from tunewright.telemetry.docs import generated, main, tuning_schema

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "examples" / "simulator.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tuning.md", "tuning.schema.json", "metrics.md"])
def test_the_documentation_is_what_the_code_generates(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generated(EXAMPLE)[name], (
        "run: python -m tunewright.telemetry.docs"
    )


def test_check_names_the_drift_and_writing_repairs_it(tmp_path, capsys):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "simulator.yaml").write_text(EXAMPLE, encoding="utf-8")
    docs = tmp_path / "docs"
    docs.mkdir()
    assert main(["--check", str(docs)]) == 1
    assert not list(docs.iterdir())
    assert main([str(docs)]) == 0
    assert main(["--check", str(docs)]) == 0
    changed = docs / "metrics.md"
    changed.write_text(changed.read_text(encoding="utf-8").replace("tunewright_build_info", "tunewright_built"))
    capsys.readouterr()
    assert main(["--check", str(docs)]) == 1
    told = capsys.readouterr().err
    assert "-| `tunewright_built`" in told
    assert "+| `tunewright_build_info`" in told


def test_outside_the_repository_it_says_so(tmp_path, capsys):
    assert main([str(tmp_path / "docs")]) == 2
    assert "root of the repository" in capsys.readouterr().err


def test_every_metric_is_documented():
    text = generated(EXAMPLE)["metrics.md"]
    for metric in METRICS:
        assert text.count(f"| `{metric.name}` | {metric.type} |") == 1


def fields(schema, block, path=()):
    for name, field in block["properties"].items():
        choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
        kind = {**field, **choices[0]}
        named = kind if "$ref" in kind else kind.get("items", {})
        target = schema["$defs"][named["$ref"].rsplit("/", 1)[1]] if "$ref" in named else {}
        yield (*path, name), {**target, **kind}
        if "properties" in target:
            yield from fields(schema, target, (*path, name))


def test_every_field_is_described_and_named_as_in_the_file():
    schema = tuning_schema()
    text = generated(EXAMPLE)["tuning.md"]
    found = dict(fields(schema, schema))
    assert len(found) > 70
    for path, field in found.items():
        assert "_" not in path[-1]
        assert f"| `{path[-1]}` |" in text
        assert field.get("description") or "const" in field, path


def test_defaults_of_the_schema_are_those_of_the_models_as_a_file_has_them():
    schema = tuning_schema()
    minimal = {
        "apiVersion": "tunewright.dev/v1alpha1",
        "kind": "Tuning",
        "metadata": {"name": "a"},
        "spec": {"target": {"command": ["{port}"]}, "objective": {"maximize": "goodput"}},
    }
    sessions = {"concurrency": 1, "firstPrompt": 1, "perTurn": 1, "output": 1}
    normal, pair = {"mean": 1, "standardDeviation": 1, "most": 1}, {"promptTokens": 1, "outputTokens": 1}
    ways = ({"prompt": normal, "output": normal}, {"pairs": [pair]}, {"trace": {"file": "a"}})
    loads = (
        {},
        {"mode": "sessions", "sessions": sessions},
        {"mode": "trace", "trace": {"file": "a"}},
        *({"lengths": way} for way in ways),
    )
    filled = [
        Tuning.model_validate(minimal | {"spec": minimal["spec"] | {"load": load}}).model_dump(
            mode="json", by_alias=True
        )
        for load in loads
    ]

    def value(document, path):
        for part in path[:-1]:
            document = document.get(part) or {}
            document = document[0] if isinstance(document, list) else document
        return document.get(path[-1], KeyError)

    checked = 0
    for path, field in fields(schema, schema):
        if "default" in field and "properties" not in field:
            # A block that may be left out is looked at in the document that has it.
            actual = next(found for document in filled if (found := value(document, path)) is not KeyError)
            if path != ("spec", "target", "command"):
                assert field["default"] == actual, path
            checked += 1
        if str(field.get("default", "")).endswith("%"):
            parse_share(field["default"])
        elif "(us|ms|s|m|h|d)" in field.get("pattern", "") and "default" in field:
            parse_duration(field["default"])
    assert checked > 40


def test_the_schema_is_json_and_names_what_the_example_uses():
    schema = json.loads(generated(EXAMPLE)["tuning.schema.json"])
    known = {path for path, _ in fields(schema, schema)}

    def paths(value, above=()):
        if isinstance(value, dict):
            for name, item in value.items():
                yield (*above, name)
                yield from paths(item, (*above, name))

    assert set(paths(yaml.safe_load(EXAMPLE))) <= known
    assert schema["additionalProperties"] is False
    assert all(block["additionalProperties"] is False for block in schema["$defs"].values() if "properties" in block)
