"""Every example is a tuning file that could be run: its fields, its search, and its commands."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tunewright.cli.app import app
from tunewright.domain.tuning import Tuning
from tunewright.knobs.facts import ModelFacts
from tunewright.platform.process.command import Command
from tunewright.propose.space import build_space, check_search
from tunewright.tuningfile import read_tuning

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TUNINGS = [path for path in EXAMPLES if "kind: Tuning" in path.read_text()]


def test_there_are_examples() -> None:
    assert {"simulator.yaml", "workstation.yaml", "adopted.yaml", "agent-sessions.yaml"} <= {
        path.name for path in TUNINGS
    }


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


def test_the_unit_for_systemd_ends_the_agent_alone_and_runs_a_command_that_there_is() -> None:
    unit = (EXAMPLES[0].parent / "tunewright.service").read_text(encoding="utf-8")
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["KillMode"] == "process"
    assert set(settings["RestartPreventExitStatus"].split()) == {"2", "3", "4"}
    words = shlex.split(settings["ExecStart"])
    assert words[0].endswith("/tunewright")
    command: Any = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    given = command.make_context(words[1], words[2:]).params
    assert given["keep_going"]
    assert given["plain"]


def test_the_commands_of_getting_started_can_be_parsed() -> None:
    text = (EXAMPLES[0].parents[1] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(tunewright [^`]+)`", text)
    checked = 0
    for line in lines:
        words = shlex.split(line.split("#")[0])
        if "tunewright" not in words:
            continue
        name, rest = words[words.index("tunewright") + 1], words[words.index("tunewright") + 2 :]
        if name.startswith("--"):
            continue
        commands[name].make_context(name, rest)
        checked += 1
    assert checked > 20
    for file in set(re.findall(r"examples/[\w.-]+", text)):
        assert (EXAMPLES[0].parents[1] / file).exists(), file
