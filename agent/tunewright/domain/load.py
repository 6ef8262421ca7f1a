"""The part of the tuning file about the load of every test."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.traffic import GivenLengths, Ramp, Sessions, Trace
from tunewright.domain.units import Duration, Part, format_duration


class LoadMode(StrEnum):
    """How requests arrive in a load test."""

    PROFILE = "profile"
    CLOSED_LOOP = "closedLoop"
    OPEN_LOOP = "openLoop"
    SESSIONS = "sessions"
    TRACE = "trace"
    HIGHEST_RATE = "highestRate"


class Load(Model):
    """The load of every test; what is left out is as the traffic profile says."""

    mode: LoadMode = Field(
        default=LoadMode.PROFILE,
        description="`closedLoop` keeps `concurrency` requests running; `openLoop` sends `rate` a second; "
        "`highestRate` seeks the highest `rate` that keeps the SLO, from `rate` or production's own, on one start; "
        "`sessions` keeps conversations running; `trace` replays a recording; "
        "`profile` is a closed loop at the concurrency that production showed.",
    )
    concurrency: int | None = Field(default=None, ge=1, le=100_000, description="Streams of the closed loop.")
    rate: float | None = Field(default=None, gt=0, description="Requests per second of the open loop.")
    burstiness: float | None = Field(
        default=None,
        gt=0,
        description="Variance of arrivals of the open loop against Poisson's, 1 by default.",
    )
    ramp: Ramp | None = Field(default=None, description="A slow beginning of the open loop, before it is measured.")
    prompt_tokens: int | None = Field(default=None, ge=1, description="Fixed prompt length.")
    output_tokens: int | None = Field(default=None, ge=1, description="Fixed output length.")
    lengths: GivenLengths | None = Field(default=None, description="Lengths that are not fixed, or go together.")
    prompts_file: str | None = Field(
        default=None,
        min_length=1,
        description='Text prompts, where content matters, as to speculation: one `{"prompt": "…"}` a line, on the '
        "machine that runs the agent.",
    )
    prefix_reuse: Part | None = Field(default=None, description="Share of prompt tokens that is shared.")
    sessions: Sessions | None = Field(default=None, description="Agent sessions, for mode `sessions`.")
    trace: Trace | None = Field(default=None, description="A recording, for mode `trace`.")
    duration: Duration = Field(default=35.0, description="Length of the steady window of one measurement.")
    max_warmup: Duration = Field(default=120.0, description="A warm-up that has not settled by then is ended.")
    seed: int = Field(default=1, ge=0, description="Seed of the workload.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mode is LoadMode.CLOSED_LOOP and self.concurrency is None:
            raise ValueError("closedLoop needs concurrency")
        if self.mode is LoadMode.OPEN_LOOP and self.rate is None:
            raise ValueError("openLoop needs rate")
        open_loop = self.mode in (LoadMode.OPEN_LOOP, LoadMode.HIGHEST_RATE)
        if not open_loop and (self.rate is not None or self.burstiness is not None):
            raise ValueError("rate and burstiness belong to mode openLoop or highestRate")
        if open_loop and self.concurrency is not None:
            raise ValueError("concurrency belongs to mode closedLoop or profile")
        self._check_ramp()
        for mode, block in ((LoadMode.SESSIONS, self.sessions), (LoadMode.TRACE, self.trace)):
            if (self.mode is mode) != (block is not None):
                raise ValueError(f"mode {mode.value} and the block {mode.value} belong together")
        if self.sessions is not None or self.trace is not None:
            given = {
                "concurrency": self.concurrency,
                "promptTokens": self.prompt_tokens,
                "outputTokens": self.output_tokens,
                "prefixReuse": self.prefix_reuse,
                "lengths": self.lengths,
                "promptsFile": self.prompts_file,
            }
            wrong = " and ".join(name for name, value in given.items() if value is not None)
            if wrong:
                raise ValueError(f"{wrong} can't be with mode {self.mode.value}: its block says it all")
        self._check_lengths()
        return self

    @property
    def file_field(self) -> str | None:
        """The field that names a file on the agent's machine, if any does."""
        named = {
            "trace": self.trace is not None,
            "lengths.trace": self.lengths is not None and self.lengths.trace is not None,
            "promptsFile": self.prompts_file is not None,
        }
        return next((name for name, is_named in named.items() if is_named), None)

    def _check_ramp(self) -> None:
        if self.ramp is None:
            return
        if self.mode is not LoadMode.OPEN_LOOP:
            raise ValueError(
                "ramp belongs to mode openLoop"
                + (": give a low rate for the search to begin with" if self.mode is LoadMode.HIGHEST_RATE else "")
            )
        if self.rate is not None and self.ramp.start_rate >= self.rate:
            raise ValueError(f"ramp.startRate ({self.ramp.start_rate:g}) must be below rate ({self.rate:g})")
        if self.ramp.duration >= self.max_warmup:
            raise ValueError(
                f"ramp.duration ({format_duration(self.ramp.duration)}) must be below maxWarmup "
                f"({format_duration(self.max_warmup)}), whose part it is: nothing is measured within a ramp"
            )

    def _check_lengths(self) -> None:
        """Refuse what says twice how long requests are."""
        lengths = self.lengths or GivenLengths.model_construct()
        together = lengths.trace is not None or bool(lengths.pairs)
        for fixed, name, other in (
            (self.prompt_tokens, "promptTokens", lengths.prompt),
            (self.output_tokens, "outputTokens", lengths.output),
        ):
            if fixed is not None and (together or other is not None):
                raise ValueError(f"{name} and lengths both say how long requests are: leave one out")
        if self.prompts_file is None:
            return
        if self.mode is LoadMode.HIGHEST_RATE:
            raise ValueError(
                "promptsFile can't be with mode highestRate: each level would send the same prompts to the same "
                "server, whose cache knows them; use openLoop"
            )
        given = {
            "promptTokens": self.prompt_tokens is not None,
            "prefixReuse": self.prefix_reuse is not None,
            "lengths.prompt": lengths.prompt is not None,
            "lengths.pairs": bool(lengths.pairs),
            "lengths.trace": lengths.trace is not None,
        }
        if wrong := " and ".join(name for name, is_given in given.items() if is_given):
            raise ValueError(
                f"{wrong} can't be with promptsFile: its texts are as long as they are, and share what they do"
            )
