"""Taking up what people decided. One function grants; everything else asks it."""

from collections.abc import Mapping, Sequence
from typing import Literal

from tunewright.controller.context import Context
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import BEFORE_CONFIRMING, TERMINAL, TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import Decision, TuningRecord, Wish
from tunewright.domain.step import asked_for, enter, say, update
from tunewright.ports import Refused
from tunewright.propose.asked import read_asked

Action = Literal["approve", "reject", "suspend", "resume", "abort", "rollback", "propose"]

_CAN_GO_BACK = TOUCHES_PRODUCTION | {Phase.PROMOTED}
_MOST_WISHES = 200


def refusal(record: TuningRecord, decision: Decision) -> str | None:
    """Why this decision can't be taken now; None when it can. Used before it is written and when it is taken up."""
    if decision.action in ("approve", "reject"):
        if record.phase is not Phase.AWAITING_APPROVAL or record.winner is None:
            instead = _instead(record) if decision.action == "reject" else ""
            return f"nothing waits for approval: the tuning is {record.phase}{instead}"
        return stale(record, decision)
    if decision.action == "propose":
        return _why_not_proposed(record, decision)
    if decision.action == "suspend" and record.suspended_since is not None:
        return "it is suspended already"
    if decision.action == "resume" and record.suspended_since is None:
        return "it is not suspended"
    if decision.action == "abort" and record.phase in TERMINAL:
        return f"it has ended: {record.phase}{_instead(record)}"
    if decision.action == "rollback" and record.phase not in _CAN_GO_BACK:
        return f"production was not changed: the tuning is {record.phase}"
    return None


def decided_before(record: TuningRecord, decision: Decision, kept: Sequence[Decision]) -> str | None:
    """Who approved or rejected this very winner before, so that `decision` comes too late; None: nobody did.

    A rejection takes an approval back for as long as nothing was moved; nothing takes a rejection back.
    """
    if decision.action not in ("approve", "reject") or record.approval_since is None:
        return None
    for before in reversed(kept):
        if before.at < record.approval_since:
            break
        if before.action not in ("approve", "reject") or stale(record, before) is not None:
            continue
        if before.action == "approve" and decision.action == "reject":
            return None
        done = "approved" if before.action == "approve" else "rejected"
        return f"{before.by} {done} it already{f': {before.reason}' if before.reason else ''}"
    return None


def _why_not_proposed(record: TuningRecord, decision: Decision) -> str | None:
    if record.phase not in BEFORE_CONFIRMING:
        return f"the search is over: the tuning is {record.phase}"
    if len(record.proposed) >= _MOST_WISHES:
        return f"{_MOST_WISHES} candidates were asked for already"
    try:
        read_asked(record.tuning.spec.search, decision.values, "the candidate")
    except Refused as refusal:
        return str(refusal)
    return None


def _instead(record: TuningRecord) -> str:
    """What does what was meant, for whoever wants out; empty where nothing is left to do."""
    if record.phase in _CAN_GO_BACK:
        return "; `rollback` brings production back"
    return "" if record.phase in TERMINAL else "; `abort` ends it"


def stale(record: TuningRecord, decision: Decision) -> str | None:
    """What changed since the decision was made; None when it is about this very candidate, spec and baseline."""
    held = {
        "candidate": (decision.candidate, record.winner.hash if record.winner else ""),
        "spec": (decision.spec, record.tuning.spec.spec_hash),
        "baseline": (decision.baseline, record.baseline.hash if record.baseline else ""),
    }
    changed = [f"{name} is {now}, not {then}" for name, (then, now) in held.items() if then != now]
    return f"decided on something else: {', '.join(changed)}" if changed else None


def bound(
    record: TuningRecord,
    action: Action,
    *,
    at: float,
    by: str,
    reason: str = "",
    values: Mapping[str, str] | None = None,
) -> Decision:
    """A decision about what the record holds right now; `values` are those of a candidate that is proposed."""
    return Decision(
        action=action,
        at=at,
        by=by,
        reason=reason,
        candidate=record.winner.hash if record.winner else "",
        spec=record.tuning.spec.spec_hash,
        baseline=(record.baseline or Candidate()).hash,
        values=dict(values or {}),
    )


def take_up(record: TuningRecord, context: Context) -> TuningRecord:
    """Take up the decisions that the record does not know yet, in the order they were made."""
    for decision in context.store.decisions(record.name)[len(record.decisions) :]:
        why_not = refusal(record, decision) or decided_before(record, decision, record.decisions)
        record = update(record, decisions=(*record.decisions, decision))
        if why_not is None:
            record = _take(record, decision, context.clock.now())
        else:
            record = say(record, f"The {decision.action} by {decision.by} has no effect: {why_not}.")
    return record


def _take(record: TuningRecord, decision: Decision, now: float) -> TuningRecord:
    why = f" ({decision.reason})" if decision.reason else ""
    match decision.action:
        case "approve":
            return say(record, f"Approved by {decision.by}{why}.")
        case "reject":
            sentence = f"Rejected by {decision.by}{why}. Production stays as it is."
            return enter(record, Phase.REJECTED, sentence, now)
        case "suspend":
            return update(record, suspended_since=now, sentence=f"Suspended by {decision.by}{why}.")
        case "resume":
            held = now - (record.suspended_since or now)
            sentence = f"Resumed by {decision.by}{why}."
            return update(record, suspended_since=None, waited=record.waited + held, sentence=sentence)
        case "propose":
            named = ", ".join(f"{name} {text}" for name, text in decision.values.items())
            wish = Wish(values=decision.values, by=decision.by, at=decision.at)
            return update(record, proposed=(*record.proposed, wish), sentence=f"Asked for by {decision.by}: {named}.")
        case "abort" | "rollback":
            back = go_back(record, f"{decision.action} by {decision.by}{why}", now)
            return asked_for(back, decision.by) if back.phase is not record.phase else back


def go_back(record: TuningRecord, why: str, now: float) -> TuningRecord:
    """End it safely from any phase: back to the baseline where production was touched, else just ended."""
    record = update(record, suspended_since=None)
    if record.phase in TERMINAL and record.phase is not Phase.PROMOTED:
        return record
    if record.phase is Phase.ROLLING_BACK:
        return record
    if record.promotion is not None and record.phase in (TOUCHES_PRODUCTION | {Phase.PROMOTED}):
        promotion = update(record.promotion, updated=0, back_reason=why)
        sentence = f"Going back to the baseline: {why}."
        return enter(record, Phase.ROLLING_BACK, sentence, now, promotion=promotion)
    return enter(record, Phase.FAILED, f"Ended: {why}. Production was not touched.", now)


def live_approval(record: TuningRecord) -> Decision | None:
    """The approval of this very candidate, spec and baseline, if it was given in this round of waiting.

    The only place that says yes: the rollout asks it before it touches production.
    """
    for decision in reversed(record.decisions):
        if record.approval_since is None or decision.at < record.approval_since:
            return None
        if decision.action == "approve" and stale(record, decision) is None:
            return decision
    return None
