"""The protocols between the core and everything outside it. Adapters are held to them by the contract tests.

Long actions are `start(id)`, `poll(id)`, `cancel(id)` with deterministic ids: each call is short and may be repeated,
also by another process after a crash. Every call either returns within its own time-out or raises `PortError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tunewright.domain.answers import Answer, QualityPrompt
from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.load import LoadFile
from tunewright.domain.measurement import Interim, Measurement
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import Decision, Earlier, Failure, SearchInputs, StartMemory, TrialRecord, TuningRecord
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Workload


class PortError(Exception):
    """Something outside did not answer, or not as it should: what, where, and what to do. Worth another try."""


class Conflict(PortError):
    """The record was written by somebody else since it was read: read again and decide again."""


class Refused(Exception):
    """Asking again will not help; the message says what to change."""


class Objected(Refused):
    """A decision was not kept, because of another one that came before."""


Objection = Callable[[Sequence[Decision]], str | None]
"""Why a decision is not to be kept beside these; None where nothing speaks against it."""


def no_objection(_decisions: Sequence[Decision]) -> str | None:
    """None."""
    return None


Key = tuple[str, str]
"""Namespace and name of a tuning; outside of Kubernetes there are no namespaces, and it is empty."""


class Clock(Protocol):
    """Time, injected so that no test sleeps."""

    def now(self) -> float:
        """Seconds since the epoch: for records and for asking Prometheus."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump: for time-outs."""
        ...


# --- metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One series: its labels (with `__name__`), and its raw samples (seconds since the epoch, value) in order."""

    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def name(self) -> str:
        """The metric's name."""
        return self.labels["__name__"]


@dataclass(frozen=True)
class SeriesWindow:
    """Raw samples over one window, and the queries that fetched them."""

    start: float
    end: float
    series: Sequence[Series]
    queries: Sequence[str]
    warnings: Sequence[str] = ()


class MetricsSource(Protocol):
    """Where metrics come from: Prometheus, or a direct scrape of the servers."""

    def describe(self) -> str:
        """For people: `Prometheus at URL` or `direct scrape of N servers`."""
        ...

    def fetch(
        self, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
    ) -> SeriesWindow:
        """Raw samples of the series called one of `names` (histograms: `_bucket`, `_sum`, `_count` are names).

        `matchers` are labels that must be equal, beside the source's own selector. Series that are not there are
        simply absent; no answer at all, or an answer that is an error, raises `PortError` naming the query.
        """
        ...


# --- the spare -------------------------------------------------------------------------------------------------------


class ServerPhase(StrEnum):
    """Where a server on the spare is."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"  # it has answered a real one-token completion, and is proven to be the launched one
    FAILED = "failed"  # it is dead or was given up; its log has been read
    STOPPING = "stopping"


@dataclass(frozen=True)
class ServerStatus:
    """What the spare knows of one server."""

    phase: ServerPhase
    detail: str = ""
    url: str | None = None
    version: str | None = None
    start_seconds: float | None = None
    """From launch to the first completion; while it starts, so far (None: it waits for its node)."""
    effective: Mapping[str, KnobValue] = field(default_factory=dict)
    surprises: Sequence[str] = ()
    failure: Failure | None = None
    memory: StartMemory | None = None
    waiting: bool = False
    """While it starts: nothing runs yet, and what it waits for (a node, an image) will be told, so don't look often."""
    silent_seconds: float = 0.0
    """Once it is ready: how long /health has been left unanswered, until the server counts as failed."""


