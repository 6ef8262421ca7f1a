"""Everything a person needs to decide on a promotion, in one answer."""

from collections.abc import Sequence

from pydantic import Field

from tunewright.api.views import CandidateView, FinalistView, candidate_view, collection, finalist_view
from tunewright.controller.decisions import live_approval
from tunewright.controller.gating import must_prove
from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.measurement import Measurement
from tunewright.domain.model import Model
from tunewright.domain.objective import objective_unit
from tunewright.domain.phases import TOUCHES_PRODUCTION, Phase
from tunewright.domain.profile import Source
from tunewright.domain.promotion import PromotionMode
from tunewright.domain.quality import judge_quality
from tunewright.domain.state import Decision, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.units import format_duration, format_share
from tunewright.domain.verdict import Verdict
from tunewright.knobs.catalogue import is_lossy


class Binding(Model):
    """What an approval or rejection must name: it is about this very candidate, spec and baseline."""

    candidate: str
    spec: str
    baseline: str


class Difference(Model):
    """One knob that the winner sets otherwise than the baseline; None means vLLM's default."""

    knob: str
    baseline: KnobValue | None
    candidate: KnobValue | None
    lossy: bool = Field(description="The candidate's value can change answers.")


class Side(Model):
    """Means over the sound confirming runs of one side. Latencies are in seconds, rates per second."""

    runs: int
    objective: float
    output_tokens_per_second: float
    requests_per_second: float
    ttft_p95: float
    itl_p95: float
    e2e_p95: float
    error_rate: float


class SloLine(Model):
    """One bound of the SLO before and after: the worst of the sound confirming runs of each side."""

    bound: str = Field(description="Its name in the tuning file, as `ttftP95` or `errorRate`.")
    limit: float = Field(description="Seconds; for `errorRate` a share.")
    baseline: float | None
    candidate: float | None
    holds: bool | None = Field(description="Whether the candidate keeps it in every run; None: no sound run.")


class QualityView(Model):
    """The quality gate: whether the answers stay the same."""

    required: bool = Field(description="It can change answers, its speculation is new, or `quality.always` is set.")
    passed: bool
    agreement: float | None = Field(description="Share of answer tokens before the first difference.")
    divergence: float | None = Field(description="Symmetric KL of the next token's probabilities, in nats.")
    accuracy: float | None = Field(description="Share of right answers, where the prompts have them.")
    baseline_accuracy: float | None
    reason: str


class Rollout(Model):
    """Where the rollout is. Times are seconds since the epoch."""

    replicas: int
    updated: int = Field(description="Replicas that are to run the winner.")
    canary_since: float | None
    judged_from: float | None
    rolled_at: float | None
    going_back: str | None = Field(description="Why it goes back; None: it goes forward.")
    verdict: Verdict | None = Field(description="The last verdict, with the raw numbers that it rests on.")


class PromotionView(Model):
    """A promotion. Without a winner yet, most of it is None."""

    namespace: str | None = Field(description="In a cluster; None outside of one.")
    tuning: str
    phase: Phase
    sentence: str
    mode: PromotionMode
    suspended: bool
    waits_for_approval: bool
    waiting_since: float | None
    expires_at: float | None = Field(description="The approval expires then (time suspended comes on top).")
    bind: Binding | None = Field(description="To be sent with an approval or rejection.")
    winner: FinalistView | None = Field(description="The winner with its gain, the interval and the rounds.")
    others: tuple[FinalistView, ...] = Field(description="The other finalists.")
    baseline: CandidateView | None
    source: Source | None = Field(description="Where the numbers come from: simulated, CPU or GPU.")
    objective: str = Field(description="What is improved, as the tuning file names it.")
    objective_unit: str
    before: Side | None = Field(description="The baseline on the spare.")
    after: Side | None = Field(description="The winner on the spare.")
    slo: tuple[SloLine, ...]
    differences: tuple[Difference, ...] = Field(description="What changes in the configuration.")
    lossy: tuple[str, ...] = Field(description="Knobs by which the winner can change answers.")
    quality: QualityView | None
    notes: tuple[str, ...] = Field(
        description="What else to know of production before deciding, as it was when the approval was asked for: who "
        "loses which field, autoscalers, what is not known."
    )
    approval: Decision | None = Field(description="The approval that counts.")
    pending: tuple[Decision, ...] = Field(description="Decisions that the loop has not taken up yet.")
    rollout: Rollout | None
    what_happens_next: tuple[str, ...]
    how_to_go_back: tuple[str, ...]


