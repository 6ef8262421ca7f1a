"""What the API shows of tunings and trials: explicit fields, so that nothing is shown by accident."""

from collections.abc import Sequence

from pydantic import Field

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.measurement import Measurement
from tunewright.domain.model import Model
from tunewright.domain.pareto import measure, pareto_front
from tunewright.domain.phases import TERMINAL, Phase
from tunewright.domain.profile import Source
from tunewright.domain.redact import HIDDEN
from tunewright.domain.state import (
    ConfirmStatus,
    Decision,
    Failure,
    Finalist,
    PhaseChange,
    SearchInputs,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.tuning import TuningSpec

PREFIX = "/api/v1alpha1"

MAX_HISTORY = 200
"""Lines of a tuning's story that are shown: the latest ones."""


class TuningSummary(Model):
    """One line about a tuning. Times are seconds since the epoch."""

    namespace: str | None = Field(description="In a cluster; None outside of one.")
    name: str
    phase: Phase
    phase_since: float
    ended: bool
    suspended: bool
    sentence: str = Field(description="What it does, and why.")
    gain: float | None = Field(description="Confirmed gain of the winner as a ratio minus 1; None before that.")
    source: Source | None = Field(description="Where the numbers come from: simulated, CPU or GPU.")
    waits_for_approval: bool


class TuningList(Model):
    """A page of tunings by name, or by namespace and name."""

    items: tuple[TuningSummary, ...]
    next: str | None = Field(description="Ask with `after` set to this for the next page; None: that was all.")


class CandidateView(Model):
    """A candidate: knobs that are set explicitly, under the hash that names them."""

    hash: str
    values: dict[str, KnobValue]


class FinalistView(Model):
    """A finalist, with what the confirming runs say of it."""

    candidate: CandidateView
    gain: float | None = Field(description="Ratio minus 1 over the baseline.")
    low: float | None = Field(description="Lower end of its interval.")
    high: float | None = Field(description="Upper end of its interval.")
    rounds: int = Field(description="Fresh starts of each side that it rests on.")
    status: ConfirmStatus
    reason: str


class TuningView(TuningSummary):
    """A tuning."""

    spec: TuningSpec = Field(description="As it was asked for; values of environment variables are hidden.")
    spec_hash: str
    trials: int = Field(description="How many there are.")
    suspended_since: float | None
    baseline: CandidateView | None
    finalists: tuple[FinalistView, ...]
    winner: CandidateView | None
    inputs: SearchInputs | None = Field(description="What the search knew when it began, and what it leaves alone.")
    errors: int = Field(description="Failures in a row of the current step.")
    history: tuple[PhaseChange, ...] = Field(description="Its story: the latest changes of phase.")


class TrialView(Model):
    """A trial. Times are seconds since the epoch, spans are seconds."""

    id: str
    number: int
    purpose: TrialPurpose
    candidate: CandidateView
    round: int
    reason: str = Field(description="Why this candidate was tried.")
    attempt: int
    phase: TrialPhase
    phase_since: float
    created_at: float
    finished_at: float | None
    start_seconds: float | None
    slot: int = Field(description="The spare it ran on, from 0.")
    spare_seconds: float = Field(description="How long it held that spare.")
    outcome: TrialOutcome | None
    objective: float | None = Field(description="Larger is better, also when minimizing.")
    slo_margin: float | None = Field(description="Smallest (bound - value) / bound over the SLO; negative: missed.")
    failure: Failure | None
    stopped: str | None = Field(description="Why its load test was ended early; its figures are an estimate then.")
    effective: dict[str, KnobValue] = Field(description="Knobs as the server reported them.")
    surprises: tuple[str, ...] = Field(description="Knobs that the server changed silently.")
    measurement: Measurement | None


class TrialList(Model):
    """A page of trials by number."""

    items: tuple[TrialView, ...]
    next: int | None = Field(description="Ask with `after` set to this for the next page; None: that was all.")


class ParetoPoint(Model):
    """One trial on the front."""

    trial: str
    number: int
    candidate: CandidateView
    values: dict[str, float] = Field(description="By measure; latencies in seconds, rates per second.")


class ParetoView(Model):
    """The trials, measured whole and within the SLO, that no other such one beats in every measure (one run each)."""

    measures: tuple[str, ...] = Field(description="As spec.objective.pareto names them.")
    points: tuple[ParetoPoint, ...]


class DecisionView(Model):
    """A decision: who, when, what, why, and on what."""

    number: int = Field(description="Counts the decisions of this tuning, from 0.")
    taken_up: bool = Field(description="The loop has seen it; what came of it is in the tuning's story.")
    decision: Decision


class DecisionList(Model):
    """A page of decisions, oldest first."""

    items: tuple[DecisionView, ...]
    next: int | None = Field(description="Ask with `after` set to this for the next page; None: that was all.")


def collection(namespace: str) -> str:
    """The path of the tunings of a namespace; outside of a cluster it is empty, and there is one path."""
    return f"{PREFIX}/namespaces/{namespace}/tunings" if namespace else f"{PREFIX}/tunings"


def summary(record: TuningRecord, namespace: str = "") -> dict[str, object]:
    """The fields of `TuningSummary`; `namespace` is empty outside of a cluster."""
    winner = record.winner
    won = next((f for f in record.finalists if winner is not None and f.candidate.hash == winner.hash), None)
    return {
        "namespace": namespace or None,
        "name": record.name,
        "phase": record.phase,
        "phase_since": record.phase_since,
        "ended": record.phase in TERMINAL,
        "suspended": record.suspended_since is not None,
        "sentence": record.sentence,
        "gain": won.gain.estimate.value if won and won.gain else None,
        "source": record.source,
        "waits_for_approval": record.phase is Phase.AWAITING_APPROVAL,
    }


def tuning_view(record: TuningRecord, trials: int, namespace: str = "") -> TuningView:
    """One tuning in full."""
    return TuningView.model_validate(
        summary(record, namespace)
        | {
            "spec": without_secrets(record.tuning.spec),
            "spec_hash": record.spec_hash,
            "trials": trials,
            "suspended_since": record.suspended_since,
            "baseline": candidate_view(record.baseline),
            "finalists": tuple(finalist_view(finalist) for finalist in record.finalists),
            "winner": candidate_view(record.winner),
            "inputs": record.inputs,
            "errors": record.errors,
            "history": record.history[-MAX_HISTORY:],
        }
    )


def without_secrets(spec: TuningSpec) -> TuningSpec:
    """The spec with the values of its environment variables hidden: they are where secrets are kept."""
    hidden = {
        part: given.model_copy(update={"environment": dict.fromkeys(given.environment, HIDDEN)})
        for part, given in (("target", spec.target), ("spare", spec.spare))
    }
    return spec.model_copy(update=hidden)


def candidate_view(candidate: Candidate | None) -> CandidateView | None:
    """A candidate with its name."""
    return None if candidate is None else _candidate(candidate)


def finalist_view(finalist: Finalist) -> FinalistView:
    """A finalist. Before two rounds there is no interval, and none is shown."""
    gain = finalist.gain
    known = gain is not None and gain.rounds >= 2
    return FinalistView(
        candidate=_candidate(finalist.candidate),
        gain=gain.estimate.value if gain and known else None,
        low=gain.estimate.low if gain and known else None,
        high=gain.estimate.high if gain and known else None,
        rounds=gain.rounds if gain else 0,
        status=gain.status if gain else ConfirmStatus.RUNNING,
        reason=gain.reason if gain else "not measured yet",
    )


def trial_view(trial: TrialRecord) -> TrialView:
    """A trial without its answers, which are text of the model's and of use to the quality gate alone."""
    same = TrialView.model_fields.keys() - {"candidate", "spare_seconds"}
    return TrialView.model_validate(
        {name: getattr(trial, name) for name in same}
        | {"candidate": _candidate(trial.candidate), "spare_seconds": trial.gpu_seconds}
    )


def pareto_view(record: TuningRecord, trials: Sequence[TrialRecord]) -> ParetoView:
    """The front of the search's trials; empty where the spec names no measures."""
    names = record.tuning.spec.objective.pareto
    front = pareto_front([trial for trial in trials if trial.of_search], names) if names else []
    return ParetoView(
        measures=names,
        points=tuple(
            ParetoPoint(
                trial=trial.id,
                number=trial.number,
                candidate=_candidate(trial.candidate),
                values={name: measure(name, trial.measurement) for name in names},
            )
            for trial in front
            if trial.measurement is not None
        ),
    )


def decision_views(decisions: Sequence[Decision], taken_up: int) -> list[DecisionView]:
    """Decisions in order; the first `taken_up` are known to the loop."""
    return [DecisionView(number=n, taken_up=n < taken_up, decision=d) for n, d in enumerate(decisions)]


def _candidate(candidate: Candidate) -> CandidateView:
    return CandidateView(hash=candidate.hash, values=dict(candidate.values))
