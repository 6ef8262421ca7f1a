"""Server-side apply in memory, for the fields of a Deployment that are applied: one owner for each leaf."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from tunewright.kube.client import FIELD_MANAGER, Json
from tunewright.kube.errors import Cause, KubeConflict


def server_side_apply(live: Json, body: Json, *, force: bool) -> None:
    """Server-side apply as far as it matters: leaf by leaf, with one owner each in `live["owners"]`."""
    owned: dict[str, str] = live.setdefault("owners", {})
    wanted = dict(_leaves(body))
    taken = [
        key
        for key, value in wanted.items()
        if owned.get(key, FIELD_MANAGER) != FIELD_MANAGER and _read(live, key) != value
    ]
    if taken and not force:
        causes = tuple(Cause(field=key, message=f'conflict with "{owned[key]}" using apps/v1') for key in taken)
        raise KubeConflict("PATCH", live["metadata"]["name"], "conflicts", status=409, causes=causes)
    for key in [key for key, owner in owned.items() if owner == FIELD_MANAGER and key not in wanted]:
        del owned[key]
        _write(live, key, None)
    for key, value in wanted.items():
        owned[key] = FIELD_MANAGER
        _write(live, key, value)
    strategy = live["spec"].setdefault("strategy", {"type": "RollingUpdate"})
    if strategy.get("type") != "Recreate":
        strategy.setdefault("rollingUpdate", {})
        for field in ("maxSurge", "maxUnavailable"):
            strategy["rollingUpdate"].setdefault(field, "25%")
    _record(live, owned)


def _record(live: Json, owned: dict[str, str]) -> None:
    fields: Json = {}
    for key in (key for key, owner in owned.items() if owner == FIELD_MANAGER and "/env/" in key):
        _, container, _, name = key.split("/")
        node = fields
        path = ["f:spec", "f:template", "f:spec", "f:containers", _key(container), "f:env", _key(name)]
        for step in path:
            node = node.setdefault(step, {})
    live["metadata"]["managedFields"] = [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields}]


def _leaves(body: Json) -> Iterator[tuple[str, Any]]:
    for key, text in (body["metadata"].get("annotations") or {}).items():
        yield f"annotation/{key}", text
    spec = body["spec"]
    for field in ("paused", "minReadySeconds"):
        if field in spec:
            yield field, spec[field]
    for field, value in ((spec.get("strategy") or {}).get("rollingUpdate") or {}).items():
        yield f"strategy/{field}", value
    for container in spec["template"]["spec"]["containers"]:
        for field in ("args", "command"):
            if field in container:
                yield f"containers/{container['name']}/{field}", container[field]
        for entry in container.get("env") or []:
            yield f"containers/{container['name']}/env/{entry['name']}", entry["value"]


def _read(live: Json, key: str) -> Any:
    holder, last = _place(live, key)
    if isinstance(holder, list):
        return next((each.get("value") for each in holder if each["name"] == last), None)
    return holder.get(last)


def _write(live: Json, key: str, value: Any) -> None:
    holder, last = _place(live, key)
    if isinstance(holder, list):
        holder[:] = [each for each in holder if each["name"] != last] + (
            [{"name": last, "value": value}] if value is not None else []
        )
    elif value is None:
        holder.pop(last, None)
    else:
        holder[last] = copy.deepcopy(value)


def _place(live: Json, key: str) -> tuple[Any, str]:
    parts = key.split("/")
    if parts[0] == "annotation":
        return live["metadata"].setdefault("annotations", {}), "/".join(parts[1:])
    if parts[0] == "strategy":
        return live["spec"].setdefault("strategy", {}).setdefault("rollingUpdate", {}), parts[1]
    if parts[0] != "containers":
        return live["spec"], parts[0]
    container = next(each for each in live["spec"]["template"]["spec"]["containers"] if each["name"] == parts[1])
    return (container.setdefault("env", []), parts[3]) if parts[2] == "env" else (container, parts[2])


def _key(name: str) -> str:
    return "k:" + json.dumps({"name": name}, separators=(",", ":"))
