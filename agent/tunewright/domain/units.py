"""Durations and shares as people write them in a tuning file: `250ms`, `1h30m`, `5%`."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 36500
"""Days; no clock of the system waits much longer."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")
_DURATION = r"^(\d+(\.\d+)?(us|ms|s|m|h|d))+$"
_SHARE = r"^\d+(\.\d+)?%$"


class Seconds(float):
    """A duration in seconds that has been read from text, so that it is not read twice."""


class Share(float):
    """A share between 0 and 1 (or above, for gains) that has been read from text such as `5%`."""


def _brief(value: object) -> str:
    """What was given instead, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_duration(value: object) -> Seconds:
    """Read `250ms`, `90s` or `1h30m` as seconds; a number without a unit is refused, since it could be either."""
    if isinstance(value, Seconds):
        return value
    if not isinstance(value, str) or not re.fullmatch(_DURATION, value):
        raise ValueError(f"a duration with its unit is wanted, such as 250ms, 30s, 10m or 1h30m, not {_brief(value)}")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    if seconds > _LONGEST * _SECONDS["d"]:
        raise ValueError(f"a duration of at most {_LONGEST}d is wanted, not {_brief(value)}")
    return Seconds(seconds)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back as the same number of seconds (to the microsecond)."""
    left = round(seconds * 1e6)
    if left == 0:
        return "0s"
    text = ""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        size = round(_SECONDS[unit] * 1e6)
        if left >= size:
            text += f"{left // size}{unit}"
            left %= size
    return text


def parse_share(value: object) -> Share:
    """Read `5%` as 0.05; a number without the sign is refused, since 5 and 0.05 are both found in the wild."""
    if isinstance(value, Share):
        return value
    if not isinstance(value, str) or not re.fullmatch(_SHARE, value):
        raise ValueError(f"a percentage with its sign is wanted, such as 5% or 0.1%, not {_brief(value)}")
    return Share(float(value[:-1]) / 100)


def format_share(share: float) -> str:
    """The text of a share, as `parse_share` reads it."""
    text = f"{share * 100:.12f}".rstrip("0").rstrip(".")  # never 1e-05%, which would not be read back
    return f"{text}%"


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _DURATION, "examples": ["250ms", "30s", "10m"]}),
]
Percentage = Annotated[
    float,
    BeforeValidator(parse_share),
    PlainSerializer(format_share, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _SHARE, "examples": ["5%", "0.1%"]}),
]


def _part(share: float) -> float:
    if share > 1:
        raise ValueError(f"a part of the whole is wanted, at most 100%, not {format_share(share)}")
    return share


Part = Annotated[Percentage, AfterValidator(_part)]
"""A share of something, which can't be more than all of it."""


def check_url(url: str) -> str:
    """The URL, if it has a host and a port that can be called. Raises ValueError."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"no URL that can be called: {_brief(url)}; write it as http://127.0.0.1:8000")
    return url
