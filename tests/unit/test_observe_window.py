"""Arithmetic on counters and histograms: restarts, gaps, series that come and go, edges that differ."""

import math
from itertools import accumulate
from pathlib import Path

import pytest
from exposed import Exposed, window_of
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tunewright.domain.profile import Histogram
from tunewright.observe import names
from tunewright.observe.window import Distribution, clean, coarsen, increase, join, merge
from tunewright.ports import Refused, Series, SeriesWindow

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vllm"


def counter(*values: float, **labels: str) -> Series:
    return Series({"__name__": "c_total", **labels}, [(15.0 * i, v) for i, v in enumerate(values)])


def test_a_counter_grows_by_last_minus_first() -> None:
    found = increase(counter(5, 7, 12))
    assert found is not None
    assert (found.value, found.seconds, found.samples, found.resets) == (7, 30, 3, 0)


def test_a_drop_is_a_restart_from_zero() -> None:
    found = increase(counter(5, 9, 2, 3))
    assert found is not None
    assert (found.value, found.resets) == (4 + 2 + 1, 1)


@pytest.mark.parametrize("values", [(), (5,), (math.nan, 5), (math.nan, math.nan, math.inf)])
def test_fewer_than_two_numbers_say_nothing(values: tuple[float, ...]) -> None:
    assert increase(counter(*values)) is None


def test_nan_is_dropped_and_noted() -> None:
    window = SeriesWindow(0, 60, [counter(5, math.nan, 8, instance="a")], ["q"])
    cleaned = clean(window)
    assert cleaned.increase("c_total") == 3
    assert any("1 samples are no numbers" in note for note in cleaned.notes)


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=8), min_size=1, max_size=4),
)
def test_no_request_is_lost_or_invented_over_restarts(lives: list[list[int]]) -> None:
    """Each life of a process counts up from 0; all that a scrape could see is found again."""
    values, seen = [], 0
    for number, steps in enumerate(lives):
        life = list(accumulate(steps))
        values += life
        seen += life[-1] - (life[0] if number == 0 else 0)
    # A restart that ends above where it began shows in no drop of this counter alone: another one shows it.
    other = [i + 1 for steps in lives for i, _ in enumerate(steps)]
    shown = Series({"__name__": "d_total", "instance": "a"}, counter(*other).samples)
    window = SeriesWindow(0, 999, [counter(*values, instance="a"), shown], ["q"])
    assert clean(window).increase("c_total") == seen


def test_a_restart_shows_in_all_counters_of_the_server_only() -> None:
    a1 = counter(10, 20, 30, instance="a")
    a2 = Series({"__name__": "d_total", "instance": "a"}, [(0, 100), (15, 3), (30, 4)])
    b = counter(10, 20, 30, instance="b")
    cleaned = clean(SeriesWindow(0, 30, [a1, a2, b], ["q"]))
    by_name = {server.name: server.increase("c_total") for server in cleaned.servers}
    assert by_name == {"a": 20 + 10, "b": 20}
    assert any("a restarted 1 times" in note for note in cleaned.notes)


def test_a_counter_that_appears_on_a_running_server_counts_from_zero() -> None:
    old = counter(1, 2, 3, 4, instance="a")
    new = Series({"__name__": "c_total", "instance": "a", "finished_reason": "error"}, [(30.0, 2.0), (45.0, 5.0)])
    assert clean(SeriesWindow(0, 45, [old, new], ["q"])).increase("c_total", finished_reason="error") == 5


def test_a_server_that_appears_counts_from_its_first_sample() -> None:
    """It may have served long before it was first scraped."""
    old = counter(1, 2, 3, 4, instance="a")
    new = Series({"__name__": "c_total", "instance": "b"}, [(30.0, 1000.0), (45.0, 1005.0)])
    cleaned = clean(SeriesWindow(0, 45, [old, new], ["q"]))
    assert {s.name: s.increase("c_total") for s in cleaned.servers} == {"a": 3, "b": 5}


