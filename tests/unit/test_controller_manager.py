"""Many tunings at once."""

from collections.abc import Callable

import pytest
from world import FakeClock

from tunewright.controller.manager import IDLE, MAX_BACKOFF, Key, Manager, WorkQueue
from tunewright.ports import Conflict, PortError

A, B = ("ns", "a"), ("ns", "b")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def manager(
    clock: FakeClock, step: Callable[[Key], float | None], acting: Callable[[], bool] = lambda: True
) -> Manager:
    return Manager(lambda: [A, B], step, clock, may_act=acting)


def test_the_earliest_is_taken_first(clock: FakeClock) -> None:
    queue = WorkQueue(clock)
    queue.add(A, 5.0)
    queue.add(B, 1.0)
    assert queue.take(0.0) is None
    clock.advance(6.0)
    assert [queue.take(0.0), queue.take(0.0), queue.take(0.0)] == [B, A, None]


def test_a_wake_up_is_earlier_than_the_plan_and_a_later_plan_does_not_undo_it(clock: FakeClock) -> None:
    queue = WorkQueue(clock)
    queue.add(A, 60.0)
    queue.add(A)
    queue.add(A, 60.0)
    assert queue.take(0.0) == A
    assert queue.take(0.0) is None


def test_one_in_work_is_given_to_nobody_else_and_comes_again_when_woken_meanwhile(clock: FakeClock) -> None:
    queue = WorkQueue(clock)
    queue.add(A)
    assert queue.take(0.0) == A
    queue.add(A)
    assert queue.take(0.0) is None
    queue.done(A)
    assert queue.take(0.0) == A


def test_one_that_fails_waits_longer_each_time_and_does_not_hold_up_the_others(clock: FakeClock) -> None:
    steps: list[Key] = []

    def step(key: Key) -> float | None:
        steps.append(key)
        if key == A:
            raise PortError("the API server does not answer")
        return 1.0

    both = manager(clock, step)
    both.queue.add(A)
    both.queue.add(B)
    for _ in range(600):
        while both.once(0.0):
            pass
        clock.advance(1.0)
    assert steps.count(B) == pytest.approx(600, abs=5)
    assert 5 <= steps.count(A) <= 20


def test_backoff_is_bounded_and_forgotten_after_a_success(clock: FakeClock) -> None:
    fail = True

    def step(_key: Key) -> float | None:
        if fail:
            raise PortError("no")
        return None

    one = manager(clock, step)
    one.queue.add(A)
    for _ in range(30):
        assert one.once(0.0)
        clock.advance(MAX_BACKOFF)
    fail = False
    assert one.once(0.0)
    assert not one.once(0.0)
    fail = True
    one.queue.add(A)
    assert one.once(0.0)
    clock.advance(1.0)
    assert one.once(0.0), "the first failure after a success waits a second at most"


def test_a_conflict_is_read_again_at_once(clock: FakeClock) -> None:
    outcomes = iter([Conflict("written meanwhile"), None])

    def step(_key: Key) -> float | None:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return None

    one = manager(clock, step)
    one.queue.add(A)
    assert one.once(0.0)
    clock.advance(0.1)
    assert one.once(0.0)


def test_a_fault_of_ours_does_not_end_the_loop(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    def step(_key: Key) -> float | None:
        raise ZeroDivisionError

    one = manager(clock, step)
    one.queue.add(A)
    assert one.once(0.0)
    assert "a fault in reconciling ns/a" in caplog.text


def test_one_that_asks_for_nothing_is_looked_at_again_as_long_as_it_is_there(clock: FakeClock) -> None:
    there, steps = [A, B], list[Key]()
    both = Manager(lambda: there, lambda key: steps.append(key), clock, may_act=lambda: True)
    for _ in range(10):
        both.resync()
        clock.advance(IDLE)
        while both.once(0.0):
            pass
    assert (steps.count(A), steps.count(B)) == (10, 10)
    there.remove(B)
    for _ in range(10):
        both.resync()
        clock.advance(IDLE)
        while both.once(0.0):
            pass
    assert (steps.count(A), steps.count(B)) == (20, 10), "what is gone is not asked about for ever"


def test_without_the_lease_nothing_is_listed(clock: FakeClock) -> None:
    one = manager(clock, lambda _key: None, acting=lambda: False)
    one.resync()
    assert len(one.queue) == 0
    with_lease = manager(clock, lambda _key: None)
    with_lease.resync()
    assert len(with_lease.queue) == 2
