"""The weights of an HTTPRoute: what it becomes with the canary in it, and what it is to be again. Pure.

The route itself keeps, in an annotation written with the weights, how it was: so a crash loses nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.kube.client import FIELD_MANAGER, Json
from tunewright.kube.resources import GROUP
from tunewright.platform.kubernetes.fields import last_writer
from tunewright.platform.kubernetes.names import Owner
from tunewright.ports import Refused

RECORD_ANNOTATION = f"{GROUP}/canary"
"""On the route while the canary is in it: whose canary it is, and how the route was before."""

Backends = list[list[Json]]
"""The backendRefs of every rule."""

_PARTS = 1000
"""So many parts a weight of the target's Service is cut into, where the API's bound on weights allows it."""
_LARGEST = 1_000_000
_FEWEST = 100
"""Fewer parts can't hold a share to a percent."""


@dataclass(frozen=True)
class Record:
    """What the annotation holds: enough to bring the route back without any other record."""

    tuning: str
    uid: str
    service: str  # the canary's
    manager: str  # who wrote the rules before us
    before: Backends
    after: Backends

    @classmethod
    def read(cls, route: Json) -> "Record | None":
        """The record on a route; None when there is none that we wrote, or somebody made another thing of it."""
        text = (route["metadata"].get("annotations") or {}).get(RECORD_ANNOTATION)
        try:
            found = cls(**json.loads(text)) if text else None
        except (ValueError, TypeError):
            return None
        return found if found is not None and found._is_whole() else None

    @classmethod
    def of(cls, owner: Owner, route: Json, service: str, canary: str, share: float) -> "Record":
        """The route as it is, and as it is to be. Raises `Refused` as `split` does."""
        theirs = managers(route)
        manager = theirs[-1] if theirs else FIELD_MANAGER
        return cls(owner.name, owner.uid, canary, manager, backends(route), split(route, service, canary, share))

    @classmethod
    def lost(cls, canary: str) -> "Record":
        """In place of one that somebody took off the route: nothing is known but whose backendRefs are to go."""
        return cls("", "", canary, FIELD_MANAGER, [], [])

    def text(self) -> str:
        """As the annotation holds it."""
        return json.dumps(vars(self), separators=(",", ":"))

    def _is_whole(self) -> bool:
        texts = (self.tuning, self.uid, self.service, self.manager)
        lists = (self.before, self.after)
        return (
            all(isinstance(each, str) for each in texts)
            and all(isinstance(rules, list) and all(_are_refs(refs) for refs in rules) for rules in lists)
            and len(self.before) == len(self.after)
        )


def backends(route: Json) -> Backends:
    """The backendRefs of every rule as they are."""
    return [rule.get("backendRefs") or [] for rule in route["spec"].get("rules") or []]


def rules_with(route: Json, wanted: Backends) -> list[Json]:
    """The route's rules with other backendRefs; a rule whose own are wanted is untouched."""
    pairs = zip(route["spec"].get("rules") or [], wanted, strict=True)
    return [rule if refs == (rule.get("backendRefs") or []) else {**rule, "backendRefs": refs} for rule, refs in pairs]


def named(route: Json, services: Sequence[str]) -> list[str]:
    """Which of these Services the route sends requests to."""
    return [name for name in services if any(_sends_to(ref, name, route) for refs in backends(route) for ref in refs)]


def has(route: Json, service: str) -> bool:
    """Whether any rule names this Service, with whatever weight."""
    return any(_is(ref, service) for refs in backends(route) for ref in refs)


def split(route: Json, service: str, canary: str, share: float) -> Backends:
    """What goes to `service` goes by `share` (of 1) to `canary`; what goes elsewhere stays what it is.

    Raises `Refused` where no rule sends to the Service, or so little that it can't be split.
    """
    if not named(route, [service]):
        raise Refused(f"no rule of HTTPRoute {route['metadata']['name']} sends requests to Service {service} any more")
    return [_split(refs, service, canary, share, route) for refs in backends(route)]


def _split(refs: list[Json], service: str, canary: str, share: float, route: Json) -> list[Json]:
    if not any(_sends_to(ref, service, route) for ref in refs):
        return refs
    scale = min(_PARTS, _LARGEST // max(_weight(ref) for ref in refs))
    found: list[Json] = []
    for ref in refs:
        parts = _weight(ref) * scale
        if not _sends_to(ref, service, route):
            found.append({**ref, "weight": parts})
            continue
        if parts < _FEWEST:
            raise Refused(
                f"the weights in HTTPRoute {route['metadata']['name']} lie too far apart to split that of Service "
                f"{service} ({_weight(ref)}) once more: write them smaller"
            )
        part = round(parts * share)
        found += [{**ref, "weight": parts - part}, {**ref, "name": canary, "weight": part}]
    return found


def without(route: Json, record: Record) -> Backends:
    """The route without the canary: every rule that is as we wrote it to the byte as it was; of what somebody else
    changed meanwhile our own backendRef alone is taken out."""
    return [_without(at, refs, record) for at, refs in enumerate(backends(route))]


def _without(at: int, refs: list[Json], record: Record) -> list[Json]:
    if at < len(record.after) and record.after[at] == refs:
        return record.before[at]
    for before, after in zip(record.before, record.after, strict=True):
        if after == refs:
            return before  # rules were added, or stand in another order
    return [ref for ref in refs if not _is(ref, record.service)]


def stuck(route: Json, record: Record) -> str | None:
    """Why the canary can't be taken out: a rule that sends to nobody else any more. None when it can."""
    for now, left in zip(backends(route), without(route, record), strict=True):
        ours = sum(_weight(ref) for ref in now if _is(ref, record.service))
        if ours and not any(_weight(ref) for ref in left):
            return (
                f"somebody else lets a rule of HTTPRoute {route['metadata']['name']} send everything to the canary "
                f"({last_writer(route)}): give another backendRef a weight, and it is taken out"
            )
    return None


def changed(route: Json, record: Record) -> str | None:
    """What somebody else changed since we wrote; None when nothing."""
    if backends(route) == record.after:
        return None
    return (
        f"somebody else changed the backendRefs of HTTPRoute {route['metadata']['name']} since the canary came "
        f"({last_writer(route)}); they are left as they are"
    )


def managers(route: Json) -> list[str]:
    """Who owns the rules beside us, the last writer last."""
    entries = [
        entry
        for entry in route["metadata"].get("managedFields") or []
        if "f:rules" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        and entry.get("manager") not in (None, FIELD_MANAGER)
    ]
    return [str(entry["manager"]) for entry in sorted(entries, key=lambda each: str(each.get("time") or ""))]


def accepted(route: Json) -> bool:
    """Whether a Gateway says that it takes the route."""
    parents = (route.get("status") or {}).get("parents") or []
    conditions = [each for parent in parents for each in parent.get("conditions") or []]
    return any(each.get("type") == "Accepted" and each.get("status") == "True" for each in conditions)


def _sends_to(ref: Json, service: str, route: Json) -> bool:
    elsewhere = ref.get("namespace") not in (None, "", route["metadata"]["namespace"])
    return _is(ref, service) and not elsewhere and _weight(ref) > 0


def _is(ref: Json, service: str) -> bool:
    kind = (ref.get("group") or "", ref.get("kind") or "Service")
    return kind == ("", "Service") and ref.get("name") == service


def _are_refs(found: object) -> bool:
    return isinstance(found, list) and all(
        isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("weight", 1), int)
        for each in found
    )


def _weight(ref: Json) -> int:
    return int(ref.get("weight", 1))
