"""The traffic profile: what production traffic looks like, per replica, over one window."""

from enum import StrEnum
from itertools import pairwise

from pydantic import Field, model_validator

from tunewright.domain.model import Model


class Source(StrEnum):
    """Where a number comes from; it is shown beside every number."""

    SIMULATED = "simulated"
    CPU = "CPU"
    GPU = "GPU"
    UNKNOWN = "unknown"  # the server does not tell its version

    @classmethod
    def of_version(cls, version: str) -> "Source":
        """Read it from what a server's `/version` answers: the local part of the version names the build."""
        if "+simulated" in version:
            return cls.SIMULATED
        if not version:
            return cls.UNKNOWN
        return cls.CPU if "+cpu" in version else cls.GPU


class Histogram(Model):
    """Counts between edges. `edges[i]` is the inclusive upper edge of `counts[i]`; the first lower edge is 0.

    What was beyond the last finite edge is in `overflow`.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    overflow: float = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> "Histogram":
        if len(self.edges) != len(self.counts):
            raise ValueError(f"{len(self.edges)} edges but {len(self.counts)} counts")
        if any(left >= right for left, right in pairwise(self.edges)):
            raise ValueError("the edges must rise")
        if any(count < 0 for count in (*self.counts, self.overflow)):
            raise ValueError("a count is negative")
        return self

    @property
    def total(self) -> float:
        """How many observations there are."""
        return sum(self.counts) + self.overflow

    def quantile(self, q: float) -> float | None:
        """The q-quantile by linear interpolation inside its bucket; None when empty or beyond the last edge."""
        if self.total <= 0:
            return None
        rank, lower, seen = q * self.total, 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=True):
            if count > 0 and seen + count >= rank:
                return lower + (edge - lower) * max(0.0, rank - seen) / count
            seen, lower = seen + count, edge
        return None

    @property
    def mean(self) -> float | None:
        """The mean with each bucket at its middle (the overflow at the last edge); None when empty."""
        if self.total <= 0 or not self.edges:
            return None
        lower, weighted = 0.0, self.overflow * self.edges[-1]
        for edge, count in zip(self.edges, self.counts, strict=True):
            weighted += count * (lower + edge) / 2
            lower = edge
        return weighted / self.total


class TrafficProfile(Model):
    """Per replica: demand, concurrency, lengths, prefix reuse and acceptance, learned over one window.

    `given`: nothing was watched, the tuning file says what the traffic is. Concurrency, lengths and prefix reuse are
    then as it says; what only watching tells is 0 or None, and is not shown.
    """

    given: bool = Field(default=False, description="Given in the tuning file: no traffic was watched.")

    start: float = Field(description="Start of the window, seconds since the epoch.")
    end: float = Field(description="End of the window, seconds since the epoch.")
    replicas: int = Field(ge=1, description="Replicas that served in the window.")
    via: str = Field(description="Where the metrics came from: a Prometheus URL, or a direct scrape.")
    source: Source
    finished_requests: float = Field(ge=0, description="Requests finished in the window, all replicas.")
    saturated: bool = Field(description="The queue never emptied: demand is at least what was finished.")
    demand: float = Field(
        ge=0,
        description="Requests/s and replica: finished plus growth of the queue; a lower bound if saturated.",
    )
    burstiness: float | None = Field(
        default=None, description="Variance over mean of arrivals per step; 1 is Poisson, None is not known."
    )
    concurrency: float = Field(ge=0, description="Mean of running plus waiting requests, per replica.")
    concurrency_p95: float = Field(ge=0, description="95th percentile over the window of running plus waiting.")
    running: float = Field(ge=0, description="Mean of running requests, per replica.")
    waiting: float = Field(ge=0, description="Mean of waiting requests, per replica.")
    prompt_tokens: Histogram
    output_tokens: Histogram
    prompt_tokens_mean: float = Field(ge=0, description="Exact mean prompt length, from the histogram's sum.")
    output_tokens_mean: float = Field(ge=0, description="Exact mean output length, from the histogram's sum.")
    prefix_reuse: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of prompt tokens found in the prefix cache; None: cache is off.",
    )
    acceptance: tuple[float, ...] = Field(
        default=(), description="Share of drafts accepted at each position of speculation; empty without it."
    )
    error_rate: float = Field(ge=0, le=1, description="Share of finished requests that ended in an error.")
    output_tokens_per_second: float = Field(ge=0, description="Generated tokens/s, per replica.")
    ttft_p95: float | None = Field(default=None, description="Seconds, from the servers' histograms; None: no data.")
    itl_p95: float | None = Field(default=None, description="Seconds per engine step; None: no data.")
    e2e_p95: float | None = Field(default=None, description="Seconds; None: no data.")
    notes: tuple[str, ...] = Field(default=(), description="What a reader should know: resets, replicas that came.")

    def summary(self) -> str:
        """One sentence for people: what this traffic looks like."""
        if self.given:
            shared = f" ({self.prefix_reuse:.0%} of it shared prefix)" if self.prefix_reuse else ""
            return (
                f"{self.concurrency:.3g} requests at a time, {self.prompt_tokens_mean:.0f} tokens in{shared}, "
                f"{self.output_tokens_mean:.0f} out, as the tuning file says"
            )
        demand = f"at least {self.demand:.2g}" if self.saturated else f"{self.demand:.2g}"
        prefix = "prefix cache off" if self.prefix_reuse is None else f"{self.prefix_reuse:.0%} of it shared prefix"
        return (
            f"{demand} requests/s and replica, {self.concurrency:.3g} at a time, "
            f"{self.prompt_tokens_mean:.0f} tokens in ({prefix}), {self.output_tokens_mean:.0f} out"
        )
