"""Read the prompts of the quality gate: JSONL, one prompt a line, perhaps with the right answer."""

import json
from pathlib import Path

from pydantic import ValidationError

from tunewright.domain.answers import MAX_PROMPTS, QualityPrompt
from tunewright.ports import Refused

MAX_BYTES = 512 * 1024
"""A load test's request in a cluster is a ConfigMap, and that holds 1 MiB."""


def read_prompts(path: Path) -> tuple[QualityPrompt, ...]:
    """The prompts in a file. Raises `Refused` with the line and what is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise Refused(f"quality.promptsFile: {path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"quality.promptsFile: {path} is not UTF-8: {error}") from error
    return parse_prompts(text, f"quality.promptsFile: {path}")


def parse_prompts(text: str, where: str) -> tuple[QualityPrompt, ...]:
    """The prompts in a text; `where` names it in messages. Raises `Refused`; never quotes what was read."""
    if len(text.encode()) > MAX_BYTES:
        raise Refused(f"{where} is larger than {MAX_BYTES // 1024} KiB: fewer prompts say as much")
    found: list[QualityPrompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{where}, line {number}")
        if prompt.prompt in lines:
            raise Refused(f"{where}, line {number}: the same prompt as in line {lines[prompt.prompt]}")
        lines[prompt.prompt] = number
        found.append(prompt)
    if not found:
        raise Refused(f'{where} holds no prompt; a line is {{"prompt": "…", "answer": "…"}}')
    if len(found) > MAX_PROMPTS:
        raise Refused(f"{where} holds {len(found)} prompts; at most {MAX_PROMPTS} are taken")
    return tuple(found)


def _parse(line: str, where: str) -> QualityPrompt:
    try:
        document = json.loads(line)
    except ValueError as error:
        # Of a file that is none of prompts nothing is told: it may be somebody's secret.
        raise Refused(f'{where}: is no JSON; a line is {{"prompt": "…", "answer": "…"}}') from error
    if not isinstance(document, dict):
        raise Refused(f'{where}: an object is wanted, as {{"prompt": "…", "answer": "…"}}')
    if unknown := sorted(map(str, document.keys() - {"prompt", "answer"})):
        raise Refused(f"{where}: unknown field `{unknown[0][:40]}`; known are prompt and answer")
    for field in ("prompt", "answer"):
        given = document.get(field)
        if (field in document or field == "prompt") and (not isinstance(given, str) or not given.strip()):
            raise Refused(f"{where}: {field} must be a text that is not empty")
    try:
        return QualityPrompt.model_validate(document)
    except ValidationError as error:
        raise Refused(f"{where}: {error.errors()[0]['msg']}") from error
