"""Names, labels and owner references of what we create: deterministic, so that nothing is created twice."""

import hashlib
import re
from dataclasses import dataclass

from tunewright.kube.client import Json
from tunewright.kube.resources import GROUP, MANAGED_BY, TUNING_LABEL, TUNINGS, Resource

ROLE_LABEL = f"{GROUP}/role"
"""`trial`, `load`, `load-file`, `log` or `canary`."""

TRIAL_ANNOTATION = f"{GROUP}/trial"

PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")

OWNER_ANNOTATION = f"{GROUP}/tuning-uid"
"""On what must outlive its Tuning for a while, and so has no owner reference: the Tuning's uid."""

_LONGEST = 63
"""A pod's name is its host name, and a Deployment's name becomes part of its pods' labels."""


@dataclass(frozen=True)
class Owner:
    """The Tuning that what we create belongs to. By its owner reference that is deleted with it."""

    name: str
    uid: str

    @property
    def reference(self) -> Json:
        """That of all that is deleted with it."""
        return TUNINGS.owner(self.name, self.uid)

    def owns(self, found: Json) -> bool:
        """Whether an object is this very tuning's, not one of an earlier tuning of the same name."""
        return self.uid in owner_uids(found)

    def metadata(self, name: str, role: str, **annotations: str) -> Json:
        """The metadata of an object of ours."""
        return {
            "name": name,
            "labels": {**MANAGED_BY, TUNING_LABEL: self.name, ROLE_LABEL: role},
            "annotations": annotations,
            "ownerReferences": [self.reference],
        }

    def selector(self, role: str) -> str:
        """The label selector of this tuning's objects of one role."""
        return f"{TUNING_LABEL}={self.name},{ROLE_LABEL}={role}"


def owner_uids(found: Json) -> set[str]:
    """Of which Tunings an object is."""
    metadata = found["metadata"]
    uids = {each.get("uid") for each in metadata.get("ownerReferences") or []}
    uids.add((metadata.get("annotations") or {}).get(OWNER_ANNOTATION))
    return {str(uid) for uid in uids if uid}


def joined(*parts: str) -> str:
    """The parts as one DNS label; a digest stands in for what is too long or has other characters."""
    name = "-".join(parts)
    if len(name) <= _LONGEST and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        return name
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[: _LONGEST - 11].strip("-")
    return f"{plain}-{digest}" if plain else f"x-{digest}"
