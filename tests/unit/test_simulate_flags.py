"""The command line: every flag of the real help text, and refusals word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunewright.knobs import binary
from tunewright.simulate import flags, flags_from_help, main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
HELP = (FIXTURES / "vllm-0.32-serve-help.txt").read_text(encoding="utf-8")


def recorded(case: str) -> tuple[list[str], str]:
    """A recorded command's arguments after `serve`, and its stderr from the usage line on."""
    folder = FIXTURES / "failures" / case
    words = (folder / "cmd").read_text(encoding="utf-8").split()
    stderr = (folder / "stderr").read_text(encoding="utf-8")
    return words[2:], stderr[stderr.index("usage:") :]


def test_the_shipped_table_is_the_help_text() -> None:
    assert flags.load_flags() == flags_from_help.parse_help(HELP)
    assert len(flags.load_flags()) == 316


@pytest.mark.parametrize("case", ["unknown_flag", "bad_value", "bad_choice"])
def test_refusals_are_word_for_word(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, stderr = recorded(case)
    assert main(["serve", *arguments]) == 2
    written = capsys.readouterr()
    assert written.err == stderr
    assert written.out == ""


@pytest.mark.parametrize(
    "removed",
    [
        "--swap-space",
        "--num-scheduler-steps",
        "--cuda-graph-sizes",
        "--disable-log-requests",
        "--max-num-partial-prefills",
    ],
)
def test_removed_flags_are_refused(removed: str) -> None:
    with pytest.raises(flags.UsageError, match=f"unrecognized arguments: {removed}"):
        flags.parse(["m", removed, "4"])


def _example(flag: dict[str, object]) -> list[str]:
    name = str(flag["names"][0])  # type: ignore[index]
    kind, choices = flag["kind"], flag.get("choices")
    if kind in ("bool", "switch"):
        return [name]
    value = {"int": "1", "float": "0.5", "human": "2k", "json": "{}", "str": "x"}[str(kind)]
    return [name, str(choices[0]) if isinstance(choices, list) else value]


@pytest.mark.parametrize(
    "flag", [f for f in flags.load_flags() if f["names"][0] != "--config"], ids=lambda f: f["names"][0]
)
def test_every_real_flag_is_accepted(flag: dict[str, object]) -> None:
    assert flags.dest_of(flag) in flags.parse(["m", *_example(flag)]).given


def test_forms_of_writing_a_flag() -> None:
    words = ["m", "-tp", "2", "--max_num_seqs=4", "--no-enable-prefix-caching", "-O3", "-cc.cudagraph_mode=NONE"]
    words += ["--max-model-len", "25.6k", "--max-num-batched-tokens", "8K", "--served-model-name", "a", "b"]
    parsed = flags.parse(words)
    assert parsed.get("tensor_parallel_size") == 2
    assert parsed.get("max_num_seqs") == 4
    assert parsed.get("enable_prefix_caching") is False
    assert parsed.get("optimization_level") == 3
    assert parsed.get("compilation_config") == {"cudagraph_mode": "NONE"}
    assert (parsed.get("max_model_len"), parsed.get("max_num_batched_tokens")) == (25_600, 8_192)
    assert parsed.served_names == ["a", "b"]


def test_the_config_file_and_what_overrides_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    lines = [
        "model: from-file",
        "max-num-seqs: 4",
        "port: 9",
        "no-async-scheduling: true",
        "enable-prefix-caching: false",
    ]
    file.write_text("\n".join([*lines, f"speculative-config: '{json.dumps(spec)}'", "served-model-name: [x, y]"]))
    parsed = flags.parse(["--config", str(file), "--max-num-seqs", "8"])
    assert parsed.model == "from-file"
    assert parsed.get("max_num_seqs") == 8
    assert parsed.get("port") == 9
    assert parsed.get("async_scheduling") is False
    assert parsed.get("enable_prefix_caching") is False
    assert parsed.get("speculative_config") == spec
    assert parsed.served_names == ["x", "y"]


def test_an_unknown_key_in_the_config_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("swap-space: 4\n")
    with pytest.raises(flags.UsageError, match="unrecognized arguments: --swap-space 4"):
        flags.parse(["m", "--config", str(file)])


@pytest.mark.parametrize("case", ["tp3_heads", "mbt_below_maxlen", "gpu_util_2", "kv_too_small_for_maxlen"])
def test_non_default_arguments_read_as_recorded(case: str) -> None:
    folder = FIXTURES / "failures" / case
    import shlex

    words = shlex.split((folder / "cmd").read_text(encoding="utf-8"))
    shown = flags.non_default(flags.parse(words[2:]))
    line = next(x for x in (folder / "stdout").read_text(encoding="utf-8").splitlines() if "non-default" in x)
    assert shown == eval(line.partition("non-default args: ")[2])


def test_unknown_faults_and_profiles_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--sim-fault", "nonsense"]) == 2
    assert "die-under-load" in capsys.readouterr().err
    assert main(["serve", "m", "--profile", "nonsense"]) == 2
    assert "hybrid-30b-h200" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "0.32.0+simulated\n"


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none_is_refused_in_a_sentence(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", port]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"error: argument --port: {port} is not from 0 to 65535\n")
    assert "Traceback" not in told


def test_the_help_tells_every_flag_that_is_taken_also_the_simulator_s_own() -> None:
    taken = {name for action in flags._parser(flags.load_flags())._actions for name in action.option_strings}
    assert taken == set(binary.read_help(flags.help_text()).flags) & taken
