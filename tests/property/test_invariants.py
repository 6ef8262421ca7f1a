"""The invariants of docs/architecture.md under random schedules of faults and of people, on a fake clock.

`INVARIANT_SCHEDULES=5000` runs so many schedules instead of a few dozen.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tunings import tuning
from world import BASELINE, BEST, THEIRS, Behaviour, Killed, World, oom

from tunewright.controller.decisions import bound
from tunewright.controller.reconcile import reconcile
from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TERMINAL, TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import TuningRecord
from tunewright.domain.verdict import Outcome

SPEC: dict[str, Any] = {
    "metrics": {"window": "20s", "interval": "1s", "minRequests": 20},
    "load": {"mode": "closedLoop", "concurrency": 16, "duration": "1s", "maxWarmup": "1s"},
    "budget": {"trials": 2},
    "confirm": {"finalists": 1, "minRounds": 2, "maxRounds": 2, "minGain": "5%"},
    "promotion": {
        "approvalExpiry": "1h",
        "canary": {"share": "30%", "warmup": "1s", "trafficTimeout": "60s"},
        "analysis": {"interval": "4s", "minDuration": "8s", "maxDuration": "48s", "minRequests": 30},
        "watch": "8s",
        "foreignTimeout": "30s",
    },
}
MIN_REQUESTS = 30
MAY_APPLY = TOUCHES_PRODUCTION | {Phase.PROMOTED, Phase.ROLLED_BACK}
LIMIT = 6000
"""Passes until everything must have ended: what holds for longer holds for ever."""

OUTAGES = (
    "metrics.fetch", "target.apply", "target.observe", "target.preflight", "target.notes", "target.baseline",
    "spare.start", "spare.poll", "spare.cancel", "load.start", "load.poll", "load.cancel",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happens `after` passes."""

    after: int
    what: str
    how: Any = None


def events() -> st.SearchStrategy[list[Event]]:
    """A schedule: outages of ports, kills, servers that die or get worse, people, edits, an autoscaler, spares."""
    kinds = st.one_of(
        st.tuples(st.just("outage"), st.tuples(st.sampled_from(OUTAGES), st.integers(1, 6))),
        st.tuples(st.just("kill"), st.tuples(st.integers(1, 30), st.booleans())),
        st.tuples(st.just("canary"), st.sampled_from(["dies", "slow", "errors", "well"])),
        st.tuples(st.just("decide"), st.sampled_from(["approve", "reject", "suspend", "resume", "abort", "rollback"])),
        st.tuples(st.just("spec"), st.sampled_from(["1s", "3s"])),
        st.tuples(st.just("field"), st.booleans()),
        st.tuples(st.just("scale"), st.integers(1, 4)),
        st.tuples(st.just("spares"), st.integers(1, 3)),
        st.tuples(st.just("intrude"), st.sampled_from([THEIRS, None])),
        st.tuples(st.just("wait"), st.sampled_from([5.0, 60.0, 4000.0])),
    )
    return st.lists(st.builds(lambda after, kind: Event(after, *kind), st.integers(0, 60), kinds), max_size=10)


