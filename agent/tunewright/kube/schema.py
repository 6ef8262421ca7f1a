"""From pydantic models to the structural schema of a CRD: flat and without unions, for every version since 1.20."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "pattern", "minimum", "maximum",
    "minLength", "maxLength", "minItems", "maxItems", "multipleOf",
)  # fmt: skip


def structural(model: type[BaseModel]) -> Schema:
    """The schema of `model` by its outside names, with the models' defaults as a person would write them.

    Raises `ValueError` naming the field where a model can't be said in a structural schema.
    """
    # Of the serialised form: only there are defaults written as `35s`, not as seconds.
    document = model.model_json_schema(by_alias=True, mode="serialization")
    return _convert(document, document.get("$defs", {}), "spec")


def _convert(node: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Schema:
    node = dict(node)
    while "$ref" in node:
        # What stands beside the reference is about this field, so it wins over what the model says of itself.
        beside = {key: value for key, value in node.items() if key != "$ref"}
        node = {**defs[node["$ref"].rpartition("/")[2]], **beside}
    if "anyOf" in node:
        return _optional(node, defs, where)
    if "type" not in node and "const" in node:
        node["type"] = "string"
    if not isinstance(node.get("type"), str):
        raise ValueError(f"{where}: has no single type, which a structural schema needs: {node}")

    found: Schema = {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        found["enum"] = [node["const"]]
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in node:
            found[bound.lower()], found[f"exclusive{bound}"] = node[f"exclusive{bound}"], True
    if "examples" in node:
        such = ", ".join(map(str, node["examples"]))
        found["description"] = f"{found.get('description', '')} Such as {such}.".strip()
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if node["type"] == "integer":
        found["format"] = "int64"
    if node["type"] == "array":
        found["items"] = _convert(node["items"], defs, f"{where}[]")
    if node["type"] == "object":
        found |= _object(node, defs, where)
    # Kubernetes 1.20 takes the default "" for null; a field that is left out is read as "" anyway.
    if node.get("default") not in (None, ""):
        found["default"] = node["default"]
    return found


def _object(node: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Schema:
    if "properties" not in node:
        return {"additionalProperties": _convert(node["additionalProperties"], defs, f"{where}{{}}")}
    properties = {name: _convert(field, defs, f"{where}.{name}") for name, field in node["properties"].items()}
    required = node.get("required", [])
    for name, field in properties.items():
        # A block that is left out is filled in by the API server, so that the object shows what is in force.
        # Nor one that may be None: it says something by being there.
        optional = "anyOf" in node["properties"][name]
        if field["type"] == "object" and not field.get("required") and name not in required and not optional:
            field.setdefault("default", {})
    return {"properties": properties} | ({"required": list(required)} if required else {})  # a list shared is an alias


def _optional(node: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Schema:
    """`X | None` can be left out. Not `nullable`: such a field has no type in `kubectl explain`. No other union."""
    kinds = [kind for kind in node["anyOf"] if kind.get("type") != "null"]
    if len(kinds) != 1 or len(kinds) == len(node["anyOf"]):
        raise ValueError(f"{where}: is a union, which a structural schema can't say")
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return _convert({**kinds[0], **beside}, defs, where)
