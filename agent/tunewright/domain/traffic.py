"""Traffic that is more than numbers, as the tuning file names it: sessions, recordings, ramps, lengths."""

from statistics import NormalDist
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


CONFIG_MAP = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
"""Names that a ConfigMap may have."""

TraceFormat = Literal["auto", "mooncake", "timed", "azure"]


class TraceFile(Model):
    """A recorded trace: a file on one machine, a ConfigMap in a cluster."""

    file: str | None = Field(
        default=None,
        min_length=1,
        description="The recording: JSON lines or CSV, or gzip of them, on the machine that runs the agent.",
    )
    config_map: str | None = Field(
        default=None,
        pattern=CONFIG_MAP,
        description="In a cluster: the ConfigMap whose key `trace.jsonl` or `trace.csv` (or one of them with `.gz`) "
        "holds it.",
    )
    format: TraceFormat = Field(
        default="auto",
        description="`mooncake`: JSON lines, milliseconds, a hash for each 512 tokens. `timed`: vLLM's timed trace, "
        "seconds, a hash for each 16 tokens. `azure`: Azure's CSV of LLM requests. `auto`: as the file shows.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.file is None) == (self.config_map is None):
            raise ValueError("name one of file (on one machine) and configMap (in a cluster)")
        return self

    @property
    def path(self) -> str:
        """Where a load test reads it."""
        if self.file is None:
            raise AssertionError("a load test is given a ConfigMap as a file")
        return self.file


class Trace(TraceFile):
    """A recorded trace, replayed at its own times: arrivals, lengths, and shared prefixes where it has them."""

    speed: float = Field(default=1.0, gt=0, le=1000, description="How many times as fast as it was recorded.")


class Ramp(Model):
    """An open loop that begins slowly, so that a cold server isn't hit at once: part of the warm-up, never measured."""

    start_rate: float = Field(gt=0, description="Requests per second at first; they rise evenly to the asked rate.")
    duration: Duration = Field(description="How long the rise takes; the warm-up is judged from its end on.")

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.duration <= 0:
            raise ValueError("duration must be above 0s; leave the ramp out for none")
        return self


_MOST_TOKENS = 10_000_000


class Normal(Model):
    """A normal distribution of token counts, truncated to `least` and `most`."""

    mean: float = Field(gt=0, le=_MOST_TOKENS, description="Of the normal itself: bounds that cut more move it.")
    standard_deviation: float = Field(gt=0, le=_MOST_TOKENS, description="Of the normal itself.")
    least: int = Field(default=1, ge=1, le=_MOST_TOKENS, description="No length is below.")
    most: int = Field(ge=1, le=_MOST_TOKENS, description="No length is above.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.least <= self.mean <= self.most:
            raise ValueError(
                f"the mean ({self.mean:g}) must be within the bounds, of least ({self.least}) and most ({self.most})"
            )
        return self

    @property
    def untruncated(self) -> NormalDist:
        """The normal itself."""
        return NormalDist(self.mean, self.standard_deviation)

    @property
    def range(self) -> tuple[float, float]:
        """What is rounded to a length within the bounds: half a token more on either side."""
        return self.least - 0.5, self.most + 0.5

    @property
    def truncated_mean(self) -> float:
        """Mean of what is drawn, before it is rounded to whole tokens."""
        normal, (low, high) = self.untruncated, self.range
        kept = normal.cdf(high) - normal.cdf(low)
        return self.mean + self.standard_deviation**2 * (normal.pdf(low) - normal.pdf(high)) / kept


class Pair(Model):
    """Prompt and output length of one kind of request."""

    prompt_tokens: int = Field(ge=1, le=_MOST_TOKENS, description="Prompt length.")
    output_tokens: int = Field(ge=1, le=_MOST_TOKENS, description="Output length.")
    weight: float = Field(default=1.0, gt=0, le=1e12, description="How often it comes, against the others.")


class GivenLengths(Model):
    """Lengths of prompts and outputs, apart (`prompt`, `output`) or as they belong together (`pairs`, `trace`)."""

    prompt: Normal | None = Field(default=None, description="Prompt lengths.")
    output: Normal | None = Field(default=None, description="Output lengths.")
    pairs: tuple[Pair, ...] = Field(default=(), max_length=100, description="Kinds of requests, drawn by weight.")
    trace: TraceFile | None = Field(
        default=None, description="Requests of a recording, drawn in no order and without their times."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        apart = self.prompt is not None or self.output is not None
        if apart + bool(self.pairs) + (self.trace is not None) != 1:
            raise ValueError("give one of: prompt and output (either, or both), pairs, trace")
        return self
