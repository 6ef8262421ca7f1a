"""A workload as requests: lengths by the job's seed, contents new in each run, prefixes shared to the asked degree."""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tunewright.domain.workload import Workload
from tunewright.loadtest.job import LoadJob, TokenRange
from tunewright.loadtest.lengths import Ints, LengthSource, Paired, Separate

SHARED_PREFIXES = 4  # few enough to stay cached, more than one so that no kernel profits from a single common prefix
_SAMPLE = 1024
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "body",
    "information",
)  # fmt: skip


class Planned(NamedTuple):
    """One request that is ready to be sent."""

    number: int
    prompt_tokens: int
    output_tokens: int
    body: bytes
    whole: bool = False


class PromptSource:
    """The requests of one run, in order. The i-th has the same lengths in every run with the same seed."""

    def __init__(
        self,
        job: LoadJob,
        model: str,
        content_seed: int,
        max_model_len: int | None = None,
        block_size: int = 16,
        pairs: Paired | None = None,
    ) -> None:
        """`block_size` is the server's cache block in tokens: a prefix is only found again in whole blocks. `pairs` are
        the lengths where they belong together."""
        workload = job.workload
        self._lengths = LengthSource(
            pairs or Separate(workload.prompt_tokens, workload.output_tokens, max_model_len), job.seed
        )
        self._sharing_rng = np.random.default_rng([job.seed, 2])
        self._content_rng = np.random.default_rng([content_seed, 3])
        self._index = 0
        self._block = block_size
        sample, _ = self._lengths.draw(_SAMPLE)
        self._factor, self.reachable_reuse = _sharing(workload, block_size, sample)
        self._build, self._low, self._high = body_builder(job, model)
        self._prefixes = self._content_rng.integers(self._low, self._high, (SHARED_PREFIXES, 0))

    def next(self, shorten: float = 1.0) -> Planned:
        """The next request; `shorten` in (0, 1] cuts its output, so that a closed loop starts out of step."""
        prompt, output = self._lengths.next()
        output = max(1, round(output * shorten))
        tokens = self._content_rng.integers(self._low, self._high, prompt)
        shared = self._shared_tokens(prompt)
        if shared:
            tokens[:shared] = self._prefix(shared)
        planned = Planned(self._index, prompt, output, self._build(tokens, output))
        self._index += 1
        return planned

    def _shared_tokens(self, prompt: int) -> int:
        blocks = min(self._factor * prompt / self._block, (prompt - 1) // self._block)
        whole = int(blocks)
        return (whole + (self._sharing_rng.random() < blocks - whole)) * self._block

    def _prefix(self, length: int) -> Ints:
        if self._prefixes.shape[1] < length:  # grown at the end only: what was sent stays a prefix
            missing = (SHARED_PREFIXES, length - self._prefixes.shape[1])
            more = self._content_rng.integers(self._low, self._high, missing)
            self._prefixes = np.concatenate([self._prefixes, more], axis=1)
        return self._prefixes[int(self._sharing_rng.integers(SHARED_PREFIXES)), :length]


def body_builder(job: LoadJob, model: str) -> tuple[Callable[[Ints, int], bytes], int, int]:
    """What makes a request of prompt tokens and an output length, and the range that tokens are drawn from."""
    if job.endpoint == "chat":
        return _chat_body(model, job.workload.temperature), 0, len(WORDS)
    return _completions_body(model, job.workload.temperature, job.token_ids), job.token_ids.low, job.token_ids.high


def _sharing(workload: Workload, block: int, lengths: Ints) -> tuple[float, float]:
    """The factor by which prompts must share, and the reuse it gives.

    A prompt of n tokens can be found again in at most (n-1)//block blocks: the last token is always computed. Long
    prompts therefore share more than `prefix_reuse` where short ones can't, so that the share of all tokens is right.
    """
    prompts = lengths.astype(np.float64)
    most = (prompts - 1) // block * block

    def reuse(factor: float) -> float:
        return float(np.minimum(factor * prompts, most).sum() / prompts.sum())

    wanted = workload.prefix_reuse
    low, high = 0.0, float(block) * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reuse(middle) < wanted else (low, middle)
    return high, reuse(high)


def _completions_body(model: str, temperature: float, ids: TokenRange) -> Callable[[Ints, int], bytes]:
    """Writes token ids by table: padded to one width (JSON allows the spaces), so a prompt is one array look-up."""
    width = len(str(ids.high)) + 1
    table = np.array([f"{number},".rjust(width).encode() for number in range(ids.high)], dtype=f"S{width}")

    def build(tokens: Ints, output: int) -> bytes:
        return text_request(model, b"[%b]" % table[tokens].tobytes()[:-1], output, temperature)

    return build


def _chat_body(model: str, temperature: float) -> Callable[[Ints, int], bytes]:
    """Chat takes no token ids: common words, about one token each; what they really were, the usage says."""
    table = np.array(WORDS, dtype=object)

    def build(tokens: Ints, output: int) -> bytes:
        text = " ".join(table[tokens]).encode()
        return chat_request(model, [b'{"role":"user","content":"%b"}' % text], output, temperature)

    return build


def text_request(model: str, prompt: bytes, output: int, temperature: float) -> bytes:
    """A streaming request to `/v1/completions` for exactly `output` tokens; `prompt` is JSON: token ids or a text."""
    return b"".join(
        (
            f'{{"model":{json.dumps(model)},"prompt":'.encode(),
            prompt,
            b',"max_tokens":%d,"temperature":%g,"ignore_eos":true,"stream":true,' % (output, temperature),
            b'"stream_options":{"include_usage":true}}',
        )
    )


def chat_request(model: str, messages: list[bytes], output: int, temperature: float) -> bytes:
    """A streaming request to `/v1/chat/completions` for exactly `output` tokens; `messages` are JSON."""
    return b"".join(
        (
            f'{{"model":{json.dumps(model)},"messages":['.encode(),
            b",".join(messages),
            b'],"max_completion_tokens":%d,"temperature":%g,"ignore_eos":true,"stream":true,' % (output, temperature),
            b'"stream_options":{"include_usage":true}}',
        )
    )