def promotion_view(
    record: TuningRecord,
    trials: Sequence[TrialRecord],
    pending: Sequence[Decision],
    now: float,
    namespace: str = "",
) -> PromotionView:
    """The promotion of one tuning as it is at `now`; `namespace` is empty outside of a cluster."""
    spec, winner, baseline = record.tuning.spec, record.winner, record.baseline
    runs = [t for t in trials if t.purpose is TrialPurpose.CONFIRM and t.objective is not None]
    old = [t for t in runs if baseline is not None and t.candidate.hash == baseline.hash]
    new = [t for t in runs if winner is not None and t.candidate.hash == winner.hash]
    waits = record.phase is Phase.AWAITING_APPROVAL
    views = {f.candidate.hash: finalist_view(f) for f in record.finalists}
    differences = _differences(baseline, winner) if baseline and winner else ()
    lossy = tuple(d.knob for d in differences if d.lossy)
    return PromotionView(
        namespace=namespace or None,
        tuning=record.name,
        phase=record.phase,
        sentence=record.sentence,
        mode=spec.promotion.mode,
        suspended=record.suspended_since is not None,
        waits_for_approval=waits,
        waiting_since=record.approval_since if waits else None,
        expires_at=_expiry(record, now) if waits else None,
        # The spec that the results are of: after an edit it is no longer the tuning's, and nothing can be approved.
        bind=Binding(candidate=winner.hash, spec=record.spec_hash, baseline=baseline.hash)
        if winner and baseline
        else None,
        winner=views.get(winner.hash) if winner else None,
        others=tuple(view for name, view in views.items() if winner is None or name != winner.hash),
        baseline=candidate_view(baseline),
        source=record.source,
        objective=spec.objective.maximize or spec.objective.minimize or "",
        objective_unit=objective_unit(spec.objective),
        before=_side(old),
        after=_side(new),
        slo=_slo(record, old, new),
        differences=differences,
        lossy=lossy,
        quality=_quality(record, runs, lossy),
        notes=record.notes,
        approval=live_approval(record),
        pending=tuple(pending),
        rollout=_rollout(record),
        what_happens_next=_next(record),
        how_to_go_back=_back(record, f"{collection(namespace)}/{record.name}"),
    )


def _expiry(record: TuningRecord, now: float) -> float:
    held = now - record.suspended_since if record.suspended_since is not None else 0.0
    return record.phase_since + record.waited + held + record.tuning.spec.promotion.approval_expiry


def _differences(baseline: Candidate, winner: Candidate) -> tuple[Difference, ...]:
    return tuple(
        Difference(knob=knob, baseline=old, candidate=new, lossy=is_lossy(knob, new))
        for knob, (old, new) in baseline.differences(winner).items()
    )


def _measured(trials: Sequence[TrialRecord]) -> list[Measurement]:
    return [t.measurement for t in trials if t.measurement is not None]


def _side(trials: Sequence[TrialRecord]) -> Side | None:
    runs = _measured(trials)
    if not runs:
        return None

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return Side(
        runs=len(runs),
        objective=mean([abs(t.objective or 0.0) for t in trials]),
        output_tokens_per_second=mean([m.output_tokens_per_second.value for m in runs]),
        requests_per_second=mean([m.requests_per_second for m in runs]),
        ttft_p95=mean([m.ttft.p95 for m in runs]),
        itl_p95=mean([m.itl.p95 for m in runs]),
        e2e_p95=mean([m.e2e.p95 for m in runs]),
        error_rate=mean([m.error_rate for m in runs]),
    )


