"""Read prompts, of the quality gate or to load with: JSONL, one prompt a line, perhaps with the right answer.

The file may be gzip of that.
"""

import json
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tunewright.bounded import read_bounded, unpacked
from tunewright.domain.answers import MAX_PROMPTS, QualityPrompt
from tunewright.ports import Refused


class Bounds(NamedTuple):
    """What a file of prompts may hold."""

    size: int
    """In bytes."""
    prompts: int


QUALITY = Bounds(512 << 10, MAX_PROMPTS)
"""A load test's request in a cluster is a ConfigMap, and that holds 1 MiB."""
LOAD = Bounds(64 << 20, 200_000)


def read_prompts(path: Path, field: str, bounds: Bounds) -> tuple[QualityPrompt, ...]:
    """The prompts in a file that `field` names. Raises `Refused` with the line and what is wrong with it."""
    where = f"{field}: {path}"
    try:
        data = read_bounded(path, bounds.size)
    except OSError as error:
        raise Refused(f"{where} can't be read: {error.strerror or error}") from error
    return decode_prompts(data, where, bounds)


def decode_prompts(data: bytes, where: str, bounds: Bounds) -> tuple[QualityPrompt, ...]:
    """The prompts in the bytes of a file, which may be gzip. Raises `Refused`, as `parse_prompts` does."""
    try:
        text = unpacked(data, bounds.size).decode()
    except OSError as error:
        raise Refused(f"{where} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{where} is not UTF-8: {error}") from error
    return parse_prompts(text, where, bounds)


def parse_prompts(text: str, where: str, bounds: Bounds) -> tuple[QualityPrompt, ...]:
    """The prompts in a text; `where` names it in messages. Raises `Refused`; never quotes what was read."""
    if len(text.encode()) > bounds.size:
        raise Refused(f"{where} is larger than {bounds.size >> 10} KiB: fewer prompts say as much")
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
    if len(found) > bounds.prompts:
        raise Refused(f"{where} holds {len(found)} prompts; at most {bounds.prompts} are taken")
    return tuple(found)


def _parse(line: str, where: str) -> QualityPrompt:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
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
