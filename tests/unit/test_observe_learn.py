"""The traffic profile: what is learned from traffic that the test made, and when it is refused."""

import random

import pytest
from exposed import LENGTHS, Exposed, window_of

from tunewright.domain.profile import Source, TrafficProfile
from tunewright.observe import names
from tunewright.observe.learn import PROFILE_METRICS, learn_profile
from tunewright.ports import Refused, SeriesWindow

STEP = 15.0
STEPS = 41


def learn(window: SeriesWindow, min_requests: int = 100) -> TrafficProfile:
    return learn_profile(window, via="a test", source=Source.SIMULATED, min_requests=min_requests)


def serve(server: Exposed, per_step: int = 30, running: float = 8, waiting: float = 0, **request: int) -> Exposed:
    """Steady traffic over the window."""
    server.set(names.RUNNING, running)
    server.set(names.WAITING, waiting)
    server.scrape(0)
    for step in range(1, STEPS):
        server.finish(per_step, **request)
        server.scrape(step * STEP)
    return server


def test_steady_traffic_is_read_per_replica() -> None:
    """Two replicas with equal traffic have the same profile per replica as one of them."""
    two = learn(window_of(serve(Exposed("a")), serve(Exposed("b"))))
    assert two.replicas == 2
    assert two.finished_requests == 2 * 30 * 40
    assert two.demand == pytest.approx(2.0)
    assert (two.concurrency, two.concurrency_p95, two.running, two.waiting) == (8, 8, 8, 0)
    assert (two.prompt_tokens_mean, two.output_tokens_mean) == (200, 60)
    assert two.output_tokens_per_second == pytest.approx(120)
    assert not two.saturated
    assert two.source is Source.SIMULATED
    assert two.via == "a test"
    one = learn(window_of(serve(Exposed("a"))))
    assert one.demand == pytest.approx(two.demand)
    assert one.output_tokens_per_second == pytest.approx(two.output_tokens_per_second)


def test_lengths_and_latencies_are_distributions() -> None:
    server = Exposed()
    server.scrape(0)
    server.finish(90, prompt=150, output=15, ttft=0.3, tpot=0.02)
    server.finish(10, prompt=1500, output=150, ttft=4.0, tpot=0.09)
    server.scrape(600)
    profile = learn(window_of(server))
    prompts = dict(zip(profile.prompt_tokens.edges, profile.prompt_tokens.counts, strict=True))
    assert (prompts[200.0], prompts[2000.0], profile.prompt_tokens.total) == (90, 10, 100)
    assert profile.output_tokens_mean == (90 * 15 + 10 * 150) / 100
    assert profile.ttft_p95 == pytest.approx(2.5 + 2.5 * 5 / 10)
    assert profile.e2e_p95 == pytest.approx(15 + 5 * 5 / 10)


def test_growth_of_the_queue_is_demand() -> None:
    server = Exposed()
    for step in range(STEPS):
        server.set(names.RUNNING, 10)
        server.set(names.WAITING, 5 + 15 * step)
        server.scrape(step * STEP)
        server.finish(30)
    profile = learn(window_of(server))
    assert profile.saturated
    assert profile.demand == pytest.approx((30 + 15) / 15)
    assert profile.burstiness is None


@pytest.mark.parametrize(
    ("queue", "running", "saturated"),
    [
        (lambda step: 5, lambda step: 64, True),
        (lambda step: 0 if step == 20 else 5, lambda step: 64, True),  # one glimpse in 41
        (lambda step: 0 if step % 4 == 0 else 5, lambda step: 64, False),  # it does empty
        (lambda step: 5, lambda step: 64 if step % 2 else 4, False),  # not at a limit: bursts being taken in
        (lambda step: 0, lambda step: 64, False),
    ],
)
def test_saturated_is_a_queue_that_never_empties_before_a_full_server(queue, running, saturated) -> None:  # type: ignore[no-untyped-def]
    server = Exposed()
    for step in range(STEPS):
        server.set(names.RUNNING, running(step))
        server.set(names.WAITING, queue(step))
        server.scrape(step * STEP)
        server.finish(30)
    assert learn(window_of(server)).saturated is saturated


