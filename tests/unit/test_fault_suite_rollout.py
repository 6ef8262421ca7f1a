"""What went wrong in other rollouts, told as Given, When, Then on a fake platform.

Each docstring names the report that it closes. docs/field-lessons.md lists where every lesson is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import world as fake
from pydantic import ValidationError
from tunings import tuning
from world import BASELINE, BEST, Behaviour, FakeMetrics, FakeTarget, World, oom

from tunewright.controller.decisions import bound
from tunewright.controller.reconcile import reconcile
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.domain.verdict import Outcome
from tunewright.ports import Conflict, Series, SeriesWindow, TargetPlan, TargetStatus

TPOT = "vllm:request_time_per_output_token_seconds"
FINISHED = "vllm:request_success_total"
QUICK = {
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "budget": {"trials": 2},
    "confirm": {"finalists": 1, "minRounds": 2, "maxRounds": 3, "minGain": "5%"},
}

Spoil = Callable[[Series, float], Series | None]
"""What becomes of a series that is asked for at a time; None: it is not there."""


class Given:
    """A tuning on a fake platform, and what people and faults do to it."""

    def __init__(self, **spec: object) -> None:
        self.world = World()
        self.world.create(tuning(**(QUICK | spec)))

    @property
    def record(self) -> TuningRecord:
        return self.world.record()

    def waits_for_approval(self) -> Given:
        self.world.run(until=lambda r: r.phase is Phase.AWAITING_APPROVAL)
        return self

    def approved(self) -> Given:
        self.waits_for_approval().decide("approve")
        return self

    def in_phase(self, phase: Phase) -> Given:
        self.approved().world.run(until=lambda r: r.phase is phase)
        return self

    def canary_is_judged(self) -> Given:
        self.approved().world.run(until=lambda r: r.promotion is not None and r.promotion.judged_from is not None)
        return self

    def decide(self, action: str) -> None:
        decision = bound(self.record, action, at=self.world.clock.now(), by="ana")  # type: ignore[arg-type]
        self.world.store.decide("demo", decision)

    def passes(self, count: int, each: float = 1.0) -> TuningRecord:
        context = self.world.context()
        for _ in range(count):
            reconcile("demo", context)
            self.world.clock.advance(each)
        return self.record

    def end(self) -> TuningRecord:
        return self.world.run()

    @property
    def touched(self) -> bool:
        return "target.apply" in self.world.calls

    @property
    def serves(self) -> list[str]:
        return [server.candidate.hash for server in self.world.fleet]


@pytest.fixture
def metrics_are(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Spoil what every later question to the metrics source answers."""
    whole = FakeMetrics.fetch

    def spoil_with(spoil: Spoil) -> None:
        def fetch(
            self: FakeMetrics, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
        ) -> SeriesWindow:
            window = whole(self, names, start, end, matchers)
            series = [spoilt for s in window.series if (spoilt := spoil(s, self.world.clock.now())) is not None]
            return replace(window, series=series)

        monkeypatch.setattr(FakeMetrics, "fetch", fetch)

    return spoil_with


def of_canary(series: Series) -> bool:
    return series.labels.get("instance") == "canary"


# --- what the metrics say, and what they don't ------------------------------------------------------------------------


