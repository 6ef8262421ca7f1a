"""The table of lessons names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "field-lessons.md").read_text())


def test_every_lesson_names_a_test_that_exists() -> None:
    assert len(NAMED) > 50
    missing = [f"{path}::{name}" for path, name in NAMED if not re.search(rf"def {name}\(", (ROOT / path).read_text())]
    assert not missing


def test_every_test_of_the_fault_suite_closes_a_report() -> None:
    """The docstring names it, or says what the fault was."""
    text = (ROOT / "tests" / "unit" / "test_fault_suite_rollout.py").read_text()
    for name, docstring in re.findall(r"def (test_\w+)\([^\n]*\n    (.{3})", text):
        assert docstring == '"""', f"{name} has no docstring"
