"""Taking out of what is shown whatever looks like a credential. It never reaches logs, the API or the report."""

import re
from typing import Any

HIDDEN = "(hidden)"
SECRET_FLAGS = ("--api-key", "--hf-token")
"""Flags whose next word is a secret."""

_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
_ASSIGNED = re.compile(r"(?i)((?:api[-_]?key|token|password|secret)['\"]?\s*[=:]\s*\[?['\"]?)[^\s'\",}\]]+")
_FLAG = re.compile(r"(?i)(--(?:api-key|hf-token)\s+['\"]?|\bbearer\s+)[^\s'\"]+")


def redact(text: str) -> str:
    """`text` without what looks like a credential: users in URLs, API keys, tokens, passwords."""
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _ASSIGNED.sub(lambda found: found.group(1) + HIDDEN, text)
    return _FLAG.sub(lambda found: found.group(1) + HIDDEN, text)


def redact_all(value: Any) -> Any:
    """A plain JSON value with every text in it redacted, and the word after a secret flag hidden."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(str(key)): redact_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [
            HIDDEN if index and value[index - 1] in SECRET_FLAGS else redact_all(item)
            for index, item in enumerate(value)
        ]
    return value
