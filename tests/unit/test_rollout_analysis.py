"""The canary's verdict: what is caught, what is let through, and what is never a pass."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rollouts import E2E, FINISHED, GENERATED, PREEMPTIONS, TPOT, TTFT, WAITING, Behaviour, cut, windows
from scipy.special import ndtri

from tunewright.domain.profile import Histogram
from tunewright.domain.promotion import Analysis
from tunewright.domain.tuning import Slo
from tunewright.domain.verdict import Outcome, Verdict
from tunewright.observe.names import CANARY_METRICS
from tunewright.ports import Series, SeriesWindow
from tunewright.rollout.analysis import compare, hold_to_slo, judge, readings, weigh
from tunewright.rollout.evidence import Evidence, Latency
from tunewright.rollout.freshness import blind_spots
from tunewright.rollout.inference import (
    Block,
    Estimated,
    chance_of_fewer,
    chance_of_more,
    clustering,
    level_of_a_look,
    mean_ratio,
    share_lower,
    share_upper,
)

STEADY = Behaviour(rate=2.0)
SLOWER = replace(STEADY, ttft=STEADY.ttft * 1.25, tpot=STEADY.tpot * 1.25)
WHOLE = 1800.0
CALM = [Block(100, 0.0)] * 20
"""No preemptions."""


def analysis(**changes: Any) -> Analysis:
    return Analysis(**({"interval": "60s", "min_duration": "5m", "max_duration": "30m"} | changes))


def slo(**bounds: str) -> Slo:
    return Slo(**bounds)


def end_of_analysis(canary: Behaviour, stable: Behaviour, seed: int) -> Outcome:
    """Look every minute until there is a verdict, or the time is up."""
    canary_window, stable_windows = windows(canary, stable, seed, WHOLE)
    at, spec = 60.0, analysis(tolerance="20%")
    while at <= WHOLE:
        verdict = compare(cut(canary_window, at), [cut(w, at) for w in stable_windows], slo(), spec, at=at)
        if verdict.outcome is not Outcome.INCONCLUSIVE:
            return verdict.outcome
        at += 120.0
    return Outcome.INCONCLUSIVE


def test_both_figures_of_the_gate_bad_caught_and_good_let_through() -> None:
    seeds = range(12)
    good = [end_of_analysis(STEADY, STEADY, seed) for seed in seeds]
    bad = [end_of_analysis(SLOWER, STEADY, seed) for seed in seeds]
    assert good.count(Outcome.PASS) >= 10
    assert good.count(Outcome.FAIL) == 0
    assert bad.count(Outcome.FAIL) >= 11
    assert bad.count(Outcome.PASS) == 0


def test_a_better_canary_passes_and_says_by_how_much() -> None:
    canary, stable = windows(replace(STEADY, ttft=0.15, tpot=0.01), STEADY, 1, WHOLE)
    verdict = compare(canary, stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.PASS
    assert "ttft mean -4" in verdict.reason or "ttft mean -5" in verdict.reason
    assert verdict.at == 1.0


def test_several_stable_servers_are_one_side() -> None:
    canary, stable = windows(STEADY, STEADY, 2, WHOLE, replicas=3)
    verdict = compare(canary, stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.PASS
    ttft = next(m for m in verdict.metrics if m.metric == "ttft mean")
    assert ttft.stable.samples == pytest.approx(3 * ttft.canary.samples, rel=0.1)


def without(window: SeriesWindow, *names: str) -> SeriesWindow:
    series = [s for s in window.series if not s.name.startswith(names)]
    return SeriesWindow(window.start, window.end, series, window.queries)


def empty(window: SeriesWindow) -> SeriesWindow:
    return SeriesWindow(window.start, window.end, [], window.queries)


def poisoned(window: SeriesWindow) -> SeriesWindow:
    series = [Series(s.labels, [(at, math.nan) for at, _ in s.samples]) for s in window.series]
    return SeriesWindow(window.start, window.end, series, window.queries)


@pytest.mark.parametrize("spoil", [empty, poisoned, lambda w: without(w, FINISHED), lambda w: cut(w, 0.0)])
@pytest.mark.parametrize("side", ["canary", "stable"])
def test_no_data_is_never_a_verdict(spoil, side) -> None:  # type: ignore[no-untyped-def]
    canary, stable = windows(STEADY, STEADY, 3, WHOLE)
    whole = SeriesWindow(0, WHOLE, [], ["q"])
    if side == "canary":
        canary = replace(spoil(canary), end=whole.end)
    else:
        stable = [replace(spoil(w), end=whole.end) for w in stable]
    verdict = compare(canary, stable, slo(ttft_p95="60s"), analysis(), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert side in verdict.reason


@pytest.mark.parametrize("name", [TTFT, TPOT, E2E])
def test_no_verdict_on_a_metric_that_few_requests_have(name: str) -> None:
    """As TPOT where most answers are one token: that there are requests enough says nothing of it."""
    canary, stable = windows(SLOWER, STEADY, 3, WHOLE)
    few = [
        replace(s, samples=[(at, value * 0.01) for at, value in s.samples]) if s.name.startswith(name) else s
        for s in canary.series
    ]
    verdict = compare(replace(canary, series=few), stable, slo(), analysis(), at=1.0)
    short = {m.metric.split()[0]: m for m in verdict.metrics if "requests tell their" in m.reason}
    assert set(short) == {{TTFT: "ttft", TPOT: "tpot", E2E: "e2e"}[name]}
    assert all(m.outcome is Outcome.INCONCLUSIVE for m in short.values())


@pytest.mark.parametrize("name", [TTFT, TPOT, E2E])
@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_latency_is_never_a_pass_and_is_named(name: str, side: int) -> None:
    """As after a metric was renamed: the guard must not become empty."""
    canary, stable = windows(STEADY, STEADY, 3, WHOLE)
    both = [canary, stable[0]]
    both[side] = without(both[side], name)
    verdict = compare(both[0], [both[1]], slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert name in verdict.reason
    assert ("canary", "stable")[side] in verdict.reason


def test_no_stable_server_and_no_reading_are_inconclusive() -> None:
    canary, _ = windows(STEADY, STEADY, 3, WHOLE)
    assert compare(canary, [], slo(), analysis(), at=1.0).outcome is Outcome.INCONCLUSIVE
    assert judge([], slo(), analysis(), at=1.0).outcome is Outcome.INCONCLUSIVE


def test_errors_that_are_not_counted_are_no_proof_of_health() -> None:
    canary, stable = windows(STEADY, STEADY, 3, WHOLE)
    blind = [s for s in canary.series if s.labels.get("finished_reason") != "error"]
    verdict = compare(SeriesWindow(0, WHOLE, blind, ["q"]), stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "finished_reason error" in verdict.reason


def test_too_few_requests_on_either_side_are_no_verdict() -> None:
    slow = replace(STEADY, rate=0.01)
    for canary_behaviour, stable_behaviour in ((slow, STEADY), (STEADY, slow)):
        canary, stable = windows(canary_behaviour, stable_behaviour, 4, WHOLE)
        verdict = compare(canary, stable, slo(), analysis(), at=1.0)
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "of 50 requests finished" in verdict.reason


def test_nothing_passes_before_the_shortest_time() -> None:
    canary, stable = windows(replace(STEADY, rate=20, ttft=0.1), replace(STEADY, rate=20), 5, 240)
    verdict = compare(canary, stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == "watched 4m of 5m"


def test_what_is_surely_worse_goes_back_before_the_shortest_time() -> None:
    canary, stable = windows(replace(STEADY, rate=20, ttft=3.0), replace(STEADY, rate=20), 5, 120)
    verdict = compare(canary, stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.FAIL
    assert "surely worse" in verdict.reason


def test_the_first_look_at_the_first_moment_is_too_early() -> None:
    canary, stable = windows(STEADY, STEADY, 5, WHOLE)
    verdict = compare(cut(canary, 0.0), [cut(w, 0.0) for w in stable], slo(), analysis(min_duration="0s"), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_a_canary_that_fails_requests_is_not_watched_any_longer() -> None:
    canary, stable = windows(replace(STEADY, errors=0.5), STEADY, 5, 60)
    verdict = compare(canary, stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.FAIL
    assert "ended in an error, above 1.00%" in verdict.reason


def with_finished(window: SeriesWindow, reason: str, total: float) -> SeriesWindow:
    """The window with so many requests that ended for this reason."""
    series = [
        Series(s.labels, [(0.0, 0.0), (WHOLE, total)]) if s.labels.get("finished_reason") == reason else s
        for s in window.series
    ]
    return SeriesWindow(0, WHOLE, series, ["q"])


@pytest.mark.parametrize(
    ("canary_share", "stable_share", "outcome"),
    [
        (0.0003, 0.0, Outcome.PASS),  # a stray one
        (0.004, 0.004, Outcome.PASS),  # surely below what is allowed
        (0.013, 0.0, Outcome.FAIL),  # surely more than the others
        (0.008, 0.008, Outcome.INCONCLUSIVE),  # not surely below, nor more
        (0.1, 0.0, Outcome.FAIL),
        (0.03, 0.03, Outcome.PASS),  # going back would not help
        (0.06, 0.03, Outcome.FAIL),
    ],
)
def test_errors_are_held_against_what_is_allowed_and_against_the_others(
    canary_share: float, stable_share: float, outcome: Outcome
) -> None:
    canary, stable = windows(STEADY, STEADY, 6, WHOLE)
    total = readings(canary, stable)[0].value or 0
    both = [
        with_finished(w, "error", round(total * share))
        for w, share in ((canary, canary_share), (stable[0], stable_share))
    ]
    assert compare(both[0], both[1:], slo(), analysis(tolerance="20%"), at=1.0).metrics[0].outcome is outcome


def test_aborted_requests_are_neither_finished_nor_errors() -> None:
    canary, stable = windows(STEADY, STEADY, 6, WHOLE)
    both = [with_finished(w, "abort", 9999.0) for w in (canary, stable[0])]
    aborted = compare(both[0], both[1:], slo(), analysis(), at=1.0)
    assert aborted.metrics[0] == compare(canary, stable, slo(), analysis(), at=1.0).metrics[0]
    assert outcome_of(aborted, "aborted") is Outcome.PASS


def test_clients_that_give_up_on_the_canary_alone_send_it_back() -> None:
    canary, stable = windows(STEADY, STEADY, 6, WHOLE)
    verdict = compare(with_finished(canary, "abort", 200.0), stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.FAIL
    assert "were aborted, surely more" in verdict.reason


def test_preemptions_of_the_canary_alone_send_it_back_though_they_come_in_bursts() -> None:
    more = replace(STEADY, preemptions=0.3)
    found = [compare(*windows(more, STEADY, seed, WHOLE), slo(), analysis(), at=1.0) for seed in range(5)]
    assert [outcome_of(verdict, "preemptions") for verdict in found] == [Outcome.FAIL] * 5
    assert "preemptions per request against 0.000, surely more" in found[0].reason


def test_preemptions_that_both_sides_have_are_no_fault_of_the_canary() -> None:
    often = replace(STEADY, preemptions=0.3)
    found = [compare(*windows(often, often, seed, WHOLE), slo(), analysis(), at=1.0) for seed in range(20)]
    assert not [v for v in found if outcome_of(v, "preemptions") is Outcome.FAIL]
    few = [compare(*windows(STEADY, often, seed, WHOLE), slo(), analysis(), at=1.0) for seed in range(5)]
    assert [outcome_of(verdict, "preemptions") for verdict in few] == [Outcome.PASS] * 5


def saturated(canary: Behaviour, stable: Behaviour, **changes: Any) -> Verdict:
    return compare(*windows(canary, stable, 7, WHOLE), slo(), analysis(tolerance="20%", **changes), at=1.0)


def test_throughput_is_judged_where_requests_wait_on_both_sides() -> None:
    full, less = replace(STEADY, waiting=1.0), replace(STEADY, waiting=1.0, tokens=75.0)
    assert outcome_of(saturated(full, full), "throughput") is Outcome.PASS
    verdict = saturated(less, full)
    assert verdict.outcome is Outcome.FAIL
    assert "output tokens per second and GPU" in verdict.reason
    assert outcome_of(saturated(full, less), "throughput") is Outcome.PASS, "more is better"


def test_throughput_is_told_as_not_judged_while_it_is_what_was_asked_for() -> None:
    less = replace(STEADY, tokens=75.0)
    verdict = saturated(less, replace(STEADY, waiting=1.0))
    assert verdict.outcome is Outcome.PASS
    assert "throughput (requests waited on the canary in 0% of the time: it is what was asked for)" in verdict.reason
    required = saturated(less, STEADY, required=["throughput"])
    assert required.outcome is Outcome.INCONCLUSIVE
    assert "throughput: requests waited" in required.reason


def test_throughput_is_counted_per_gpu() -> None:
    full = replace(STEADY, waiting=1.0)
    canary, stable = windows(full, full, 7, WHOLE)
    verdict = judge(readings(canary, stable, (2, 1)), slo(), analysis(), at=1.0)
    assert outcome_of(verdict, "throughput") is Outcome.FAIL, "twice the GPUs for as many tokens"


@pytest.mark.parametrize(
    ("metric", "series"),
    [("aborted", None), ("preemptions", PREEMPTIONS), ("throughput", GENERATED), ("throughput", WAITING)],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_further_metric_that_is_missing_is_no_pass_where_it_is_required(
    metric: str, series: str | None, side: int
) -> None:
    full = replace(STEADY, waiting=1.0)
    canary, stable = windows(full, full, 3, WHOLE)
    both = [canary, stable[0]]
    if series is None:
        kept = [s for s in both[side].series if s.labels.get("finished_reason") != "abort"]
        both[side] = SeriesWindow(0, WHOLE, kept, ["q"])
    else:
        both[side] = without(both[side], series)
    required = compare(both[0], both[1:], slo(), analysis(tolerance="20%", required=[metric]), at=1.0)
    assert required.outcome is Outcome.INCONCLUSIVE
    assert f"{metric}: there is no" in required.reason
    told = compare(both[0], both[1:], slo(), analysis(tolerance="20%", required=[]), at=1.0)
    assert told.outcome is Outcome.PASS
    assert f"not judged here: {metric} (there is no" in told.reason


def test_what_the_analysis_needs_is_looked_for_before_anything_moves() -> None:
    canary, _ = windows(STEADY, STEADY, 3, WHOLE)
    assert blind_spots("s0", canary, analysis()) == []
    assert "num_preemptions_total" in blind_spots("s0", without(canary, PREEMPTIONS), analysis())[0]
    assert blind_spots("s0", without(canary, PREEMPTIONS), analysis(required=[])) == []
    kept = [s for s in canary.series if s.labels.get("finished_reason") != "abort"]
    assert "finished_reason abort" in blind_spots("s0", SeriesWindow(0, WHOLE, kept, ["q"]), analysis())[0]


def test_the_verdict_follows_from_the_stored_readings() -> None:
    """As they are read from the record again, and small enough for it."""
    canary, stable = windows(SLOWER, STEADY, 7, WHOLE, replicas=2)
    stored = readings(canary, stable)
    again = [type(r).model_validate_json(r.model_dump_json()) for r in stored]
    bounds = slo(ttft_p95="2s", e2e_p50="9s")
    assert judge(again, bounds, analysis(), at=1.0) == compare(canary, stable, bounds, analysis(), at=1.0)
    assert sum(len(r.model_dump_json()) for r in stored) < 48 * 1024


def test_only_what_is_asked_for_is_used() -> None:
    """A canary is judged alike where the servers' other series, which nobody fetches then, are left out."""
    canary, stable = windows(SLOWER, STEADY, 7, WHOLE)
    only = [replace(w, series=[s for s in w.series if s.name in CANARY_METRICS]) for w in (canary, *stable)]
    assert len(only[0].series) < len(canary.series)
    told, whole = (compare(w, rest, slo(), analysis(), at=1.0) for w, rest in ((only[0], only[1:]), (canary, stable)))
    assert told == whole
    assert told.outcome is not Outcome.INCONCLUSIVE


