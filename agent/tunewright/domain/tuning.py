"""The tuning file: one schema for `tunewright tune FILE`, the custom resource's spec and its CRD."""

from itertools import combinations, pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tunewright.domain.candidate import content_hash
from tunewright.domain.load import Load, LoadMode
from tunewright.domain.measurement import LatencyName, PercentileName
from tunewright.domain.model import Model
from tunewright.domain.promotion import Promotion, PromotionMode, Quality
from tunewright.domain.units import Duration, Percentage, check_url, format_duration
from tunewright.domain.workload import given_lengths

LATENCIES: tuple[LatencyName, ...] = ("ttft", "tpot", "itl", "e2e")
PERCENTILES: tuple[PercentileName, ...] = ("p50", "p90", "p95", "p99")
MAX_SPARES = 16
KnobText = Annotated[str, BeforeValidator(lambda value: _as_text(value))]
"""A knob's value as text; plain numbers and booleans of a file are taken too."""
_URL = r"^https?://[^\s/?#]+(/[^\s?#]*)?$"


def _as_text(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class Metadata(Model):
    """Names the tuning."""

    name: str = Field(
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="Name of the tuning: lower-case letters, digits and dashes, at most 63 characters.",
    )


class Target(Model):
    """The vLLM workload in production. Exactly one of `command` (processes that Tunewright runs behind its proxy),
    `urls` (servers that somebody else runs) and `deployment` (in a cluster)."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Command of one production server, as `[vllm, serve, MODEL, --port, '{port}']`; "
        "`{port}` is filled in, and `{replica}` by 0, 1, … (one past the last: canary and spare; further spares: the "
        "numbers after that). "
        "Tunewright starts the replicas and a proxy before them.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Environment of every production server, beside the agent's own; `{replica}` is filled in.",
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Production servers to run. 0: none, the command is tuned on the spare alone, under the traffic "
        "that `load` gives; promotion is `recommend` only.",
    )
    listen: str = Field(
        default="127.0.0.1:8000",
        pattern=r"^[^\s:]+:\d{1,5}$",
        description="Address of the proxy before the replicas: where clients send their requests.",
    )
    first_port: int = Field(default=18100, ge=1024, le=65000, description="Servers take free ports from here upwards.")
    urls: tuple[str, ...] = Field(
        default=(),
        description="Base URLs of production servers that somebody else runs; promotion is `recommend` only.",
    )
    deployment: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Name of the Deployment that runs vLLM, in the tuning's own namespace.",
    )
    container: str | None = Field(
        default=None, min_length=1, max_length=63, description="Its container that runs vLLM, where that is not clear."
    )
    api_key_file: str | None = Field(default=None, description="File with the bearer token of the servers.")
    model: str | None = Field(default=None, description="Served model name; asked of the server when left out.")
    start_timeout: Duration = Field(default=900.0, description="A server that is not ready by then has failed.")
    drain_timeout: Duration = Field(
        default=300.0, description="How long a server's running requests are waited for before it is stopped."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        for url in self.urls:
            check_url(url)
        if sum((bool(self.command), bool(self.urls), self.deployment is not None)) != 1:
            raise ValueError(
                "name exactly one of command (Tunewright runs the servers), urls (somebody else does) "
                "and deployment (in a cluster)"
            )
        if self.container is not None and self.deployment is None:
            raise ValueError("container belongs to deployment")
        if self.command and not any("{port}" in word for word in self.command):
            raise ValueError("command must contain {port}, as in: --port {port}")
        return self


class Spare(Model):
    """The spare that trials run on. What is left out is taken from the target."""

    command: tuple[str, ...] = Field(
        default=(), description="Command of the server under test; the target's command when left out."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment beside the target's, as CUDA_VISIBLE_DEVICES."
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="In a cluster: labels of the nodes that the spare's pods may run on."
    )
    gpus: int | None = Field(
        default=None, ge=0, le=64, description="In a cluster: GPUs of a spare pod; as the target's when left out."
    )
    cache_claim: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="In a cluster: a PersistentVolumeClaim for compiled kernels, so that not every trial starts cold.",
    )
    cache_path: str = Field(
        default="/root/.cache/vllm", pattern=r"^/.*$", description="In a cluster: where that claim is mounted."
    )
    start_timeout: Duration = Field(default=900.0, description="A trial that is not ready by then has failed.")
    parallelism: int = Field(
        default=1,
        ge=1,
        le=MAX_SPARES,
        description="Trials at a time, each on a spare of its own: in a cluster as many pods, on one machine as many "
        "servers, whose `{replica}` counts up from the first spare's. Their GPUs must be of one kind.",
    )


class Metrics(Model):
    """Where the metrics of production come from."""

    prometheus: str | None = Field(
        default=None,
        pattern=_URL,
        description="URL of Prometheus; the servers are scraped directly when left out.",
    )
    selector: str = Field(default="", description='Label matchers that name production\'s series, as `job="vllm"`.')
    bearer_token_file: str | None = Field(default=None, description="File with Prometheus' bearer token.")
    window: Duration = Field(default=1800.0, description="The traffic profile is learned over this long.")
    interval: Duration = Field(default=15.0, description="Scrape interval (of Prometheus, or our own).")
    min_requests: int = Field(default=100, ge=1, description="A window with fewer finished requests is refused.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.interval:
            raise ValueError("interval must be above 0s: servers would be asked without a pause")
        if self.prometheus is not None:
            check_url(self.prometheus)
        return self


class Objective(Model):
    """What is improved: exactly one of the two."""

    maximize: Literal["outputTokensPerSecond", "goodput", "tokensPerDollar"] | None = Field(
        default=None, description="Capacity: at the load of the test, never at production's own rate."
    )
    minimize: (
        Literal[
            "ttftP50", "ttftP90", "ttftP95", "ttftP99", "tpotP50", "tpotP90", "tpotP95", "tpotP99",
            "itlP50", "itlP90", "itlP95", "itlP99", "e2eP50", "e2eP90", "e2eP95", "e2eP99",
        ]
        | None
    ) = Field(default=None, description="A latency percentile of the load test.")  # fmt: skip
    pareto: tuple[
        Literal[
            "outputTokensPerSecond", "goodput",
            "ttftP50", "ttftP90", "ttftP95", "ttftP99", "tpotP50", "tpotP90", "tpotP95", "tpotP99",
            "itlP50", "itlP90", "itlP95", "itlP99", "e2eP50", "e2eP90", "e2eP95", "e2eP99",
        ],
        ...,
    ] = Field(
        default=(),
        max_length=4,
        description="Measures of which the report and the API show the Pareto front; the objective alone decides.",
    )  # fmt: skip
    gpu_price_per_hour: float | None = Field(default=None, gt=0, description="Price of one GPU hour, in dollars.")
    api_price_per_million_tokens: float | None = Field(
        default=None, gt=0, description="What an API charges for a million output tokens, in dollars: for the report."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.maximize is None) == (self.minimize is None):
            raise ValueError("name exactly one of maximize and minimize")
        if len(self.pareto) == 1 or len(set(self.pareto)) < len(self.pareto):
            raise ValueError("pareto names two to four different measures")
        if self.maximize == "tokensPerDollar" and self.gpu_price_per_hour is None:
            raise ValueError("tokensPerDollar needs gpuPricePerHour")
        return self


class Slo(Model):
    """What must hold in every load test; all bounds that are given."""

    ttft_p50: Duration | None = Field(default=None, description="Time to first token, 50th percentile.")
    ttft_p90: Duration | None = Field(default=None, description="Time to first token, 90th percentile.")
    ttft_p95: Duration | None = Field(default=None, description="Time to first token, 95th percentile.")
    ttft_p99: Duration | None = Field(default=None, description="Time to first token, 99th percentile.")
    tpot_p50: Duration | None = Field(default=None, description="Time per output token, 50th percentile.")
    tpot_p90: Duration | None = Field(default=None, description="Time per output token, 90th percentile.")
    tpot_p95: Duration | None = Field(default=None, description="Time per output token, 95th percentile.")
    tpot_p99: Duration | None = Field(default=None, description="Time per output token, 99th percentile.")
    itl_p50: Duration | None = Field(default=None, description="Inter-token latency, 50th percentile.")
    itl_p90: Duration | None = Field(default=None, description="Inter-token latency, 90th percentile.")
    itl_p95: Duration | None = Field(default=None, description="Inter-token latency, 95th percentile.")
    itl_p99: Duration | None = Field(default=None, description="Inter-token latency, 99th percentile.")
    e2e_p50: Duration | None = Field(default=None, description="Whole request, 50th percentile.")
    e2e_p90: Duration | None = Field(default=None, description="Whole request, 90th percentile.")
    e2e_p95: Duration | None = Field(default=None, description="Whole request, 95th percentile.")
    e2e_p99: Duration | None = Field(default=None, description="Whole request, 99th percentile.")
    error_rate: Percentage = Field(default=0.01, description="Share of requests that may fail.")

    def bounds(self) -> list[tuple[LatencyName, PercentileName, float]]:
        """The latency bounds that are given, in seconds."""
        found = []
        for latency in LATENCIES:
            for percentile in PERCENTILES:
                bound: float | None = getattr(self, f"{latency}_{percentile}")
                if bound is not None:
                    found.append((latency, percentile, bound))
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for latency in LATENCIES:
            given = [(p, value) for name, p, value in self.bounds() if name == latency]
            for (low, lower), (high, upper) in pairwise(given):
                if lower > upper:
                    raise ValueError(
                        f"{latency}{low.upper()} ({format_duration(lower)}) is above {latency}{high.upper()} "
                        f"({format_duration(upper)}): a lower percentile can't be the larger one"
                    )
            if any(value <= 0 for _, value in given):
                raise ValueError(f"a bound on {latency} must be above 0")
        for (name, p, value), (other, q, bound) in combinations(self.bounds(), 2):
            if name == "ttft" and other == "e2e" and p >= q and value > bound:
                raise ValueError(
                    f"ttft{p.upper()} ({format_duration(value)}) is above e2e{q.upper()} ({format_duration(bound)}): "
                    "the first token is part of the whole request, so the first bound can never bind"
                )
        return self


class Search(Model):
    """Which knobs are searched."""

    include: tuple[str, ...] = Field(default=(), description="Search only these knobs; all that apply when empty.")
    exclude: tuple[str, ...] = Field(default=(), description="Leave these knobs as the baseline has them.")
    pin: dict[str, KnobText] = Field(default_factory=dict, description="Set these knobs to a value in every candidate.")
    candidates: tuple[dict[str, KnobText], ...] = Field(
        default=(),
        max_length=50,
        description="Try these first, each laid over what production runs: `- {max_num_seqs: 64}`.",
    )
    allow_lossy: bool = Field(default=False, description="Try knobs that can change answers, as a KV cache in FP8.")
    early_stop: bool = Field(
        default=True,
        description="End a trial as soon as its interval says that it can't be the best, or can't meet the SLO.",
    )
    seed: int = Field(default=1, ge=0, description="Seed of the search.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for one, other, first, second in (
            ("include", "exclude", self.include, self.exclude),
            ("pin", "exclude", tuple(self.pin), self.exclude),
            ("pin", "include", tuple(self.pin), self.include),
        ):
            both = sorted(set(first) & set(second))
            if both:
                raise ValueError(f"{', '.join(both)} is named in both {one} and {other}")
        return self


class Budget(Model):
    """What a tuning may cost; the first limit that is reached ends the search."""

    trials: int = Field(default=20, ge=1, le=1000, description="Trials of the search, without the confirming runs.")
    gpu_minutes: float | None = Field(default=None, gt=0, description="Minutes that spares may be held, in all.")
    wall_time: Duration | None = Field(default=None, description="Time from the start of the search.")


class Confirm(Model):
    """How a finalist is measured again, in turns with the baseline."""

    finalists: int = Field(default=2, ge=1, le=5, description="How many of the best candidates are confirmed.")
    min_rounds: int = Field(default=3, ge=2, le=50, description="Fresh starts of each before a gain is settled.")
    max_rounds: int = Field(default=6, ge=2, le=50, description="Fresh starts of each before it is given up.")
    min_gain: Percentage = Field(default=0.05, description="A smaller gain is no improvement.")
    ladder: bool = Field(
        default=False,
        description="Measure what each change of the winner contributes, one trial for each, before it is promoted.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"minRounds ({self.min_rounds}) is above maxRounds ({self.max_rounds})")
        return self


class Retune(Model):
    """When a finished tuning starts again."""

    mode: Literal["never", "onDrift"] = Field(default="never", description="`onDrift`: when the traffic changed.")
    drift: Percentage = Field(default=0.3, description="Drift of the traffic past which it starts again.")


_LATER = frozenset({"promptsConfigMap", "temperature", "configMap"})
"""Fields of `load` that an upgrade may add to what is kept: left out, they are no part of a hash. Another hash would
begin every tuning anew, also one that has ended, and take production back in the middle of a rollout."""


def _without_later(found: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in found.items() if value is not None or name not in _LATER}
    return {name: _without_later(value) if isinstance(value, dict) else value for name, value in kept.items()}


class TuningSpec(Model):
    """What a person asks for."""

    target: Target
    spare: Spare = Field(default_factory=Spare)
    metrics: Metrics = Field(default_factory=Metrics)
    objective: Objective
    slo: Slo = Field(default_factory=Slo)
    load: Load = Field(default_factory=Load)
    search: Search = Field(default_factory=Search)
    budget: Budget = Field(default_factory=Budget)
    confirm: Confirm = Field(default_factory=Confirm)
    quality: Quality = Field(default_factory=Quality)
    promotion: Promotion = Field(default_factory=Promotion)
    retune: Retune = Field(default_factory=Retune)
    suspend: bool = Field(default=False, description="Hold the tuning where it is.")

    @property
    def offline(self) -> bool:
        """Whether there is no production: a command is tuned on the spare alone, and the winner is recommended."""
        return bool(self.target.command) and self.target.replicas == 0

    @property
    def spec_hash(self) -> str:
        """Names what results depend on; a change of it starts the tuning anew, other edits don't.

        How many spares there are decides when results come, not what they are.
        """
        fields = {"target", "spare", "metrics", "objective", "slo", "load", "search", "quality"}
        others = {
            "objective": {"api_price_per_million_tokens", "pareto"},
            "spare": {"parallelism"},
            "search": {"early_stop", "candidates"},
        }
        found = self.model_dump(mode="json", include=fields, exclude=others)
        return content_hash(found | {"load": _without_later(found["load"])})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target.urls and self.promotion.mode is not PromotionMode.RECOMMEND:
            raise ValueError(
                "target.urls names servers that somebody else runs, so promotion.mode must be recommend: "
                "Tunewright can't restart them"
            )
        if self.load.mode is LoadMode.HIGHEST_RATE and not self.slo.bounds():
            raise ValueError("load.mode highestRate needs a latency in slo: without one every rate is good")
        source = self.load.source
        if source is not None and (why := source.misplaced(in_cluster=self.target.deployment is not None)):
            raise ValueError(why)
        if self.target.urls and not self.spare.command:
            raise ValueError("target.urls needs spare.command: there is no command of production's to take")
        if self.target.deployment is not None and (self.spare.command or self.spare.environment):
            raise ValueError("the spare runs the target's own pod template: leave spare.command and environment out")
        if self.promotion.canary.labels and self.target.deployment is None:
            raise ValueError(
                "promotion.canary.labels is for clusters: on one machine our proxy sends the canary's share"
            )
        if self.promotion.canary.http_route is not None and self.target.deployment is None:
            raise ValueError(
                "promotion.canary.httpRoute is for clusters: on one machine our proxy sends the canary's share"
            )
        if self.quality.prompts_file is not None and self.target.deployment is not None:
            raise ValueError("quality.promptsFile is for one machine: in a cluster name a ConfigMap, promptsConfigMap")
        if self.quality.prompts_config_map is not None and self.target.deployment is None:
            raise ValueError("quality.promptsConfigMap is for clusters: on one machine name a file, promptsFile")
        if self.spare.command and not any("{port}" in word for word in self.spare.command):
            raise ValueError("spare.command must contain {port}, as in: --port {port}")
        if self.target.replicas == 0:
            self._check_offline()
        if self.slo.error_rate >= 1:
            raise ValueError("slo.errorRate of 100% or more allows a server that answers nothing")
        return self

    def _check_offline(self) -> None:
        if not self.target.command:
            raise ValueError("target.replicas of 0 belongs to target.command, which is then tuned without production")
        if self.promotion.mode is not PromotionMode.RECOMMEND:
            raise ValueError(
                "target.replicas is 0: there is no production to promote to, so promotion.mode must be recommend"
            )
        load = self.load
        if load.mode is not LoadMode.CLOSED_LOOP or None in given_lengths(load):
            raise ValueError(
                "target.replicas is 0: there is no traffic to learn from, so load must give it: mode closedLoop with "
                "concurrency, promptTokens and outputTokens (or lengths by prompt and output, or by pairs)"
            )
        if self.metrics.prometheus is not None or self.retune.mode == "onDrift":
            raise ValueError(
                "target.replicas is 0: there is no traffic to watch; leave metrics.prometheus and retune.mode out"
            )


class Tuning(Model):
    """A whole tuning file."""

    api_version: Literal["tunewright.dev/v1alpha1"]
    kind: Literal["Tuning"]
    metadata: Metadata
    spec: TuningSpec
