"""A workload: what a load test sends, made from a traffic profile or given by hand."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

from pydantic import Field, model_validator

from tunewright.domain.load import Load, LoadMode
from tunewright.domain.model import Model
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.traffic import Normal, Pair, Ramp, Sessions, Trace, TraceFile


class Lengths(Model):
    """A distribution of token counts: one fixed number, a normal, or a histogram with the exact mean where it is known.

    A histogram's buckets are wide, and lengths lie mostly in their lower parts: even inside each bucket the drawn ones
    would be longer than production's. So they are drawn lower or higher in every bucket, such that `mean` is met.
    """

    fixed: int | None = Field(default=None, ge=1)
    normal: Normal | None = None
    histogram: Histogram | None = None
    mean: float | None = Field(default=None, gt=0, description="Of the histogram; even inside buckets when left out.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(given is not None for given in (self.fixed, self.normal, self.histogram)) != 1:
            raise ValueError("name exactly one of fixed and histogram (and normal)")
        if self.mean is not None and self.histogram is None:
            raise ValueError("mean belongs to histogram")
        return self

    @property
    def average(self) -> float | None:
        """The mean length in tokens; None for an empty histogram."""
        if self.fixed is not None:
            return float(self.fixed)
        if self.normal is not None:
            return self.normal.truncated_mean
        return self.mean or (self.histogram.mean if self.histogram is not None else None)

    @classmethod
    def of(cls, weights: Mapping[int, float]) -> "Lengths":
        """Just these lengths, by weight."""
        total = sum(weights.values())
        mean = sum(length * weight for length, weight in weights.items()) / total
        return cls(histogram=_just(weights), mean=mean)

    def as_histogram(self) -> Histogram:
        """For what compares and shows lengths."""
        if self.fixed is not None:
            return _just({self.fixed: 1})
        return _bins(self.normal) if self.normal is not None else self.histogram or Histogram(edges=(), counts=())


class Workload(Model):
    """Arrivals, lengths and prefix sharing. Exactly one of `concurrency` (closed loop), `rate` (open loop) and `trace`
    (open too). Where `trace`, `pairs`, `pairs_of` or `prompts_file` say how long requests are, `prompt_tokens` (and,
    but with `prompts_file`, `output_tokens`) are those of the quality prompts alone."""

    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0, description="Requests per second.")
    burstiness: float = Field(default=1.0, gt=0, description="Variance over mean of arrivals; 1 is Poisson.")
    ramp: Ramp | None = None
    prompt_tokens: Lengths
    output_tokens: Lengths
    pairs: tuple[Pair, ...] = Field(default=(), description="Lengths as they belong together, drawn by weight.")
    pairs_of: TraceFile | None = Field(default=None, description="The same, of the requests of a trace.")
    prompts_file: str | None = Field(default=None, min_length=1, description="Texts to send, one JSON object a line.")
    prefix_reuse: float = Field(default=0.0, ge=0, le=1, description="Share of prompt tokens that is shared.")
    temperature: float = Field(default=0.0, ge=0, le=2, description="At which answers are sampled; 0 is greedy.")
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
        if self.ramp is not None and (self.rate is None or self.highest or self.ramp.start_rate >= self.rate):
            raise ValueError("a ramp leads from a lower rate to that of an open loop, and to no search for the highest")
        if any(named is not None and named.file is None for named in (self.trace, self.pairs_of)):
            raise ValueError("a load test reads a trace from a file: configMap belongs to the tuning file")
        ways = {
            "sessions": self.sessions is not None,
            "trace": self.trace is not None,
            "pairs of lengths": bool(self.pairs),
            "lengths of a trace": self.pairs_of is not None,
            "a file of prompts": self.prompts_file is not None,
        }
        named = [name for name, given in ways.items() if given]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} can't be together: each says how long requests are")
        if self.prompts_file is not None and (self.prefix_reuse or self.highest):
            raise ValueError(
                "a file of prompts can't be with prefix reuse, which is the texts' own, nor with the search for the "
                "highest rate, whose levels would send one server the same prompts again"
            )
        return self

    @classmethod
    def of_sessions(cls, sessions: Sessions, temperature: float = 0.0) -> "Workload":
        """The workload that consists of these conversations."""
        return cls(
            concurrency=sessions.concurrency,
            prompt_tokens=Lengths(fixed=round(sessions.mean_prompt)),
            output_tokens=Lengths(fixed=sessions.output),
            prefix_reuse=sessions.prefix_reuse,
            temperature=temperature,
            sessions=sessions,
        )


def given_lengths(load: Load) -> tuple[Lengths | None, Lengths | None]:
    """Prompt and output lengths as `load` gives them; None for what it leaves to the traffic, or to a file."""
    prompt = Lengths(fixed=load.prompt_tokens) if load.prompt_tokens is not None else None
    output = Lengths(fixed=load.output_tokens) if load.output_tokens is not None else None
    if (given := load.lengths) is None:
        return prompt, output
    if given.pairs:
        prompts: dict[int, float] = defaultdict(float)
        outputs: dict[int, float] = defaultdict(float)
        for pair in given.pairs:
            prompts[pair.prompt_tokens] += pair.weight
            outputs[pair.output_tokens] += pair.weight
        return Lengths.of(prompts), Lengths.of(outputs)
    return (
        Lengths(normal=given.prompt) if given.prompt is not None else prompt,
        Lengths(normal=given.output) if given.output is not None else output,
    )


def given_profile(load: Load, at: float) -> TrafficProfile:
    """The traffic as `load` gives it, where there is none to watch; `at` is now, in seconds since the epoch.

    Raises ValueError unless concurrency and the lengths of prompts and outputs are given: nothing is guessed.
    """
    streams, (prompt, output) = load.concurrency, given_lengths(load)
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
        prompt_tokens=prompt.as_histogram(),
        output_tokens=output.as_histogram(),
        prompt_tokens_mean=prompt.average or 0.0,
        output_tokens_mean=output.average or 0.0,
        prefix_reuse=load.prefix_reuse or 0.0,
        error_rate=0,
        output_tokens_per_second=0,
    )


def _just(weights: Mapping[int, float]) -> Histogram:
    """These lengths and no others: each has a bucket of its own, one token wide."""
    counts: dict[int, float] = {}
    for length in sorted(weights):
        if length > 1:
            counts.setdefault(length - 1, 0.0)
        counts[length] = weights[length]
    return Histogram(edges=tuple(counts), counts=tuple(counts.values()))


_BINS = 20


def _bins(normal: Normal) -> Histogram:
    """A truncated normal in equal buckets."""
    width = max(1, -(-(normal.most - normal.least + 1) // _BINS))
    edges = [normal.least - 1, *range(normal.least - 1 + width, normal.most, width), normal.most]
    below = [normal.untruncated.cdf(edge + 0.5) for edge in edges]
    counts = [0.0, *(right - left for left, right in pairwise(below))]
    first = 1 if edges[0] == 0 else 0  # the first lower edge is 0 anyway
    return Histogram(edges=tuple(edges[first:]), counts=tuple(counts[first:]))


def workload_for(load: Load, profile: TrafficProfile) -> Workload:
    """The workload that `load` asks for, filled in from what production showed.

    Mode `profile` is a closed loop at the concurrency production showed (its 95th percentile, so that the test is at
    the busy end of what was seen): capacity, never production's own rate, which every feasible candidate meets.
    """
    if (source := load.source) is not None and source.config_map is not None:
        raise AssertionError("a load test reads a file: the copy of the ConfigMap is wanted, by `Load.reading`")
    temperature = load.temperature or 0.0
    if load.sessions is not None:
        return Workload.of_sessions(load.sessions, temperature)
    reuse = load.prefix_reuse if load.prefix_reuse is not None else profile.prefix_reuse
    prompt, output = given_lengths(load)
    seen_prompt = Lengths(histogram=profile.prompt_tokens, mean=profile.prompt_tokens_mean or None)
    seen_output = Lengths(histogram=profile.output_tokens, mean=profile.output_tokens_mean or None)
    shape: dict[str, Any] = {
        "prompt_tokens": prompt or seen_prompt,
        "output_tokens": output or seen_output,
        "pairs": load.lengths.pairs if load.lengths is not None else (),
        "pairs_of": load.lengths.trace if load.lengths is not None else None,
        "prompts_file": load.prompts_file,
        "prefix_reuse": reuse or 0.0 if load.prompts_file is None else 0.0,
        "temperature": temperature,
    }
    if load.trace is not None:
        return Workload(trace=load.trace, **shape)
    burstiness = load.burstiness or profile.burstiness or 1.0
    if load.mode is LoadMode.OPEN_LOOP:
        return Workload(rate=load.rate, burstiness=burstiness, ramp=load.ramp, **shape)
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
