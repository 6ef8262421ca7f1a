from itertools import product

import pytest

from tunewright.domain.phases import (
    TERMINAL,
    TOUCHES_PRODUCTION,
    TRANSITIONS,
    IllegalTransition,
    Phase,
    check_transition,
)


def reachable(start, without=frozenset()):
    seen, todo = set(), [start]
    while todo:
        phase = todo.pop()
        if phase not in seen:
            seen.add(phase)
            todo += [after for after in TRANSITIONS[phase] if after not in without]
    return seen


def test_every_phase_has_its_row_and_can_be_reached():
    assert set(TRANSITIONS) == set(Phase)
    assert reachable(Phase.PENDING) == set(Phase)


def test_every_phase_can_come_to_an_end_and_no_end_is_a_trap():
    for phase in Phase:
        assert reachable(phase) & TERMINAL
    for end in TERMINAL:
        assert Phase.PENDING in TRANSITIONS[end]


def test_production_is_entered_only_through_the_canary_and_left_only_by_promotion_or_going_back():
    for phase in set(Phase) - TOUCHES_PRODUCTION - {Phase.PROMOTED}:
        assert TRANSITIONS[phase] & TOUCHES_PRODUCTION <= {Phase.CANARY}
    for phase in TOUCHES_PRODUCTION - {Phase.ROLLING_BACK}:
        assert Phase.ROLLING_BACK in TRANSITIONS[phase]
        assert TRANSITIONS[phase] - TOUCHES_PRODUCTION <= {Phase.PROMOTED}
    assert TRANSITIONS[Phase.ROLLING_BACK] == {Phase.ROLLED_BACK, Phase.PENDING, Phase.FAILED}


def test_nothing_reaches_production_without_confirming():
    assert not reachable(Phase.PENDING, without={Phase.CONFIRMING}) & TOUCHES_PRODUCTION


def test_check_allows_exactly_the_table_and_staying():
    for old, new in product(Phase, Phase):
        if new is old or new in TRANSITIONS[old]:
            check_transition(old, new)
        else:
            with pytest.raises(IllegalTransition, match=f"{old} may not become {new}"):
                check_transition(old, new)