def test_differing_bucket_edges_are_compared_where_they_agree() -> None:
    canary, stable = windows(STEADY, STEADY, 8, WHOLE)
    fewer = [s for s in canary.series if s.labels.get("le") not in ("0.25", "0.75")]
    verdict = compare(SeriesWindow(0, WHOLE, fewer, ["q"]), stable, slo(), analysis(tolerance="20%"), at=1.0)
    assert verdict.outcome is Outcome.PASS
    ttft = {r.query for r in readings(SeriesWindow(0, WHOLE, fewer, ["q"]), stable) if TTFT in r.query}
    assert not any('le="0.25"' in query for query in ttft)


def test_a_broken_histogram_holds_and_is_named() -> None:
    canary, stable = windows(STEADY, STEADY, 8, WHOLE)
    broken = [s for s in canary.series if not (s.name == f"{TTFT}_bucket" and s.labels["le"] == "+Inf")]
    verdict = compare(SeriesWindow(0, WHOLE, broken, ["q"]), stable, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "isn't a whole histogram" in verdict.reason


def outcome_of(verdict: Verdict, metric: str) -> Outcome:
    return next(m.outcome for m in verdict.metrics if m.metric == metric)


@pytest.mark.parametrize(("bound", "outcome"), [("10s", Outcome.PASS), ("500ms", Outcome.FAIL)])
def test_a_bound_of_the_slo_is_held(bound: str, outcome: Outcome) -> None:
    canary, stable = windows(replace(STEADY, ttft=1.0), replace(STEADY, ttft=0.1), 9, WHOLE)
    verdict = compare(canary, stable, slo(ttft_p95=bound), analysis(), at=1.0)
    assert outcome_of(verdict, "slo ttft p95") is outcome


def test_a_bound_that_the_stable_servers_miss_too_is_left_to_the_comparison() -> None:
    """Otherwise a canary that halves the latency would be sent back to the servers that are worse."""
    canary, stable = windows(replace(STEADY, ttft=1.0), replace(STEADY, ttft=3.0), 9, WHOLE)
    verdict = compare(canary, stable, slo(ttft_p95="500ms"), analysis(), at=1.0)
    assert verdict.outcome is Outcome.PASS
    assert "which the stable servers miss too" in verdict.reason


def test_a_bound_below_the_lowest_bucket_is_not_judged_and_named() -> None:
    canary, stable = windows(replace(STEADY, tpot=0.004), replace(STEADY, tpot=0.004), 9, WHOLE)
    verdict = compare(canary, stable, slo(tpot_p50="5ms", itl_p95="50ms"), analysis(tolerance="20%"), at=1.0)
    assert verdict.outcome is Outcome.PASS
    assert "itl p95 (the histograms don't resolve it), tpot p50 (the histograms don't resolve it)" in verdict.reason


def slo_p95_against(factor: float) -> Verdict:
    """A canary held to a bound of so many times its own p95, beside much faster stable servers."""
    canary, stable = windows(STEADY, replace(STEADY, ttft=0.1), 9, WHOLE)
    loose = compare(canary, stable, slo(ttft_p95="60s"), analysis(), at=1.0)
    own = next(m for m in loose.metrics if m.metric == "slo ttft p95").canary.value or 0.0
    return compare(canary, stable, slo(ttft_p95=f"{own * factor * 1e3:.1f}ms"), analysis(), at=1.0)


@pytest.mark.parametrize("factor", [0.99, 1.001])
def test_a_bound_that_is_barely_missed_or_met_is_open(factor: float) -> None:
    """A pass needs that it is surely not missed by more than a tenth."""
    assert outcome_of(slo_p95_against(factor), "slo ttft p95") is Outcome.INCONCLUSIVE
    assert outcome_of(slo_p95_against(1.5), "slo ttft p95") is Outcome.PASS


@pytest.mark.parametrize(("share", "outcome"), [(0.05, Outcome.PASS), (0.15, Outcome.FAIL)])
def test_a_tail_that_the_mean_hides_is_caught(share: float, outcome: Outcome) -> None:
    """As many seconds in all, but three times as many of the slow requests."""
    canary, stable = evidence_with_tail(share), evidence_with_tail(0.05)
    verdict = weigh({"canary": canary, "stable": stable}, 0, WHOLE, slo(), analysis(), at=1.0)
    assert outcome_of(verdict, "ttft mean") is Outcome.PASS
    assert outcome_of(verdict, "ttft tail") is outcome
    assert verdict.outcome is outcome


def evidence_with_tail(share: float) -> Evidence:
    """2,000 requests, of which so many took above 1 s; their mean is the same."""
    histogram = Histogram(edges=(0.5, 1.0, 2.5), counts=(1000, 1000 - 2000 * share, 2000 * share))
    one = Latency(histogram, [Block(100, 50.0 + (1 if i % 2 else -1)) for i in range(20)])
    return Evidence(2000, 0, 0, {TTFT: one, TPOT: one, E2E: one}, (), CALM)


def test_no_edge_sets_slow_requests_apart() -> None:
    one = Latency(Histogram(edges=(0.5, 1.0), counts=(0, 2000)), [Block(100, 50.0 + i % 2) for i in range(20)])
    side = Evidence(2000, 0, 0, {TTFT: one, TPOT: one, E2E: one}, (), CALM)
    verdict = weigh({"canary": side, "stable": side}, 0, WHOLE, slo(), analysis(), at=1.0)
    assert verdict.outcome is Outcome.PASS
    assert not [m for m in verdict.metrics if "tail" in m.metric]


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    both = windows(STEADY, STEADY, 10, WHOLE)
    still = [
        SeriesWindow(0, WHOLE, [Series(s.labels, [(t, 0.0) for t, _ in s.samples]) if s.name == f"{TPOT}_sum" else s
                                for s in w.series], ["q"])
        for w in (both[0], both[1][0])
    ]  # fmt: skip
    verdict = compare(still[0], [still[1]], slo(), analysis(tolerance="20%"), at=1.0)
    assert verdict.outcome is Outcome.PASS
    assert "tpot" not in verdict.reason


def test_after_the_roll_all_servers_are_held_to_the_slo() -> None:
    fast, _ = windows(replace(STEADY, ttft=0.1), STEADY, 11, WHOLE)
    slow, _ = windows(replace(STEADY, ttft=4.0), STEADY, 11, WHOLE)
    failing, _ = windows(replace(STEADY, errors=0.1), STEADY, 11, WHOLE)
    bound = slo(ttft_p95="1s")
    assert hold_to_slo(fast, bound, analysis(), at=1.0).outcome is Outcome.PASS
    verdict = hold_to_slo(slow, bound, analysis(), at=1.0)
    assert verdict.outcome is Outcome.FAIL
    assert "surely missed" in verdict.reason
    assert hold_to_slo(failing, bound, analysis(), at=1.0).outcome is Outcome.FAIL
    assert hold_to_slo(empty(fast), bound, analysis(), at=1.0).outcome is Outcome.INCONCLUSIVE


def test_after_the_roll_a_bound_that_was_missed_before_is_no_regression() -> None:
    canary, stable = windows(replace(STEADY, ttft=1.0), replace(STEADY, ttft=3.0), 9, WHOLE)
    bound = slo(ttft_p95="500ms")
    before = compare(canary, stable, bound, analysis(), at=1.0)
    assert hold_to_slo(canary, bound, analysis(), at=2.0).outcome is Outcome.FAIL
    assert hold_to_slo(canary, bound, analysis(), at=2.0, before=before).outcome is Outcome.PASS


def test_windows_of_another_time_are_a_fault_of_the_caller() -> None:
    canary, stable = windows(STEADY, STEADY, 1, 600)
    with pytest.raises(ValueError, match="not of the same time"):
        compare(cut(canary, 300), stable, slo(), analysis(), at=1.0)


def test_a_tolerance_of_zero_can_still_be_met() -> None:
    busy = replace(STEADY, rate=20.0, swell=0.0)
    canary, stable = windows(replace(busy, ttft=busy.ttft * 0.97, tpot=busy.tpot * 0.97), busy, 12, WHOLE)
    assert compare(canary, stable, slo(), analysis(tolerance="0%"), at=1.0).outcome is Outcome.PASS


# --- the statistics ---------------------------------------------------------------------------------------------------


def test_blocks_that_rise_and_fall_together_say_more() -> None:
    """The spread of the ratio is that of the differences, not of the common ups and downs."""
    levels = [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]
    common = [Block(10, 10 * level) for level in levels]
    other = [Block(10, 10 * level) for level in reversed(levels)]
    together, apart = mean_ratio(common, common), mean_ratio(common, other)
    assert together is not None
    assert apart is not None
    assert (together.estimate, together.error) == (0.0, 0.0)
    assert apart.error > 0.1


def test_a_ratio_needs_blocks_and_means() -> None:
    block = Block(1, 1.0)
    assert mean_ratio([block] * 4, [block] * 4) is None
    assert mean_ratio([Block(1, 0.0)] * 6, [block] * 6) is None
    assert mean_ratio([Block(0, 0.0)] * 6, [block] * 6) is None


def test_bounds_widen_with_certainty_and_with_fewer_blocks() -> None:
    few, many = Estimated(0.1, 0.05, 5), Estimated(0.1, 0.05, 20)
    assert few.lower(0.01) < many.lower(0.01) < many.lower(0.1) < 0.1 < many.upper(0.1) < few.upper(0.1)
    assert Estimated(0.0, 1.0, 10_000).upper(0.025) == pytest.approx(1.96, abs=0.001)


def test_looking_more_often_asks_for_more_of_each_look() -> None:
    once, often = level_of_a_look(0.01, 1.0, 1.0), level_of_a_look(0.01, 1.0, 60.0)
    assert often < once < 0.01


def test_a_random_walk_crosses_the_line_of_all_looks_as_seldom_as_it_says() -> None:
    """Sixty looks at a walk without drift, 20,000 times: at most one in twenty is ever beyond."""
    rng = np.random.default_rng(1)
    steps = np.arange(1, 61)
    deviations = np.cumsum(rng.normal(size=(20_000, 60)), axis=1) / np.sqrt(steps)
    beyond = (deviations.max(axis=1) > -ndtri(level_of_a_look(0.05, 1.0, 60.0))).mean()
    assert 0.02 < beyond < 0.05


def test_two_shares_are_compared_exactly() -> None:
    assert chance_of_more(0, 10, 5, 10) == 1.0
    assert chance_of_more(5, 10, 0, 10) == pytest.approx(0.5**5)
    assert chance_of_fewer(0, 10, 5, 10, 1.0) == pytest.approx(0.5**5)
    assert chance_of_fewer(0, 10, 5, 10, 2.0) == pytest.approx((1 / 3) ** 5)
    assert chance_of_fewer(5, 10, 0, 10, 2.0) == 1.0
    assert chance_of_more(7, 30, 9, 50) + chance_of_fewer(6, 30, 10, 50, 1.0) == pytest.approx(1.0)


def test_requests_that_are_alike_count_less() -> None:
    histogram = Histogram(edges=(1, 2), counts=(50, 50))
    alike = [Block(10, 5.0) if i % 2 else Block(10, 15.0) for i in range(10)]
    mixed = [Block(10, 10.0 + (0.1 if i % 2 else -0.1)) for i in range(10)]
    assert clustering(alike, histogram) > 5
    assert clustering(mixed, histogram) == 1.0


def test_the_lower_bound_of_a_share_is_exact() -> None:
    """With all of n failed, it is the n-th root of the level."""
    assert share_lower(5, 5, 0.01) == pytest.approx(0.01 ** (1 / 5))
    assert share_lower(0, 50, 0.01) == 0


def test_the_upper_bound_of_a_share_is_exact() -> None:
    assert share_upper(0, 5, 0.01) == pytest.approx(1 - 0.01 ** (1 / 5))
    assert share_upper(50, 50, 0.01) == 1