def test_a_few_samples_say_nothing_of_saturation() -> None:
    server = Exposed()
    for at in (0.0, 300.0, 600.0):
        server.set(names.RUNNING, 64)
        server.set(names.WAITING, 5)
        server.scrape(at)
        server.finish(100)
    assert not learn(window_of(server)).saturated


def test_uneven_saturation_is_noted() -> None:
    profile = learn(window_of(serve(Exposed("a"), waiting=5, running=64), serve(Exposed("b"))))
    assert not profile.saturated
    assert any("unevenly" in note for note in profile.notes)


@pytest.mark.parametrize(("burst", "low", "high"), [(1, 0.7, 1.4), (8, 5.0, 12.0)])
def test_burstiness_is_variance_over_mean(burst: int, low: float, high: float) -> None:
    """Poisson arrivals have 1; the same coming in groups of `burst` have that many times as much."""
    random.seed(7)
    server = Exposed()
    server.set(names.RUNNING, 3)
    server.scrape(0)
    for step in range(1, 400):
        groups, clock = 0, random.expovariate(40 / burst)
        while clock < 1:
            groups += 1
            clock += random.expovariate(40 / burst)
        server.finish(groups * burst)
        server.scrape(step * 15.0)
    found = learn(window_of(server, end=6000)).burstiness
    assert found is not None
    assert low < found < high


def test_a_slow_swell_is_no_burst() -> None:
    server = Exposed()
    server.scrape(0)
    for step in range(1, 121):
        server.finish(20 + step)
        server.scrape(step * STEP)
    found = learn(window_of(server, end=1800)).burstiness
    assert found is not None
    assert found < 0.1


def test_few_steps_say_nothing_of_bursts() -> None:
    server = Exposed()
    for at in range(5):
        server.scrape(at * STEP)
        server.finish(at * 20)
    assert learn(window_of(server)).burstiness is None


def test_reuse_of_prefixes() -> None:
    assert learn(window_of(serve(Exposed(), cached=50))).prefix_reuse == pytest.approx(0.25)
    assert learn(window_of(serve(Exposed(), cached=0))).prefix_reuse == 0.0


def test_no_queries_while_prompts_flow_means_the_cache_is_off() -> None:
    server = serve(Exposed())
    off = [s for s in server.series() if s.name not in (names.PREFIX_QUERIES, names.PREFIX_HITS)]
    silent = Exposed()
    silent.scrape(0)
    silent.scrape(600)
    still = [s for s in silent.series() if s.name in (names.PREFIX_QUERIES, names.PREFIX_HITS)]
    assert learn(SeriesWindow(0, 600, off, ["q"])).prefix_reuse is None
    assert learn(SeriesWindow(0, 600, off + still, ["q"])).prefix_reuse is None


def test_acceptance_by_position_in_numeric_order() -> None:
    server = Exposed()
    server.set(names.DRAFTS, 0)
    for position in range(12):
        server.set(names.ACCEPTED, 0, position=str(position))
    server.scrape(0)
    server.finish(100)
    server.add(names.DRAFTS, 1000)
    for position in range(12):
        server.add(names.ACCEPTED, 900 - 50 * position, position=str(position))
    server.scrape(600)
    assert learn(window_of(server)).acceptance == pytest.approx([(900 - 50 * p) / 1000 for p in range(12)])
    assert learn(window_of(serve(Exposed()))).acceptance == ()


def test_aborts_are_neither_finished_nor_errors_but_demand() -> None:
    server = Exposed()
    server.scrape(0)
    server.finish(190)
    server.finish(10, reason="error")
    server.finish(100, reason="abort")
    server.scrape(600)
    profile = learn(window_of(server))
    assert profile.finished_requests == 200
    assert profile.error_rate == pytest.approx(0.05)
    assert profile.demand == pytest.approx(300 / 600)
    assert any("100 requests were aborted" in note for note in profile.notes)


