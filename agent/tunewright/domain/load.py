"""The part of the tuning file about the load of every test."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.traffic import Sessions, Trace
from tunewright.domain.units import Duration, Part


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
    prompt_tokens: int | None = Field(default=None, ge=1, description="Fixed prompt length.")
    output_tokens: int | None = Field(default=None, ge=1, description="Fixed output length.")
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
        for mode, block in ((LoadMode.SESSIONS, self.sessions), (LoadMode.TRACE, self.trace)):
            if (self.mode is mode) != (block is not None):
                raise ValueError(f"mode {mode.value} and the block {mode.value} belong together")
        if self.sessions is not None or self.trace is not None:
            given = {
                "concurrency": self.concurrency,
                "promptTokens": self.prompt_tokens,
                "outputTokens": self.output_tokens,
                "prefixReuse": self.prefix_reuse,
            }
            wrong = " and ".join(name for name, value in given.items() if value is not None)
            if wrong:
                raise ValueError(f"{wrong} can't be with mode {self.mode.value}: its block says it all")
        return self
