"""Prompts that are texts of a file, where content matters: to speculation, to experts, to the answers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tunewright.domain.workload import Lengths
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.lengths import LengthSource, Separate
from tunewright.loadtest.prompts import Planned, chat_request, text_request
from tunewright.ports import Refused
from tunewright.promptsfile import LOAD, read_prompts

_BYTES_PER_TOKEN = 4  # a guess that the usage replaces; only a request that is cut off keeps it


class TextSource:
    """The requests of one run: every text once in an order by the job's seed, then all of them again in another."""

    def __init__(self, job: LoadJob, model: str, limit: int | None = None) -> None:
        """Raises `LoadFailure` where the file is of no use."""
        if job.workload.prompts_file is None:
            raise AssertionError("a workload of texts is wanted")
        self._file = job.workload.prompts_file
        try:
            found = read_prompts(Path(self._file), "the prompts file", LOAD)
        except Refused as refusal:
            raise LoadFailure(str(refusal)) from refusal
        self._texts = [prompt.prompt for prompt in found]
        digest = hashlib.sha256(json.dumps(self._texts).encode()).hexdigest()
        self._told = f"{self._file}: {len(self._texts)} prompts, sha256 of their texts {digest[:12]}"
        self._lengths = LengthSource(Separate(Lengths(fixed=1), job.workload.output_tokens, limit), job.seed)
        self._order = np.random.default_rng([job.seed, 7])
        self._left: list[int] = []
        self._build = _builder(job, model)
        self._index = 0

    def next(self, shorten: float = 1.0) -> Planned:
        """The next request; `shorten` in (0, 1] cuts its output."""
        if not self._left:
            self._left = self._order.permutation(len(self._texts)).tolist()
        text, (_, output) = self._texts[self._left.pop()], self._lengths.next()
        output = max(1, round(output * shorten))
        self._index += 1
        guess = max(1, len(text.encode()) // _BYTES_PER_TOKEN)
        return Planned(self._index - 1, guess, output, self._build(text, output))

    def remarks(self, sent: int) -> tuple[str, ...]:
        """Which file it was, and whether `sent` requests were more than it has."""
        if sent <= len(self._texts):
            return (self._told,)
        return (
            self._told,
            f"{sent} requests were sent: the prompts were used again, and prefix caches find those; give more prompts",
        )


def _builder(job: LoadJob, model: str) -> Callable[[str, int], bytes]:
    temperature = job.workload.temperature

    def chat(text: str, output: int) -> bytes:
        return chat_request(model, [json.dumps({"role": "user", "content": text}).encode()], output, temperature)

    def completion(text: str, output: int) -> bytes:
        return text_request(model, json.dumps(text).encode(), output, temperature)

    return chat if job.endpoint == "chat" else completion
