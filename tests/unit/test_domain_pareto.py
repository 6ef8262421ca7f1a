"""The Pareto front of what was measured, in the domain, the API and the report."""

import itertools
import random

import pytest
from pydantic import ValidationError
from restapi import Rest
from tunings import tuning
from world import BASELINE, BEST, Behaviour, World, measured

from tunewright.domain.candidate import Candidate
from tunewright.domain.pareto import measure, pareto_front
from tunewright.domain.state import TrialOutcome, TrialPurpose, TrialRecord
from tunewright.domain.step import update
from tunewright.telemetry.report import render_report

BOTH = ("outputTokensPerSecond", "ttftP95")


def trial(number: int, tokens: float, ttft: float, **changes) -> TrialRecord:
    given = {"purpose": TrialPurpose.SEARCH, "outcome": TrialOutcome.COMPLETE, **changes}
    return TrialRecord(
        id=f"{number:03d}-{Candidate(values={'max_num_seqs': number + 1}).hash}", number=number,
        candidate=Candidate(values={"max_num_seqs": number + 1}), objective=tokens,
        measurement=measured(Behaviour(tokens=tokens, ttft=ttft)), **given,
    )  # fmt: skip


def test_the_front_against_every_pair() -> None:
    rng = random.Random(3)
    trials = [trial(n, rng.randint(1, 9) * 100.0, rng.randint(1, 9) / 10) for n in range(60)]
    front = pareto_front(trials, BOTH)

    def point(t: TrialRecord) -> tuple[float, float]:
        return measure(BOTH[0], t.measurement), -measure(BOTH[1], t.measurement)

    for one, other in itertools.product(trials, front):
        better = all(a >= b for a, b in zip(point(one), point(other), strict=True)) and point(one) != point(other)
        assert not better
    beaten = [t for t in trials if t not in front]
    assert beaten
    for one in beaten:
        assert any(all(a >= b for a, b in zip(point(t), point(one), strict=True)) for t in front)
    assert [measure("ttftP95", t.measurement) for t in front] == sorted(
        measure("ttftP95", t.measurement) for t in front
    )


def test_what_misses_the_slo_was_ended_early_or_failed_is_not_on_it() -> None:
    out = [TrialOutcome.INFEASIBLE, TrialOutcome.STOPPED, TrialOutcome.FAILED]
    trials = [trial(0, 100.0, 0.5), *(trial(n, 900.0, 0.1, outcome=o) for n, o in enumerate(out, 1))]
    trials.append(update(trial(5, 900.0, 0.1), measurement=None))
    assert [t.number for t in pareto_front(trials, BOTH)] == [0]


@pytest.mark.parametrize(
    "names", [["ttftP95"], ["ttftP95", "ttftP95"], ["tokensPerDollar", "ttftP95"], ["ttftP96", "e2eP50"]]
)
def test_measures_that_make_no_front_are_refused(names) -> None:
    with pytest.raises(ValidationError):
        tuning(objective={"maximize": "outputTokensPerSecond", "pareto": names})


def test_naming_measures_does_not_start_anew() -> None:
    named = tuning(objective={"maximize": "outputTokensPerSecond", "pareto": list(BOTH)})
    assert named.spec.spec_hash == tuning().spec.spec_hash


def test_api_and_report_show_it(tmp_path) -> None:
    names = ["outputTokensPerSecond", "ttftP95", "e2eP99"]
    rest = Rest(tmp_path)
    record = rest.store.load("demo")
    assert record is not None
    spec = tuning(objective={"maximize": "outputTokensPerSecond", "pareto": names})
    record = rest.store.save(update(record, tuning=spec, spec_hash=spec.spec.spec_hash))
    rest.store.clear_trials("demo")
    trials = [trial(0, 400.0, 0.1), trial(1, 800.0, 0.3), trial(2, 700.0, 0.4)]
    trials.append(trial(3, 9000.0, 0.01, purpose=TrialPurpose.CONFIRM))
    for each in trials:
        rest.store.save_trial("demo", each)
    told = rest.get("/tunings/demo/pareto").json()
    assert told["measures"] == names
    assert [(p["number"], p["values"]["ttftP95"]) for p in told["points"]] == [(0, 0.1), (1, 0.3)]
    page = render_report(record, trials).split('id="tradeoff"')[1].split("</section>")[0]
    assert "E2E p99" in page
    assert "800" in page
    assert "700 output" not in page.split("<table")[-1]


def test_a_whole_tuning_says_what_it_knew_and_left_alone() -> None:
    world = World(behaviours={BEST.hash: Behaviour(tokens=1200.0, ttft=0.3, start=0.5)})
    world.create(
        tuning(promotion={"mode": "recommend"}, metrics={"window": "20s", "interval": "1s", "minRequests": 20})
    )
    record = world.run()
    assert record.inputs is not None
    page = render_report(record, world.trials_now("demo"))
    assert "1 flags of this vLLM are not tuned" in page
    assert "--api-server-count" in page
    assert record.baseline == BASELINE
