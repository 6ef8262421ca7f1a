"""What the command `tunewright load` reads and writes: the job, its progress and its result."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tunewright.domain.answers import Answer, QualityPrompt, answering_time
from tunewright.domain.measurement import Interim, Measurement
from tunewright.domain.model import Model
from tunewright.domain.tuning import Slo
from tunewright.domain.units import check_url
from tunewright.domain.workload import Workload, time_limit
from tunewright.ports import LoadRequest

Endpoint = Literal["completions", "chat"]


class TokenRange(Model):
    """Token ids that prompts are drawn from: inside every usual vocabulary, clear of special and byte tokens."""

    low: int = Field(default=100, ge=0)
    high: int = Field(default=20_000, ge=1, le=9_999_999, description="Exclusive.")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.high - self.low < 2:
            raise ValueError("high must be at least 2 above low")
        return self


class LoadJob(Model):
    """One load test, as `ports.LoadRequest` asks for it, and what only the command line can set. Times in seconds."""

    url: Annotated[str, AfterValidator(check_url)] = Field(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")
    workload: Workload
    model: str | None = Field(default=None, description="Served model name; asked of the server when left out.")
    slo: Slo = Field(default_factory=Slo)
    duration: float = Field(gt=0, description="Length of the steady window.")
    max_warmup: float = Field(ge=0, description="A warm-up that has not settled by then is ended.")
    seed: int = Field(ge=0, description="Seed of lengths and arrivals.")
    content_seed: int | None = Field(
        default=None, ge=0, description="Seed of the prompts' tokens; new in each run when left out."
    )
    quality_prompts: int = Field(default=0, ge=0)
    quality_max_tokens: int = Field(default=0, ge=0)
    prompts: tuple[QualityPrompt, ...] = Field(default=(), description="Answered instead of `quality_prompts`.")
    api_key_file: str | None = None
    ca_file: str | None = Field(default=None, description="PEM file of the authorities to trust for https.")
    endpoint: Endpoint = "completions"
    interim: bool = Field(default=False, description="Tell estimates before the window is over.")
    token_ids: TokenRange = Field(default_factory=TokenRange)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.workload.sessions is not None and self.endpoint != "chat":
            raise ValueError("sessions are conversations: endpoint must be chat")
        if self.workload.highest and not self.slo.bounds():
            raise ValueError("the highest rate is sought under an SLO: name a bound on a latency")
        if (ramp := self.workload.ramp) is not None and ramp.duration >= self.max_warmup:
            raise ValueError("the ramp must be shorter than the longest warm-up, whose part it is")
        return self

    @classmethod
    def of(cls, request: LoadRequest) -> "LoadJob":
        """The job that the controller's request describes."""
        workload = request.workload
        found: dict[str, object] = {}  # the load test runs in a folder of its own
        for name, named in (("trace", workload.trace), ("pairs_of", workload.pairs_of)):
            if named is not None:
                found[name] = named.model_copy(update={"file": str(Path(named.path).absolute())})
        if workload.prompts_file is not None:
            found["prompts_file"] = str(Path(workload.prompts_file).absolute())
        workload = workload.model_copy(update=found)
        return cls(
            url=request.url.rstrip("/"),
            workload=workload,
            model=request.model,
            slo=request.slo,
            duration=request.duration,
            max_warmup=request.max_warmup,
            seed=request.seed,
            quality_prompts=request.quality_prompts,
            quality_max_tokens=request.quality_max_tokens,
            prompts=tuple(request.prompts),
            api_key_file=request.api_key_file,
            endpoint="completions" if request.workload.sessions is None else "chat",
            interim=request.interim,
        )

    @property
    def hard_limit(self) -> float:
        """Seconds after which a run is ended from outside, whatever it does."""
        asked = len(self.prompts) or self.quality_prompts
        answering = answering_time(asked, self.quality_max_tokens)
        return time_limit(self.duration, self.max_warmup, self.workload.highest) + answering


class Progress(Model):
    """Rewritten about once a second while a load test runs."""

    share: float = Field(ge=0, le=1)
    detail: str
    interim: Interim | None = None


class LoadResult(Model):
    """How a load test ended: a measurement, or the reason why there is none."""

    measurement: Measurement | None = None
    failure: str | None = None
    answers: tuple[Answer, ...] = ()
    content_seed: int = Field(description="With the job's seed and token ids, the very prompts that were sent.")
    notes: tuple[str, ...] = Field(default=(), description="What a reader should know, without being a fault.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError("exactly one of measurement and failure is wanted")
        return self


class LoadFailure(Exception):
    """The load test has no result; the message says what, where and what to do."""


class Overloaded(LoadFailure):
    """There is no result, because the server did not keep up with what was sent."""
