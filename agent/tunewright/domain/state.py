"""The records: one per tuning, one per trial. They are the only truth; everything else is derived from them."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.load import Load, LoadFile
from tunewright.domain.measurement import Estimate, Measurement
from tunewright.domain.model import Model
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Source, TrafficProfile
from tunewright.domain.recipe import Recipe
from tunewright.domain.tuning import Tuning
from tunewright.domain.verdict import Reading, Verdict


class FailureKind(StrEnum):
    """Why a server did not come up, or did not stay up."""

    INVALID_FLAG = "invalidFlag"  # the flag, or its value, is not of this vLLM version
    INVALID_COMBINATION = "invalidCombination"  # vLLM refuses these values together
    OUT_OF_MEMORY = "outOfMemory"  # at start
    OUT_OF_MEMORY_UNDER_LOAD = "outOfMemoryUnderLoad"  # after a healthy start
    KV_TOO_SMALL = "kvTooSmall"  # the cache holds not even one request
    MAMBA_BLOCKS = "mambaBlocks"  # max_num_seqs above what the Mamba cache holds
    UNSUPPORTED_BACKEND = "unsupportedBackend"  # not on this GPU or for this model
    GPU_NOT_CLEAN = "gpuNotClean"  # somebody else holds the memory
    PORT_IN_USE = "portInUse"
    UNSCHEDULABLE = "unschedulable"  # no node takes the pod, or its node can't bring it up
    MODEL_MISSING = "modelMissing"
    CRASHED = "crashed"  # the engine died for a reason not listed here
    HUNG = "hung"  # it ran, but did not answer by its deadline
    KILLED = "killed"  # by a signal from outside
    NOT_AS_LAUNCHED = "notAsLaunched"  # the effective configuration is not the candidate's
    LOAD_TEST = "loadTest"  # the load test itself failed, or its result is void
    UNKNOWN = "unknown"


MACHINE_FAULTS = frozenset(
    {
        FailureKind.GPU_NOT_CLEAN,
        FailureKind.PORT_IN_USE,
        FailureKind.UNSCHEDULABLE,
        FailureKind.MODEL_MISSING,
        FailureKind.KILLED,
        FailureKind.LOAD_TEST,
    }
)
"""Kinds that are never blamed on the candidate: the trial is tried again, a bounded number of times."""


class Failure(Model):
    """A failed start or run, as a person would want to be told."""

    kind: FailureKind
    cause: str = Field(description="The first line of the log that names the root cause.")
    advice: str = Field(default="", description="What to do about it.")
    limits: dict[str, float] = Field(
        default_factory=dict, description="Bounds the message told, as `max_num_seqs` at most 128."
    )
    exit_code: int | None = None

    @property
    def machine_fault(self) -> bool:
        """Whether the machine is at fault, not the candidate."""
        return self.kind in MACHINE_FAULTS


class StartMemory(Model):
    """What a good start logged of its memory; None: the line was not there."""

    available_kv_gib: float | None = Field(default=None, description="GiB left for the KV cache, per GPU.")
    kv_cache_tokens: int | None = Field(default=None, description="Tokens that the KV cache holds.")
    max_concurrency: float | None = Field(default=None, description="Requests of full length that it holds at once.")
    device_gib: float | None = Field(default=None, description="GiB of one GPU's whole memory.")


class TrialPurpose(StrEnum):
    """Why a trial is run."""

    BASELINE = "baseline"
    SEARCH = "search"
    CONFIRM = "confirm"
    LADDER = "ladder"  # a step from the baseline to the winner: what each change contributes


class TrialPhase(StrEnum):
    """Where a trial is; each step is idempotent, so that it can be taken again after a crash."""

    PENDING = "Pending"
    STARTING = "Starting"
    MEASURING = "Measuring"
    STOPPING = "Stopping"
    DONE = "Done"


class TrialOutcome(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"  # measured, and it meets the SLO
    INFEASIBLE = "infeasible"  # measured but misses the SLO, or the candidate can't run here
    STOPPED = "stopped"  # ended early, with an estimate: it can't be the best, or can't meet the SLO; never chosen
    FAILED = "failed"  # by the machine's fault, more often than it is tried again


class TrialRecord(Model):
    """One candidate brought up on the spare, load-tested and judged."""

    id: str = Field(description="Deterministic: `<number>-<candidate hash>`, so that nothing is run twice.")
    number: int = Field(ge=0)
    purpose: TrialPurpose
    candidate: Candidate
    round: int = Field(default=0, ge=0, description="Confirming round or step of the ladder, from 1; 0 elsewhere.")
    reason: str = Field(default="", description="Why this candidate was proposed.")
    slot: int = Field(default=0, ge=0, description="The spare it runs on: 0, 1, … below `spare.parallelism`.")
    attempt: int = Field(default=1, ge=1, description="Counts launches; part of the name of each.")
    machine_faults: int = Field(default=0, ge=0, description="Attempts that the machine spoilt.")
    phase: TrialPhase = TrialPhase.PENDING
    phase_since: float = 0.0
    created_at: float = 0.0
    ready_at: float | None = None
    load_started_at: float | None = None
    finished_at: float | None = None
    start_seconds: float | None = Field(default=None, description="From launch to the first completion.")
    outcome: TrialOutcome | None = None
    measurement: Measurement | None = None
    answers: tuple[Answer, ...] = Field(default=(), description="Greedy answers, for the quality gate.")
    failure: Failure | None = None
    stopped: str | None = Field(default=None, description="Why its load test was ended before its time.")
    objective: float | None = Field(default=None, description="Larger is better, also when minimizing.")
    slo_margin: float | None = Field(
        default=None, description="Smallest (bound − value) / bound over the SLO; negative: missed."
    )
    effective: dict[str, KnobValue] = Field(default_factory=dict, description="Knobs as the server reports them.")
    surprises: tuple[str, ...] = Field(default=(), description="Knobs that the server changed silently.")
    memory: StartMemory | None = Field(default=None, description="What the start logged of its memory.")

    @property
    def of_search(self) -> bool:
        """Whether it is of the search or its baseline, not of what comes after."""
        return self.purpose in (TrialPurpose.BASELINE, TrialPurpose.SEARCH)

    @property
    def gpu_seconds(self) -> float:
        """Seconds that this trial held its spare."""
        return (self.finished_at or self.phase_since) - self.created_at if self.created_at else 0.0


class Earlier(Model):
    """A trial of an earlier tuning of the same target: a prior for the search, never a result."""

    tuning: str = Field(description="The run that it was part of: its name and when it began.")
    trial: str
    at: float
    candidate: Candidate
    version: str | None = Field(description="vLLM's, as the trial's measurement told it.")
    objective: float | None = Field(description="By the objective of the tuning that it is a prior of.")
    slo_margin: float | None
    failed: bool = Field(description="It did not run, by the candidate's own fault.")
    memory: StartMemory | None = None


class SearchInputs(Model):
    """What the search knew when it began; empty where it was not known."""

    version: str = Field(default="", description="vLLM's.")
    model: str = ""
    gpu: str = ""
    searched: tuple[str, ...] = Field(default=(), description="Knobs of which other values are tried.")
    flags_unknown: str = Field(default="", description="Why vLLM's own flags could not be asked; empty: they were.")
    missing: tuple[str, ...] = Field(default=(), description="Knobs that this vLLM does not have: never passed.")
    renamed: dict[str, str] = Field(default_factory=dict, description="Of these, those it has under another flag.")
    not_tuned: tuple[str, ...] = Field(default=(), description="Flags of this vLLM that no knob stands for.")


class ConfirmStatus(StrEnum):
    """What the confirming runs say of a finalist."""

    RUNNING = "running"
    BETTER = "better"
    NOT_BETTER = "notBetter"
    NOT_SETTLED = "notSettled"


WIDEST_GAIN = 20.0
"""An interval of a gain that reaches further than to 20 times the baseline says only that nothing is known yet."""


class Gain(Model):
    """The gain over the baseline, as a ratio minus 1, from the confirming runs alone."""

    estimate: Estimate
    rounds: int = Field(ge=0, description="Fresh starts of each side that it rests on.")
    status: ConfirmStatus
    reason: str

    @property
    def bounded(self) -> bool:
        """Whether the interval says anything: that of two starts may reach to thousands of times the baseline."""
        return self.rounds >= 2 and self.estimate.high <= WIDEST_GAIN


class Finalist(Model):
    """A candidate that is measured again, in turns with the baseline."""

    candidate: Candidate
    gain: Gain | None = None


class Decision(Model):
    """What a person (or the mode `auto`) decided. Every decision is kept."""

    action: Literal["approve", "reject", "suspend", "resume", "abort", "rollback", "propose"]
    at: float
    by: str
    reason: str = ""
    candidate: str = Field(default="", description="Hash of the candidate that was decided on.")
    spec: str = Field(default="", description="specHash at that moment.")
    baseline: str = Field(default="", description="Hash of the baseline at that moment.")
    values: dict[str, str] = Field(default_factory=dict, description="Of `propose`: the knobs to be tried, as text.")


class Wish(Model):
    """A candidate that a person asked for."""

    values: dict[str, str]
    by: str
    at: float


class PromotionState(Model):
    """Where the guarded rollout is."""

    candidate: Candidate
    baseline: Candidate
    replicas: int = Field(ge=1)
    updated: int = Field(default=0, ge=0, description="Replicas that are to run the candidate.")
    canary_since: float | None = Field(default=None, description="When the canary answered its first completion.")
    judged_from: float | None = Field(default=None, description="Start of the window that is judged.")
    verdict: Verdict | None = None
    readings: tuple[Reading, ...] = Field(default=(), description="Raw numbers of the canary's last verdict.")
    canary_verdict: Verdict | None = Field(default=None, description="The verdict on which the roll began.")
    before: tuple[Reading, ...] = Field(default=(), description="Raw numbers of production before the canary came.")
    rolled_at: float | None = None
    back_reason: str | None = Field(default=None, description="Why it goes back; None: it goes forward.")


class PhaseChange(Model):
    """One line of the tuning's story."""

    at: float
    phase: Phase
    sentence: str
    by: str = Field(default="", description="Whose abort or rollback it was; empty: nobody's.")