def test_metrics_that_vanish_hold_a_healthy_canary_and_it_goes_on_when_they_return(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """argo-rollouts#1466: an empty result became an index error, and that an abort."""
    given = Given().canary_is_judged()
    until = given.world.clock.now() + 100

    metrics_are(lambda s, now: None if now < until else s)
    held = given.world.run(until=lambda r: r.promotion is not None and r.promotion.verdict is not None)

    assert held.phase is Phase.CANARY
    assert held.promotion is not None
    assert held.promotion.verdict is not None
    assert held.promotion.verdict.outcome is Outcome.INCONCLUSIVE
    assert given.end().phase is Phase.PROMOTED


@pytest.mark.parametrize(
    ("watch", "told"),
    [("20s", "nothing surely worse in 20s, and no more can be said: watched 20s of "), ("6m", " replicas (0 of ")],
)
def test_a_promotion_says_how_much_its_watch_could_tell(watch: str, told: str) -> None:
    """A watch shorter than a verdict takes ended with "(watched 8s of 15s)", as if it had been cut short."""
    ended = Given(promotion={"watch": watch}).approved().end()
    assert ended.phase is Phase.PROMOTED
    assert told in ended.sentence


def test_a_canary_whose_every_measurement_failed_is_no_success() -> None:
    """argo-rollouts#4479: "Successful" though every measurement errored."""
    given = Given().canary_is_judged()

    given.world.outages = {"metrics.fetch": 10**6}
    ended = given.end()

    assert ended.phase is Phase.ROLLED_BACK
    assert given.serves == [BASELINE.hash] * 2


def test_an_analysis_that_was_terminated_is_no_success() -> None:
    """argo-rollouts#1329: a terminated run counted as successful."""
    given = Given().canary_is_judged()
    given.decide("abort")
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert ended.promotion is not None
    assert ended.promotion.canary_verdict is None


def test_no_verdict_before_every_required_metric_has_its_samples(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """argo-rollouts#1360: a verdict before the delayed metric ever ran."""
    given = Given().canary_is_judged()
    late = given.world.clock.now() + 200

    metrics_are(lambda s, now: None if of_canary(s) and s.name.startswith(TPOT) and now < late else s)
    moved = given.world.run(until=lambda r: r.phase is not Phase.CANARY)

    assert moved.phase is Phase.ROLLING
    assert moved.phase_since >= late


def test_a_canary_that_gets_no_traffic_goes_back_and_says_so(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """argo-rollouts#4864: the analysis started before there was traffic."""
    given = Given().canary_is_judged()
    metrics_are(lambda s, _: Series(s.labels, [(t, 0.0) for t, _ in s.samples]) if of_canary(s) else s)
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert "no traffic reached the canary" in ended.sentence


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_never_pass(metrics_are, value: float) -> None:  # type: ignore[no-untyped-def]
    """flagger#1098: NaN and no traffic passed by default."""
    given = Given().canary_is_judged()
    metrics_are(lambda s, _: Series(s.labels, [(t, value) for t, _ in s.samples]) if of_canary(s) else s)
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert Phase.ROLLING not in [change.phase for change in ended.history]


def test_an_error_counter_that_nobody_scraped_is_no_proof_of_health(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """prometheus#3886: the error counter of a new pod reads 0 because nothing was scraped yet."""
    given = Given().canary_is_judged()
    metrics_are(lambda s, _: None if of_canary(s) and s.labels.get("finished_reason") == "error" else s)
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert "finished_reason error" in ended.sentence


def test_a_renamed_metric_is_found_before_anything_moves(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """vllm#18354: a renamed metric silently empties a guard."""
    given = Given().waits_for_approval()
    metrics_are(lambda s, _: None if s.name.startswith(TPOT) else s)

    given.decide("approve")
    held = given.passes(3)
    ended = given.end()

    assert held.phase is Phase.AWAITING_APPROVAL
    assert f"shows no {TPOT}_bucket" in held.sentence
    assert ended.phase is Phase.FAILED
    assert not given.touched


def test_a_gap_in_the_metrics_only_holds_an_approved_promotion(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """As above, where the metrics return: the approval is not lost."""
    given = Given().waits_for_approval()
    until = given.world.clock.now() + 30
    metrics_are(lambda s, now: None if now < until else s)
    given.decide("approve")
    assert given.end().phase is Phase.PROMOTED


def test_a_selector_that_catches_several_servers_is_found_before_anything_moves(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """vllm#18354: every query must return the series of exactly one server."""
    given = Given().waits_for_approval()
    metrics_are(lambda s, _: Series({**s.labels, "instance": f"other-{s.name}"}, s.samples))
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.FAILED
    assert "metrics.selector is too wide" in ended.sentence
    assert not given.touched


def test_gauges_of_two_servers_are_averaged_not_summed() -> None:
    """A gauge was summed over replicas: each of the two fake servers has 4 requests running."""
    profile = Given().waits_for_approval().record.profile
    assert profile is not None
    assert profile.replicas == 2
    assert profile.concurrency == pytest.approx(4.0)


# --- holds, deadlines and people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["abort", "rollback"])
def test_a_persons_decision_moves_an_inconclusive_canary_on(metrics_are, action: str) -> None:  # type: ignore[no-untyped-def]
    """argo-rollouts#3015: resuming after inconclusive looped for ever."""
    given = Given().canary_is_judged()
    metrics_are(lambda s, _: None if of_canary(s) else s)
    given.passes(20)
    given.decide(action)
    assert given.passes(1).phase is Phase.ROLLING_BACK
    assert given.end().phase is Phase.ROLLED_BACK


def test_resumed_after_inconclusive_it_comes_to_an_end(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """argo-rollouts#3015."""
    given = Given().canary_is_judged()
    metrics_are(lambda s, _: None if of_canary(s) else s)
    for action in ("suspend", "resume", "suspend", "resume"):
        given.decide(action)
        given.passes(20)
    assert given.end().phase is Phase.ROLLED_BACK


def test_an_invalid_spec_is_refused_at_once_with_the_field_named() -> None:
    """argo-rollouts#872: an invalid spec sat in Progressing for ever."""
    spoilt = tuning().model_dump(mode="json", by_alias=True)
    spoilt["spec"]["promotion"]["analysis"]["minDuration"] = "2h"
    with pytest.raises(ValidationError, match=r"spec\.promotion\.analysis[\s\S]*minDuration is above maxDuration"):
        Tuning.model_validate(spoilt)


def test_a_canary_that_never_becomes_ready_ends_at_an_absolute_deadline() -> None:
    """argo-rollouts#3765: crash-looping looked like progress."""
    given = Given().waits_for_approval()
    given.world.behaviours[BEST.hash] = Behaviour(tokens=1200.0, ttft=0.3, start=10**9)
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert "took longer than its" in "".join(change.sentence for change in ended.history)


def test_waiting_for_a_person_costs_no_deadline() -> None:
    """argo-rollouts#3534: the deadline ticked while it waited for a person."""
    given = Given().waits_for_approval()
    given.world.clock.advance(3500)
    given.decide("approve")
    given.world.run(until=lambda r: r.phase is Phase.CANARY)
    given.decide("suspend")
    given.passes(20, each=3600)
    given.decide("resume")
    assert given.end().phase is Phase.PROMOTED


def test_an_approval_that_never_comes_expires_and_changes_nothing() -> None:
    """flagger#1450."""
    given = Given().waits_for_approval()
    given.world.clock.advance(3601)
    assert given.end().phase is Phase.REJECTED
    assert not given.touched


def test_a_model_that_takes_a_quarter_of_an_hour_to_load_is_waited_for() -> None:
    """A 600 s deadline fired while the model was loading: deadlines come from the load time of the trials."""
    given = Given(target=tuning().spec.target.model_dump(mode="json", by_alias=True) | {"startTimeout": "30m"})
    given.world.behaviours[BEST.hash] = Behaviour(tokens=1200.0, ttft=0.3, start=880.0)
    given.approved()
    assert given.end().phase is Phase.PROMOTED


# --- going back -------------------------------------------------------------------------------------------------------


def test_a_replica_that_fails_in_the_roll_goes_back_and_the_last_good_copy_stays() -> None:
    """flagger#1898: the rollback killed the only healthy copy. The fake target asserts it at every single step."""
    given = Given().in_phase(Phase.ROLLING)
    given.world.canary_behaviour = Behaviour(failure=oom())
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert given.serves == [BASELINE.hash] * 2


def test_new_servers_that_fail_requests_end_the_roll() -> None:
    """The analysis goes on during the roll (flagger#453)."""
    promotion = tuning().spec.promotion.model_dump(mode="json")
    given = Given(promotion=promotion)
    given.world.behaviours[BEST.hash] = Behaviour(tokens=1200.0, ttft=0.3, start=60.0)
    given.in_phase(Phase.ROLLING)
    given.world.canary_behaviour = Behaviour(tokens=1200.0, ttft=0.3, errors=30)
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert "the new servers are worse" in ended.sentence
    assert Phase.WATCHING not in [change.phase for change in ended.history]


@pytest.mark.parametrize("phase", sorted(TOUCHES_PRODUCTION))
def test_abort_is_idempotent_and_safe_in_every_phase(phase: Phase) -> None:
    """argo-rollouts#1292: an abort with nothing running scaled stable to 0."""
    given = Given()
    if phase is Phase.ROLLING_BACK:
        given.in_phase(Phase.ROLLING).decide("abort")
        given.passes(1)
    else:
        given.in_phase(phase)
    for _ in range(3):
        given.decide("abort")
        given.passes(1)
    assert given.end().phase is Phase.ROLLED_BACK
    given.decide("abort")
    assert given.passes(20).phase is Phase.ROLLED_BACK
    assert given.serves == [BASELINE.hash] * 2
    assert given.world.canary is None


def test_an_autoscaler_does_not_revive_an_aborted_canary() -> None:
    """argo-rollouts#4973."""
    given = Given().in_phase(Phase.CANARY)
    given.decide("abort")
    given.end()
    given.world.scale(4)
    given.passes(50)
    assert given.world.canary is None
    assert given.serves == [BASELINE.hash] * 4


def test_a_problem_that_shows_later_goes_back_by_itself() -> None:
    """flagger#453: problems showed after the promotion."""
    given = Given().in_phase(Phase.WATCHING)
    given.world.behaviours[BEST.hash] = Behaviour(tokens=1200.0, ttft=0.3, errors=30)
    ended = given.end()
    assert ended.phase is Phase.ROLLED_BACK
    assert given.serves == [BASELINE.hash] * 2


def test_the_last_known_good_is_kept_after_the_promotion() -> None:
    """flagger#453: an hour later a person can still go back."""
    given = Given().approved()
    given.end()
    given.world.clock.advance(7200)
    given.decide("rollback")
    given.world.run(until=lambda r: r.phase is Phase.ROLLED_BACK)
    assert given.serves == [BASELINE.hash] * 2


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", [["resume"], ["suspend", "resume"], ["rollback"], ["reject"], ["abort"]])
def test_no_other_path_passes_the_manual_gate(actions: list[str]) -> None:
    """argo-rollouts#185: a manual gate was passed by another code path."""
    given = Given().waits_for_approval()
    for action in actions:
        given.decide(action)
        given.passes(10)
    given.passes(100)
    assert not given.touched


@pytest.mark.parametrize("what", ["baseline", "spec"])
def test_what_changes_while_it_is_approved_voids_the_approval(what: str) -> None:
    """flagger#30: the revision changed while it was being approved."""
    given = Given().waits_for_approval()
    given.decide("approve")
    if what == "baseline":
        given.world.stable = Candidate(values={"max_num_seqs": 32})
    else:
        changed = tuning(**QUICK, slo={"ttftP95": "3s"})
        given.world.store.save(given.record.model_copy(update={"tuning": changed}))
    record = given.world.run(until=lambda r: r.phase in (Phase.PENDING, Phase.PROFILING))
    assert record.winner is None
    assert not given.touched


def test_another_vllm_than_the_measured_one_is_found_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """flagger#30: what was measured is no longer what runs."""
    given = Given().waits_for_approval()
    whole = FakeTarget._status

    def upgraded(self: FakeTarget, *args: Any, **more: Any) -> TargetStatus:
        status = whole(self, *args, **more)
        return replace(status, replicas=[replace(r, version="0.40.0") for r in status.replicas])

    monkeypatch.setattr(FakeTarget, "_status", upgraded)
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.FAILED
    assert "production runs 0.40.0" in ended.sentence
    assert not given.touched


def test_another_image_or_model_than_the_measured_one_is_found_before_anything_moves() -> None:
    """flagger#30: the same version and the same knobs, and another model behind them."""
    given = Given().waits_for_approval()
    given.world.beside_knobs = "vllm-openai:v0.32.0: `vllm serve other`"
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.FAILED
    assert "beside vllm-openai:v0.32.0: `vllm serve m`, but production runs" in ended.sentence
    assert not given.touched


def test_an_approval_that_could_not_begin_in_time_expires() -> None:
    """flagger#1450: a yes of last week is no yes to what is there today."""
    given = Given().waits_for_approval()
    given.world.outages = {"target.baseline": 10**6}
    given.decide("approve")
    given.passes(3)
    assert given.record.phase is Phase.AWAITING_APPROVAL
    given.world.clock.advance(given.record.tuning.spec.promotion.approval_expiry)
    given.world.outages = {}
    ended = given.end()
    assert ended.phase is Phase.REJECTED
    assert "The approval by ana expired before anything could move" in ended.sentence
    assert not given.touched


def test_traffic_unlike_the_measured_one_is_found_before_anything_moves(metrics_are) -> None:  # type: ignore[no-untyped-def]
    """A gain that was measured with short prompts says nothing of long ones."""
    given = Given().waits_for_approval()
    longer = ("vllm:prompt_tokens_total", "vllm:request_prompt_tokens_sum")
    metrics_are(lambda s, _: Series(s.labels, [(t, 3 * v) for t, v in s.samples]) if s.name in longer else s)
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.FAILED
    assert "the traffic is not what the winner was measured with" in ended.sentence
    assert not given.touched


def test_capacity_is_checked_before_anything_moves() -> None:
    """LLMKube#192: 25 % surge of one replica and no spare GPU were pending for ever."""
    given = Given().waits_for_approval()
    given.world.problems = ("no GPU is free for the canary",)
    given.decide("approve")
    ended = given.end()
    assert ended.phase is Phase.FAILED
    assert "no GPU is free for the canary" in ended.sentence
    assert not given.touched


def test_what_passes_by_itself_costs_no_winner() -> None:
    """A pod that restarts, or somebody else's roll, is over in a minute: hours of measuring must not end for that."""
    given = Given().waits_for_approval()
    given.world.problems = ("another rollout is in progress",)
    given.decide("approve")
    given.world.run(until=lambda r: "Held before anything moves: another rollout is in progress." in r.sentence)
    assert given.record.phase is Phase.AWAITING_APPROVAL
    assert not given.touched
    given.world.problems = ()
    assert given.end().phase is Phase.PROMOTED


@pytest.mark.parametrize("phase", [Phase.BASELINING, Phase.SEARCHING, Phase.CONFIRMING])
def test_what_an_abort_ends_half_way_is_gone_from_the_spare(phase: Phase) -> None:
    """ado#1336: what was given up was never removed, and the GPU stayed held."""
    given = Given()
    given.world.run(until=lambda r: r.phase is phase and bool(given.world.servers))
    given.decide("abort")
    assert given.end().phase is Phase.FAILED
    assert given.world.leftovers() == []


# --- others who write, and a platform that fails ----------------------------------------------------------------------


def test_a_conflict_at_every_single_write_is_survived() -> None:
    """argo-rollouts#1904: "Object has been modified" left a rollout stuck."""
    given = Given()
    saved, context = given.world.store.save, given.world.context()
    attempts = {"all": 0}

    def every_other(record: TuningRecord) -> TuningRecord:
        attempts["all"] += 1
        if attempts["all"] % 2:
            raise Conflict("somebody else wrote meanwhile")
        return saved(record)

    given.world.store.save = every_other  # type: ignore[method-assign]
    for _ in range(20_000):
        record = given.record
        if record.phase is Phase.AWAITING_APPROVAL and not given.world.store.decisions("demo"):
            given.decide("approve")
        if record.phase is Phase.PROMOTED:
            break
        try:
            again = reconcile("demo", context)
        except Conflict:
            again = 0.0
        given.world.clock.advance(max(again or 0.0, 0.05))
    assert given.record.phase is Phase.PROMOTED
    assert attempts["all"] > 20


@pytest.mark.parametrize("call", ["target.apply", "target.observe", "target.preflight", "target.baseline"])
@pytest.mark.parametrize("phase", [Phase.AWAITING_APPROVAL, Phase.CANARY, Phase.ROLLING, Phase.WATCHING])
def test_a_platform_that_does_not_answer_for_a_while_changes_nothing_of_the_end(phase: Phase, call: str) -> None:
    """argo-rollouts#1904: any single call may fail, and be tried again."""
    given = Given().approved()
    given.world.run(until=lambda r: r.phase is phase)
    given.world.outages = {call: 4}
    assert given.end().phase is Phase.PROMOTED


def test_what_a_foreign_manager_changes_is_held_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """argo-cd#9570: a GitOps tool re-applied what was rolled out or back."""
    given = Given().canary_is_judged()
    whole, until = FakeTarget._status, given.world.clock.now() + 150

    def edited(self: FakeTarget, *args: Any, **more: Any) -> TargetStatus:
        status = whole(self, *args, **more)
        held = self.world.clock.now() < until
        return replace(status, foreign="args of Deployment vllm were changed by argocd") if held else status

    monkeypatch.setattr(FakeTarget, "_status", edited)
    held = given.world.run(until=lambda r: "Held, since" in r.sentence and bool(r.foreign))
    assert held.phase is Phase.CANARY
    moved = given.world.run(until=lambda r: r.phase is not Phase.CANARY)
    assert moved.phase is Phase.ROLLING
    assert moved.phase_since >= until


def test_a_restart_makes_nothing_twice() -> None:
    """argo-rollouts#3264: endless child objects after a restart."""
    given = Given().approved()
    given.world.run(until=lambda r: r.phase is Phase.ROLLING)
    plans: list[TargetPlan] = []
    for _ in range(5):  # each context is a new agent
        reconcile("demo", given.world.context())
        plans.append(given.world.plans[-1])
    assert len({(p.baseline.hash, p.candidate.hash) for p in plans}) == 1
    assert given.end().phase is Phase.PROMOTED
    ids = [trial.id for trial in given.world.store.trials("demo")]
    assert len(ids) == len(set(ids))


def test_the_fake_platform_would_notice_an_outage() -> None:
    """The suite can fail: a plan that leaves nobody ready is caught by the fake target."""
    given = Given().in_phase(Phase.CANARY)
    for server in given.world.fleet:
        server.ready_at = math.inf
    with pytest.raises(AssertionError, match="no ready server is left"):
        fake.FakeTarget(given.world).apply(TargetPlan(baseline=BASELINE, candidate=BEST))
