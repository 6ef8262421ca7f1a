"""The search space: which knobs, which values, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.domain.candidate import Candidate
from tunewright.domain.tuning import Search
from tunewright.knobs.catalogue import CATALOGUE, is_lossy
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.ports import Refused
from tunewright.propose.space import build_space, check_search

HYBRID = ModelFacts(
    family=Family.HYBRID, attention_heads=32, experts=128, mtp_layers=1, gpu_count=1, gpu_memory_gib=139.8,
    compute_capability=9.0, gpu_name="NVIDIA H200", vllm_version="0.32.0",
)  # fmt: skip
DENSE = ModelFacts(family=Family.DENSE, experts=0, mtp_layers=0, gpu_count=1, gpu_memory_gib=139.8, gpu_name="H200")
CPU = ModelFacts(family=Family.DENSE, experts=0, mtp_layers=0, gpu_count=0)


def _names(facts, baseline=None, **search):
    return {axis.name for axis in build_space(Search(**search), facts, Candidate(values=baseline or {})).axes}


def test_each_family_has_its_knobs():
    hybrid, dense, cpu = _names(HYBRID), _names(DENSE), _names(CPU)
    assert {"mamba_backend", "mamba_ssm_cache_dtype", "moe_backend", "speculative_method"} <= hybrid
    assert not {name for name in dense if name.startswith(("mamba", "moe"))}
    assert len(hybrid) >= 10
    assert not {"attention_backend", "gpu_memory_utilization", "async_scheduling"} & cpu
    assert {"max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "omp_num_threads"} <= cpu


def test_include_exclude_and_pin():
    assert _names(DENSE, include=("max_num_seqs",)) == {"max_num_seqs"}
    assert _names(DENSE, include=("block_size",)) == {"block_size"}
    assert "max_num_seqs" not in _names(DENSE, exclude=("max_num_seqs",))
    space = build_space(Search(pin={"max_num_seqs": "96", "max_model_len": "8K"}), DENSE, Candidate())
    assert space.fixed["max_num_seqs"] == 96
    assert space.fixed["max_model_len"] == 8192
    assert space.axis("max_num_seqs") is None


def test_lossy_values_only_where_they_are_allowed():
    for allowed in (False, True):
        space = build_space(Search(allow_lossy=allowed), HYBRID, Candidate())
        lossy = {axis.name for axis in space.axes for value in axis.values if is_lossy(axis.name, value)}
        assert bool(lossy) == allowed
    space = build_space(Search(), HYBRID, Candidate(values={"mamba_ssm_cache_dtype": "float16"}))
    assert "float16" in space.axis("mamba_ssm_cache_dtype").values  # production has it: nothing is changed by it


def test_the_default_is_one_value_and_productions_own_is_kept():
    space = build_space(Search(), DENSE, Candidate(values={"max_num_seqs": 100, "gpu_memory_utilization": 0.92}))
    seqs = space.axis("max_num_seqs").values
    assert 100 in seqs
    assert 1024 not in seqs  # that is what None means on this GPU
    assert seqs[-1] is None
    assert None not in space.axis("gpu_memory_utilization").values
    assert 0.92 in space.axis("gpu_memory_utilization").values
    assert space.axis("enable_prefix_caching").values == (None, False)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([HYBRID, DENSE, CPU, ModelFacts()]), st.booleans())
def test_positions_and_candidates_agree(data, facts, lossy):
    baseline = Candidate(values={"max_num_seqs": 100, "gpu_memory_utilization": 0.92})
    space = build_space(Search(allow_lossy=lossy), facts, baseline)
    positions = {axis.name: data.draw(st.integers(0, len(axis.values) - 1)) for axis in space.axes}
    candidate = space.candidate(positions)
    assert space.candidate(space.positions(candidate)) == candidate
    assert space.tidy(candidate.values) == candidate


def test_speculation_is_a_method_and_a_depth_or_nothing():
    space = build_space(Search(), HYBRID, Candidate())
    zero = dict.fromkeys((axis.name for axis in space.axes), 0)
    assert "speculative_method" not in space.candidate(zero).values
    one = space.candidate({**zero, "num_speculative_tokens": 1})
    assert one.values["speculative_method"] in ("mtp", "ngram")
    assert "mtp" not in build_space(Search(), DENSE, Candidate()).axis("speculative_method").values


def test_a_pinned_method_is_switched_off_by_a_depth_of_zero():
    space = build_space(Search(pin={"speculative_method": "mtp"}), HYBRID, Candidate())
    zero = {axis.name: 0 for axis in space.axes}
    assert space.candidate(zero).values["num_speculative_tokens"] == 0


def test_a_pinned_depth_finds_its_method():
    space = build_space(Search(include=("max_num_seqs",), pin={"num_speculative_tokens": "1"}), HYBRID, Candidate())
    assert space.axis("speculative_method") is not None


def test_depending_knobs_go_with_what_they_depend_on():
    space = build_space(Search(allow_lossy=True), HYBRID, Candidate())
    values = {"mamba_ssm_cache_dtype": "float32", "enable_mamba_cache_stochastic_rounding": True}
    assert space.tidy(values).values == {"mamba_ssm_cache_dtype": "float32"}
    assert space.tidy({"enforce_eager": True, "cudagraph_mode": "FULL"}).values == {"enforce_eager": True}


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"include": ("max_num_seqs", "max_num_sequences")}, ("spec.search.include[1]", "max_num_seqs")),
        ({"exclude": ("--block-sise",)}, ("spec.search.exclude[0]", "block_size")),
        ({"pin": {"zzzz": "1"}}, ("spec.search.pin.zzzz", "docs/knobs.md")),
        ({"pin": {"max_num_seqs": "many"}}, ("spec.search.pin.max_num_seqs", "not a number")),
        ({"pin": {"kv_cache_dtype": "fp8"}}, ("spec.search.pin.kv_cache_dtype", "allowLossy")),
        ({"include": ("kv_cache_dtype",)}, ("spec.search.include[0]", "allowLossy")),
        ({"include": ("max_model_len",)}, ("spec.search.include[0]", "spec.search.pin.max_model_len")),
    ],
)
def test_refusals_name_the_field_and_the_way_out(search, words):
    with pytest.raises(Refused) as refused:
        check_search(Search(**search))
    for word in words:
        assert word in str(refused.value)


def test_every_searched_knob_can_be_included():
    for knob in CATALOGUE.values():
        if knob.grid:
            check_search(Search(include=(knob.name,), allow_lossy=True))
