"""Many tunings at once."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from world import FakeClock

from tunewright.clock import SystemClock
from tunewright.controller.manager import IDLE, MAX_BACKOFF, WORKERS, Manager, WorkQueue
from tunewright.ports import Conflict, Key, PortError

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


def test_the_woken_and_those_whose_time_has_come_take_turns(clock: FakeClock) -> None:
    queue = WorkQueue(clock)
    timed = [("ns", f"timed-{n}") for n in range(4)]
    for key in timed:
        queue.add(key, 1.0)
    clock.advance(2.0)
    queue.wake(A)
    queue.wake(B)
    queue.wake(A)
    taken = [queue.take(0.0) for _ in range(7)]
    assert taken == [A, timed[0], B, *timed[1:], None], "neither waits behind all of the other"


def test_a_wake_up_of_one_whose_time_has_come_is_one_pass(clock: FakeClock) -> None:
    for woken_first in (True, False):
        queue = WorkQueue(clock)
        queue.add(A, 5.0 if woken_first else 0.0)
        queue.wake(A)
        assert queue.take(0.0) == A
        queue.done(A)
        clock.advance(10.0)
        assert queue.take(0.0) is None


def test_one_in_work_that_is_woken_is_given_to_nobody_else_and_comes_again(clock: FakeClock) -> None:
    queue = WorkQueue(clock)
    queue.wake(A)
    assert queue.take(0.0) == A
    queue.wake(A)
    queue.wake(B)
    assert [queue.take(0.0), queue.take(0.0)] == [B, None]
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


def test_what_had_nothing_to_do_comes_again_by_chance_between_half_and_the_whole_time(clock: FakeClock) -> None:
    for chance, after in ((0.0, IDLE / 2), (1.0, IDLE)):
        one = Manager(lambda: [A], lambda _key: None, clock, may_act=lambda: True, chance=lambda c=chance: c)
        one.resync()
        clock.advance(after - 1.0)
        one.resync()
        assert not one.once(0.0), "a later look does not change the plan"
        clock.advance(1.0)
        assert one.once(0.0)


def test_no_step_is_put_off_for_longer_than_the_idle_time(clock: FakeClock) -> None:
    one = manager(clock, lambda _key: 10 * IDLE)
    one.queue.wake(A)
    assert one.once(0.0)
    clock.advance(IDLE)
    assert one.once(0.0)


def test_one_that_asks_for_nothing_does_not_come_again_by_itself(clock: FakeClock) -> None:
    one = manager(clock, lambda _key: None)
    one.queue.wake(A)
    assert one.once(0.0)
    clock.advance(10 * IDLE)
    assert not one.once(0.0)
    one.queue.wake(A)
    assert one.once(0.0)


def test_while_nothing_wakes_them_all_are_looked_at_with_each_resync(clock: FakeClock) -> None:
    woken = [True]
    one = Manager(lambda: [A, B], lambda _key: None, clock, may_act=lambda: True, woken=lambda: woken[0])
    one.resync()
    assert not one.once(0.0)
    woken[0] = False
    one.resync()
    assert one.once(0.0)
    assert one.once(0.0)
    assert not one.once(0.0)


# --- many that hang ---


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_two_hundred_that_hang_do_not_hold_up_another(released: threading.Event) -> None:
    """As tunings whose metrics source does not answer: each pass of theirs takes until it gives up."""
    hanging = [("ns", f"hangs-{n}") for n in range(200)]
    begun, passed, stop = set(), threading.Event(), threading.Event()

    def step(key: Key) -> float | None:
        if key == A:
            passed.set()
            return None
        begun.add(key)
        released.wait(60.0)
        return 60.0

    many = Manager(list, step, SystemClock(), may_act=lambda: True)
    for key in hanging:
        many.queue.add(key)
    running = threading.Thread(target=many.run, args=(stop,))
    running.start()
    try:
        deadline = time.monotonic() + 60.0
        while len(begun) < len(hanging) and time.monotonic() < deadline:
            released.wait(0.05)
        assert len(begun) == len(hanging), "they do not hold up each other, either"
        many.queue.wake(A)
        assert passed.wait(30.0)
        assert not released.is_set()
    finally:
        released.set()
        stop.set()
        running.join(60.0)
    assert not running.is_alive()


def test_workers_that_stood_in_are_let_go(clock: FakeClock, released: threading.Event) -> None:
    stop, begun = threading.Event(), threading.Semaphore(0)

    def step(_key: Key) -> float | None:
        begun.release()
        released.wait(60.0)
        return None

    many = Manager(list, step, clock, may_act=lambda: True)
    for n in range(WORKERS):
        many.queue.add(("ns", f"hangs-{n}"))
    many.staff(stop)
    for _ in range(WORKERS):
        assert begun.acquire(timeout=30.0)
    assert many.staffed == WORKERS, "they have only just begun"
    clock.advance(1.0)
    many.staff(stop)
    assert many.staffed == 3 * WORKERS
    released.set()
    deadline = time.monotonic() + 30.0
    while many.staffed > WORKERS and time.monotonic() < deadline:
        clock.advance(1.0)
        many.staff(stop)
        stop.wait(0.05)
    assert many.staffed <= WORKERS
    stop.set()
