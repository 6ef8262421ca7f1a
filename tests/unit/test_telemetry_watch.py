"""What the loop keeps and tells for those who watch: drift, foreign managers, and how each pass went."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from exposed import Exposed, window_of
from telemetry_samples import T0, promoted
from tunings import tuning
from world import World

from tunewright.controller import loop
from tunewright.controller.promoting import ended
from tunewright.domain.phases import Phase
from tunewright.observe.learn import learn_profile
from tunewright.ports import Conflict, PortError, SeriesWindow, TargetStatus


def traffic(prompt: int = 200) -> SeriesWindow:
    server = Exposed()
    server.scrape(0)
    for second in range(1, 61):
        server.finish(2, prompt=prompt)
        server.scrape(float(second))
    return window_of(server, end=60.0)


@dataclass
class Ended:
    """An ended tuning whose window is a minute; `answer` is what the metrics source says."""

    mode: str = "never"
    answer: object = field(default_factory=traffic)
    foreign: str | None = None
    now: float = T0
    asked: int = 0

    def __post_init__(self) -> None:
        done, _ = promoted()
        learned = learn_profile(traffic(), via="x", source=done.profile.source, min_requests=20)
        spec = tuning(retune={"mode": self.mode, "drift": "30%"})
        self.record = done.model_copy(update={"tuning": spec, "profile": learned, "phase_since": T0})

    def fetch(self, *_: object) -> SeriesWindow:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def look(self, after: float) -> float | None:
        self.now += after
        status = TargetStatus(replicas=(), desired=2, settled=True, detail="", foreign=self.foreign)
        context = SimpleNamespace(
            clock=SimpleNamespace(now=lambda: self.now),
            metrics=SimpleNamespace(fetch=self.fetch),
            target=SimpleNamespace(apply=lambda _plan: status),
            store=SimpleNamespace(trials=lambda _name: []),
        )
        step = ended(self.record, context)
        self.record = step.record
        return step.again


def test_drift_is_told_once_per_window_also_where_nothing_is_started_again() -> None:
    world = Ended()
    assert world.look(59) is None
    assert (world.asked, world.record.drift) == (0, None)
    assert world.look(1) is None
    assert world.record.drift == pytest.approx(0, abs=0.01)
    world.answer = traffic(prompt=800)
    for _ in range(59):
        world.look(1)
    assert world.asked == 1
    world.look(1)
    assert world.asked == 2
    assert world.record.drift is not None
    assert world.record.drift > 0.5
    assert world.record.phase is Phase.PROMOTED


def test_drift_past_the_threshold_starts_anew_where_that_is_asked_for() -> None:
    world = Ended(mode="onDrift", answer=traffic(prompt=800))
    assert world.look(60) == 0.0
    assert world.record.phase is Phase.PENDING
    assert "The traffic changed" in world.record.sentence
    assert world.record.drift is None, "the drift was from a profile that is gone"


@pytest.mark.parametrize("answer", [PortError("no answer"), SeriesWindow(0, 60, (), ())], ids=["error", "empty"])
@pytest.mark.parametrize("mode", ["never", "onDrift"])
def test_metrics_that_are_missing_after_the_end_change_nothing(answer: object, mode: str) -> None:
    world = Ended(mode=mode, answer=answer)
    before = world.record
    world.look(60)
    assert world.record.model_copy(update={"drift_at": None}) == before
    world.look(30)
    assert world.asked == 1


def test_a_foreign_manager_is_kept_and_forgotten_when_it_is_gone() -> None:
    world = Ended(foreign="fields of Deployment chat are owned by others: helm")
    world.look(1)
    assert "helm" in world.record.foreign
    world.foreign = None
    world.look(1)
    assert world.record.foreign == ""


class Never:
    """Says stop after some passes."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def is_set(self) -> bool:
        return self.left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left <= 0


def told(world: World, monkeypatch: pytest.MonkeyPatch, outcome: object) -> list[tuple[float, BaseException | None]]:
    def reconcile(_name: str, _context: object) -> float:
        world.clock.advance(2.0)
        if isinstance(outcome, BaseException):
            raise outcome
        return 0.0

    monkeypatch.setattr(loop, "reconcile", reconcile)
    seen: list[tuple[float, BaseException | None]] = []
    observe = lambda seconds, error: seen.append((seconds, error))  # noqa: E731
    loop.run("demo", world.context(), Never(2), lambda _record: None, observe=observe)
    return seen


def test_each_pass_is_told_with_its_time_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.create(tuning())
    assert told(world, monkeypatch, None) == [(2.0, None)] * 2
    conflict = Conflict("somebody else wrote")
    assert told(world, monkeypatch, conflict) == [(2.0, conflict)] * 2
    with pytest.raises(KeyError):
        told(world, monkeypatch, KeyError("ours"))


def test_a_fault_is_told_before_it_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(), []
    world.create(tuning())
    fault = ValueError("ours")
    monkeypatch.setattr(loop, "reconcile", lambda *_: (_ for _ in ()).throw(fault))
    with pytest.raises(ValueError, match="ours"):
        loop.run("demo", world.context(), Never(2), lambda _r: None, observe=lambda s, e: seen.append(e))
    assert seen == [fault]


def test_what_failed_outside_counts_though_the_record_swallowed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    record = world.create(tuning())
    context = world.context()
    context.store.save(record.model_copy(update={"errors": 3, "sentence": "Trying again in 4s: no answer"}))
    ((_, error), _) = told(world, monkeypatch, None)
    assert isinstance(error, PortError)
    assert "no answer" in str(error)