class Spare(Protocol):
    """Brings candidates up, one at a time on each spare (`slot`), and leaves nothing behind."""

    def start(self, trial_id: str, candidate: Candidate, slot: int = 0) -> None:
        """Launch it on spare `slot` (0, 1, … below `spare.parallelism`), unless it is launched already.

        Raises `PortError` while something of another trial is still on that spare.
        """
        ...

    def poll(self, trial_id: str) -> ServerStatus:
        """How it is; notices a death within a second, also under load. `ABSENT` when nothing is left of it."""
        ...

    def cancel(self, trial_id: str) -> None:
        """Begin to end it, whole; `poll` answers `ABSENT` once processes, memory and port are proven free."""
        ...

    def log_tail(self, trial_id: str, lines: int = 50) -> str:
        """The last lines of its log, kept also after it ended; empty when there is none."""
        ...

    def sweep(self, keep: Sequence[str]) -> list[str]:
        """End whatever belongs to trials not in `keep` (left by a crash); the ids that were found."""
        ...


# --- the load test ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadRequest:
    """One load test: what is sent where, for how long, judged by what.

    `quality_prompts` prompts of the workload's lengths are answered greedily after it, or `prompts` where given.
    """

    url: str
    workload: Workload
    model: str | None
    slo: Slo
    duration: float
    max_warmup: float
    seed: int
    quality_prompts: int = 0
    quality_max_tokens: int = 0
    prompts: Sequence[QualityPrompt] = ()
    api_key_file: str | None = None
    file: LoadFile | None = None
    """What of a ConfigMap the workload reads at its path: in a cluster alone."""
    interim: bool = False
    """Whether estimates are wanted before the window is over."""


class LoadPhase(StrEnum):
    """Where a load test is."""

    ABSENT = "absent"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class LoadStatus:
    """What is known of one load test."""

    phase: LoadPhase
    detail: str = ""
    progress: float = 0.0
    measurement: Measurement | None = None
    answers: Sequence[Answer] = ()
    interim: Interim | None = None


class LoadTest(Protocol):
    """Runs `tunewright load` as a child process or a pod."""

    def start(self, run_id: str, request: LoadRequest) -> None:
        """Start it unless it runs or has ended under this id."""
        ...

    def poll(self, run_id: str) -> LoadStatus:
        """How it is. An unreadable or empty result is `FAILED` with the raw text, never a number."""
        ...

    def cancel(self, run_id: str) -> None:
        """End it and forget its result; returns once it is gone."""
        ...


# --- production ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replica:
    """One production server as it is now."""

    name: str
    candidate_hash: str | None
    ready: bool
    canary: bool
    labels: Mapping[str, str]
    since: float
    version: str | None = None


@dataclass(frozen=True)
class TargetPlan:
    """What production is to look like. The adapter moves towards it, never below one ready known-good server.

    `updated` replicas run `candidate`, the others `baseline`; with `canary`, one more server of `candidate` takes
    `canary_share` of the requests.
    """

    baseline: Candidate
    candidate: Candidate
    updated: int = 0
    canary: bool = False
    canary_share: float = 0.0


@dataclass(frozen=True)
class TargetStatus:
    """Production as it is, against the last plan."""

    replicas: Sequence[Replica]
    desired: int
    settled: bool
    detail: str
    failure: Failure | None = None
    foreign: str | None = None


class Target(Protocol):
    """The vLLM workload in production; the only way to touch it."""

    def describe(self) -> str:
        """For people: what it is and where clients reach it."""
        ...

    def baseline(self) -> Candidate:
        """What production is configured to run now, read from production itself."""
        ...

    def beside_knobs(self) -> str:
        """What production runs beside its knobs, for people: image, model, all other arguments. The same text while
        nothing of that changed; empty where it can't change under a tuning (its own spec says it), or isn't known."""
        ...

    def observe(self) -> TargetStatus:
        """Production as it is; changes nothing."""
        ...

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        """Why this candidate could not be rolled out, before anything moves; empty when it could."""
        ...

    def notes(self, candidate: Candidate) -> Sequence[str]:
        """What whoever approves this candidate should know, though it is no obstacle; empty where there is nothing."""
        ...

    def apply(self, plan: TargetPlan) -> TargetStatus:
        """Take one idempotent step towards `plan`. A new server gets requests only after a real completion; one that
        is to go is drained first. `failure` is set when a server of `candidate` died or could not start."""
        ...

    def let_go(self) -> bool:
        """Leave production to somebody else who changed it: give back what was held (strategy, pause, canary), never
        what they set. May be repeated. False where nobody else can own it, and nothing was done."""
        ...

    def recipe(self, candidate: Candidate) -> Recipe:
        """What production would be given to run `candidate`, for the files of `tunewright recommend`."""
        ...

    def recommend(self, candidate: Candidate) -> str:
        """What a person would change by hand to run `candidate`, as text."""
        ...


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """The next candidate, and why."""

    candidate: Candidate
    reason: str


