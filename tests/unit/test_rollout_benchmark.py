"""The figures of the analysis are of the real analysis: the benchmark's quick streams say what the samples would."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tunewright.domain.promotion import Analysis
from tunewright.domain.tuning import Slo
from tunewright.domain.verdict import Outcome
from tunewright.observe import names
from tunewright.ports import Series, SeriesWindow
from tunewright.rollout.analysis import compare, weigh


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def samples(side, scrapes: int, instance: str) -> SeriesWindow:  # type: ignore[no-untyped-def]
    """What Prometheus would hold of one side."""
    streams = module("streams")
    end = scrapes * streams.SCRAPE

    def counter(name: str, steps: list[float], **labels: str) -> Series:
        found, value = [(0.0, 0.0)], 0.0
        for number, step in enumerate(steps[:scrapes], start=1):
            value += step
            found.append((number * streams.SCRAPE, value))
        return Series({"__name__": name, "instance": instance, "engine": "0", "model_name": "m", **labels}, found)

    def every() -> Iterator[Series]:
        finished, errors = side.finished, side.errors
        yield counter(names.FINISHED, (finished - errors).tolist(), finished_reason="stop")
        yield counter(names.FINISHED, errors.tolist(), finished_reason="error")
        yield counter(names.FINISHED, (0 * errors).tolist(), finished_reason="abort")
        yield counter(names.PREEMPTIONS, (0 * errors).tolist())
        for name, table in side.buckets.items():
            cumulative = table.cumsum(axis=1)
            for column, edge in enumerate((*side.edges[name], "+Inf")):
                yield counter(f"{name}_bucket", cumulative[:, column].tolist(), le=str(edge))
            yield counter(f"{name}_count", cumulative[:, -1].tolist())
            yield counter(f"{name}_sum", side.sums[name].tolist())

    return SeriesWindow(0.0, end, list(every()), ["q"])


@pytest.mark.parametrize("scrapes", [6, 13, 20, 33, 50])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_quick_streams_and_samples_come_to_the_same_verdict(factor: float, scrapes: int) -> None:
    streams = module("streams")
    canary, stable = streams.sides(streams.case("x", factor=factor, errors=0.003), seed=scrapes)
    for side in (canary, stable):
        side.grow(scrapes)
    slo, analysis, end = Slo(ttft_p95="600ms", e2e_p90="5s"), Analysis(), scrapes * streams.SCRAPE
    quick = weigh(
        {"canary": canary.evidence(scrapes), "stable": stable.evidence(scrapes)}, 0.0, end, slo, analysis, at=end
    )
    real = compare(samples(canary, scrapes, "c"), [samples(stable, scrapes, "s")], slo, analysis, at=end)
    assert [(m.metric, m.outcome, m.reason) for m in quick.metrics] == [
        (m.metric, m.outcome, m.reason) for m in real.metrics
    ]
    assert quick.outcome is real.outcome


def test_every_rule_tells_a_canary_twice_as_slow_from_one_as_good() -> None:
    streams, rules = module("streams"), module("rollout_rules")
    for name, rule in rules.RULES.items():
        slow = streams.case("slow", factor=2.0, errors=0.05)
        ended = rule(slow, *streams.sides(slow, 1))
        assert ended.outcome is Outcome.FAIL, name
        good = streams.case("good", factor=0.8, bad=False)
        assert rule(good, *streams.sides(good, 1)).outcome is Outcome.PASS, name


def test_the_goals_hold_on_a_few_rollouts() -> None:
    """The benchmark has a thousand of each; these catch a gate that lost its power, or lets nothing through."""
    streams, rules = module("streams"), module("rollout_rules")

    def ends(case, seeds: int = 8):  # type: ignore[no-untyped-def]
        return [rules.ours(case, *streams.sides(case, seed)) for seed in range(seeds)]

    assert all(e.outcome is Outcome.PASS and e.after <= 900 for e in ends(streams.case("good", bad=False)))
    assert sum(e.outcome is Outcome.FAIL and e.after <= 600 for e in ends(streams.case("x 1.10", factor=1.1))) >= 7
    assert sum(e.outcome is Outcome.FAIL and e.after <= 180 for e in ends(streams.case("x 1.25", factor=1.25))) >= 7
    assert sum(e.outcome is Outcome.FAIL for e in ends(streams.case("errors", errors=0.01))) >= 7
