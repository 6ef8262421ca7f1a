"""The binary is asked for its version by the command that runs it, with its places filled in."""

from pathlib import Path

from tunings import tuning

from tunewright.checks import run_checks
from tunewright.clock import SystemClock


def test_a_wrapper_with_the_replica_in_it_is_filled_in_and_sees_the_environment(tmp_path: Path) -> None:
    """As `taskset -c {replica} vllm serve ...`: an unfilled place made the check fail on a command that runs."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$1 core $CORE lib $LIB"\n')
    program.chmod(0o755)
    command = ["env", "CORE={replica}", str(program), "serve", "m", "--port", "{port}"]
    asked = tuning(target={"command": command, "environment": {"LIB": "of {replica}"}})
    found = {finding.what: finding for finding in run_checks(asked, tmp_path / "state", SystemClock())}
    assert found["target binary"].good
    assert found["target binary"].detail == "--version core 0 lib of 0"
