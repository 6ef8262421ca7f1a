"""Traffic that is more than a number of streams, as the tuning file names it: agent sessions, a recorded trace."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.units import Duration, Percentage


class Sessions(Model):
    """Agent sessions: conversations of many turns, `concurrency` of them at all times. Each turn sends the conversation
    so far, with what was answered; between an answer and the next turn a tool runs. Sent to `/v1/chat/completions`."""

    concurrency: int = Field(ge=1, le=100_000, description="Conversations at all times, in a turn or in a pause.")
    turns: int = Field(default=12, ge=1, le=1000, description="Turns of one conversation; then a new one begins.")
    first_prompt: int = Field(ge=1, description="Tokens of the first turn: system prompt, tools, files, the task.")
    shared_prompt: int = Field(
        default=0, ge=0, description="Tokens of `firstPrompt` that all conversations begin with, as a system prompt."
    )
    per_turn: int = Field(ge=1, description="Tokens that each further turn adds, as a tool's output.")
    output: int = Field(ge=1, description="Tokens answered in each turn.")
    pause: Duration = Field(default=2.0, description="From an answer to the next turn, on average: a tool runs.")
    spread: Percentage = Field(
        default=0.5, description="Lengths and pauses are drawn evenly from their mean ± this share."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shared_prompt >= self.first_prompt:
            raise ValueError(
                f"sharedPrompt ({self.shared_prompt}) must be below firstPrompt ({self.first_prompt}), whose part it is"
            )
        if self.spread > 1:
            raise ValueError("spread above 100% would draw lengths below 0")
        return self

    @property
    def mean_prompt(self) -> float:
        """Mean prompt length over all turns, in tokens."""
        return self.first_prompt + (self.turns - 1) / 2 * (self.per_turn + self.output)

    @property
    def longest(self) -> int:
        """The most tokens that a conversation can come to."""
        further = (self.turns - 1) * (self.per_turn + self.output)
        return round((1 + self.spread) * (self.first_prompt + further + self.output))

    @property
    def prefix_reuse(self) -> float:
        """Share of all prompt tokens that the server has seen before, in the same conversation or as shared prompt."""
        new = self.first_prompt - self.shared_prompt + (self.turns - 1) * self.per_turn
        return 1 - new / (self.turns * self.mean_prompt)


TraceFormat = Literal["auto", "mooncake", "timed", "azure"]


class Trace(Model):
    """A recorded trace, replayed at its own times: arrivals, lengths, and shared prefixes where it has them."""

    file: str = Field(min_length=1, description="The recording: JSON lines or CSV, on the machine that runs the agent.")
    format: TraceFormat = Field(
        default="auto",
        description="`mooncake`: JSON lines, milliseconds, a hash for each 512 tokens. `timed`: vLLM's timed trace, "
        "seconds, a hash for each 16 tokens. `azure`: Azure's CSV of LLM requests. `auto`: as the file shows.",
    )
    speed: float = Field(default=1.0, gt=0, le=1000, description="How many times as fast as it was recorded.")
