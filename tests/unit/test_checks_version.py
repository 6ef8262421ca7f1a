"""The binary is asked for its version by the command that runs it, with its places filled in."""

import sys
from pathlib import Path

from tunings import tuning

from tunewright.checks import Finding, run_checks
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


def checked(tmp_path: Path, *flags: str) -> Finding:
    command = [sys.executable, "-m", "tunewright.simulate", "serve", "m", "--port", "{port}", *flags]
    asked = tuning(target={"command": command, "replicas": 1})
    return next(f for f in run_checks(asked, tmp_path / "state", SystemClock()) if f.what == "target flags")


def test_a_flag_that_this_vllm_does_not_take_is_named_with_its_nearest(tmp_path: Path) -> None:
    """It passed the check, and every start of the tuning then ended with status 2."""
    found = checked(tmp_path, "--swap-space", "4", "--max-num-sqes=8", "--profile", "demo")
    assert not found.good
    assert found.detail.startswith(
        "this vLLM does not know --swap-space, --max-num-sqes (did you mean --max-num-seqs?)"
    )
    assert not (tmp_path / "state").exists()


def test_flags_that_this_vllm_takes_pass_and_its_answer_is_kept_where_there_is_state(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    assert checked(tmp_path, "--max_num_seqs", "8", "--sim-speed", "4").good
    assert list((tmp_path / "state" / "binaries").glob("flags-*.json"))


def test_flags_are_left_alone_where_the_binary_does_not_tell_them(tmp_path: Path) -> None:
    asked = tuning(target={"command": ["true", "serve", "m", "--swap-space", "--port", "{port}"], "replicas": 1})
    found = next(f for f in run_checks(asked, tmp_path / "state", SystemClock()) if f.what == "target flags")
    assert found.good
    assert found.detail.startswith("not checked: `true serve --help=all`")
