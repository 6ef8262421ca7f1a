"""Greedy answers to prompts that are the same for every server of one workload."""

import json
import re
import time
import zlib
from typing import Any

import httpx
import numpy as np

from tunewright.loadtest.counters import Observer
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.prompts import draw_lengths

_WORDS = re.compile(r"\s*\S+|\s+")
_LONGEST_PROMPT = 2048
_TIMEOUT = 120.0


def quality_answers(
    job: LoadJob, observer: Observer, model: str, max_model_len: int | None, deadline: float
) -> tuple[tuple[str, ...], ...]:
    """Ask the fixed prompts one at a time, greedily; each answer as its tokens, or as words if none are given.

    The prompts follow from the workload alone, not from a run's seed. Raises `LoadFailure` when one is not answered,
    or when `time.monotonic()` passes `deadline`.
    """
    longest = min(_LONGEST_PROMPT, (max_model_len or 1 << 30) - job.quality_max_tokens)
    if job.quality_prompts and longest < 1:
        raise LoadFailure(f"quality answers of {job.quality_max_tokens} tokens leave no room for a prompt")
    found: list[tuple[str, ...]] = []
    for tokens in quality_prompts(job, longest):
        if time.monotonic() > deadline:
            raise LoadFailure(f"the quality answers took too long: {len(found)} of {job.quality_prompts} in time")
        found.append(_ask(job, observer, model, tokens))
    return tuple(found)


def quality_prompts(job: LoadJob, longest: int) -> list[list[int]]:
    """The token ids of the fixed prompts, each at most `longest` long."""
    shape = job.workload.model_dump_json(include={"prompt_tokens", "output_tokens"})
    rng = np.random.default_rng([zlib.crc32(shape.encode()), job.token_ids.low, job.token_ids.high])
    lengths = draw_lengths(job.workload.prompt_tokens, rng, job.quality_prompts)
    return [
        rng.integers(job.token_ids.low, job.token_ids.high, min(int(length), longest)).tolist() for length in lengths
    ]


def _ask(job: LoadJob, observer: Observer, model: str, tokens: list[int]) -> tuple[str, ...]:
    body = {"model": model, "prompt": tokens, "max_tokens": job.quality_max_tokens, "temperature": 0, "logprobs": 1}
    url = f"{job.url.rstrip('/')}/v1/completions"
    try:
        answer = observer.http.post(url, json=body, timeout=_TIMEOUT)
        if answer.status_code != 200:
            raise LoadFailure(f"{url} answers {answer.status_code} to a quality prompt: {answer.text[:200]}")
        return _tokens(answer.json())
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadFailure(f"{url} gives no readable answer to a quality prompt: {error!r}; read its log") from error


def _tokens(answer: dict[str, Any]) -> tuple[str, ...]:
    choice = answer["choices"][0]
    tokens = (choice.get("logprobs") or {}).get("tokens")
    if isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens):
        return tuple(tokens)
    text = choice["text"]
    if not isinstance(text, str):
        raise ValueError(f"no text in {json.dumps(choice)[:200]}")
    words = tuple(_WORDS.findall(text))
    return words if len(words) > 1 else tuple(text)  # scripts without spaces are compared by character
