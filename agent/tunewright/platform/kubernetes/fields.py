"""The fields of the target's Deployment that we write, and who owns them."""

import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunewright.domain.candidate import Candidate
from tunewright.kube.client import FIELD_MANAGER, Json
from tunewright.kube.errors import Cause, KubeConflict
from tunewright.kube.resources import GROUP
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.podtemplate import PodTemplate

ROLLOUT_ANNOTATION = f"{GROUP}/rollout"
"""On the target: whose rollout it is, and how it was before. It is the one thing that outlives the tuning."""

HOLD_SECONDS = 30
"""`minReadySeconds` while we roll: so long Kubernetes waits behind a ready replica for our `paused`."""

_ONE_BY_ONE = {"maxSurge": 0, "maxUnavailable": 1}
_DEFAULT_STRATEGY = {"maxSurge": "25%", "maxUnavailable": "25%"}
_GITOPS = {
    "argocd.argoproj.io/instance": "Argo CD",
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
}
_MANAGER = re.compile(r'conflict with "([^"]+)"')


@dataclass(frozen=True)
class Note:
    """What the annotation holds: enough to bring the target back without any other record."""

    tuning: str
    uid: str
    active: bool
    baseline: str  # hash
    base: str  # of the pod template without its knobs
    leaves: Json  # of the container, as they were
    strategy: Json
    min_ready: int

    @classmethod
    def read(cls, deployment: Json) -> "Note | None":
        """The note on a Deployment; None when there is none that we wrote."""
        text = (deployment["metadata"].get("annotations") or {}).get(ROLLOUT_ANNOTATION)
        try:
            return cls(**json.loads(text)) if text else None
        except (ValueError, TypeError):
            return None

    @classmethod
    def of(cls, owner: Owner, deployment: Json, template: PodTemplate) -> "Note":
        """How the target is now, before anything of it is written."""
        spec = deployment["spec"]
        return cls(
            tuning=owner.name,
            uid=owner.uid,
            active=True,
            baseline=template.candidate.hash,
            base=template.base,
            leaves=template.as_written(),
            strategy=dict((spec.get("strategy") or {}).get("rollingUpdate") or _DEFAULT_STRATEGY),
            min_ready=int(spec.get("minReadySeconds") or 0),
        )

    def again(self, owner: Owner, template: PodTemplate) -> "Note":
        """The same last known-good configuration, for going back to it after the rollout was over."""
        return replace(self, active=True, tuning=owner.name, uid=owner.uid, base=template.base)

    def ended(self) -> "Note":
        """The same, as the last known-good configuration; the rollout is over."""
        return replace(self, active=False)

    def without_strategy(self) -> "Note":
        """The same where the strategy is somebody else's by now."""
        return replace(self, strategy=_DEFAULT_STRATEGY)

    def text(self) -> str:
        """As the annotation holds it."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":"))


def body(name: str, note: Note, leaves: Json, *, paused: bool, hold_seconds: int, rolling: bool) -> Json:
    """What is applied: the note, the leaves, and while `rolling` our strategy. What is left out of it falls back."""
    spec: Json = {"template": {"spec": {"containers": [leaves]}}}
    if rolling:
        spec["strategy"] = {"rollingUpdate": _ONE_BY_ONE}
        if not note.min_ready:  # a value of somebody else's holds as well
            spec["minReadySeconds"] = hold_seconds
        if paused:
            spec["paused"] = True
    elif note.strategy != _DEFAULT_STRATEGY:
        spec["strategy"] = {"rollingUpdate": note.strategy}
    return {"metadata": {"name": name, "annotations": {ROLLOUT_ANNOTATION: note.text()}}, "spec": spec}


def strategy_back(deployment: Json, note: Note, leaves: Json) -> Json | None:
    """What is applied before our strategy is left out: how it was. None where it is not ours any more.

    What is left out of an apply falls back only where nobody else owns it. A client-side apply goes on owning the
    defaults that were filled in for it (seen on 1.20), and our values would stay. `leaves` are those that are there.
    """
    spec = deployment["spec"]
    if (spec.get("strategy") or {}).get("rollingUpdate") != _ONE_BY_ONE or note.strategy == _ONE_BY_ONE:
        return None
    paused, hold = bool(spec.get("paused")), int(spec.get("minReadySeconds") or 0)  # until the next apply
    whole = body(deployment["metadata"]["name"], note, leaves, paused=paused, hold_seconds=hold, rolling=True)
    whole["spec"]["strategy"] = {"rollingUpdate": note.strategy}
    return whole


def leaves_for(template: PodTemplate, candidate: Candidate, note: Note, ours: Container[str]) -> Json:
    """The container's leaves for `candidate`; going back, the very bytes of before: so nothing restarts needlessly.

    `ours` as in `PodTemplate.leaves`, which raises `Refused`.
    """
    leaves = template.leaves(candidate, ours)
    if candidate.hash != note.baseline:
        return leaves
    back: Json = {"name": template.name}
    for field in ("command", "args"):
        if field in leaves and field in note.leaves:
            back[field] = note.leaves[field]
    return back | ({"env": leaves["env"]} if "env" in leaves else {})


def own_variables(deployment: Json, container: str) -> frozenset[str]:
    """The `env` entries that we own by server-side apply."""
    found: set[str] = set()
    for entry in deployment["metadata"].get("managedFields") or []:
        if entry.get("manager") != FIELD_MANAGER or entry.get("operation") != "Apply" or entry.get("subresource"):
            continue
        fields: Any = entry.get("fieldsV1") or {}
        key = json.dumps({"name": container}, separators=(",", ":"))
        for each in ("f:spec", "f:template", "f:spec", "f:containers", f"k:{key}", "f:env"):
            fields = fields.get(each) or {}
        found.update(json.loads(each[2:])["name"] for each in fields if each.startswith("k:"))
    return frozenset(found)


def owned_elsewhere(found: Json) -> Iterator[str]:
    """Who keeps an object as it is, and would set back what is changed of it."""
    metadata = found["metadata"]
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    for key, tool in _GITOPS.items():
        if key in marks:
            yield f"{tool} ({key}: {marks[key]}) keeps it as its source says: promote by a change there (recommend)"
    for each in metadata.get("ownerReferences") or []:
        if each.get("controller"):
            yield f"{each['kind']} {each['name']} owns it and would set it back: change that (mode recommend)"


def last_writer(found: Json) -> str:
    """Who last wrote a spec, and when, as far as the object itself says."""
    entries = [e for e in found["metadata"].get("managedFields") or [] if "f:spec" in (e.get("fieldsV1") or {})]
    if not entries:
        return "by whom is not recorded"
    last = max(entries, key=lambda entry: str(entry.get("time") or ""))
    return f"last written by {last.get('manager')} at {last.get('time')}"


def owners(conflict: KubeConflict) -> list[str]:
    """`MANAGER owns FIELD` for each field of a refused apply; its message where it tells no fields."""
    return list(_owners(conflict.causes)) or [conflict.message]


def _owners(causes: Sequence[Cause]) -> Iterator[str]:
    for cause in causes:
        manager = _MANAGER.search(cause.message)
        yield f"{manager[1] if manager else cause.message} owns {cause.field}"