def test_a_restart_loses_no_requests_and_is_noted() -> None:
    server = Exposed()
    server.set(names.RUNNING, 5)
    server.scrape(0)
    for step in range(1, STEPS):
        if step == 20:
            server.restart()
            server.set(names.RUNNING, 5)
        server.finish(30)
        server.scrape(step * STEP)
    profile = learn(window_of(server))
    assert profile.finished_requests == 30 * 40
    assert profile.demand == pytest.approx((30 * 40 + 5) / 600)  # the five it died with came again
    assert any("a:8000 restarted 1 times" in note for note in profile.notes)


def test_replicas_that_follow_each_other_are_not_taken_for_more() -> None:
    """A rolling update in the window: three pods were there, one at a time."""
    servers = []
    for number in range(3):
        server = Exposed(f"10.0.0.{number}:8000", pod=f"p{number}", namespace="n")
        for step in range(14):
            server.scrape((number * 14 + step) * STEP)
            server.finish(30)
        servers.append(server)
    profile = learn(window_of(*servers, end=630))
    assert profile.replicas == 1
    assert profile.demand == pytest.approx(2.0)
    assert any("3 servers came and went" in note for note in profile.notes)


def test_servers_with_differing_edges_are_merged_and_noted() -> None:
    short = Exposed("a", edges={"vllm:request_prompt_tokens": LENGTHS[:9]})
    profile = learn(window_of(serve(short), serve(Exposed("b"))))
    assert profile.prompt_tokens.edges == LENGTHS[:9]
    assert profile.prompt_tokens_mean == 200
    assert any("edges differ" in note for note in profile.notes)


def test_too_little_traffic_says_how_much_is_missing() -> None:
    server = Exposed()
    server.scrape(0)
    server.finish(34)
    server.scrape(600)
    with pytest.raises(Refused, match=r"^34 of 100 requests finished in 10m; wait, widen metrics.window"):
        learn(window_of(server))


def test_no_traffic_at_all_is_refused_also_where_nothing_is_asked_for() -> None:
    server = Exposed()
    server.scrape(0)
    server.scrape(600)
    with pytest.raises(Refused, match="0 of 1 requests"):
        learn(window_of(server), min_requests=1)


def test_no_data_names_the_queries() -> None:
    with pytest.raises(Refused, match=r"no vLLM metric in 10m.*metrics.selector.*Asked: \{job=\"x\"\}"):
        learn(SeriesWindow(0, 600, [], ['{job="x"}']))


@pytest.mark.parametrize("name", [names.FINISHED, names.WAITING, f"{names.PROMPT_LENGTH}_bucket"])
def test_a_metric_that_was_renamed_is_named(name: str) -> None:
    """Never taken for zero."""
    series = [s for s in serve(Exposed()).series() if s.name != name]
    with pytest.raises(Refused, match=f"no series {name}"):
        learn(SeriesWindow(0, 600, series, ["q"]))


def test_one_sample_is_no_window() -> None:
    server = Exposed()
    server.scrape(300)
    with pytest.raises(Refused, match="no server has two samples"):
        learn(window_of(server))


def test_what_the_source_warned_of_is_kept() -> None:
    window = window_of(serve(Exposed()))
    warned = SeriesWindow(0, 600, window.series, ["q"], ["Prometheus: something was slow"])
    assert "Prometheus: something was slow" in learn(warned).notes


def test_latencies_beyond_the_last_bucket_are_unknown_not_small() -> None:
    server = Exposed()
    server.scrape(0)
    server.finish(100, ttft=100.0)
    server.scrape(600)
    profile = learn(window_of(server))
    assert profile.ttft_p95 is None
    assert any("beyond its last bucket" in note for note in profile.notes)


def test_every_series_that_is_used_is_asked_for() -> None:
    """A profile is the same when only the metrics that are asked for are there."""
    window = window_of(serve(Exposed(), cached=20))
    asked = [s for s in window.series if s.name in PROFILE_METRICS]
    assert len(asked) < len(window.series)
    assert learn(SeriesWindow(0, 600, asked, window.queries)) == learn(window)