class TuningRecord(Model):
    """All that is known of one tuning, beside its trials."""

    tuning: Tuning
    version: int = Field(default=0, description="Counts writes; a write of an old version is refused.")
    spec_hash: str
    phase: Phase = Phase.PENDING
    phase_since: float
    waited: float = Field(default=0.0, description="Seconds suspended in this phase: they cost no deadline.")
    suspended_since: float | None = None
    sentence: str = ""
    source: Source | None = None
    load_file: LoadFile | None = Field(
        default=None, description="Copied when it began, where `load` names a ConfigMap."
    )
    profile: TrafficProfile | None = None
    baseline: Candidate | None = None
    beside_knobs: str = Field(default="", description="What production ran beside its knobs then; empty: not known.")
    baseline_noise: float | None = Field(default=None, description="Log-sd between fresh starts, when known.")
    search_since: float | None = None
    inputs: SearchInputs | None = Field(default=None, description="What the search knew when it began.")
    earlier: tuple[Earlier, ...] = Field(default=(), description="What earlier tunings of this target measured.")
    earlier_by: str = Field(default="", description="Objective and SLO by which they were judged.")
    target_key: str = Field(default="", description="What is tuned, by which earlier tunings are found.")
    proposed: tuple[Wish, ...] = Field(default=(), description="Candidates that people asked for, in order.")
    finalists: tuple[Finalist, ...] = ()
    winner: Candidate | None = None
    recipe: Recipe | None = Field(default=None, description="How the winner would be set by hand.")
    ladder: tuple[Candidate, ...] = Field(
        default=(), description="What is measured between baseline and winner, each with one change more."
    )
    simplified: bool = False
    promotion: PromotionState | None = None
    approval_since: float | None = None
    notes: tuple[str, ...] = Field(
        default=(), description="What else an approver should know of production, from when the approval was asked for."
    )
    decisions: tuple[Decision, ...] = ()
    history: tuple[PhaseChange, ...] = ()
    errors: int = Field(default=0, ge=0, description="Failures in a row of the current step.")
    foreign: str = Field(default="", description="Who else changes or owns what was set in production; empty: nobody.")
    foreign_since: float | None = Field(default=None, description="Since when without a pause.")
    drift: float | None = Field(default=None, description="Drift of the traffic since it was learned, if looked at.")
    drift_at: float | None = Field(default=None, description="When the traffic was last compared, or could not be.")

    @property
    def name(self) -> str:
        """The tuning's name."""
        return self.tuning.metadata.name

    @property
    def stopped_by(self) -> str:
        """Who ended it, or sent production back, by abort or rollback; empty: nobody did, or it went wrong since."""
        past = [change for change in self.history if change.phase is not Phase.ROLLED_BACK]
        return past[-1].by if past and self.phase in (Phase.FAILED, Phase.ROLLING_BACK, Phase.ROLLED_BACK) else ""

    @property
    def load(self) -> Load:
        """The spec's load as load tests are given it: by the file that is kept for them, not by a ConfigMap's name."""
        load = self.tuning.spec.load
        return load if self.load_file is None else load.reading(self.load_file.path)
