"""`tunewright explain-failure`, for anyone whose vLLM won't start."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunewright.cli.app import app

FAILURES = Path(__file__).parents[1] / "fixtures" / "vllm" / "failures"


def told(*arguments, code=0, text=None):
    result = CliRunner().invoke(app, ["explain-failure", *map(str, arguments)], input=text)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("name", "kind", "fault"),
    [
        ("unknown_flag", "invalidFlag", "configuration"),
        ("kv_too_small_for_maxlen", "kvTooSmall", "configuration"),
        ("port_in_use", "portInUse", "machine"),
        ("model_missing_path", "modelMissing", "machine"),
    ],
)
def test_real_failures_are_explained(name, kind, fault):
    folder = FAILURES / name
    code = json.loads((folder / "result.json").read_text()).get("rc", 1)
    output = told("--exit-code", code, "--stdout", folder / "stdout", "--stderr", folder / "stderr", "--json")
    document = json.loads(output)
    assert (document["kind"], document["fault"]) == (kind, fault)
    assert document["cause"]
    assert document["advice"]
    assert document["exitCode"] == code


def test_for_people_it_names_the_bound_and_the_change():
    output = told(
        "--exit-code", "1", "--stderr", "-",
        text="ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (128). Please lower\n",
    )  # fmt: skip
    assert "mambaBlocks" in output
    assert "bound: max_num_seqs at most 128" in output
    assert "change: Lower max_num_seqs" in output


def test_no_secret_is_repeated(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: can't use --api-key sk-very-secret here\n")
    assert "sk-very-secret" not in told("--exit-code", "1", "--stdout", log)


def test_what_is_wrong_with_the_call_is_said(tmp_path):
    assert "--stdout FILE" in told("--exit-code", "1", code=2)
    assert "can't be read" in told("--stdout", tmp_path / "none", code=2)


def test_bytes_that_are_no_text_are_shown_as_one_clean_line(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"RuntimeError: \xff\x1b[2J\x00 broken\n")
    output = told("--exit-code", "1", "--stdout", log)
    assert all(sign.isprintable() for line in output.splitlines() for sign in line)
    assert told("--exit-code", "1", "--stdout", "-", text=log.read_bytes()) == output
