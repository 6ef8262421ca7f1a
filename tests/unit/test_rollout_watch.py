"""After the roll it must not be worse than before it, also where no SLO says so."""

from dataclasses import replace
from typing import Any

import pytest
from rollouts import PREEMPTIONS, Behaviour, windows

from tunewright.domain.promotion import Analysis
from tunewright.domain.verdict import Outcome, Verdict
from tunewright.ports import SeriesWindow
from tunewright.rollout.watch import Compared, compare_with_before, told, with_before

STEADY = Behaviour(rate=4.0, swell=0.1)
HOUR = 3600.0


def analysis(**changes: Any) -> Analysis:
    return Analysis(**({"interval": "60s"} | changes))


def seen(behaviour: Behaviour, seed: int, seconds: float = 1800.0) -> SeriesWindow:
    return windows(behaviour, behaviour, seed, seconds)[0]


def compared(before: Behaviour, after: Behaviour, seed: int, seconds: float = 1200.0, **changes: Any) -> Compared:
    return compare_with_before(
        told(seen(before, seed)), told(seen(after, seed + 1000, seconds)), analysis(**changes), horizon=HOUR
    )


def outcome(found: Compared) -> Outcome:
    passed = Verdict(outcome=Outcome.PASS, reason="as good", at=1.0)
    return with_before(passed, found).outcome


def test_both_figures_regressions_are_caught_and_what_is_as_good_stays() -> None:
    """Twenty of each: all latencies 1.5 times as long, as long, and shorter; other minutes, so traffic moves too."""
    worse = replace(STEADY, ttft=STEADY.ttft * 1.5, tpot=STEADY.tpot * 1.5)
    better = replace(STEADY, ttft=STEADY.ttft * 0.7, tpot=STEADY.tpot * 0.7)
    assert [outcome(compared(STEADY, worse, seed)) for seed in range(20)].count(Outcome.FAIL) >= 19
    assert [outcome(compared(STEADY, STEADY, seed)) for seed in range(20)].count(Outcome.FAIL) == 0
    assert [outcome(compared(STEADY, better, seed)) for seed in range(20)].count(Outcome.FAIL) == 0


def test_it_is_told_by_how_much_and_against_what() -> None:
    worse = replace(STEADY, ttft=STEADY.ttft * 2, tpot=STEADY.tpot * 2)
    verdict = with_before(Verdict(outcome=Outcome.INCONCLUSIVE, reason="too early", at=5.0), compared(STEADY, worse, 1))
    assert verdict.outcome is Outcome.FAIL
    assert "s before the roll, surely worse" in verdict.reason
    assert {m.metric for m in verdict.metrics} == {f"{name} since the roll" for name in ("ttft", "tpot", "e2e")}
    assert all(m.stable.samples > 1000 for m in verdict.metrics)


@pytest.mark.parametrize(
    ("busier", "said"),
    [
        (replace(STEADY, rate=6.0), "requests per second and server against"),
        (replace(STEADY, tokens=200.0), "output tokens per request against"),
    ],
)
def test_where_a_server_has_more_to_do_the_candidate_is_not_blamed(busier: Behaviour, said: str) -> None:
    found = compared(STEADY, replace(busier, ttft=1.5, tpot=0.1), 1)
    assert outcome(found) is Outcome.PASS
    assert said in found.unjudged
    passed = Verdict(outcome=Outcome.PASS, reason="as good", at=1.0)
    assert "not compared with before the roll: a server has more to do" in with_before(passed, found).reason


def test_less_traffic_is_no_excuse() -> None:
    assert outcome(compared(STEADY, replace(STEADY, rate=2.0, ttft=1.0, tpot=0.06), 1)) is Outcome.FAIL


def test_too_little_is_no_verdict() -> None:
    worse = replace(STEADY, ttft=1.0, tpot=0.1)
    assert "of 5000 requests finished" in compared(STEADY, worse, 1, min_requests=5000).unjudged
    found = compared(STEADY, worse, 1, seconds=30.0, min_requests=1)
    assert {m.outcome for m in found.metrics} == {Outcome.INCONCLUSIVE}
    assert compare_with_before((), told(seen(STEADY, 1)), analysis(), horizon=HOUR).unjudged
    nothing = told(SeriesWindow(0.0, HOUR, [], ["q"]))
    assert (
        "is not known after" in compare_with_before(told(seen(STEADY, 1)), nothing, analysis(), horizon=HOUR).unjudged
    )


def test_what_is_kept_of_before_is_small() -> None:
    kept = told(seen(STEADY, 1))
    assert len(kept) < 150
    assert not [r for r in kept if "_bucket" in r.query]
    assert any(PREEMPTIONS in r.query for r in kept)
