"""The catalogue against the help text of a real vLLM, and the page made from it."""

import re
from pathlib import Path

import pytest

from tunewright.knobs.catalogue import CATALOGUE, is_lossy, near
from tunewright.knobs.docs import knobs_page
from tunewright.knobs.knob import Family, Searched

ROOT = Path(__file__).parents[2]
HELP = (ROOT / "tests/fixtures/vllm/vllm-0.32-serve-help.txt").read_text(encoding="utf-8")
HELP_FLAGS = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", "\n".join(re.findall(r"^  -.*", HELP, re.MULTILINE))))


@pytest.mark.parametrize("knob", [k for k in CATALOGUE.values() if k.flag or k.json_flag], ids=lambda k: k.name)
def test_every_flag_is_one_of_vllm(knob):
    assert (knob.flag or knob.json_flag) in HELP_FLAGS


@pytest.mark.parametrize("knob", [k for k in CATALOGUE.values() if k.choices and k.flag], ids=lambda k: k.name)
def test_choices_are_those_of_vllm(knob):
    listed = re.search(rf"^  {knob.flag} \{{([^}}]*)\}}", HELP, re.MULTILINE)
    if listed:  # some flags check their choices later, and the help lists none
        assert set(knob.choices) == set(listed[1].split(",")) - {"None"}


@pytest.mark.parametrize("knob", list(CATALOGUE.values()), ids=lambda k: k.name)
def test_grid_values_are_read_back_as_themselves(knob):
    for value in knob.grid:
        assert knob.parse(knob.format(value)) == value
    assert knob.does.endswith(".")
    assert knob.default


def test_negated_flags_are_there_for_every_boolean():
    for knob in CATALOGUE.values():
        if knob.kind == "bool" and knob.flag:
            assert f"--no-{knob.flag[2:]}" in HELP_FLAGS


def test_no_flag_of_vllm_is_cut_short_to_a_knob():
    """`--x` of vLLM's own must not be taken for a cut-short `--x-y` of the catalogue."""
    flags = {knob.flag for knob in CATALOGUE.values() if knob.flag}
    mistaken = {f for f in HELP_FLAGS for own in flags if len(f) >= 7 and own.startswith(f) and f != own}
    assert mistaken == set()


def test_enough_is_searched_for_each_family():
    for family in Family:
        searched = [k for k in CATALOGUE.values() if family in k.families and k.search is Searched.ALWAYS and k.grid]
        assert len(searched) >= 10


def test_only_values_that_change_answers_are_lossy():
    assert is_lossy("kv_cache_dtype", "fp8")
    assert is_lossy("mamba_ssm_cache_dtype", "float16")
    assert is_lossy("enable_mamba_cache_stochastic_rounding", True)
    assert is_lossy("mamba_cache_philox_rounds", 3)
    assert not is_lossy("mamba_cache_philox_rounds", 0)
    assert not is_lossy("mamba_ssm_cache_dtype", "float32")
    assert not is_lossy("kv_cache_dtype", "auto")
    assert not is_lossy("max_num_seqs", 8)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_num_batched_tokens", "8k", 8000),
        ("max_num_batched_tokens", "8K", 8192),
        ("max_model_len", "25.6k", 25600),
        ("max_model_len", "auto", -1),
        ("kv_cache_memory_bytes", "70997981287", 70997981287),
        ("gpu_memory_utilization", ".9", 0.9),
        ("gpu_memory_utilization", "0.9", 0.9),
        ("max_num_seqs", "many", None),
        ("max_num_seqs", "8k", None),
        ("max_num_seqs", "0", None),
        ("max_num_seqs", "9" * 400, None),
        ("max_num_seqs", "9" * 5000, None),
        ("gpu_memory_utilization", "0." + "9" * 5000, None),
        ("max_num_seqs", "1.5", None),
        ("gpu_memory_utilization", "2.0", None),
        ("scheduling_policy", "PRIORITY", "priority"),
        ("scheduling_policy", "lifo", None),
        ("async_scheduling", "maybe", None),
    ],
)
def test_parsing(name, text, value):
    if value is None:
        with pytest.raises(ValueError, match=name):
            CATALOGUE[name].parse(text)
    else:
        assert CATALOGUE[name].parse(text) == value


def test_versions_bound_a_knob():
    knob = CATALOGUE["performance_mode"]
    assert not knob.available("0.26.0")
    assert knob.available("v0.30.1")
    assert knob.available("0.32.0+cpu")
    assert knob.available(None)
    assert knob.available("dev")


def test_near_names_are_found_from_a_flags_spelling():
    assert near("--max-num-sequences")[0] == "max_num_seqs"
    assert near("gpu_mem_utilisation")[0] == "gpu_memory_utilization"
    assert near("zzzz") == []


def test_the_page_is_the_catalogue():
    page = (ROOT / "docs/knobs.md").read_text(encoding="utf-8")
    assert page == knobs_page(), "run: python -m tunewright.knobs.docs > docs/knobs.md"
