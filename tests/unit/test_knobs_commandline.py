"""A production command taken apart and put together again."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.domain.candidate import Candidate
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.commandline import join, split
from tunewright.ports import Refused

OTHERS = [
    ["--port", "{port}"], ["--served-model-name", "a", "b"], ["--host=0.0.0.0"], ["--trust-remote-code"],
    ["--hf-overrides", '{"a": {"b":  1}}'], ["--load-format", "dummy"], ["--api-key", "s p a c e"], ["-q", "awq"],
]  # fmt: skip


def _value(knob):
    if knob.name == "speculative_method":
        return st.sampled_from(["mtp", "ngram", "eagle3"])
    if knob.grid:
        return st.sampled_from(knob.grid)
    return st.integers(1, 10**12)


@st.composite
def _words(draw, knob):
    value = draw(_value(knob))
    spelling = draw(st.sampled_from([knob.flag, *(a for a in knob.aliases if a != "-O"), knob.flag.replace("-", "_")]))
    spelling = "--" + spelling[2:] if spelling.startswith("__") else spelling
    if knob.kind == "bool":
        return [spelling] if value or not spelling.startswith("--") else [f"--no-{spelling[2:].replace('_', '-')}"]
    text = knob.format(value)
    return draw(st.sampled_from([[spelling, text], [f"{spelling}={text}"]]))


@st.composite
def commands(draw):
    knobs = draw(st.lists(st.sampled_from([k for k in CATALOGUE.values() if k.flag]), unique=True, max_size=6))
    blocks = [draw(_words(knob)) for knob in knobs] + draw(st.lists(st.sampled_from(OTHERS), unique_by=str))
    if draw(st.booleans()):
        depth = draw(st.integers(1, 4))
        config = {"method": "mtp", "num_speculative_tokens": depth, "rejection_sample_method": "synthetic"}
        blocks.append([draw(st.sampled_from(["--speculative-config", "-sc"])), json.dumps(config, indent=1)])
    if draw(st.booleans()):
        blocks.append(["-cc", '{ "cudagraph_mode":"full", "pass_config": {"x":1}}'])
    argv = ["vllm", "serve", "/srv/model", *(word for block in draw(st.permutations(blocks)) for word in block)]
    environment = {"HOME": "/root"} | draw(st.sampled_from([{}, {"OMP_NUM_THREADS": "04"}]))
    return argv, environment


@st.composite
def candidates(draw):
    knobs = draw(st.lists(st.sampled_from(list(CATALOGUE.values())), unique=True, max_size=6))
    values = {knob.name: draw(_value(knob)) for knob in knobs}
    if values.get("num_speculative_tokens") == 0 or "speculative_method" not in values:
        values.pop("num_speculative_tokens", None)
        values.pop("speculative_method", None)
    return Candidate(values=values)


@settings(max_examples=150, deadline=None)
@given(commands())
def test_the_same_candidate_gives_the_same_bytes(command):
    argv, environment = command
    taken = split(argv, environment)
    assert join(taken, taken.candidate) == (argv, environment)


@settings(max_examples=150, deadline=None)
@given(commands(), candidates())
def test_any_candidate_is_read_back_and_the_rest_is_untouched(command, candidate):
    argv, environment = command
    taken = split(argv, environment)
    again = split(*join(taken, candidate))
    assert again.candidate == candidate
    assert again.rest == taken.rest
    assert again.rest_environment == taken.rest_environment


def _joined(argv, environment=None, **values):
    return join(split(argv, environment or {}), Candidate(values=values))


def test_all_forms_are_read():
    argv = [
        "vllm", "serve", "m", "--max-num-seqs", "64", "--max_num_batched_tokens=8K", "--no-enable-prefix-caching",
        "-tp", "2", "-pp=1", "-dp", "1", "-O3", "--async-scheduling", "--gpu-memory-util", "0.9",
        "--speculative-config", '{"method":"eagle3","model":"d","num_speculative_tokens":2}',
        "-cc.cudagraph_mode=full_decode_only", "-cc.pass_config.fuse", "true",
    ]  # fmt: skip
    assert split(argv, {"OMP_NUM_THREADS": "4"}).candidate.values == {
        "max_num_seqs": 64, "max_num_batched_tokens": 8192, "enable_prefix_caching": False, "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1, "data_parallel_size": 1, "optimization_level": 3, "async_scheduling": True,
        "gpu_memory_utilization": 0.9, "speculative_method": "eagle3", "num_speculative_tokens": 2,
        "cudagraph_mode": "FULL_DECODE_ONLY", "omp_num_threads": 4,
    }  # fmt: skip


def test_a_changed_knob_is_written_where_it_stood_and_a_new_one_at_the_end():
    argv = ["vllm", "serve", "m", "--max-num-seqs=64", "--port", "{port}"]
    assert _joined(argv, max_num_seqs=128, async_scheduling=False)[0] == [
        "vllm", "serve", "m", "--max-num-seqs", "128", "--port", "{port}", "--no-async-scheduling",
    ]  # fmt: skip
    assert _joined(argv)[0] == ["vllm", "serve", "m", "--port", "{port}"]


def test_the_last_of_two_counts_as_argparse_has_it():
    argv = ["vllm", "serve", "m", "--max-num-seqs", "4", "--max-num-seqs", "8"]
    assert split(argv, {}).candidate.values == {"max_num_seqs": 8}
    assert _joined(argv, max_num_seqs=16)[0] == ["vllm", "serve", "m", "--max-num-seqs", "16"]


def test_a_wrappers_own_flags_are_not_vllms():
    argv = ["numa", "-tp", "9", "--block-size", "x", "python", "-m", "vllm.entrypoints.openai.api_server", "-tp", "2"]
    taken = split(argv, {})
    assert taken.candidate.values == {"tensor_parallel_size": 2}
    assert taken.rest == tuple(argv[:-2])


def test_words_behind_two_dashes_are_left_alone():
    argv = ["vllm", "serve", "--max-num-seqs", "4", "--", "--max-num-seqs", "5"]
    assert _joined(argv, max_num_seqs=6, block_size=16)[0] == [
        "vllm", "serve", "--max-num-seqs", "6", "--block-size", "16", "--", "--max-num-seqs", "5",
    ]  # fmt: skip


SYNTHETIC = (
    '{"method":"mtp","num_speculative_tokens":2,"rejection_sample_method":"synthetic",'
    '"synthetic_acceptance_rates":[0.8,0.6]}'
)


@pytest.mark.parametrize(("depth", "rates"), [(1, [0.8]), (3, [0.8, 0.6, 0.45]), (4, [0.8, 0.6, 0.45, 0.3375])])
def test_speculation_keeps_productions_own_keys(depth, rates):
    argv, _ = _joined(["vllm", "serve", "m", "-sc", SYNTHETIC], speculative_method="mtp", num_speculative_tokens=depth)
    config = json.loads(argv[-1])
    assert argv[-2] == "--speculative-config"
    assert config["rejection_sample_method"] == "synthetic"
    assert config["num_speculative_tokens"] == depth
    assert config["synthetic_acceptance_rates"] == pytest.approx(rates)


def test_depth_zero_leaves_the_flag_out():
    argv = ["vllm", "serve", "m", "--speculative-config", SYNTHETIC]
    assert _joined(argv, speculative_method="mtp", num_speculative_tokens=0)[0] == ["vllm", "serve", "m"]
    assert _joined(argv)[0] == ["vllm", "serve", "m"]


def test_a_depth_of_zero_in_the_command_is_no_speculation_until_a_depth_is_tried():
    """vLLM refuses a depth of 0, so it can only stand there for what is to go with a depth that is tried."""
    template = SYNTHETIC.replace('"num_speculative_tokens":2', '"num_speculative_tokens":0')
    for words in (["-sc", template], [f"--speculative-config={template}"]):
        argv = ["vllm", "serve", "m", *words, "--port", "1"]
        assert split(argv, {}).candidate.values == {}
        assert _joined(argv)[0] == ["vllm", "serve", "m", "--port", "1"]
        assert _joined(argv, max_num_seqs=4)[0] == ["vllm", "serve", "m", "--port", "1", "--max-num-seqs", "4"]
        tried, _ = _joined(argv, speculative_method="mtp", num_speculative_tokens=1)
        assert tried[:4] == ["vllm", "serve", "m", "--speculative-config"]
        assert json.loads(tried[4]) == {
            "method": "mtp",
            "num_speculative_tokens": 1,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.8],
        }


def test_another_method_does_not_inherit_made_up_acceptance():
    words, _ = _joined(["vllm", "serve", "m", "-sc", SYNTHETIC], speculative_method="ngram", num_speculative_tokens=2)
    assert json.loads(words[-1]) == {"method": "ngram", "num_speculative_tokens": 2}


def test_another_method_does_not_inherit_the_drafter():
    argv = ["vllm", "serve", "m", "-sc", '{"method":"eagle3","model":"/d","num_speculative_tokens":2,"x":1}']
    words, _ = _joined(argv, speculative_method="ngram", num_speculative_tokens=2)
    assert json.loads(words[-1]) == {"method": "ngram", "num_speculative_tokens": 2, "x": 1}


def test_a_method_that_vllm_tells_from_the_model_stays_untold():
    argv = ["vllm", "serve", "m", "-sc", '{"model":"/d","num_speculative_tokens":2}']
    assert split(argv, {}).candidate.values == {"speculative_method": "auto", "num_speculative_tokens": 2}
    words, _ = _joined(argv, speculative_method="auto", num_speculative_tokens=3)
    assert json.loads(words[-1]) == {"model": "/d", "num_speculative_tokens": 3}


def test_shorthands_of_newer_versions_become_one_json():
    argv = ["vllm", "serve", "m", "--spec-method", "mtp", "--spec-tokens=1"]
    assert split(argv, {}).candidate.values == {"speculative_method": "mtp", "num_speculative_tokens": 1}
    words, _ = _joined(argv, speculative_method="mtp", num_speculative_tokens=2)
    assert words == [*argv[:3], "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']


def test_graph_mode_keeps_the_other_keys_of_the_compilation_config():
    argv = ["vllm", "serve", "m", "-cc", '{"mode":3,"cudagraph_mode":"FULL","custom_ops":["+a"]}']
    words, _ = _joined(argv, cudagraph_mode="PIECEWISE")
    assert json.loads(words[-1]) == {"mode": 3, "cudagraph_mode": "PIECEWISE", "custom_ops": ["+a"]}
    assert json.loads(_joined(argv)[0][-1]) == {"mode": 3, "custom_ops": ["+a"]}


def test_environment_knobs_are_written_as_production_wrote_them():
    environment = {"OMP_NUM_THREADS": "04", "A": "b"}
    assert _joined(["vllm", "serve", "m"], environment, omp_num_threads=4)[1] == environment
    assert _joined(["vllm", "serve", "m"], environment, omp_num_threads=2)[1] == {"A": "b", "OMP_NUM_THREADS": "2"}
    assert _joined(["vllm", "serve", "m"], environment)[1] == {"A": "b"}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--max-num-seqs", "$(SEQS)"], "--max-num-seqs"),
        (["--max-num-seqs=many"], "--max-num-seqs=many"),
        (["--speculative-config", "{nonsense"], "--speculative-config"),
        (["--compilation-config", "[1]"], "--compilation-config"),
        (["-sc", '{"num_speculative_tokens": "x"}'], "--speculative-config"),
    ],
)
def test_what_cant_be_read_is_refused_by_name(argv, word):
    with pytest.raises(Refused, match=word):
        split(["vllm", "serve", "m", *argv], {})


def test_a_positional_that_would_be_swallowed_is_refused():
    with pytest.raises(Refused, match="right behind `serve`"):
        split(["vllm", "serve", "--served-model-name", "a", "--max-num-seqs", "4", "/srv/model"], {})


def test_unknown_knobs_are_refused():
    with pytest.raises(Refused, match="no_such"):
        _joined(["vllm", "serve", "m"], no_such=1)
