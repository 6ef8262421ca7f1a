"""A workload as requests: lengths by the job's seed, contents new in each run, prefixes shared to the asked degree."""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.job import LoadFailure, LoadJob, TokenRange

Ints = npt.NDArray[np.int64]

SHARED_PREFIXES = 4  # few enough to stay cached, more than one so that no kernel profits from a single common prefix
_BLOCK = 1024
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
        self, job: LoadJob, model: str, content_seed: int, max_model_len: int | None = None, block_size: int = 16
    ) -> None:
        """`block_size` is the server's cache block in tokens: a prefix is only found again in whole blocks."""
        workload = job.workload
        self._limit = max_model_len
        _refuse_too_long(workload, max_model_len)
        self._workload = workload
        self._lengths_rng = np.random.default_rng([job.seed, 1])
        self._sharing_rng = np.random.default_rng([job.seed, 2])
        self._content_rng = np.random.default_rng([content_seed, 3])
        self._lengths: list[tuple[int, int]] = []
        self._index = 0
        self._block = block_size
        self._factor, self.reachable_reuse = _sharing(workload, block_size, self._draw())
        self._build, self._low, self._high = body_builder(job, model)
        self._prefixes = self._content_rng.integers(self._low, self._high, (SHARED_PREFIXES, 0))

    def next(self, shorten: float = 1.0) -> Planned:
        """The next request; `shorten` in (0, 1] cuts its output, so that a closed loop starts out of step."""
        if not self._lengths:
            self._lengths = self._draw()[::-1]
        prompt, output = self._lengths.pop()
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

    def _draw(self) -> list[tuple[int, int]]:
        prompts = draw_lengths(self._workload.prompt_tokens, self._lengths_rng, _BLOCK)
        outputs = draw_lengths(self._workload.output_tokens, self._lengths_rng, _BLOCK)
        if self._limit is not None:  # the two histograms are not joint: a pair that can't be, is cut to the limit
            outputs = np.minimum(outputs, self._limit - 1)
            prompts = np.minimum(prompts, self._limit - outputs)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def body_builder(job: LoadJob, model: str) -> tuple[Callable[[Ints, int], bytes], int, int]:
    """What makes a request of prompt tokens and an output length, and the range that tokens are drawn from."""
    if job.endpoint == "chat":
        return _chat_body(model), 0, len(WORDS)
    return _completions_body(model, job.token_ids), job.token_ids.low, job.token_ids.high


def draw_lengths(lengths: Lengths, rng: np.random.Generator, count: int) -> Ints:
    """`count` token counts, such that a known mean is met; the overflow counts as the last edge."""
    if lengths.fixed is not None:
        return np.full(count, lengths.fixed, dtype=np.int64)
    histogram = lengths.histogram
    if histogram is None or histogram.total <= 0:
        raise LoadFailure("the workload's histogram of lengths is empty: learn the profile over a longer window")
    weights = np.array([*histogram.counts, histogram.overflow]) / histogram.total
    edges = np.floor([0.0, *histogram.edges]).astype(np.int64)
    lower = np.append(edges[:-1] + 1, edges[-1])
    sizes = np.append(np.maximum(np.diff(edges), 1), 1)
    middle = 0.5 if lengths.mean is None else _middle(lengths.mean, weights, lower, sizes)
    buckets = rng.choice(len(weights), size=count, p=weights)
    inside = rng.random(count) ** (1 / middle - 1)  # its mean is `middle`; evenly spread where that is a half
    drawn: Ints = np.maximum(lower[buckets] + (inside * sizes[buckets]).astype(np.int64), 1)
    return drawn


def _middle(mean: float, weights: npt.NDArray[np.float64], lower: Ints, sizes: Ints) -> float:
    """How far into every bucket lengths must lie on average, from 0 to 1, to have this mean."""
    wide = weights * (sizes > 1)
    space = float((wide * sizes).sum())
    if space <= 0:
        return 0.5
    missing = mean - float((weights * lower).sum()) + 0.5 * float(wide.sum())  # whole tokens are rounded down
    return min(max(missing / space, 0.02), 0.98)


def _refuse_too_long(workload: Workload, limit: int | None) -> None:
    prompt, output = workload.prompt_tokens.fixed or 0, workload.output_tokens.fixed or 0
    if limit is not None and prompt + output > limit:
        raise LoadFailure(
            f"{prompt} prompt and {output} output tokens do not fit the server's max_model_len of {limit}: "
            "shorten them, or raise --max-model-len"
        )


def _sharing(workload: Workload, block: int, lengths: list[tuple[int, int]]) -> tuple[float, float]:
    """The factor by which prompts must share, and the reuse it gives.

    A prompt of n tokens can be found again in at most (n-1)//block blocks: the last token is always computed. Long
    prompts therefore share more than `prefix_reuse` where short ones can't, so that the share of all tokens is right.
    """
    prompts = np.array([prompt for prompt, _ in lengths], dtype=np.float64)
    most = (prompts - 1) // block * block

    def reuse(factor: float) -> float:
        return float(np.minimum(factor * prompts, most).sum() / prompts.sum())

    wanted = workload.prefix_reuse
    low, high = 0.0, float(block) * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reuse(middle) < wanted else (low, middle)
    return high, reuse(high)


def _completions_body(model: str, ids: TokenRange) -> Callable[[Ints, int], bytes]:
    """Writes token ids by table: padded to one width (JSON allows the spaces), so a prompt is one array look-up."""
    width = len(str(ids.high)) + 1
    table = np.array([f"{number},".rjust(width).encode() for number in range(ids.high)], dtype=f"S{width}")
    head = f'{{"model":{json.dumps(model)},"prompt":['.encode()
    tail = b'],"max_tokens":%d,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}'

    def build(tokens: Ints, output: int) -> bytes:
        return head + table[tokens].tobytes()[:-1] + tail % output

    return build


def _chat_body(model: str) -> Callable[[Ints, int], bytes]:
    """Chat takes no token ids: common words, about one token each; what they really were, the usage says."""
    table = np.array(WORDS, dtype=object)

    def build(tokens: Ints, output: int) -> bytes:
        return chat_request(model, [b'{"role":"user","content":"%b"}' % " ".join(table[tokens]).encode()], output)

    return build


def chat_request(model: str, messages: list[bytes], output: int) -> bytes:
    """A streaming request to `/v1/chat/completions` for exactly `output` tokens; `messages` are JSON."""
    return b"".join(
        (
            f'{{"model":{json.dumps(model)},"messages":['.encode(),
            b",".join(messages),
            b'],"max_completion_tokens":%d,"temperature":0,"ignore_eos":true,"stream":true,' % output,
            b'"stream_options":{"include_usage":true}}',
        )
    )