def test_a_server_scraped_twice_counts_once() -> None:
    both = [counter(0, 5, 9, instance="a", job="vllm"), counter(0, 5, 9, instance="a", job="pods")]
    cleaned = clean(SeriesWindow(0, 30, both, ["q"]))
    assert cleaned.increase("c_total") == 9
    assert any("scraped twice" in note for note in cleaned.notes)


def test_a_series_that_changes_its_target_labels_goes_on() -> None:
    before = Series({"__name__": "c_total", "instance": "a", "version": "1"}, [(0, 100), (15, 110)])
    after = Series({"__name__": "c_total", "instance": "a", "version": "2"}, [(30, 120), (45, 121)])
    assert clean(SeriesWindow(0, 45, [after, before], ["q"])).increase("c_total") == 21


def test_engines_of_one_server_add_up_and_pods_are_told_apart() -> None:
    series = [
        counter(0, 5, instance="10.0.0.1:8000", pod="p1", namespace="n", engine="0"),
        counter(0, 7, instance="10.0.0.1:8000", pod="p1", namespace="n", engine="1"),
        counter(0, 1, instance="10.0.0.2:8000", pod="p2", namespace="n", engine="0"),
    ]
    cleaned = clean(SeriesWindow(0, 15, series, ["q"]))
    assert {s.name: s.increase("c_total") for s in cleaned.servers} == {"n/p1": 12, "n/p2": 1}


def test_an_empty_window_is_empty() -> None:
    cleaned = clean(SeriesWindow(0, 15, [counter(instance="a")], ["q"]))
    assert list(cleaned.servers) == []
    assert cleaned.increase("c_total") is None
    assert cleaned.distribution("h") == (None, None)


def test_a_histogram_is_read_per_bucket() -> None:
    server = Exposed()
    server.finish(prompt=150)
    server.scrape(0)
    for prompt in (150, 150, 900, 5000):
        server.finish(prompt=prompt)
    server.scrape(15)
    found, note = clean(window_of(server)).distribution(names.PROMPT_LENGTH)
    assert found is not None
    counts = dict(zip(found.histogram.edges, found.histogram.counts, strict=True))
    assert (counts[200.0], counts[1000.0], found.histogram.overflow, found.count) == (2, 1, 1, 4)
    assert found.mean == (150 + 150 + 900 + 5000) / 4
    assert note is None


def test_a_restart_does_not_break_a_histogram() -> None:
    """Buckets that are higher after the restart than before it must not be taken as having gone on."""
    server = Exposed()
    server.finish(ttft=5.0)
    server.scrape(0)
    server.finish(ttft=5.0)
    server.scrape(15)
    server.restart()
    server.finish(3, ttft=0.3)
    server.scrape(30)
    found, _ = clean(window_of(server)).distribution(names.TTFT)
    assert found is not None
    counts = dict(zip(found.histogram.edges, found.histogram.counts, strict=True))
    assert (counts[0.5], counts[5.0], found.count) == (3, 1, 4)


def test_differing_edges_are_merged_where_they_agree() -> None:
    short = Histogram(edges=(1, 2, 5), counts=(1, 2, 3), overflow=4)
    long = Histogram(edges=(1, 5, 10), counts=(10, 20, 30), overflow=0)
    merged, note = merge("h", [Distribution(short, 30.0), Distribution(long, 300.0)])
    assert merged.histogram == Histogram(edges=(1, 5), counts=(11, 25), overflow=34)
    assert merged.total == 330
    assert note is not None
    assert "edges differ" in note


def test_an_idle_server_does_not_restrict_the_edges() -> None:
    idle = Histogram(edges=(7,), counts=(0,))
    busy = Histogram(edges=(1, 5), counts=(1, 1))
    merged, note = merge("h", [Distribution(idle, 0.0), Distribution(busy, 4.0)])
    assert (merged.histogram, note) == (busy, None)


def test_nothing_in_common_is_refused_by_name() -> None:
    parts = [Distribution(Histogram(edges=(e,), counts=(1,)), 1.0) for e in (1.0, 2.0)]
    with pytest.raises(Refused, match=r"histograms vllm:x have no bucket edge in common"):
        merge("vllm:x", parts)