class Run:
    """One schedule, and what was seen while it ran."""

    def __init__(self, start: World, schedule: list[Event]) -> None:
        lock = start.store._lock  # can't be copied, and is only ever held within one call
        self.world = copy.deepcopy(start, {id(lock): lock})
        self.schedule = list(schedule)
        self.approved_at: float | None = None
        self.passes_at = 0

    def drive(self) -> TuningRecord:
        """To the end, checking every pass."""
        context, quiet = self.world.context(), 0
        for number in range(LIMIT):
            self._happen(number)
            before = self.world.record()
            self.world.place = (before.phase, "")
            if before.phase is Phase.AWAITING_APPROVAL:
                self._person(before)
            try:
                again = reconcile("demo", context)
            except Killed:
                self.world.kill_at = None
                self.world.clock.advance(7)
                context, again = self.world.context(), 0.0
            self._check(before, self.world.record())
            self.world.clock.advance(max(again or 0.0, 0.05))
            ended = self.world.record().phase in TERMINAL and again is None and not self.schedule
            ended = ended and self._at_rest()  # while production moves, that it does wakes the loop
            quiet = quiet + 1 if ended else 0
            if quiet >= 3:
                return self.world.record()
        record = self.world.record()
        raise AssertionError(f"not ended after {LIMIT} passes: {record.phase}: {record.sentence}")

    def _at_rest(self) -> bool:
        return self.world.surge is None and len({server.candidate.hash for server in self.world.fleet}) == 1

    def _happen(self, number: int) -> None:
        if self.schedule and number >= self.passes_at + self.schedule[0].after:
            self.passes_at = number
            self._one(self.schedule.pop(0))
        if not self.schedule and self.world.record().suspended_since is not None:
            self._field(False)
            self._decide("resume")

    def _one(self, event: Event) -> None:
        world, how = self.world, event.how
        match event.what:
            case "outage":
                world.outages[how[0]] = how[1]
            case "kill":
                world.kill_at, world.kill_after_effect = len(world.calls) + how[0], how[1]
            case "canary":
                world.canary_behaviour = {
                    "dies": Behaviour(failure=oom()),
                    "slow": Behaviour(tokens=1200.0, ttft=4.0),
                    "errors": Behaviour(tokens=1200.0, ttft=0.3, errors=20),
                    "well": None,
                }[how]
            case "decide":
                self._decide(how)
            case "spec":
                self._edit(slo={"ttftP95": how})
            case "field":
                self._field(how)
            case "scale":
                world.scale(how)
            case "spares":
                world.spares = how  # what is no spare any more must not be started on
                self._edit(spare={"parallelism": how})
            case "intrude":
                if how is not None or world.intruder is not None:
                    world.intrude(how)
            case "wait":
                world.clock.advance(how)

    def _decide(self, action: str) -> None:
        record = self.world.record()
        self.world.store.decide("demo", bound(record, action, at=self.world.clock.now(), by="ana"))  # type: ignore[arg-type]

    def _field(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    def _edit(self, **changes: Any) -> None:
        record = self.world.record()
        spec = record.tuning.spec.model_dump(mode="json", by_alias=True) | changes
        edited = type(record.tuning).model_validate(
            record.tuning.model_dump(mode="json", by_alias=True) | {"spec": spec}
        )
        self.world.store.save(record.model_copy(update={"tuning": edited}))

    def _person(self, record: TuningRecord) -> None:
        """Approves once for each time that somebody is waited for."""
        if self.approved_at != record.approval_since and record.suspended_since is None:
            self.approved_at = record.approval_since
            self._decide("approve")

    def _check(self, before: TuningRecord, after: TuningRecord) -> None:
        if before.phase is not Phase.CANARY and after.phase is Phase.CANARY:
            self._was_allowed(after)
        if before.phase is Phase.CANARY and after.phase is Phase.ROLLING:
            self._was_proven(after)

    @staticmethod
    def _was_allowed(record: TuningRecord) -> None:
        """Invariant 2: a live approval of this very candidate, spec and baseline, and a settled gain."""
        promotion = record.promotion
        assert promotion is not None
        wanted = (promotion.candidate.hash, record.spec_hash, promotion.baseline.hash)
        approvals = [d for d in record.decisions if d.action == "approve" and d.at >= (record.approval_since or 0)]
        assert wanted in [(d.candidate, d.spec, d.baseline) for d in approvals]
        finalist = next(f for f in record.finalists if f.candidate.hash == promotion.candidate.hash)
        assert finalist.gain is not None
        assert finalist.gain.status == "better"

    @staticmethod
    def _was_proven(record: TuningRecord) -> None:
        """Invariant 2: enough valid samples of every metric, each of them passed."""
        verdict = record.promotion.canary_verdict if record.promotion else None
        assert verdict is not None
        assert verdict.outcome is Outcome.PASS
        assert len(verdict.metrics) >= 4
        for metric in verdict.metrics:
            assert metric.outcome is Outcome.PASS
            assert metric.canary.value is not None
            assert metric.canary.samples >= MIN_REQUESTS


def settled(world: World, record: TuningRecord) -> None:
    """What must hold at every end."""
    assert record.phase in TERMINAL
    applied = {phase for phase, _, call in world.places if call == "target.apply"}
    assert applied <= MAY_APPLY, "production was touched where nobody may"  # invariant 3
    assert world.leftovers() == []  # invariants 4 and 5
    assert world.canary is None
    wanted = world.stable
    if record.promotion is not None and record.phase in (Phase.PROMOTED, Phase.ROLLED_BACK):
        ours = record.promotion.candidate, record.promotion.baseline
        wanted = ours[record.phase is Phase.ROLLED_BACK]
        if world.intruder is not None and world.intruder not in ours:  # afterwards: theirs, named, and not fought
            wanted = world.intruder
            assert record.foreign
    assert {server.candidate.hash for server in world.fleet} == {wanted.hash}
    if Phase.PROMOTED not in [change.phase for change in record.history]:
        assert wanted.hash == (world.intruder or BASELINE).hash
    trials = world.store.trials("demo")
    assert len({trial.id for trial in trials}) == len(trials)


@pytest.fixture(scope="module")
def waiting() -> World:
    """A tuning that waits for approval; every schedule starts from a copy."""
    world = begun()
    world.run(until=lambda r: r.phase is Phase.AWAITING_APPROVAL)
    return world


@pytest.fixture(scope="module")
def begun_world() -> World:
    return begun()


def begun() -> World:
    world = World()
    for name in (BASELINE.hash, BEST.hash, world.proposals[0].hash):
        world.behaviours[name] = replace(world.behaviours.get(name, Behaviour()), start=0.5)
    world.create(tuning(**SPEC))
    return world


pytestmark = pytest.mark.timeout(900)

SCHEDULES = int(os.environ.get("INVARIANT_SCHEDULES", "40"))
FREELY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=SCHEDULES, **FREELY)  # type: ignore[arg-type]
@given(schedule=events())
def test_whatever_happens_to_a_promotion(waiting: World, schedule: list[Event]) -> None:
    run = Run(waiting, schedule)
    settled(run.world, run.drive())