class Stop(Protocol):
    """What a `threading.Event` offers: loops wait on it, so that stopping is noticed at once."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most so many seconds."""
        ...


class Proposer(Protocol):
    """Space, history and seed to the next candidate; without state of its own, so it can't disagree with the trials."""

    def propose(
        self,
        baseline: Candidate,
        trials: Sequence[TrialRecord],
        profile: TrafficProfile | None,
        earlier: Sequence[Earlier] = (),
    ) -> Proposal | None:
        """A candidate that was not tried yet and is statically valid; None when the space is exhausted.

        Trials that still run are among `trials`: they are not proposed again, and count as if they had come out as
        expected.
        `earlier` is what tunings before this one measured: a prior.
        """
        ...

    def inputs(self, baseline: Candidate, trials: Sequence[TrialRecord]) -> SearchInputs:
        """What is known and what is left alone, for people."""
        ...

    def objection(self, candidate: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> str | None:
        """Why a candidate that a person asked for can't run here; None when it may."""
        ...

    def simplify(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Candidate:
        """`winner` without the knobs whose effect is within noise as far as the trials can tell."""
        ...

    def rungs(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Sequence[Candidate]:
        """What is between baseline and winner, each with one change more than the one before, the largest first."""
        ...

    def lossy(self, candidate: Candidate, baseline: Candidate) -> Sequence[str]:
        """The knobs by which `candidate` can change answers where `baseline` does not."""
        ...


# --- the store -------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """The records. Every write is durable when the call returns, or has not happened."""

    def names(self) -> list[str]:
        """Names of all tunings, sorted."""
        ...

    def load(self, name: str) -> TuningRecord | None:
        """The tuning's record."""
        ...

    def save(self, record: TuningRecord) -> TuningRecord:
        """Write it if its version is the stored one (0: not there yet); the record with its new version.

        Raises `Conflict` otherwise.
        """
        ...

    def trials(self, name: str) -> list[TrialRecord]:
        """The tuning's trials by number."""
        ...

    def save_trial(self, name: str, trial: TrialRecord) -> None:
        """Write one trial, over the one of the same id."""
        ...

    def clear_trials(self, name: str) -> None:
        """Forget the trials of a tuning that starts anew."""
        ...

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        """Keep a person's decision until the loop takes it up.

        `unless` is asked in the same step as it is written, of all decisions there are by then, oldest first. Raises
        `Objected` with what it says.
        """
        ...

    def decisions(self, name: str) -> list[Decision]:
        """Every decision ever taken on this tuning, oldest first."""
        ...

    def delete(self, name: str) -> None:
        """Forget the tuning and all that belongs to it."""
        ...


class Stores(Protocol):
    """The stores that one program serves: one, or in a cluster one for each namespace that has tunings. Thread-safe."""

    @property
    def own(self) -> str:
        """The namespace of the program itself; empty outside of Kubernetes."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether the tunings of all namespaces are served, not those of `own` alone."""
        ...

    def of(self, namespace: str) -> Store | None:
        """The store of one namespace, also where it has no tunings; None where its tunings are not served here."""
        ...

    def tunings(self) -> list[Key]:
        """Every tuning that is served, sorted."""
        ...
