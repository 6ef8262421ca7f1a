"""What production should look like now: a pure function of the record."""

from tunewright.domain.phases import Phase
from tunewright.domain.state import PromotionState, TuningRecord
from tunewright.ports import Replica, TargetPlan, TargetStatus


def plan_for(record: TuningRecord, promotion: PromotionState) -> TargetPlan:
    """The plan of the record's phase. The canary stays while replicas restart: it carries traffic meanwhile."""
    share = record.tuning.spec.promotion.canary.share
    match record.phase:
        case Phase.CANARY:
            updated, with_canary = 0, True
        case Phase.ROLLING:
            updated, with_canary = promotion.updated, promotion.rolled_at is None
        case Phase.WATCHING | Phase.PROMOTED:
            updated, with_canary = promotion.replicas, False
        case _:
            updated, with_canary = 0, False
    return TargetPlan(
        baseline=promotion.baseline,
        candidate=promotion.candidate,
        updated=updated,
        canary=with_canary,
        canary_share=share if with_canary else 0.0,
    )


def ready_canary(status: TargetStatus) -> Replica | None:
    """The canary, once it has answered a real completion."""
    return next((r for r in status.replicas if r.canary and r.ready), None)


def ready_on(status: TargetStatus, candidate_hash: str) -> int:
    """How many replicas (without the canary) run this candidate and are ready."""
    return sum(r.ready and not r.canary and r.candidate_hash == candidate_hash for r in status.replicas)