@settings(max_examples=max(6, SCHEDULES // 5), **FREELY)  # type: ignore[arg-type]
@given(schedule=events())
def test_whatever_happens_to_a_whole_tuning(begun_world: World, schedule: list[Event]) -> None:
    run = Run(begun_world, schedule)
    settled(run.world, run.drive())


def test_without_events_it_is_promoted(waiting: World) -> None:
    run = Run(waiting, [])
    assert run.drive().phase is Phase.PROMOTED


@pytest.mark.parametrize("speculates", [False, True])
def test_a_winner_whose_answers_differ_is_never_promoted(speculates: bool) -> None:
    """Invariant 7: neither a lossy knob nor a new speculation."""
    drafts = Candidate(values={"speculative_method": "ngram", "num_speculative_tokens": 2})
    winner = drafts if speculates else BEST
    world = begun()
    world.behaviours[winner.hash] = replace(world.behaviours[BEST.hash], start=0.5)
    world.proposals = [winner]
    world.lossy = () if speculates else ("kv_cache_dtype",)

    def answers(candidate: Candidate, _run: int, count: int) -> list[Answer]:
        words = ("other" if candidate.hash == winner.hash else "same", "answer")
        return [Answer(prompt=str(n), text=" ".join(words), tokens=words) for n in range(count)]

    world.answers = answers
    record = Run(world, []).drive()
    assert record.phase is Phase.NO_IMPROVEMENT
    assert "does not keep the answers" in record.sentence
    assert "target.apply" not in world.calls
