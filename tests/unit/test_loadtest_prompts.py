import json

import numpy as np
import pytest

from tunewright.domain.profile import Histogram
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.lengths import draw_lengths
from tunewright.loadtest.prompts import PromptSource
from tunewright.loadtest.quality import quality_prompts

HISTOGRAM = Histogram(edges=(10, 100, 1000), counts=(10, 60, 30))


def job(**more) -> LoadJob:
    shape = {"prompt_tokens": Lengths(fixed=100), "output_tokens": Lengths(fixed=10), "concurrency": 4}
    given = {k: more.pop(k) for k in list(more) if k in Workload.model_fields}
    workload = Workload(**{**shape, **given})
    return LoadJob(url="http://x", workload=workload, duration=1, max_warmup=1, **{"seed": 1, **more})


def prompts(source: PromptSource, count: int) -> list[list[int]]:
    return [json.loads(source.next().body)["prompt"] for _ in range(count)]


def hits(found: list[list[int]], block: int) -> float:
    """Share of prompt tokens that a cache of whole blocks, never emptied, would have found (but the last token)."""
    cached: set[tuple[int, ...]] = set()
    hit = 0
    for prompt in found:
        usable = (len(prompt) - 1) // block
        depth = next((d for d in range(usable) if tuple(prompt[: (d + 1) * block]) not in cached), usable)
        hit += depth * block
        cached.update(tuple(prompt[: (d + 1) * block]) for d in range(len(prompt) // block))
    return hit / sum(map(len, found))


def test_a_body_is_valid_json_with_the_asked_lengths_and_ids_in_range():
    planned = PromptSource(job(), 'model "x"', 7).next()
    body = json.loads(planned.body)
    assert body["model"] == 'model "x"'
    assert (len(body["prompt"]), body["max_tokens"]) == (100, 10) == (planned.prompt_tokens, planned.output_tokens)
    source = PromptSource(job(token_ids={"low": 5, "high": 9}, prompt_tokens=Lengths(fixed=2000)), "m", 7)
    assert set(prompts(source, 1)[0]) == {5, 6, 7, 8}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_answers_are_greedy_or_sampled_as_asked(endpoint):
    def sent(**more):
        return json.loads(PromptSource(job(endpoint=endpoint, **more), "m", 7).next().body)["temperature"]

    assert (sent(), sent(temperature=0.7), sent(temperature=2)) == (0, 0.7, 2)


def test_a_chat_body_is_words():
    body = json.loads(PromptSource(job(endpoint="chat"), "m", 7).next().body)
    assert len(body["messages"][0]["content"].split()) == 100
    assert body["max_completion_tokens"] == 10


def test_lengths_follow_the_seed_and_contents_their_own():
    shape = {"prompt_tokens": Lengths(histogram=HISTOGRAM)}
    one, two = (prompts(PromptSource(job(**shape), "m", content), 50) for content in (1, 2))
    other = prompts(PromptSource(job(seed=2, **shape), "m", 1), 50)
    assert [len(p) for p in one] == [len(p) for p in two]
    assert [len(p) for p in one] != [len(p) for p in other]
    assert not {tuple(p) for p in one} & {tuple(p) for p in two}
    assert one == prompts(PromptSource(job(**shape), "m", 1), 50)


def test_lengths_are_as_the_histogram_says():
    drawn = draw_lengths(Lengths(histogram=HISTOGRAM), np.random.default_rng(1), 20_000)
    assert drawn.min() >= 1
    assert drawn.max() <= 1000
    shares = [np.mean(drawn <= 10), np.mean((drawn > 10) & (drawn <= 100)), np.mean(drawn > 100)]
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.02)
    assert drawn.mean() == pytest.approx(HISTOGRAM.mean, rel=0.03)


@pytest.mark.parametrize("spread", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("median", [30, 700, 5000])
def test_a_known_mean_is_met_and_every_bucket_keeps_its_share(spread, median):
    edges = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
    true = np.clip(np.random.default_rng(2).lognormal(np.log(median), spread, 50_000).round(), 1, 100_000)
    counts = np.histogram(true, bins=[0.5, *(np.array(edges) + 0.5)])[0]
    histogram = Histogram(edges=edges, counts=tuple(counts.tolist()))
    known = Lengths(histogram=histogram, mean=float(true.mean()))
    drawn = draw_lengths(known, np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(true.mean(), rel=0.015)
    found = np.histogram(drawn, bins=[0.5, *(np.array(edges) + 0.5)])[0]
    assert found / 200_000 == pytest.approx(counts / 50_000, abs=0.005)
    even = draw_lengths(Lengths(histogram=histogram), np.random.default_rng(1), 200_000)
    if spread > 1 or median == 700:
        assert abs(even.mean() / true.mean() - 1) > 0.02  # what the mean is for


def test_a_mean_that_the_buckets_rule_out_is_met_as_nearly_as_they_allow():
    for mean, low, high in ((1.0, 101, 105), (5000.0, 195, 200)):
        lengths = Lengths(histogram=Histogram(edges=(100, 200), counts=(0, 7)), mean=mean)
        assert low <= draw_lengths(lengths, np.random.default_rng(1), 5000).mean() <= high
    narrow = Lengths(histogram=Histogram(edges=(7, 8), counts=(0, 7)), mean=8.0)
    assert set(draw_lengths(narrow, np.random.default_rng(1), 100).tolist()) == {8}


def test_the_overflow_counts_as_the_last_edge():
    lengths = Lengths(histogram=Histogram(edges=(8, 16), counts=(0, 0), overflow=5))
    assert set(draw_lengths(lengths, np.random.default_rng(1), 100).tolist()) == {16}


def test_an_empty_histogram_is_refused():
    with pytest.raises(LoadFailure, match="histogram of lengths is empty"):
        draw_lengths(Lengths(histogram=Histogram(edges=(8,), counts=(0,))), np.random.default_rng(1), 1)


@pytest.mark.parametrize("reuse", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("lengths", [Lengths(fixed=700), Lengths(histogram=HISTOGRAM)], ids=["fixed", "histogram"])
def test_a_warm_prefix_cache_finds_the_asked_share(reuse, block, lengths):
    source = PromptSource(job(prefix_reuse=reuse, prompt_tokens=lengths), "m", 7, block_size=block)
    found = prompts(source, 1500)
    if reuse <= source.reachable_reuse + 0.001:
        # The first use of each prefix is no hit, so a finite run stays a little below.
        assert hits(found, block) == pytest.approx(reuse, abs=0.035)
    else:
        assert lengths.histogram is not None
        assert block == 128
        assert hits(found, block) == pytest.approx(source.reachable_reuse, abs=0.035)


def test_a_reuse_out_of_reach_is_known():
    assert PromptSource(job(prefix_reuse=0.9), "m", 7, block_size=128).reachable_reuse == 0
    assert PromptSource(job(prefix_reuse=0.9), "m", 7, block_size=16).reachable_reuse == pytest.approx(0.9, abs=0.001)


def test_pairs_of_lengths_fit_the_server():
    shape = {"prompt_tokens": Lengths(histogram=HISTOGRAM), "output_tokens": Lengths(histogram=HISTOGRAM)}
    source = PromptSource(job(**shape), "m", 7, max_model_len=300)
    planned = [source.next() for _ in range(2000)]
    assert all(p.prompt_tokens >= 1 and p.output_tokens >= 1 for p in planned)
    assert max(p.prompt_tokens + p.output_tokens for p in planned) == 300
    with pytest.raises(LoadFailure, match="max_model_len of 109"):
        PromptSource(job(), "m", 7, max_model_len=109)


def test_a_shortened_request_is_only_shorter_in_its_output():
    planned = PromptSource(job(), "m", 7).next(shorten=0.01)
    assert (planned.prompt_tokens, planned.output_tokens) == (100, 1)


def test_quality_prompts_follow_from_the_workload_alone():
    one = job(seed=1, content_seed=1, quality_prompts=4)
    two = job(seed=2, content_seed=2, quality_prompts=4)
    other = job(quality_prompts=4, prompt_tokens=Lengths(fixed=101))
    assert quality_prompts(one, 2048) == quality_prompts(two, 2048) != quality_prompts(other, 2048)
    assert {len(prompt) for prompt in quality_prompts(one, 50)} == {50}
