"""Lengths that are not fixed: truncated normals, and prompts and outputs as they belong together."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.domain.load import Load
from tunewright.domain.traffic import GivenLengths, Normal
from tunewright.domain.workload import Lengths, Workload, given_lengths, given_profile, workload_for
from tunewright.loadtest.counters import ServerFacts
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.lengths import LengthSource, Paired, Separate, draw_lengths
from tunewright.loadtest.prompts import PromptSource
from tunewright.loadtest.sending import sender
from tunewright.ports import LoadRequest

COUNT = 4000
FAR = 1.95 / COUNT**0.5  # a sample's distribution is this far from the true one once in a thousand times

normals = st.builds(
    lambda least, width, place, deviation: Normal(
        mean=least + place * width, standard_deviation=deviation, least=least, most=least + width
    ),
    st.integers(1, 5000),
    st.integers(0, 20_000),
    st.floats(0, 1),
    st.floats(0.01, 1e6),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(normals)
def test_a_normal_is_drawn_as_it_is_truncated(normal: Normal):
    drawn = draw_lengths(Lengths(normal=normal), np.random.default_rng(1), COUNT)
    assert normal.least <= drawn.min() <= drawn.max() <= normal.most
    whole, (low, high) = normal.untruncated, normal.range
    for length in np.quantile(drawn, [0.05, 0.25, 0.5, 0.75, 0.95]).astype(int).tolist():
        expected = (whole.cdf(length + 0.5) - whole.cdf(low)) / (whole.cdf(high) - whole.cdf(low))
        assert np.mean(drawn <= length) == pytest.approx(expected, abs=FAR)
    spread = min(normal.standard_deviation, normal.most - normal.least)
    rounding = 0.5 if normal.standard_deviation < 1 else 0.05
    assert normal.truncated_mean == pytest.approx(drawn.mean(), abs=4 * spread / COUNT**0.5 + rounding)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(normals)
def test_a_normal_as_a_histogram_says_the_same(normal: Normal):
    histogram = Lengths(normal=normal).as_histogram()
    assert histogram.edges[-1] == normal.most
    assert len(histogram.edges) <= 22
    width = (normal.most - normal.least) / 20 + 1
    assert histogram.mean == pytest.approx(normal.truncated_mean, abs=width)


def test_a_normal_follows_the_seed():
    lengths = Separate(Lengths(normal=Normal(mean=500, standard_deviation=100, most=900)), Lengths(fixed=5), None)
    one, two, other = (LengthSource(lengths, seed) for seed in (1, 1, 2))
    first = [one.next() for _ in range(1500)]
    assert first == [two.next() for _ in range(1500)]
    assert first != [other.next() for _ in range(1500)]
    assert len({prompt for prompt, _ in first}) > 200


def test_a_normal_whose_bounds_cut_nearly_all_of_it_is_met_too():
    wide = Lengths(normal=Normal(mean=10, standard_deviation=1e6, least=8, most=12))
    assert Counter(draw_lengths(wide, np.random.default_rng(1), 5000).tolist()).keys() == {8, 9, 10, 11, 12}
    narrow = Lengths(normal=Normal(mean=10, standard_deviation=1e-6, least=1, most=10_000_000))
    assert set(draw_lengths(narrow, np.random.default_rng(1), 100).tolist()) == {10}
    assert narrow.average == 10


def test_a_mean_out_of_its_bounds_is_refused():
    with pytest.raises(ValueError, match=r"mean \(5\) must be within the bounds, of least \(10\) and most \(20\)"):
        Normal(mean=5, standard_deviation=1, least=10, most=20)


kinds = st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999), st.floats(0.01, 100)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(kinds)
def test_pairs_come_together_and_by_weight(pairs: list[tuple[int, int, float]]):
    prompts, outputs = Paired(pairs, None).draw(np.random.default_rng(1), COUNT)
    found = Counter(zip(prompts.tolist(), outputs.tolist(), strict=True))
    weights: Counter[tuple[int, int]] = Counter()
    for prompt, output, weight in pairs:
        weights[prompt, output] += weight  # type: ignore[assignment]
    assert found.keys() <= weights.keys()
    for pair, weight in weights.items():
        assert found[pair] / COUNT == pytest.approx(weight / sum(weights.values()), abs=2 * FAR)


def test_a_pair_that_does_not_fit_the_server_is_refused():
    with pytest.raises(LoadFailure, match="100 prompt and 28 output tokens do not fit"):
        Paired([(1, 1, 1.0), (100, 28, 1.0)], 127)
    assert Paired([(100, 28, 1.0)], 128)


PAIRS = [{"promptTokens": 100, "outputTokens": 5, "weight": 3}, {"promptTokens": 10, "outputTokens": 50}]


def test_the_file_s_pairs_are_sent_as_they_belong_together():
    load = Load.model_validate({"mode": "closedLoop", "concurrency": 4, "lengths": {"pairs": PAIRS}})
    prompt, output = given_lengths(load)
    assert prompt is not None
    assert output is not None
    assert (prompt.average, output.average) == (77.5, 16.25)
    assert set(draw_lengths(prompt, np.random.default_rng(1), 500).tolist()) == {10, 100}
    profile = given_profile(load, 0.0)
    assert (profile.prompt_tokens_mean, profile.output_tokens_mean) == (77.5, 16.25)
    job = job_of(workload_for(load, profile))
    source = sender(job, FACTS, None, 1)  # type: ignore[arg-type]  # no sessions: the observer is not asked
    assert source.remarks(10) == ()
    found = PromptSource(job, "m", 7, pairs=Paired([(100, 5, 3.0), (10, 50, 1.0)], None))
    planned = [found.next() for _ in range(2000)]
    together = Counter((p.prompt_tokens, p.output_tokens) for p in planned)
    assert together.keys() == {(100, 5), (10, 50)}
    assert together[100, 5] / 2000 == pytest.approx(0.75, abs=0.04)
    assert {len(json.loads(p.body)["prompt"]) for p in planned[:50]} == {10, 100}


FACTS = ServerFacts(model="m", version="", max_model_len=4096, block_size=16)


def job_of(workload: Workload) -> LoadJob:
    return LoadJob(url="http://x", workload=workload, duration=1, max_warmup=1, seed=1)


def recorded(folder: Path) -> Path:
    lines = [{"timestamp": 5 * i, "input_length": 100 + i, "output_length": i, "hash_ids": [i]} for i in range(40)]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("loop", [{"mode": "closedLoop", "concurrency": 4}, {"mode": "openLoop", "rate": 2}])
def test_lengths_of_a_trace_come_together_in_either_loop(loop, tmp_path, monkeypatch):
    from telemetry_samples import profile

    recorded(tmp_path)
    monkeypatch.chdir(tmp_path)
    load = Load.model_validate(loop | {"lengths": {"trace": {"file": "trace.jsonl", "format": "mooncake"}}})
    workload = workload_for(load, profile())
    request = LoadRequest("http://x", workload, None, job_of(workload).slo, 1.0, 1.0, 1)
    job = LoadJob.of(request)
    assert job.workload.pairs_of is not None
    assert job.workload.pairs_of.file == str(tmp_path / "trace.jsonl")
    made = sender(job, FACTS, None, 1)  # type: ignore[arg-type]
    assert "40 requests, sha256" in made.remarks(5)[0]
    assert "1 requests of the trace have no output" in made.remarks(5)[1]
    with pytest.raises(LoadFailure, match=r"trace\.jsonl:38: 137 prompt and 37 output tokens do not fit"):
        sender(job, replace(FACTS, max_model_len=172), None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({}, "give one of: prompt and output"),
        ({"pairs": PAIRS, "trace": {"file": "t"}}, "give one of"),
        ({"pairs": PAIRS, "prompt": {"mean": 5, "standardDeviation": 1, "most": 9}}, "give one of"),
        ({"pairs": [{"promptTokens": 1, "outputTokens": 1, "weight": 0}]}, "pairs.0.weight"),
    ],
)
def test_lengths_are_given_in_one_way(lengths, said):
    with pytest.raises(ValueError, match=said):
        GivenLengths.model_validate(lengths)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"promptTokens": 5, "lengths": {"pairs": PAIRS}}, "promptTokens and lengths both say"),
        (
            {"outputTokens": 5, "lengths": {"output": {"mean": 5, "standardDeviation": 1, "most": 9}}},
            "outputTokens and lengths both say",
        ),
        (
            {"mode": "trace", "trace": {"file": "t"}, "lengths": {"pairs": PAIRS}},
            "lengths can't be with mode trace",
        ),
    ],
)
def test_lengths_are_said_once(load, said):
    with pytest.raises(ValueError, match=said):
        Load.model_validate(load)
    fixed_output = {"outputTokens": 5, "lengths": {"prompt": {"mean": 5, "standardDeviation": 1, "most": 9}}}
    prompt, output = given_lengths(Load.model_validate(fixed_output))
    assert prompt is not None
    assert output is not None
    assert (prompt.normal is not None, output.fixed) == (True, 5)


def test_the_search_and_the_report_know_what_is_sent():
    from telemetry_samples import profile

    from tunewright.propose.proposer import _as_sent
    from tunewright.telemetry.report.story import _arrivals, _outputs, _prompts

    load = Load.model_validate({"lengths": {"pairs": PAIRS}})
    known = _as_sent(profile(), load)
    assert known is not None
    assert (known.prompt_tokens_mean, known.output_tokens_mean) == (77.5, 16.25)
    assert _prompts(workload_for(load, profile())) == "2 kinds of requests, as given"
    normal = {"output": {"mean": 50, "standardDeviation": 10, "most": 900}}
    load = Load.model_validate(
        {"mode": "openLoop", "rate": 4, "ramp": {"startRate": 1, "duration": "9s"}, "promptsFile": "p.jsonl"}
        | {"lengths": normal}
    )
    sent = workload_for(load, profile())
    assert (sent.prefix_reuse, profile().prefix_reuse) == (0.0, 0.32), "what the texts share is theirs"
    assert _prompts(sent) == "the texts of p.jsonl"
    assert _outputs(sent) == "normal, 50 ± 10, from 1 to 900"
    assert _arrivals(sent) == "open loop, 4 requests/s after a ramp from 1"


def test_a_fault_in_a_list_names_its_place_and_what_is_known_there():
    from tunewright.ports import Refused
    from tunewright.tuningfile import read_tuning

    text = """apiVersion: tunewright.dev/v1alpha1
kind: Tuning
metadata: {name: t}
spec:
  target: {command: [vllm, serve, m, --port, "{port}"]}
  objective: {maximize: goodput}
  load: {lengths: {pairs: [{promptTokens: 5, outputToken: 5}]}}
"""
    with pytest.raises(Refused) as refusal:
        read_tuning(text, "f")
    assert "spec.load.lengths.pairs[0]: unknown field `outputToken`; did you mean `outputTokens`?" in str(refusal.value)
    assert "spec.load.lengths.pairs[0].outputTokens: is missing: Output length." in str(refusal.value)
