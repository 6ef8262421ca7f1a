"""One knob: an engine argument or an environment variable, with its type and what is known of its values."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tunewright.domain.candidate import KnobValue

Kind = Literal["int", "float", "bool", "choice"]
_MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST_SIGNS = 30
_NUMBER = re.compile(r"(-?(?:\d+(?:\.\d*)?|\.\d+))([kmgtKMGT])?")


class Family(StrEnum):
    """How a model is built, as far as knobs depend on it."""

    DENSE = "dense"
    MOE = "moe"
    HYBRID = "hybrid"


class Searched(StrEnum):
    """Whether a search tries other values of the knob."""

    ALWAYS = "always"  # wherever the knob applies
    NAMED = "named"  # only where `search.include` names it: it changes more than speed, or seldom helps
    NEVER = "never"  # production's business: only carried along


@dataclass(frozen=True)
class Knob:
    """A knob of vLLM. `grid` holds the values a search tries; other values that `parse` reads are carried as well."""

    name: str
    kind: Kind
    group: str
    does: str
    default: str  # for people: as vLLM resolves it when the knob is not set
    source: str
    flag: str | None = None  # the long flag; None for knobs inside a JSON flag and for environment variables
    aliases: tuple[str, ...] = ()
    json_flag: str | None = None  # the knob is one key of this flag's JSON
    json_key: str | None = None
    environment: str | None = None
    grid: tuple[KnobValue, ...] = ()
    choices: tuple[str, ...] = ()  # every valid value, where vLLM checks it on the command line
    nominal: KnobValue | None = None  # the default as a value, where it does not depend on model or machine
    minimum: float | None = None
    maximum: float | None = None
    human: bool = False  # `8k`, `1K`, … are read
    lossy: frozenset[KnobValue] = frozenset()  # values that can change answers
    families: frozenset[Family] = frozenset(Family)
    gpu: bool = False  # has no effect, or fails, on a machine without a GPU
    min_gpus: int = 1
    needs: str = ""  # for people: what else must hold; `validity` enforces it
    since: tuple[int, int] = (0, 26)  # first minor version known to have it
    until: tuple[int, int] | None = None  # first minor version without it
    search: Searched = Searched.ALWAYS

    @property
    def where(self) -> str:
        """How a person writes it: the flag, the key in a flag's JSON, or the environment variable."""
        if self.json_flag:
            return f"{self.json_flag} {self.json_key}"
        return self.flag or self.environment or ""

    def parse(self, text: str) -> KnobValue:
        """The value that `text` means. Raises ValueError saying what is allowed."""
        text = text.strip()
        if self.kind == "bool":
            if text.lower() in ("true", "1", "yes", "on"):
                return True
            if text.lower() in ("false", "0", "no", "off"):
                return False
            raise ValueError(f"{self.name}: {text!r} is neither true nor false")
        if self.kind == "choice":
            return self._choice(text)
        value = self._number(text)
        if self.minimum is not None and value < self.minimum and not (self.human and value == -1):
            raise ValueError(f"{self.name}: {text} is below {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name}: {text} is above {self.maximum:g}")
        return value

    def _choice(self, text: str) -> str:
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        if self.choices:
            raise ValueError(f"{self.name}: {text!r} is not one of {', '.join(self.choices)}")
        if not text:
            raise ValueError(f"{self.name}: the value is empty")
        return text

    def _number(self, text: str) -> int | float:
        if self.human and text == "auto":
            return -1  # vLLM's own number for "as much as fits"
        match = _NUMBER.fullmatch(text)
        if match is None or (match[2] and not self.human):
            raise ValueError(f"{self.name}: {text!r} is not a number")
        if len(text) > _MOST_SIGNS:  # beyond what a float and vLLM hold
            raise ValueError(f"{self.name}: a number of {len(text)} signs is too long; at most {_MOST_SIGNS} are read")
        if self.kind == "float":
            return float(match[1])
        number = float(match[1]) * _MULTIPLIERS.get(match[2] or "", 1)
        if number != int(number):
            raise ValueError(f"{self.name}: {text!r} is not a whole number")
        # Through int where there is no fraction: a byte count is beyond what a float holds exactly.
        return int(match[1]) * _MULTIPLIERS.get(match[2] or "", 1) if "." not in match[1] else int(number)

    def format(self, value: KnobValue) -> str:
        """The value as text on the command line; `parse` reads it back."""
        if isinstance(value, bool):
            return "true" if value else "false"
        return f"{value:.10g}" if isinstance(value, float) else str(value)

    def available(self, version: str | None) -> bool:
        """Whether vLLM `version` (`0.32.0`) has it; an unknown version is taken to have it."""
        found = re.match(r"v?(\d+)\.(\d+)", version or "")
        if found is None:
            return True
        number = (int(found[1]), int(found[2]))
        return self.since <= number and (self.until is None or number < self.until)
