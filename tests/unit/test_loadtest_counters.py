from pathlib import Path

import pytest

from tunewright.loadtest.counters import Counted, Scrape, disagreements, window_counters

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"


def scrape(text: str) -> Scrape:
    return Scrape(0, 0, text)


def counters(tokens: float, finished: float) -> Scrape:
    return scrape(f"vllm:generation_tokens_total 0{tokens}\nvllm:request_success_total {finished}\n")


@pytest.mark.parametrize(
    ("name", "tokens", "finished"),
    [("vllm-0.26-h200-under-load.metrics.txt", 524288, 1024), ("vllm-0.32-cpu.metrics.txt", 4112, 66)],
)
def test_real_metrics_are_read(name, tokens, finished):
    found = scrape((FIXTURES / name).read_text())
    assert found.sums()["vllm:generation_tokens_total"] == tokens
    assert found.sums()["vllm:request_success_total"] == finished
    assert found.greatest("vllm:kv_cache_usage_perc") == 0.0


def test_a_window_s_counters_are_differences():
    after = scrape((FIXTURES / "vllm-0.26-h200-under-load.metrics.txt").read_text())
    zero = scrape("\n".join(f"{name} 0" for name in after.sums()))
    found = window_counters(zero, after, [scrape("vllm:kv_cache_usage_perc 0.7\n")])
    assert found is not None
    assert (found.prompt_tokens, found.generation_tokens, found.finished_requests) == (524288, 524288, 1024)
    assert found.acceptance_rate == pytest.approx(224756 / 298916)
    assert found.prefix_hit_rate is None  # no queries: the cache is off
    assert found.kv_cache_usage_max == 0.7
    assert window_counters(after, after, [after]) is not None
    assert window_counters(counters(0, 0), counters(1, 1), []) is None


def test_several_engines_are_summed():
    text = 'vllm:generation_tokens_total{engine="0"} 3\nvllm:generation_tokens_total{engine="1"} 4e0\n'
    assert scrape(text).sums()["vllm:generation_tokens_total"] == 7


@pytest.mark.parametrize(
    ("tokens", "finished", "reasons"),
    [
        (1000, 100, 0),
        (1030, 101, 0),  # 2 % and what was in flight
        (1060, 100, 1),
        (940, 100, 1),
        (1000, 150, 1),
        (2000, 200, 2),
        (0, 0, 2),
    ],
)
def test_client_and_server_may_differ_by_two_percent_and_what_is_in_flight(tokens, finished, reasons):
    counted = Counted(tokens=1000, tokens_allowance=16, requests=100, requests_allowance=4)
    found = disagreements(counters(50, 5), counters(50 + tokens, 5 + finished), counted, "the window")
    assert len(found) == reasons


def test_a_restarted_server_is_noticed():
    (tokens, requests) = disagreements(counters(500, 50), counters(10, 1), Counted(10, 0, 1, 0), "the window")
    assert "started anew" in tokens
    assert "started anew" in requests


def test_counters_that_are_not_exported_disagree_with_nothing():
    assert disagreements(scrape(""), scrape(""), Counted(10, 0, 1, 0), "the window") == []
