"""Prompts of the quality gate, and what a server answered to them."""

from pydantic import Field

from tunewright.domain.model import Model

TOP = 5
"""Log-probabilities that are asked for per position."""

MAX_POSITIONS = 512
"""Positions of all answers together whose log-probabilities are kept, spread evenly, and at least one per answer."""

MAX_PROMPTS = 1000
"""Prompts that a file may hold."""


class QualityPrompt(Model):
    """One line of the prompts file."""

    prompt: str = Field(min_length=1, description="Sent as it is to /v1/completions: with the chat template, if any.")
    answer: str | None = Field(
        default=None, min_length=1, description="The right answer; blank space around it does not count."
    )


class Answer(Model):
    """One greedy answer. `tokens` and `top` are empty where the server does not tell log-probabilities."""

    prompt: str = Field(description="Names the prompt, so that only answers to the same one are compared.")
    text: str
    tokens: tuple[str, ...] = ()
    top: tuple[dict[str, float], ...] = Field(
        default=(), description="Per position, the log-probabilities of the most likely tokens."
    )
    correct: bool | None = Field(default=None, description="Whether it is the right answer; None: none was given.")


def is_correct(text: str, wanted: str) -> bool:
    """Exact match, without blank space around it, of as many lines as `wanted` has: a completion may run on."""
    lines = wanted.strip().splitlines()
    return [line.strip() for line in text.strip().splitlines()[: len(lines)]] == [line.strip() for line in lines]


def answering_time(prompts: int, max_tokens: int) -> float:
    """Seconds in which so many prompts are answered one by one, at ten tokens a second."""
    return prompts * (1.0 + 0.1 * max_tokens)
