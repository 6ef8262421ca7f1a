"""The command line against its page, its help and its exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tunewright.cli.app import EPILOG, app
from tunewright.domain.phases import TERMINAL
from tunewright.exits import OF_PHASE, Exit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FORWARDED = {"load", "simulate"}
TUNEWRIGHT = str(Path(sys.executable).with_name("tunewright"))


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return cells[1:]


def long_options(command: Any) -> set[str]:
    return {
        max(option.opts, key=len)
        for option in command.params
        if option.param_type_name == "option" and option.name != "help"
    }


def test_every_command_is_on_the_page_with_its_options() -> None:
    told = {}
    for command, _, options in rows(section("Commands")):
        told[command.strip("`").split()[0]] = set(re.findall(r"`(--[a-z-]+)`", options))
    assert set(told) == set(COMMANDS)
    for name in set(COMMANDS) - FORWARDED:
        assert told[name] == long_options(COMMANDS[name]), name


def test_the_exit_codes_on_the_page_are_those_of_the_code() -> None:
    text = section("Exit codes")
    codes = {int(row[0]): row[1].strip("`") for row in rows(text) if row[0].isdigit()}
    assert codes == {code.value: code.name for code in Exit}
    phases = {phase: int(row[1]) for row in rows(text.split("of the phase")[1]) for phase in row[0].split(", ")}
    assert phases == {str(phase): int(OF_PHASE[phase]) for phase in TERMINAL}
    assert {int(code) for code in re.findall(r"\b(\d+) (?=[a-z])", EPILOG)} == {code.value for code in Exit}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - FORWARDED - {"version", "serve"}))
def test_help_tells_what_it_does_and_shows_an_example_that_can_be_parsed(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    examples = re.findall(rf"^\s+tunewright ({name}\b.*)$", result.stdout, re.MULTILINE)
    assert examples, result.stdout
    import shlex

    for example in examples:
        words = shlex.split(re.split(r" [|<] ", example)[0])
        COMMANDS[name].make_context(name, words[1:], resilient_parsing=False)


def test_every_option_says_what_it_is_for() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert getattr(parameter, "help", ""), f"{name} {parameter.name}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["load", "--help"], "--concurrency"),
        (["simulate", "--help"], "--sim-fault"),
        (["simulate", "--version"], "simulated"),
        (["--help"], "Exit codes"),
        (["version"], "tunewright "),
    ],
)
def test_from_the_shell(words: list[str], told: str) -> None:
    done = subprocess.run([TUNEWRIGHT, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_a_wrong_option_ends_with_2() -> None:
    done = subprocess.run([TUNEWRIGHT, "tune", "--nonsense"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Exit.USAGE
    assert "--nonsense" in done.stderr


def complete(line: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [TUNEWRIGHT],
        env={
            **os.environ,
            "_TUNEWRIGHT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_names_of_tunings(tmp_path: Path) -> None:
    from restapi import Clock, waiting

    from tunewright.store.sqlite import SqliteStore

    store = SqliteStore(tmp_path / "tunewright" / "store.sqlite", Clock())
    store.save(waiting())
    store.close()
    assert complete("tunewright ro") == ["rollback"]
    assert complete("tunewright approve d", XDG_STATE_HOME=str(tmp_path)) == ["demo"]
    assert complete("tunewright approve x", XDG_STATE_HOME=str(tmp_path)) == []
    assert complete("tunewright approve d", XDG_STATE_HOME=str(tmp_path / "none")) == []


def test_the_completion_can_be_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [TUNEWRIGHT, "--install-completion", "bash"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".bash_completions" / "tunewright.sh").exists()
