"""What one load test measured on one server."""

from typing import Literal

from pydantic import Field

from tunewright.domain.model import Model
from tunewright.domain.profile import Source

LatencyName = Literal["ttft", "tpot", "itl", "e2e"]
PercentileName = Literal["p50", "p90", "p95", "p99"]


class Estimate(Model):
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Latency(Model):
    """Percentiles in seconds, from the client's own samples (never from histogram buckets)."""

    count: int = Field(ge=0)
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class GeneratorHealth(Model):
    """Whether the load generator delivered what it was asked for, and how well it could see."""

    asked: float = Field(description="Concurrency (closed loop) or requests/s (open loop) asked for.")
    achieved: float = Field(description="The same, as delivered over the measured window.")
    schedule_lag_p99: float = Field(description="Seconds by which sends were later than planned, 99th percentile.")
    cpu_share: float = Field(description="CPU seconds of the generator per second of the window.")
    merged_reads: float = Field(description="Share of reads that held tokens of more than one step.")
    steal: float | None = Field(
        default=None, description="Share of the machine's CPU time that its hypervisor gave to others; None: not known."
    )


class ServerCounters(Model):
    """What the server's own counters say over the same window; None where the server does not export it."""

    prompt_tokens: float
    generation_tokens: float
    finished_requests: float
    preemptions: float
    prefix_hit_rate: float | None = None
    acceptance_rate: float | None = None
    kv_cache_usage_max: float | None = None


class Measurement(Model):
    """One steady window of one load test. Rates are per second, latencies in seconds."""

    started_at: float = Field(description="Start of the steady window, seconds since the epoch.")
    duration: float = Field(gt=0, description="Length of the steady window in seconds.")
    source: Source
    vllm_version: str
    seed: int
    warmup: float = Field(ge=0, description="Seconds of load before the steady window.")
    warmup_settled: bool = Field(description="The warm-up ended by its test, not by its limit.")
    completed: int = Field(ge=0, description="Requests that ended well inside the window.")
    failed: int = Field(ge=0)
    errors: dict[str, int] = Field(default_factory=dict, description="Failed requests by kind.")
    output_tokens_per_second: Estimate
    input_tokens_per_second: float
    requests_per_second: float
    goodput: float | None = Field(default=None, description="Requests/s that met the SLO; None without an SLO.")
    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    generator: GeneratorHealth
    server: ServerCounters | None = Field(default=None, description="None: no /metrics was readable.")
    void: tuple[str, ...] = Field(
        default=(),
        description="Reasons why nothing may be decided on this measurement; empty when it is sound.",
    )

    @property
    def error_rate(self) -> float:
        """Share of requests in the window that failed; 1 when nothing completed."""
        total = self.completed + self.failed
        return self.failed / total if total and self.completed else 1.0

    def latency(self, name: LatencyName, percentile: PercentileName) -> float:
        """A percentile of a latency in seconds."""
        value: float = getattr(getattr(self, name), percentile)
        return value


class Interim(Model):
    """What a load test knows before its window is over."""

    measurement: Measurement = Field(description="Of the part of the window that has passed.")
    at_least: dict[str, float] = Field(
        description="By `ttftP95`, …: seconds that this percentile surely has (99.7 %); left out: can't be told."
    )