def _slo(record: TuningRecord, old: Sequence[TrialRecord], new: Sequence[TrialRecord]) -> tuple[SloLine, ...]:
    slo = record.tuning.spec.slo
    before, after = _measured(old), _measured(new)

    def line(name: str, limit: float, baseline: Sequence[float], candidate: Sequence[float]) -> SloLine:
        worst = max(candidate, default=None)
        return SloLine(
            bound=name,
            limit=limit,
            baseline=max(baseline, default=None),
            candidate=worst,
            holds=None if worst is None else worst <= limit,
        )

    latencies = [
        line(f"{name}P{p[1:]}", limit, [m.latency(name, p) for m in before], [m.latency(name, p) for m in after])
        for name, p, limit in slo.bounds()
    ]
    errors = line("errorRate", slo.error_rate, [m.error_rate for m in before], [m.error_rate for m in after])
    return (*latencies, errors)


def _quality(record: TuningRecord, runs: Sequence[TrialRecord], lossy: Sequence[str]) -> QualityView | None:
    if record.winner is None or record.baseline is None:
        return None
    verdict = judge_quality(record.baseline, record.winner, runs, record.tuning.spec.quality)
    return QualityView(
        required=bool(must_prove(record, record.winner, lossy)),
        passed=verdict.passed,
        agreement=verdict.agreement,
        divergence=verdict.divergence,
        accuracy=verdict.accuracy,
        baseline_accuracy=verdict.baseline_accuracy,
        reason=verdict.reason,
    )


def _rollout(record: TuningRecord) -> Rollout | None:
    state = record.promotion
    if state is None:
        return None
    return Rollout(
        replicas=state.replicas,
        updated=state.updated,
        canary_since=state.canary_since,
        judged_from=state.judged_from,
        rolled_at=state.rolled_at,
        going_back=state.back_reason,
        verdict=state.verdict,
    )


def _next(record: TuningRecord) -> tuple[str, ...]:
    promotion, canary = record.tuning.spec.promotion, record.tuning.spec.promotion.canary
    replicas = record.promotion.replicas if record.promotion else record.tuning.spec.target.replicas
    analysis = promotion.analysis
    steps = {
        Phase.CANARY: f"One server of the winner takes {format_share(canary.share)} of the requests. After "
        f"{format_duration(canary.warmup)} of warm-up it is held against the others for "
        f"{format_duration(analysis.min_duration)} to {format_duration(analysis.max_duration)}.",
        Phase.ROLLING: f"{replicas} replicas change one by one; each answers a real request before the next one goes.",
        Phase.WATCHING: f"Production is watched for {format_duration(promotion.watch)}; then it is promoted.",
    }
    if record.phase is Phase.RECOMMENDED:
        path = f"GET /api/v1alpha1/tunings/{record.name}/recommendation?as=kustomize (or helm, args)"
        return (f"Nothing by itself: apply it by hand as the report says, or with the files of {path}.",)
    if record.phase is Phase.ROLLING_BACK:
        return (f"{replicas} replicas return to the baseline one by one.",)
    if record.phase is Phase.AWAITING_APPROVAL:
        expiry = format_duration(promotion.approval_expiry)
        return (*steps.values(), f"Without a decision within {expiry} it expires, and production stays as it is.")
    if record.phase in steps:
        return tuple(list(steps.values())[list(steps).index(record.phase) :])
    return ()


def _back(record: TuningRecord, path: str) -> tuple[str, ...]:
    analysis = record.tuning.spec.promotion.analysis
    by_hand = f"POST {path}/rollback returns every replica to the baseline"
    if record.phase is Phase.AWAITING_APPROVAL or record.phase in TOUCHES_PRODUCTION - {Phase.ROLLING_BACK}:
        return (
            f"By itself: when the canary fails, is slower than the others beyond the tolerance of "
            f"{format_share(analysis.tolerance)} (above half of it, it may go back as well), "
            f"has more than {format_share(analysis.max_error_rate)} of errors, "
            "gets no traffic or no verdict in time; when a replica does not start; when the SLO is missed later, or a "
            "latency is surely worse than before the roll.",
            f"By hand: {by_hand}, from the canary on and also after it is promoted.",
        )
    return (f"By hand: {by_hand}.",) if record.phase is Phase.PROMOTED else ()