@given(st.lists(st.integers(0, 20), min_size=5, max_size=5), st.sets(st.sampled_from([1.0, 2.0, 5.0, 10.0])))
def test_coarser_edges_keep_every_cumulative_count(counts: list[int], kept: set[float]) -> None:
    fine = Histogram(edges=(1, 2, 5, 10), counts=tuple(counts[:4]), overflow=counts[4])
    coarse = coarsen(fine, sorted(kept))
    assert coarse.total == fine.total
    for edge in kept:
        assert _below(coarse, edge) == _below(fine, edge)


def _below(histogram: Histogram, edge: float) -> float:
    return sum(c for e, c in zip(histogram.edges, histogram.counts, strict=True) if e <= edge)


def bucket(le: str, *values: float) -> Series:
    return Series({"__name__": "h_bucket", "instance": "a", "le": le}, [(15.0 * i, v) for i, v in enumerate(values)])


def test_buckets_that_are_not_cumulative_are_refused_by_name() -> None:
    window = SeriesWindow(0, 15, [bucket("1", 0, 9), bucket("2", 0, 5), bucket("+Inf", 0, 9)], ["q"])
    with pytest.raises(Refused, match=r"h_bucket of a isn't cumulative"):
        clean(window).distribution("h")


def test_a_histogram_without_infinity_is_refused() -> None:
    with pytest.raises(Refused, match=r"h_bucket of a has no bucket le=\"\+Inf\""):
        clean(SeriesWindow(0, 15, [bucket("1", 0, 9)], ["q"])).distribution("h")


@pytest.mark.parametrize("le", ["", "small", "nan"])
def test_an_edge_that_is_no_number_is_refused(le: str) -> None:
    with pytest.raises(Refused, match="without a readable edge"):
        clean(SeriesWindow(0, 15, [bucket(le, 0, 9), bucket("+Inf", 0, 9)], ["q"])).distribution("h")


def test_an_edge_may_be_written_in_two_ways_over_time() -> None:
    """Prometheus 3 writes le="1.0" where 2 wrote le="1": a window over the upgrade has both."""
    late = Series({"__name__": "h_bucket", "instance": "a", "le": "1.0"}, [(30.0, 6.0)])
    window = SeriesWindow(0, 30, [bucket("1", 0, 4), late, bucket("+Inf", 0, 5, 9)], ["q"])
    found, _ = clean(window).distribution("h")
    assert found is not None
    assert found.histogram == Histogram(edges=(1,), counts=(6,), overflow=3)


def test_a_gap_in_one_bucket_does_not_break_the_others() -> None:
    window = SeriesWindow(0, 30, [bucket("1", 0, 4, math.nan), bucket("+Inf", 0, 4, 9)], ["q"])
    found, _ = clean(window).distribution("h")
    assert found is not None
    assert found.histogram == Histogram(edges=(1,), counts=(4,), overflow=0)


def test_gauges_of_engines_are_summed_and_of_servers_kept_apart() -> None:
    one, two = Exposed("a", engine="0"), Exposed("a", engine="1")
    for at, first, second in ((0.0, 3, 4), (15.0, 5, 6)):
        one.set(names.RUNNING, first)
        two.set(names.RUNNING, second)
        one.scrape(at)
        two.scrape(at)
    other = Exposed("b")
    other.scrape(0)
    servers = clean(window_of(one, two, other)).servers
    assert {s.name: s.gauge(names.RUNNING) for s in servers} == {"a": {0.0: 7, 15.0: 11}, "b": {0.0: 0}}


def test_windows_of_another_time_are_not_joined() -> None:
    with pytest.raises(ValueError, match="not of the same time"):
        join([SeriesWindow(0, 1, [], []), SeriesWindow(0, 2, [], [])])


@pytest.mark.parametrize("version", ["vllm-0.26-h200-under-load", "vllm-0.32-cpu"])
def test_every_metric_that_is_read_is_exported_by_real_servers(version: str) -> None:
    """Under its exact name; those of speculation only where it is on."""
    text = (FIXTURES / f"{version}.metrics.txt").read_text()
    there = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    speculation = {names.DRAFTS, names.ACCEPTED}
    missing = set(names.ALL_METRICS) - there
    assert missing == (speculation if version.endswith("cpu") else set())
