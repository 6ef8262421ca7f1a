"""Every example is a tuning file that could be run: its fields, its search, and its commands."""

from pathlib import Path

import pytest

from tunewright.domain.tuning import Tuning
from tunewright.knobs.facts import ModelFacts
from tunewright.platform.process.command import Command
from tunewright.propose.space import build_space, check_search
from tunewright.tuningfile import read_tuning

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TUNINGS = [path for path in EXAMPLES if "kind: Tuning" in path.read_text()]


def test_there_are_examples() -> None:
    assert {"simulator.yaml", "workstation.yaml", "adopted.yaml"} <= {path.name for path in TUNINGS}


@pytest.mark.parametrize("path", TUNINGS, ids=lambda path: path.name)
def test_an_example_is_valid_as_it_stands(path: Path) -> None:
    tuning = read_tuning(path.read_text(encoding="utf-8"), path.name)
    assert isinstance(tuning, Tuning)
    spec = tuning.spec
    check_search(spec.search)
    if spec.target.deployment is not None:
        return
    for words, environment in (
        (spec.target.command, spec.target.environment),
        (spec.spare.command, {**spec.target.environment, **spec.spare.environment}),
    ):
        if not words:
            continue
        command = Command(words, environment)
        argv, filled = command.filled(command.baseline, port=18100, replica=0)
        assert "18100" in " ".join(argv)
        assert "{" not in " ".join(argv + list(filled.values()))
    baseline = Command(spec.target.command or spec.spare.command, spec.target.environment).baseline
    assert build_space(spec.search, ModelFacts(), baseline).axes


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_names_its_schema_and_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path in TUNINGS:
        assert lines[0] == "# yaml-language-server: $schema=../docs/tuning.schema.json"
        assert lines[1].startswith("# ")
