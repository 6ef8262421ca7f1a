"""A workload: what a load test sends, made from a traffic profile or given by hand."""

from typing import Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.tuning import Load, LoadMode


class Lengths(Model):
    """A distribution of token counts: one fixed number, or a histogram (uniform inside each bucket)."""

    fixed: int | None = Field(default=None, ge=1)
    histogram: Histogram | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.fixed is None) == (self.histogram is None):
            raise ValueError("name exactly one of fixed and histogram")
        return self


class Workload(Model):
    """Arrivals, lengths and prefix sharing. Exactly one of `concurrency` (closed loop) and `rate` (open loop)."""

    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0, description="Requests per second.")
    burstiness: float = Field(default=1.0, gt=0, description="Variance over mean of arrivals; 1 is Poisson.")
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix_reuse: float = Field(default=0.0, ge=0, le=1, description="Share of prompt tokens that is shared.")

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("name exactly one of concurrency and rate")
        return self


def _lengths(fixed: int | None, histogram: Histogram) -> Lengths:
    return Lengths(fixed=fixed) if fixed is not None else Lengths(histogram=histogram)


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
    reuse = load.prefix_reuse if load.prefix_reuse is not None else profile.prefix_reuse
    shape = {
        "prompt_tokens": _lengths(load.prompt_tokens, profile.prompt_tokens),
        "output_tokens": _lengths(load.output_tokens, profile.output_tokens),
        "prefix_reuse": reuse or 0.0,
    }
    if load.mode is LoadMode.OPEN_LOOP:
        burstiness = load.burstiness or profile.burstiness or 1.0
        return Workload(rate=load.rate, burstiness=burstiness, **shape)
    seen = max(1, round(profile.concurrency_p95))
    return Workload(concurrency=load.concurrency or seen, **shape)
