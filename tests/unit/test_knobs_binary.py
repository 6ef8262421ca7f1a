"""The flags of the very vLLM in use, read from its own help."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.domain.tuning import Search
from tunewright.knobs import binary
from tunewright.knobs.binary import BinaryFlags, ask, help_command, read_help
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.knobs.validity import problems
from tunewright.propose.space import build_space

HELP = Path(__file__).parents[1] / "fixtures" / "vllm" / "vllm-0.32-serve-help.txt"
SERVE = [sys.executable, "-m", "tunewright.simulate", "serve", "m", "--port", "{port}"]
FACTS = ModelFacts(family=Family.HYBRID, experts=8, mtp_layers=1, gpu_count=1, gpu_memory_gib=80.0)


@pytest.fixture(scope="module")
def flags():
    return read_help(HELP.read_text(encoding="utf-8"))


def without(flags: BinaryFlags, *names: str) -> BinaryFlags:
    return BinaryFlags({name: flag for name, flag in flags.flags.items() if name not in names})


def test_vllm_032s_help_is_read_whole(flags):
    assert flags.missing() == []  # the catalogue has no flag that this version has not
    assert flags.has("-tp")
    assert flags.has("--no-enable-prefix-caching")
    assert flags.flags["--performance-mode"].choices == ("balanced", "interactivity", "throughput")
    assert flags.flags["--gpu-memory-utilization"].default == "0.92"
    assert flags.flags["--max-num-seqs"].choices == ()
    assert not flags.has("--swap-space")
    for knob in CATALOGUE.values():
        for value in knob.grid:
            assert flags.takes(knob, value), (knob.name, value)


def test_flags_without_a_knob_are_listed(flags):
    listed = flags.not_tuned()
    assert "--api-server-count" in listed
    assert not {"--max-num-seqs", "--speculative-config", "--spec-tokens"} & set(listed)
    assert not any(name.startswith("--no-") for name in listed)


def test_what_the_binary_lacks_is_neither_searched_nor_valid(flags):
    old = without(flags, "--performance-mode", "--no-performance-mode")
    facts = replace(FACTS, flags=old)
    assert old.missing() == ["performance_mode"]
    assert build_space(Search(), replace(FACTS, flags=flags), Candidate()).axis("performance_mode") is not None
    assert build_space(Search(), facts, Candidate()).axis("performance_mode") is None
    told = problems(Candidate(values={"performance_mode": "throughput"}), facts)
    assert "--help=all" in told[0]


def test_a_value_that_the_binary_does_not_list_is_not_tried(flags):
    changed = dict(flags.flags)
    changed["--mamba-backend"] = replace(changed["--mamba-backend"], choices=("triton",))
    facts = replace(FACTS, flags=BinaryFlags(changed))
    assert build_space(Search(), facts, Candidate()).axis("mamba_backend") is None
    assert problems(Candidate(values={"mamba_backend": "flashinfer"}), facts)


def test_other_text_is_no_help():
    with pytest.raises(ValueError, match="no help text"):
        read_help("usage: echo [options]\n  --help   this\n")


def test_the_command_that_asks():
    assert help_command(["vllm", "serve", "m", "--port", "1"]) == ["vllm", "serve", "--help=all"]
    assert help_command(["python", "-m", "vllm.entrypoints.openai.api_server"]) is None


def test_it_is_asked_once_and_kept(tmp_path, flags, monkeypatch):
    first, why = ask(SERVE, {}, tmp_path)
    assert first is not None, why
    assert set(first.flags) >= {name for name in flags.flags if name not in ("-h", "--help")}
    told = {name: flag for name, flag in flags.flags.items() if name in first.flags}  # beside the simulator's own
    assert all(set(flag.choices) == set(first.flags[name].choices) for name, flag in told.items())
    monkeypatch.setattr(binary.subprocess, "run", lambda *a, **k: pytest.fail("asked again"))
    assert ask(SERVE, {}, tmp_path) == (first, "")


def test_a_damaged_cache_is_asked_anew(tmp_path):
    ask(SERVE, {}, tmp_path)
    (kept,) = tmp_path.glob("flags-*.json")
    kept.write_text('{"--x": 1}')
    assert ask(SERVE, {}, tmp_path)[0] is not None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-program-here", "serve"], "not found"),
        (["/bin/sh", "-c", "x"], "not of the form"),
        (["/bin/echo", "serve"], "no help text"),
    ],
)
def test_without_an_answer_it_says_why(tmp_path, command, words):
    found, why = ask(command, {}, tmp_path)
    assert found is None
    assert words in why
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_hangs_is_given_up(tmp_path):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    found, why = ask([str(program), "serve"], {}, tmp_path / "cache", timeout=0.2)
    assert found is None
    assert "did not answer" in why


def test_a_knob_under_another_name_is_told_and_not_passed(flags):
    """Where a version keeps only the other spelling of a flag."""
    old = without(flags, "--gpu-memory-utilization")
    knob = CATALOGUE["gpu_memory_utilization"]
    assert flags.renamed() == {}
    assert old.renamed() == {"gpu_memory_utilization": "--device-memory-utilization"}
    assert not old.takes(knob)
    assert build_space(Search(), replace(FACTS, flags=old), Candidate()).axis("gpu_memory_utilization") is None
    assert without(old, "--device-memory-utilization").renamed() == {}


def test_only_flags_that_the_parser_refuses_are_unknown(flags):
    command = (
        "taskset --cpu-list 0 vllm serve m --max_num_seqs=8 --no-enable-prefix-caching --gpu-memory-util 0.5 "
        "--compilation-config.mode=3 --speculative-config.num_speculative_tokens 1 -tp 2 -O3 --seed -1 --cpu-lits 0 "
        "--swap_space 4 -- --anything"
    )
    assert flags.unknown(command.split()) == ["--cpu-lits", "--swap-space"]
    assert flags.unknown(["python", "-m", "vllm.entrypoints.openai.api_server", "--nonsense"]) == []
