"""What the changes are worth, and what tokens cost: held against surfaces and sums that are known."""

import pytest
from telemetry_samples import BASELINE, measurement, promoted, record, trial, tuning

from tunewright.domain.candidate import Candidate
from tunewright.domain.pareto import pareto_front
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialOutcome, TrialPurpose
from tunewright.telemetry.effects import knob_effects, ladder, together
from tunewright.telemetry.report import render_report
from tunewright.telemetry.report.cost import costs

CACHING = BASELINE.with_value("enable_prefix_caching", True)
BOTH = CACHING.with_value("max_num_seqs", 256)
FASTER, SHORTER = tuning().spec.objective, tuning(objective={"minimize": "ttftP95"}).spec.objective


def known_surface(sign=1.0):
    """Caching is worth +20 %, 256 sequences +50 %, 32 sequences -10 %; no noise."""
    rows = [(BASELINE, 1.0), (BASELINE, 1.0), (CACHING, 1.2), (BASELINE.with_value("max_num_seqs", 256), 1.5),
            (BASELINE.with_value("max_num_seqs", 32), 0.9), (BOTH, 1.8), (BOTH, 1.8)]  # fmt: skip
    return [
        trial(n, candidate, objective=1000 * factor if sign > 0 else -1 / factor)
        for n, (candidate, factor) in enumerate(rows)
    ]


def test_the_effects_of_a_known_surface_are_found_with_their_signs() -> None:
    found = {(each.knob, each.value): each for each in knob_effects(FASTER, BASELINE, known_surface())}
    assert found["enable_prefix_caching", True].gain == pytest.approx(0.2, abs=0.06)
    assert found["max_num_seqs", 256].gain == pytest.approx(0.5, abs=0.08)
    assert found["max_num_seqs", 32].gain == pytest.approx(-0.1, abs=0.06)
    for each in found.values():
        assert each.low < each.gain < each.high
    assert found["max_num_seqs", 256].seen == 3
    assert next(iter(found)) == ("max_num_seqs", 256), "the largest comes first"


def test_a_latency_that_gets_shorter_is_a_gain() -> None:
    found = {(each.knob, each.value): each for each in knob_effects(SHORTER, BASELINE, known_surface(-1.0))}
    assert found["max_num_seqs", 256].gain == pytest.approx(1 - 1 / 1.5, abs=0.05)
    assert found["max_num_seqs", 32].gain < 0
    assert together(SHORTER, 0.5, 0.5) == pytest.approx(0.75)
    assert together(FASTER, 0.2, 0.5) == pytest.approx(0.8)


def test_the_ladder_climbs_to_the_whole_and_shows_what_was_run() -> None:
    rungs = ladder(FASTER, BASELINE, BOTH, known_surface())
    assert [rung.effect.knob for rung in rungs] == ["max_num_seqs", "enable_prefix_caching"]
    assert rungs[-1].gain == pytest.approx(0.8, abs=0.06)
    assert [rung.measured for rung in rungs] == [pytest.approx(0.5), pytest.approx(0.8)]


def test_what_was_never_measured_is_not_made_up() -> None:
    assert ladder(FASTER, BASELINE, BOTH.with_value("block_size", 32), known_surface()) == []
    assert ladder(FASTER, BASELINE, BASELINE, known_surface()) == []
    assert knob_effects(FASTER, None, known_surface()) == []
    assert knob_effects(FASTER, BASELINE, []) == []


def test_the_front_holds_what_no_other_feasible_trial_beats_in_both() -> None:
    rows = [(100, 0.1), (200, 0.2), (150, 0.3), (300, 0.3), (90, 0.05)]
    trials = [trial(n, Candidate(values={"a": n}), rate=rate, ttft=ttft) for n, (rate, ttft) in enumerate(rows)]
    trials.append(trial(9, Candidate(), rate=999.0, ttft=0.01, outcome=TrialOutcome.INFEASIBLE))
    assert [each.number for each in pareto_front(trials, ("outputTokensPerSecond", "ttftP95"))] == [4, 0, 1, 3]


def priced(**objective):
    done, trials = promoted()
    spec = tuning(objective={"maximize": "outputTokensPerSecond"} | objective)
    return done.model_copy(update={"tuning": spec}), trials


def test_the_cost_of_a_million_tokens_is_the_sum_that_is_shown() -> None:
    done, trials = priced(gpuPricePerHour=3.6)
    baseline, winner = costs(done, trials)
    assert winner.per_million == pytest.approx(3.6 / (winner.tokens_per_second * 3600) * 1e6)
    assert (baseline.measured, winner.measured) == (3, 3), "the confirming rounds, not the search's lucky run"
    page = render_report(done, trials)
    assert f"1 × $3.6/h ÷ ({winner.tokens_per_second:,.0f} tokens/s × 3600 s/h) × 1,000,000" in page
    assert winner.per_million < baseline.per_million


def test_every_gpu_of_a_server_costs() -> None:
    wide = {"effective": {"tensor_parallel_size": 4}}
    one = [trial(0, BASELINE, TrialPurpose.BASELINE, measurement=measurement(1000.0), **wide)]
    held = record(Phase.SEARCHING, tuning=tuning(objective={"maximize": "goodput", "gpuPricePerHour": 1.0}),
                  baseline=BASELINE)  # fmt: skip
    (side,) = costs(held, one)
    assert side.per_million == pytest.approx(4 / 3.6)


def test_the_api_s_price_is_compared_only_where_it_is_given() -> None:
    done, trials = priced(gpuPricePerHour=3.6)
    assert "against the API" not in render_report(done, trials)
    done, trials = priced(gpuPricePerHour=3.6, apiPricePerMillionTokens=2.0)
    page = render_report(done, trials)
    winner = costs(done, trials)[1]
    assert f"÷ $2 - 1 = {winner.per_million / 2 * 100 - 100:+.1f}%" in page
    assert "cheaper than the API from 500 output tokens/s upwards" in page


def test_without_a_price_the_report_says_how_to_give_one() -> None:
    done, trials = promoted()
    assert costs(done, trials) == []
    assert "objective.gpuPricePerHour" in render_report(done, trials)


def test_the_api_s_price_is_only_told_and_starts_nothing_anew() -> None:
    one = tuning(objective={"maximize": "goodput", "gpuPricePerHour": 1.0}).spec
    other = tuning(objective={"maximize": "goodput", "gpuPricePerHour": 1.0, "apiPricePerMillionTokens": 2.0}).spec
    third = tuning(objective={"maximize": "goodput", "gpuPricePerHour": 2.0}).spec
    assert one.spec_hash == other.spec_hash
    assert one.spec_hash != third.spec_hash


def test_what_was_asked_of_the_load_tests_stands_beside_what_they_measured() -> None:
    page = render_report(*promoted())
    assert "Asked of the load tests" in page
    assert "63.9" in page, "concurrency as delivered"
    assert "30% found in the cache" in page
