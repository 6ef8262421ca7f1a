"""Text of people and logs on one line: it is shown on terminals, which control characters could command."""

import unicodedata
from collections.abc import Iterable

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
ONE_LINE = rf"^[^\s{_CONTROLS}][^{_CONTROLS}]*$"
"""What people write with a decision: no control characters, nor any that change the direction of writing."""

MOST_REASON, MOST_VALUE = 1000, 200
"""Characters of a decision's reason, and of a proposed knob's value."""


def clean(text: str) -> str:
    """Text of a log or a person on one line, without control characters."""
    flat = " ".join(text.split())
    return "".join(" " if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in flat)


def clean_lines(lines: Iterable[str]) -> list[str]:
    """Each as `clean` has it, with its indent."""
    return [line[: len(line) - len(line.lstrip(" "))] + clean(line) for line in lines]
