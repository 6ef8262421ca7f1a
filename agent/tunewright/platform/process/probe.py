"""What a server is asked: whether it lives, whether it completes, what it is."""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tunewright.platform.process.http import Answer, Unreachable, call
from tunewright.ports import PortError

SHORT = 2.0
"""Seconds for a question that a healthy server answers at once."""

COMPLETION = 5.0
"""Seconds for one token. The first may have to compile kernels: that goes on when it is asked again."""

_CACHE_CONFIG = "vllm:cache_config_info{"


class Health(StrEnum):
    """What /health says."""

    OK = "ok"
    DEAD = "dead"  # 503: vLLM's engine is dead, and the rest will follow
    REFUSED = "refused"  # nobody listens
    SILENT = "silent"  # no answer in time, as under heavy load, or when it hangs
    OTHER = "other"  # something answers that is not a healthy vLLM


def health(url: str) -> Health:
    """Ask /health."""
    try:
        status = call("GET", f"{url}/health", SHORT).status
    except Unreachable as error:
        return Health.REFUSED if error.refused else Health.SILENT
    if status == 200:
        return Health.OK
    return Health.DEAD if status == 503 else Health.OTHER


def served_model(url: str, headers: Mapping[str, str]) -> str:
    """The name of the model that it serves. Raises `PortError`."""
    answer = call("GET", f"{url}/v1/models", SHORT, headers=headers)
    try:
        return str(_document(answer)["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise PortError(f"{url}/v1/models names no model: {answer.text[:200]}") from error


def complete_one_token(url: str, model: str | None, headers: Mapping[str, str]) -> None:
    """Have it complete one token: healthy is not enough. Raises `PortError` when it does not."""
    body: dict[str, Any] = {"model": model or served_model(url, headers), "max_tokens": 1, "temperature": 0}
    answer = call("POST", f"{url}/v1/completions", COMPLETION, json={**body, "prompt": "Hello"}, headers=headers)
    if answer.status in (400, 404, 405, 501):  # a model that only chats
        messages = [{"role": "user", "content": "Hello"}]
        path = f"{url}/v1/chat/completions"
        answer = call("POST", path, COMPLETION, json={**body, "messages": messages}, headers=headers)
    document = _document(answer)
    usage = document.get("usage") or {}
    if answer.status != 200 or not document.get("choices") or not usage.get("completion_tokens"):
        raise PortError(f"{url} completes nothing: HTTP {answer.status}: {answer.text[:200]}")


def version(url: str) -> str | None:
    """The version of vLLM, if it tells. Raises `Unreachable`."""
    answer = call("GET", f"{url}/version", SHORT)
    found = _document(answer).get("version") if answer.status == 200 else None
    return str(found) if found else None


def cache_config(url: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`, of the first engine; empty when there are none. Raises `Unreachable`."""
    answer = call("GET", f"{url}/metrics", SHORT)
    line = next((line for line in answer.text.splitlines() if line.startswith(_CACHE_CONFIG)), None)
    if line is None:
        return {}
    for family in text_string_to_metric_families(line + "\n"):
        for sample in family.samples:
            return dict(sample.labels)
    return {}


def _document(answer: Answer) -> dict[str, Any]:
    try:
        document = json.loads(answer.text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
