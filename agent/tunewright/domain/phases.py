"""A tuning's phases, and which may follow which."""

from enum import StrEnum


class Phase(StrEnum):
    """Where a tuning is. Suspended is a condition, not a phase: a suspended tuning knows where it was."""

    PENDING = "Pending"  # accepted; nothing was touched yet
    PROFILING = "Profiling"  # learning what production's traffic looks like
    BASELINING = "Baselining"  # measuring on the spare what production runs now
    SEARCHING = "Searching"  # trials of new candidates
    CONFIRMING = "Confirming"  # finalists in turns with the baseline
    AWAITING_APPROVAL = "AwaitingApproval"  # a person decides; costs no deadline of progress
    CANARY = "Canary"  # one server of the winner takes a share of production's requests
    ROLLING = "Rolling"  # replica by replica
    WATCHING = "Watching"  # everything runs the winner; a regression goes back
    ROLLING_BACK = "RollingBack"  # returning production to the baseline, replica by replica

    PROMOTED = "Promoted"  # the winner serves production
    NO_IMPROVEMENT = "NoImprovement"  # nothing better was found, or it was not settled: the reason says which
    INFEASIBLE = "Infeasible"  # nothing meets the SLO; the nearest is named
    RECOMMENDED = "Recommended"  # a better candidate is known; somebody else applies it
    REJECTED = "Rejected"  # a person said no, or the approval expired
    ROLLED_BACK = "RolledBack"  # production runs the baseline again
    FAILED = "Failed"  # could not be done; production is as it was, or as somebody else wants it


TERMINAL = frozenset(
    {
        Phase.PROMOTED,
        Phase.NO_IMPROVEMENT,
        Phase.INFEASIBLE,
        Phase.RECOMMENDED,
        Phase.REJECTED,
        Phase.ROLLED_BACK,
        Phase.FAILED,
    }
)

TOUCHES_PRODUCTION = frozenset({Phase.CANARY, Phase.ROLLING, Phase.WATCHING, Phase.ROLLING_BACK})

BEFORE_CONFIRMING = frozenset({Phase.PENDING, Phase.PROFILING, Phase.BASELINING, Phase.SEARCHING})
"""The search is still to come, or under way."""

_P = Phase
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    _P.PENDING: frozenset({_P.PROFILING, _P.FAILED}),
    _P.PROFILING: frozenset({_P.BASELINING, _P.PENDING, _P.FAILED}),
    _P.BASELINING: frozenset({_P.SEARCHING, _P.PENDING, _P.FAILED}),
    _P.SEARCHING: frozenset({_P.CONFIRMING, _P.NO_IMPROVEMENT, _P.INFEASIBLE, _P.PENDING, _P.FAILED}),
    _P.CONFIRMING: frozenset(
        {_P.AWAITING_APPROVAL, _P.CANARY, _P.RECOMMENDED, _P.NO_IMPROVEMENT, _P.PENDING, _P.FAILED}
    ),
    _P.AWAITING_APPROVAL: frozenset({_P.CANARY, _P.RECOMMENDED, _P.REJECTED, _P.PENDING, _P.FAILED}),
    _P.CANARY: frozenset({_P.ROLLING, _P.ROLLING_BACK}),
    _P.ROLLING: frozenset({_P.WATCHING, _P.ROLLING_BACK}),
    _P.WATCHING: frozenset({_P.PROMOTED, _P.ROLLING_BACK}),
    _P.ROLLING_BACK: frozenset({_P.ROLLED_BACK, _P.PENDING, _P.FAILED}),
    _P.PROMOTED: frozenset({_P.PENDING, _P.ROLLING_BACK}),
    **{end: frozenset({_P.PENDING}) for end in TERMINAL - {_P.PROMOTED}},
}


class IllegalTransition(Exception):
    """A step asked for a phase that may not follow: a fault in this program, never of the user."""


def check_transition(old: Phase, new: Phase) -> None:
    """Raise `IllegalTransition` unless `new` is `old` or may follow it."""
    if new is not old and new not in TRANSITIONS[old]:
        raise IllegalTransition(f"{old} may not become {new}")
