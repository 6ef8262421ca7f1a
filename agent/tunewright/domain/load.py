"""The part of the tuning file about the load of every test."""

from enum import StrEnum
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from tunewright.domain.model import Model
from tunewright.domain.traffic import CONFIG_MAP, GivenLengths, Ramp, Sessions, Trace, TraceFile
from tunewright.domain.units import Duration, Part, format_duration


class LoadMode(StrEnum):
    """How requests arrive in a load test."""

    PROFILE = "profile"
    CLOSED_LOOP = "closedLoop"
    OPEN_LOOP = "openLoop"
    SESSIONS = "sessions"
    TRACE = "trace"
    HIGHEST_RATE = "highestRate"


class LoadSource(NamedTuple):
    """What a load is read from: a file on one machine, a ConfigMap in a cluster."""

    field: str
    """Of the tuning file's `load` block."""
    recording: TraceFile | None
    """None: it is a file of prompts."""
    file: str | None
    config_map: str | None

    def misplaced(self, *, in_cluster: bool) -> str | None:
        """Why load tests can't read it there, and what to name instead; None: they can."""
        here, there = ("promptsFile", "promptsConfigMap") if self.recording is None else (".file", ".configMap")
        if in_cluster and self.file is not None:
            return (
                f"load.{self.field} is a file on this machine, which the pods of load tests in a cluster don't have: "
                f"name a ConfigMap, load.{self.field.replace(here, there)}"
            )
        if not in_cluster and self.config_map is not None:
            instead = self.field.replace(there, here)
            return f"load.{self.field} is for clusters: on one machine name a file, load.{instead}"
        return None


class LoadFile(Model):
    """The content of a ConfigMap as it was when the tuning began: what every load test of it reads."""

    config_map: str = Field(description="That the tuning names.")
    key: str = Field(description="Of the ConfigMap.")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of what the key held, in hex.")
    path: str = Field(description="Where load tests find it.")
    told: str = Field(description="What is in it, for people.")


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
    prompts_config_map: str | None = Field(
        default=None,
        pattern=CONFIG_MAP,
        description="In a cluster: the ConfigMap whose key `prompts.jsonl` or `prompts.jsonl.gz` holds them.",
    )
    prefix_reuse: Part | None = Field(default=None, description="Share of prompt tokens that is shared.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="At which answers are sampled, 0 (greedy) by default. Sampling costs the server time.",
    )
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
                "promptsConfigMap": self.prompts_config_map,
            }
            wrong = " and ".join(name for name, value in given.items() if value is not None)
            if wrong:
                raise ValueError(f"{wrong} can't be with mode {self.mode.value}: its block says it all")
        self._check_lengths()
        return self

    @property
    def source(self) -> LoadSource | None:
        """What it is read from, if it is: of the trace, the lengths' trace and the prompts only one can be given."""
        lengths = self.lengths.trace if self.lengths is not None else None
        for field, recording in (("trace", self.trace), ("lengths.trace", lengths)):
            if recording is not None:
                ending = "file" if recording.config_map is None else "configMap"
                return LoadSource(f"{field}.{ending}", recording, recording.file, recording.config_map)
        if texts := self._prompts_field:
            return LoadSource(texts, None, self.prompts_file, self.prompts_config_map)
        return None

    def reading(self, path: str) -> "Load":
        """The same load, read from a file at `path` instead of the ConfigMap that it names."""
        here: dict[str, object] = {"file": path, "config_map": None}
        found: dict[str, object] = {}
        if self.prompts_config_map is not None:
            found = {"prompts_file": path, "prompts_config_map": None}
        elif self.trace is not None:
            found["trace"] = self.trace.model_copy(update=here)
        elif self.lengths is not None and self.lengths.trace is not None:
            found["lengths"] = self.lengths.model_copy(update={"trace": self.lengths.trace.model_copy(update=here)})
        return self.model_copy(update=found)

    @property
    def _prompts_field(self) -> str | None:
        if self.prompts_file is not None:
            return "promptsFile"
        return "promptsConfigMap" if self.prompts_config_map is not None else None

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
        texts = self._prompts_field
        if texts is None:
            return
        if self.prompts_file is not None and self.prompts_config_map is not None:
            raise ValueError("name only one of promptsFile and promptsConfigMap")
        if self.mode is LoadMode.HIGHEST_RATE:
            raise ValueError(
                f"{texts} can't be with mode highestRate: each level would send the same prompts to the same "
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
                f"{wrong} can't be with {texts}: its texts are as long as they are, and share what they do"
            )
