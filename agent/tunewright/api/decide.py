"""Keeping what a person decides. Whether it may be decided is asked of the controller, which asks itself again."""

import logging
from functools import partial

from tunewright.api.problems import Change, ProblemError
from tunewright.controller.decisions import bound, decided_before, refusal, stale
from tunewright.domain.state import Decision, TuningRecord
from tunewright.ports import Objected, Store

log = logging.getLogger(__name__)


def keep(store: Store, record: TuningRecord, decision: Decision, namespace: str) -> Decision:
    """Write the decision for the loop to take up. Raises `ProblemError` `stale` or `not-now` when it can't be."""
    of = f"{namespace}/{record.name}" if namespace else record.name
    why_not = refusal(record, decision)
    if why_not is None:
        try:
            store.decide(record.name, decision, partial(decided_before, record, decision))
        except Objected as objection:  # of two at once, one wins
            raise ProblemError("not-now", f"The {decision.action} has no effect: {objection}.") from objection
        log.info("%s of %s by %r kept: %r", decision.action, of, decision.by, decision.reason)
        return decision
    if record.winner is not None and why_not == stale(record, decision):
        detail = f"{why_not}. Read the promotion again and decide on that."
        raise ProblemError("stale", detail, changed=_changes(record, decision))
    raise ProblemError("not-now", f"The {decision.action} has no effect: {why_not}.")


def _changes(record: TuningRecord, decision: Decision) -> list[Change]:
    now = bound(record, decision.action, at=decision.at, by=decision.by)
    pairs = {
        "candidate": (decision.candidate, now.candidate),
        "spec": (decision.spec, now.spec),
        "baseline": (decision.baseline, now.baseline),
    }
    return [Change(what=what, decided=then, now=held) for what, (then, held) in pairs.items() if then != held]


def pending(store: Store, record: TuningRecord) -> list[Decision]:
    """Decisions that were kept and that the loop has not taken up yet."""
    return store.decisions(record.name)[len(record.decisions) :]
