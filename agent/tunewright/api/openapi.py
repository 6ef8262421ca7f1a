"""The OpenAPI document as the API really answers: problem details, tokens, media types."""

from collections.abc import Collection
from typing import Any

from tunewright.api.problems import KINDS, MEDIA_TYPE, Problem

_EVERY = ("unauthenticated", "forbidden", "cross-origin", "wrong-host", "internal", "unavailable")
_POST = ("bad-request", "too-slow", "not-now", "stale", "too-large", "not-json")


def complete(document: dict[str, Any], *, public: Collection[str]) -> dict[str, Any]:
    """Add to FastAPI's document what stands before the routes; paths in `public` need no token."""
    components = document["components"]
    schemas: dict[str, Any] = components["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    schemas.update(problem.pop("$defs"))
    schemas["Problem"] = problem
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The token of the token file."}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_token = path not in public
            operation["security"] = [{"token": []}] if needs_token else []
            kinds = set(_EVERY if needs_token else ("cross-origin", "wrong-host", "internal", "unavailable"))
            if method == "post":
                kinds.update(_POST)
            if operation.get("parameters"):
                kinds.add("invalid")
            if "{" in path or path == "/metrics":
                kinds.add("not-found")
            operation["responses"].pop("422", None)
            operation["responses"].update(_responses(kinds))
    return document


def _responses(kinds: Collection[str]) -> dict[str, Any]:
    titles: dict[int, list[str]] = {}
    for kind, (status, title) in KINDS.items():
        if kind in kinds:
            titles.setdefault(status, []).append(f"{title} (`{kind}`)")
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        str(status): {"description": "; ".join(lines), "content": {MEDIA_TYPE: {"schema": schema}}}
        for status, lines in sorted(titles.items())
    }
