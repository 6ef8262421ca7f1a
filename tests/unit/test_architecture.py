"""The page on the architecture is true."""

from pathlib import Path

from tunewright.domain.phases import TERMINAL, TRANSITIONS, Phase

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_transition_table_is_the_code() -> None:
    table = PAGE.read_text().split("<!-- transitions -->")[1].split("<!-- /transitions -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    told = {phase: {name.strip() for name in after.split(",")} for phase, after in rows}
    assert told == {str(phase): {str(p) for p in after} for phase, after in TRANSITIONS.items()}


def test_every_phase_has_its_transitions_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(Phase)
    reached = {Phase.PENDING}.union(*TRANSITIONS.values())
    assert reached == set(Phase)


def test_an_end_is_only_left_to_start_anew_or_to_go_back() -> None:
    for end in TERMINAL:
        assert TRANSITIONS[end] <= {Phase.PENDING, Phase.ROLLING_BACK}
