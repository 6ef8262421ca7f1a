"""Greedy answers to prompts that are the same for every server of one workload."""

import hashlib
import json
import time
import zlib
from typing import Any, NamedTuple

import httpx
import numpy as np

from tunewright.domain.answers import MAX_POSITIONS, TOP, Answer, is_correct
from tunewright.loadtest.counters import Observer
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.lengths import draw_lengths

_LONGEST_PROMPT = 2048
_TIMEOUT = 120.0
_REFUSED = (400, 422)
_TOKEN_ID = "token_id:"  # as vLLM writes a token by number


class Asked(NamedTuple):
    """One prompt, as text or token ids, with the right answer if one is known."""

    prompt: str | list[int]
    answer: str | None = None

    @property
    def name(self) -> str:
        """The same for the same prompt, in every run."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:12]


def quality_answers(
    job: LoadJob, observer: Observer, model: str, max_model_len: int | None, deadline: float
) -> tuple[tuple[Answer, ...], str]:
    """Ask the prompts one at a time, greedily, and why there are no log-probabilities (empty when there are).

    Without prompts of the job's own they follow from the workload alone, not from a run's seed. Raises `LoadFailure`
    when one is not answered, or when `time.monotonic()` passes `deadline`.
    """
    longest = min(_LONGEST_PROMPT, (max_model_len or 1 << 30) - job.quality_max_tokens)
    if (job.prompts or job.quality_prompts) and longest < 1:
        raise LoadFailure(f"quality answers of {job.quality_max_tokens} tokens leave no room for a prompt")
    asked = [Asked(p.prompt, p.answer) for p in job.prompts] or [Asked(p) for p in quality_prompts(job, longest)]
    questioner = _Questioner(job, observer, model, positions=max(1, MAX_POSITIONS // max(1, len(asked))))
    found: list[Answer] = []
    for each in asked:
        if time.monotonic() > deadline:
            raise LoadFailure(f"the quality answers took too long: {len(found)} of {len(asked)} in time")
        found.append(questioner.ask(each, f"quality prompt {len(found) + 1} of {len(asked)}"))
    return tuple(found), questioner.refused


def quality_prompts(job: LoadJob, longest: int) -> list[list[int]]:
    """The token ids of the fixed prompts, each at most `longest` long."""
    shape = job.workload.model_dump_json(include={"prompt_tokens", "output_tokens"})
    rng = np.random.default_rng([zlib.crc32(shape.encode()), job.token_ids.low, job.token_ids.high])
    lengths = draw_lengths(job.workload.prompt_tokens, rng, job.quality_prompts)
    return [
        rng.integers(job.token_ids.low, job.token_ids.high, min(int(length), longest)).tolist() for length in lengths
    ]


class _Questioner:
    """Asks for log-probabilities until the server refuses them once; `refused` says in which words."""

    def __init__(self, job: LoadJob, observer: Observer, model: str, positions: int) -> None:
        self._job, self._observer, self._model, self._positions = job, observer, model, positions
        self._url = f"{job.url.rstrip('/')}/v1/completions"
        self.refused = ""

    def ask(self, asked: Asked, what: str) -> Answer:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": asked.prompt,
            "max_tokens": self._job.quality_max_tokens,
            "temperature": 0,
        }
        # By number: two tokens may have the same text.
        wanted: dict[str, object] = {"logprobs": TOP, "return_tokens_as_token_ids": True}
        try:
            reply = self._post(body | ({} if self.refused else wanted))
            if reply.status_code in _REFUSED and not self.refused:
                plain = self._post(body)
                if plain.status_code == 200:
                    self.refused = f"the server refuses log-probabilities ({reply.status_code}): {reply.text[:200]}"
                    reply = plain
            if reply.status_code != 200:
                raise LoadFailure(f"{self._url} answers {reply.status_code} to {what}: {reply.text[:200]}")
            return self._read(reply.json(), asked)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise LoadFailure(f"{self._url} gives no readable answer to {what}: {error!r}; read its log") from error

    def _post(self, body: dict[str, object]) -> httpx.Response:
        return self._observer.http.post(self._url, json=body, timeout=_TIMEOUT)

    def _read(self, answer: dict[str, Any], asked: Asked) -> Answer:
        choice = answer["choices"][0]
        text, told = choice["text"], choice.get("logprobs") or {}
        if not isinstance(text, str):
            raise ValueError(f"no text in {json.dumps(choice)[:200]}")
        tokens = [str(token).removeprefix(_TOKEN_ID) for token in told.get("tokens") or []]
        top = [
            {str(token).removeprefix(_TOKEN_ID): round(float(value), 4) for token, value in (position or {}).items()}
            for position in (told.get("top_logprobs") or [])[: self._positions]
        ]
        return Answer(
            prompt=asked.name,
            text=text,
            tokens=tuple(tokens),
            top=tuple(top),
            correct=None if asked.answer is None else is_correct(text, asked.answer),
        )
