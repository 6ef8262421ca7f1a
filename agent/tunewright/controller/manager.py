"""Many tunings at once: who is due, one worker per tuning at a time, and backoff for one that keeps failing."""

import heapq
import logging
import random
import threading
from collections.abc import Callable, Iterable

from tunewright.ports import Clock, Conflict, Key, PortError, Refused, Stop

_log = logging.getLogger(__name__)

RESYNC = 30.0
"""Seconds between two looks at which tunings there are, beside the watches that wake them."""
IDLE = 120.0
"""Seconds after which, at the latest, a tuning that is there and had nothing to do is looked at again; at the earliest
after half of that, by chance, so that they do not all come at once."""
MAX_BACKOFF = 120.0
WORKERS = 8
"""Passes at once that get on."""
HANGS = 0.5
"""Seconds after which a pass that has not ended counts as hanging, as on a metrics source that does not answer."""
MAX_WORKERS = 256
"""Workers in all. One that hangs costs some 100 KiB and no CPU."""
STAFFING = 0.25
"""Seconds between two looks at whether there are workers enough."""


class WorkQueue:
    """Keys and when they are due. A key in work is given to nobody else; woken meanwhile, it comes again at once.

    Those that were woken and those whose time has come take turns, so that neither waits behind all of the other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._woken: dict[Key, None] = {}  # in the order in which they were
        self._woken_last = False
        self._working: set[Key] = set()
        self._changed = threading.Condition()

    def add(self, key: Key, after: float = 0.0) -> None:
        """Make `key` due after so many seconds, or earlier where it already is."""
        with self._changed:
            at = self._clock.monotonic() + after
            if at < self._due.get(key, float("inf")):
                self._due[key] = at
                heapq.heappush(self._heap, (at, key))
                self._changed.notify()

    def plan(self, key: Key, after: float) -> None:
        """Make `key` due after so many seconds, unless it is due at some time already."""
        with self._changed:
            planned = key in self._due or key in self._woken
        if not planned:
            self.add(key, after)

    def wake(self, key: Key) -> None:
        """Something happened to `key`: it is due now."""
        with self._changed:
            if key not in self._woken:
                self._woken[key] = None
                self._changed.notify()

    def take(self, timeout: float) -> Key | None:
        """The next key that is due, now in work; None when none is within `timeout` seconds."""
        with self._changed:
            deadline = self._clock.monotonic() + timeout
            while True:
                now = self._clock.monotonic()
                key, next_at = self._next(now)
                if key is not None:
                    self._working.add(key)
                    return key
                left = min(deadline, next_at) - now
                if deadline <= now:
                    return None
                self._changed.wait(max(0.001, left))

    def done(self, key: Key) -> None:
        """Its work has ended; it may be taken again."""
        with self._changed:
            self._working.discard(key)
            if key in self._due:
                heapq.heappush(self._heap, (self._due[key], key))
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._due.keys() | self._woken.keys())

    def _next(self, now: float) -> tuple[Key | None, float]:
        key, at = self._next_in_time(now)
        woken = next((each for each in self._woken if each not in self._working), None)
        if woken is not None and (key is None or not self._woken_last):
            del self._woken[woken]
            self._woken_last = True
            if key is not None and key != woken:  # not yet: it is given to the next that asks
                self._due[key] = at
                heapq.heappush(self._heap, (at, key))
            self._due.pop(woken, None)  # this pass is the one that was planned, too
            return woken, now
        if key is not None:
            self._woken_last = False
            self._woken.pop(key, None)
        return key, at

    def _next_in_time(self, now: float) -> tuple[Key | None, float]:
        while self._heap:
            at, key = self._heap[0]
            if self._due.get(key) != at or key in self._working:
                heapq.heappop(self._heap)  # outdated, or comes back with `done`
                continue
            if at > now:
                return None, at
            heapq.heappop(self._heap)
            del self._due[key]
            return key, at
        return None, float("inf")


class Manager:
    """Runs `step(key)` for every key as often as it asks for, until `stop`.

    A few workers do that. For every pass that hangs two more are taken on, so that the other tunings do not wait for
    it. A step that answers None asks for nothing: a wake-up brings its key back, and `resync` as long as it is there.

    `may_act` is asked before every step: without the lease nothing is done. `observe` is told how long each took.
    `woken` says whether changes wake the keys at present: while they do not, all are looked at with each resync.
    """

    def __init__(
        self,
        keys: Callable[[], Iterable[Key]],
        step: Callable[[Key], float | None],
        clock: Clock,
        *,
        may_act: Callable[[], bool],
        woken: Callable[[], bool] = lambda: True,
        observe: Callable[[float, BaseException | None], None] = lambda _seconds, _error: None,
        workers: int = WORKERS,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance` gives numbers from 0 to 1."""
        self.queue = WorkQueue(clock)
        self._keys, self._step, self._clock = keys, step, clock
        self._may_act, self._woken, self._observe, self._chance = may_act, woken, observe, chance
        self._failures: dict[Key, int] = {}
        self._began: dict[Key, float] = {}
        self._workers = self._wanted = workers
        self._threads: set[threading.Thread] = set()

    def run(self, stop: Stop) -> None:
        """Until `stop`; steps that are under way are waited for."""
        next_resync = self._clock.monotonic()
        while not stop.is_set():
            if self._clock.monotonic() >= next_resync:
                self.resync()
                next_resync = self._clock.monotonic() + RESYNC
            self.staff(stop)
            stop.wait(STAFFING)
        for thread in list(self._threads):
            thread.join(timeout=60.0)

    def resync(self) -> None:
        """Look which tunings there are; every one is due at some time."""
        if not self._may_act():
            return
        try:
            for key in self._keys():
                if self._woken():
                    self.queue.plan(key, self._idle())
                else:
                    self.queue.add(key)
        except PortError as error:
            _log.warning("the tunings could not be listed: %s", error)

    @property
    def staffed(self) -> int:
        """How many workers there are now."""
        return len(self._threads)

    def staff(self, stop: Stop) -> None:
        """Take on as many workers as are wanted now; too many, and all with `stop`, end by themselves."""
        now = self._clock.monotonic()
        hanging = sum(now - began > HANGS for began in list(self._began.values()))
        self._wanted = min(MAX_WORKERS, self._workers + 2 * hanging)
        for _ in range(self._wanted - len(self._threads)):  # counted once: with `stop` they end as they begin
            thread = threading.Thread(target=self._work, args=(stop,), name="reconcile", daemon=True)
            self._threads.add(thread)
            thread.start()

    def once(self, timeout: float) -> bool:
        """Take one step of the next tuning that is due; whether there was one."""
        key = self.queue.take(timeout)
        if key is None:
            return False
        self._began[key] = self._clock.monotonic()
        try:
            again = self._try(key)
        finally:
            del self._began[key]
            self.queue.done(key)
        if again is not None:
            self.queue.add(key, again)
        return True

    def _work(self, stop: Stop) -> None:
        while not stop.is_set():
            if len(self._threads) > self._wanted:
                break
            if self._may_act():
                self.once(timeout=0.5)
            else:
                stop.wait(0.5)
        self._threads.discard(threading.current_thread())

    def _try(self, key: Key) -> float | None:
        started = self._clock.monotonic()
        try:
            again = self._step(key)
        except Conflict as conflict:
            self._observe(self._clock.monotonic() - started, conflict)
            return 0.05
        except Exception as error:  # noqa: BLE001 - one tuning's fault must not stop the others
            self._observe(self._clock.monotonic() - started, error)
            if not isinstance(error, PortError | Refused):
                _log.exception("a fault in reconciling %s/%s", *key)
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            wait = min(MAX_BACKOFF, 0.5 * 2.0 ** min(failures, 10))
            _log.warning("%s/%s: trying again in %g s: %s", *key, wait, error)
            return wait
        self._failures.pop(key, None)
        self._observe(self._clock.monotonic() - started, None)
        return min(again, IDLE) if again is not None else None

    def _idle(self) -> float:
        return IDLE * (0.5 + 0.5 * self._chance())
