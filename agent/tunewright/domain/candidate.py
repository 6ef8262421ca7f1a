"""A candidate: a set of knob values, named by its content."""

import hashlib
import json
from collections.abc import Mapping

from pydantic import Field

from tunewright.domain.model import Model

KnobValue = bool | int | float | str


def content_hash(value: object) -> str:
    """Ten hex digits that name `value` by its canonical JSON: equal content, equal name, in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Candidate(Model):
    """The knobs that are set explicitly; every knob not named here keeps the default of the vLLM version in use.

    Keys are knob names of the catalogue (`max_num_seqs`), values are plain JSON values.
    """

    values: Mapping[str, KnobValue] = Field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The content hash that names this candidate everywhere: records, pods, ConfigMaps, approvals."""
        return content_hash(dict(self.values))

    def with_value(self, knob: str, value: KnobValue | None) -> "Candidate":
        """A copy with one knob set, or with it left to its default when `value` is None."""
        values = {name: old for name, old in self.values.items() if name != knob}
        if value is not None:
            values[knob] = value
        return Candidate(values=values)

    def differences(self, other: "Candidate") -> dict[str, tuple[KnobValue | None, KnobValue | None]]:
        """Per knob that differs, the value here and the value there; None means the default."""
        names = sorted({*self.values, *other.values})
        return {
            name: (self.values.get(name), other.values.get(name))
            for name in names
            if self.values.get(name) != other.values.get(name)
        }
