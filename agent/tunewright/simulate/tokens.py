"""Prompts into tokens and tokens into text, deterministically: no vocabulary, no weights.

The same model and prompt always give the same answer, whatever the batch and the knobs, except that lossy
knobs flip a small fixed share of its tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

CHARACTERS_PER_TOKEN = 4
_GAP = 4.0  # nats between the two most likely tokens, at most
_MASK = (1 << 64) - 1
_A, _C = 6364136223846793005, 1442695040888963407

# Sixty-four pieces of text, so that six bits choose one.
_PLAIN = (
    "the of and to a in is that it for with as on be at by this from or an are which we can has not more when each "
    "request server model token time value state load step queue batch cache memory result measure rate mean first "
    "next other same new old small large fast slow one two many few all some"
)
WORDS: tuple[str, ...] = (*(f" {word}" for word in _PLAIN.split()), ",", ".")


def next_state(state: int) -> int:
    """One step of a 64-bit linear congruential generator: the source of an answer's tokens."""
    return (state * _A + _C) & _MASK


def token_of(state: int) -> int:
    """The token that a state stands for: an index into WORDS."""
    return state >> 58


def flips(state: int, flip: int) -> bool:
    """Whether a lossy knob changes this token: other bits of the same state decide, so it is the same in every run."""
    return (state >> 24) & 1023 < flip


def top_logprobs(state: int, flip: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens of one position, the answer's own first, as the state has them.

    The first two are up to 4 nats apart, evenly; a lossy knob moves them by what makes just the nearest flip.
    """
    first, gap = token_of(state), ((state >> 24 & 1023) - flip + 0.5) * _GAP / 1024
    logits = {first: 0.0, first ^ 1: -gap}
    for other in range(2, len(WORDS)):
        logits[first ^ other] = -_GAP - 2.0 - other / 16
    whole = math.log(math.fsum(math.exp(value) for value in logits.values()))
    ranked = sorted(logits.items(), key=lambda item: -item[1])[:count]
    return [(token, value - whole) for token, value in ranked]


def split_text(text: str) -> list[str]:
    """Text in pieces of four characters, one token each."""
    return [text[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(text), CHARACTERS_PER_TOKEN)]


def token_ids(prompt: str | Sequence[int]) -> list[int]:
    """A prompt's token ids: as given, or one for every four characters (at least one)."""
    if isinstance(prompt, str):
        data = prompt.encode()
        return [zlib.crc32(data[i : i + CHARACTERS_PER_TOKEN]) & 0x1FFFF for i in range(0, max(1, len(data)), 4)]
    return list(prompt)


def prefix_hashes(ids: Sequence[int], block: int) -> list[int]:
    """One hash for each full block; each covers everything before it, so equal hashes mean equal prefixes."""
    hashes: list[int] = []
    parent = 0
    for start in range(0, len(ids) - block + 1, block):
        parent = hash((parent, tuple(ids[start : start + block])))
        hashes.append(parent)
    return hashes


def seed_of(model: str, ids: Sequence[int], salt: int = 0) -> int:
    """Where the answer to a prompt starts: depends on the model and on every token of the prompt."""
    packed = zlib.crc32(",".join(map(str, ids)).encode(), zlib.crc32(model.encode()))
    return next_state(next_state((packed << 20) ^ (len(ids) << 4) ^ salt))


def answer_length(seed: int, mean_tokens: float) -> int:
    """Tokens until the model would end by itself (exponential around the mean); 0 if it never does."""
    if mean_tokens <= 0:
        return 0
    share = ((next_state(seed ^ 0x9E3779B97F4A7C15) >> 11) + 1) / (2**53 + 2)
    return 1 + int(-math.log(share) * mean_tokens)
