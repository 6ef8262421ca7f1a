"""A workload: what a load test sends, made from a traffic profile or given by hand."""

from typing import Self

from pydantic import Field, model_validator

from tunewright.domain.load import Load, LoadMode
from tunewright.domain.model import Model
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.traffic import Sessions, Trace


class Lengths(Model):
    """A distribution of token counts: one fixed number, or a histogram with the exact mean where that is known.

    A histogram's buckets are wide, and lengths lie mostly in their lower parts: even inside each bucket the drawn ones
    would be longer than production's. So they are drawn lower or higher in every bucket, such that `mean` is met.
    """

    fixed: int | None = Field(default=None, ge=1)
    histogram: Histogram | None = None
    mean: float | None = Field(default=None, gt=0, description="Of the histogram; even inside buckets when left out.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.fixed is None) == (self.histogram is None):
            raise ValueError("name exactly one of fixed and histogram")
        if self.mean is not None and self.histogram is None:
            raise ValueError("mean belongs to histogram")
        return self


class Workload(Model):
    """Arrivals, lengths and prefix sharing. Exactly one of `concurrency` (closed loop), `rate` (open loop) and `trace`
    (open too; the lengths are then those of the quality prompts alone)."""

    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0, description="Requests per second.")
    burstiness: float = Field(default=1.0, gt=0, description="Variance over mean of arrivals; 1 is Poisson.")
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix_reuse: float = Field(default=0.0, ge=0, le=1, description="Share of prompt tokens that is shared.")
    sessions: Sessions | None = Field(
        default=None, description="`concurrency` counts conversations; the lengths above are then the means of a turn."
    )
    trace: Trace | None = None
    highest: bool = Field(
        default=False, description="Seek the highest rate that keeps the SLO; `rate` is where that begins."
    )

    @property
    def open_loop(self) -> bool:
        """Whether requests come by the clock, whatever comes back."""
        return self.concurrency is None

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if sum(given is not None for given in (self.concurrency, self.rate, self.trace)) != 1:
            raise ValueError("name exactly one of concurrency and rate (and trace)")
        if self.sessions is not None and self.concurrency != self.sessions.concurrency:
            raise ValueError("concurrency must be that of the sessions")
        if self.highest and self.rate is None:
            raise ValueError("the search for the highest rate needs a rate to begin with")
        return self

    @classmethod
    def of_sessions(cls, sessions: Sessions) -> "Workload":
        """The workload that consists of these conversations."""
        return cls(
            concurrency=sessions.concurrency,
            prompt_tokens=Lengths(fixed=round(sessions.mean_prompt)),
            output_tokens=Lengths(fixed=sessions.output),
            prefix_reuse=sessions.prefix_reuse,
            sessions=sessions,
        )


def _lengths(fixed: int | None, histogram: Histogram, mean: float) -> Lengths:
    return Lengths(fixed=fixed) if fixed is not None else Lengths(histogram=histogram, mean=mean or None)


def given_profile(load: Load, at: float) -> TrafficProfile:
    """The traffic as `load` gives it, where there is none to watch; `at` is now, in seconds since the epoch.

    Raises ValueError unless concurrency, promptTokens and outputTokens are given: nothing is guessed.
    """
    streams, prompt, output = load.concurrency, load.prompt_tokens, load.output_tokens
    if streams is None or prompt is None or output is None:
        raise ValueError("load gives no whole traffic: concurrency, promptTokens and outputTokens are wanted")
    return TrafficProfile(
        given=True,
        start=at,
        end=at,
        replicas=1,
        via="the tuning file",
        source=Source.UNKNOWN,
        finished_requests=0,
        saturated=False,
        demand=0,
        concurrency=streams,
        concurrency_p95=streams,
        running=streams,
        waiting=0,
        prompt_tokens=_all_of(prompt),
        output_tokens=_all_of(output),
        prompt_tokens_mean=prompt,
        output_tokens_mean=output,
        prefix_reuse=load.prefix_reuse or 0.0,
        error_rate=0,
        output_tokens_per_second=0,
    )


def _all_of(length: int) -> Histogram:
    """One request of just this length."""
    return Histogram(edges=(length - 1, length), counts=(0, 1)) if length > 1 else Histogram(edges=(1,), counts=(1,))


def workload_for(load: Load, profile: TrafficProfile) -> Workload:
    """The workload that `load` asks for, filled in from what production showed.

    Mode `profile` is a closed loop at the concurrency production showed (its 95th percentile, so that the test is at
    the busy end of what was seen): capacity, never production's own rate, which every feasible candidate meets.
    """
    if load.sessions is not None:
        return Workload.of_sessions(load.sessions)
    reuse = load.prefix_reuse if load.prefix_reuse is not None else profile.prefix_reuse
    shape = {
        "prompt_tokens": _lengths(load.prompt_tokens, profile.prompt_tokens, profile.prompt_tokens_mean),
        "output_tokens": _lengths(load.output_tokens, profile.output_tokens, profile.output_tokens_mean),
        "prefix_reuse": reuse or 0.0,
    }
    if load.trace is not None:
        return Workload(trace=load.trace, **shape)
    burstiness = load.burstiness or profile.burstiness or 1.0
    if load.mode is LoadMode.OPEN_LOOP:
        return Workload(rate=load.rate, burstiness=burstiness, **shape)
    if load.mode is LoadMode.HIGHEST_RATE:
        return Workload(rate=load.rate or max(profile.demand, 0.1), highest=True, burstiness=burstiness, **shape)
    seen = max(1, round(profile.concurrency_p95))
    return Workload(concurrency=load.concurrency or seen, **shape)


MOST_RUNS = 14
"""Runs of one search for the highest rate, on one server."""
LEVEL_WARMUP = 30.0
"""Longest warm-up of a level, in seconds: the server is warm, and only its queue has to settle."""


def time_limit(duration: float, max_warmup: float, highest: bool) -> float:
    """Seconds after which a load test is ended from outside, whatever it does."""
    one = max_warmup + 3 * duration + 120.0
    return one if not highest else one + MOST_RUNS * (LEVEL_WARMUP + 2 * duration + 15.0)
