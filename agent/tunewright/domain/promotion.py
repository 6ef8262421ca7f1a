"""The part of the tuning file about what comes after the search: the quality gate, and the guarded rollout."""

import re
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.traffic import CONFIG_MAP
from tunewright.domain.units import Duration, Part, Percentage

_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class Quality(Model):
    """The gate before promotion for what could change answers: lossy knobs, and a speculation that is new."""

    always: bool = Field(default=False, description="Every candidate must pass it.")
    prompts: int = Field(
        default=16, ge=1, le=1000, description="Prompts answered greedily by both, as long as production's."
    )
    prompts_file: str | None = Field(
        default=None,
        min_length=1,
        description='Your own prompts instead: one `{"prompt": "…", "answer": "…"}` a line, `answer` as you like.',
    )
    prompts_config_map: str | None = Field(
        default=None,
        pattern=CONFIG_MAP,
        description="In a cluster: the ConfigMap whose key `prompts.jsonl` holds them.",
    )
    max_tokens: int = Field(default=32, ge=1, le=4096, description="Length of each answer in tokens.")
    min_agreement: Part = Field(
        default=0.98, description="Share of answer tokens up to the first difference, on average."
    )
    max_divergence: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean divergence (symmetric KL, in nats) of the next token's probabilities. Left out: "
        "0.05, where the servers tell log-probabilities; given: those that don't tell them do not pass.",
    )
    max_accuracy_loss: Percentage = Field(
        default=0.01, description="Share of the prompts with an `answer` that may be lost."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prompts_file is not None and self.prompts_config_map is not None:
            raise ValueError("name only one of promptsFile and promptsConfigMap")
        return self


class PromotionMode(StrEnum):
    """Who decides that the winner goes to production."""

    RECOMMEND = "recommend"
    APPROVE = "approve"
    AUTO = "auto"


class Canary(Model):
    """The first server of the winner in production."""

    share: Part = Field(default=0.25, description="Share of production's requests that the canary gets.")
    warmup: Duration = Field(default=60.0, description="Its first minutes are not judged: caches are cold.")
    traffic_timeout: Duration = Field(default=600.0, description="No traffic by then: back, saying so.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="In a cluster: more labels of its pod, by which a router (production-stack, llm-d) finds servers.",
    )

    http_route: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
        description="In a cluster: the HTTPRoute (Gateway API) before the target's Service. Its weights then give the "
        "canary `share`; without it the share is one server's of all.",
    )

    @model_validator(mode="after")
    def _valid_labels(self) -> Self:
        for key, value in self.labels.items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                raise ValueError(f"{key}: {value} is no label that Kubernetes takes")
        return self


class FurtherMetric(StrEnum):
    """What the canary is judged by beside latencies and errors, which are always required."""

    ABORTED = "aborted"
    PREEMPTIONS = "preemptions"
    THROUGHPUT = "throughput"


class Analysis(Model):
    """The canary against the stable servers over the same minutes."""

    interval: Duration = Field(default=30.0, description="Time between two looks.")
    min_duration: Duration = Field(
        default=300.0, description="No pass before then; what is surely worse goes back sooner."
    )
    max_duration: Duration = Field(default=3600.0, description="A verdict still open by then goes back.")
    min_requests: int = Field(default=50, ge=1, description="Requests on each side before any verdict.")
    tolerance: Percentage = Field(
        default=0.1,
        description="Latencies worse by this share, or more, are caught; as good passes; between, the nearer.",
    )
    max_error_rate: Percentage = Field(
        default=0.01, description="Back, above this or surely more than the others and half of this."
    )
    aborted_tolerance: Percentage = Field(
        default=0.01, description="Back, when surely so many more of the requests are aborted than on the others."
    )
    preemption_tolerance: Percentage = Field(
        default=0.05, description="Preemptions per 100 requests that the canary may have more than the others."
    )
    throughput_tolerance: Percentage = Field(
        default=0.1, description="Output tokens per second and GPU that may be lost, judged while requests wait."
    )
    required: tuple[FurtherMetric, ...] = Field(
        default=(FurtherMetric.ABORTED, FurtherMetric.PREEMPTIONS),
        description="`aborted`, `preemptions`, `throughput`: without a metric that is named here nothing passes. Name "
        "`throughput` only where requests always wait.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_duration > self.max_duration:
            raise ValueError("minDuration is above maxDuration")
        return self


class Promotion(Model):
    """How the winner goes to production."""

    mode: PromotionMode = Field(
        default=PromotionMode.APPROVE,
        description="`recommend` changes nothing, `approve` waits for a person, `auto` does not.",
    )
    take_over: bool = Field(default=False, description="Take fields over from the tool that owns them.")
    approval_expiry: Duration = Field(
        default=604800.0, description="An approval not given, or not begun on, by then expires."
    )
    canary: Canary = Field(default_factory=Canary)
    analysis: Analysis = Field(default_factory=Analysis)
    watch: Duration = Field(default=3600.0, description="After the roll: a regression within goes back.")
    foreign_timeout: Duration = Field(
        default=3600.0,
        description="Going back is held for so long by what somebody else changed; then production is left to them.",
    )
