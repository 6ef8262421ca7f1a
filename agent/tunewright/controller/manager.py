"""Many tunings at once: who is due, one worker per tuning at a time, and backoff for one that keeps failing."""

import heapq
import logging
import threading
from collections.abc import Callable, Iterable

from tunewright.ports import Clock, Conflict, Key, PortError, Refused, Stop

_log = logging.getLogger(__name__)

RESYNC = 30.0
"""Seconds between two looks at which tunings there are, beside the watches that wake them."""
IDLE = 60.0
"""Seconds after which a tuning that is there and had nothing to do is looked at again."""
MAX_BACKOFF = 120.0
WORKERS = 8


class WorkQueue:
    """Keys and when they are due. A key in work is given to nobody else; woken meanwhile, it comes again at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
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

    def forget(self, key: Key) -> None:
        """Drop it; a wake-up brings it back."""
        with self._changed:
            self._due.pop(key, None)

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
        return len(self._due)

    def _next(self, now: float) -> tuple[Key | None, float]:
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
    """Runs `step(key)` for every key as often as it asks for, on a few threads, until `stop`.

    A step that answers None asks for nothing: a wake-up brings its key back, and `resync` as long as it is there.
    `may_act` is asked before every step: without the lease nothing is done. `observe` is told how long each took.
    """

    def __init__(
        self,
        keys: Callable[[], Iterable[Key]],
        step: Callable[[Key], float | None],
        clock: Clock,
        *,
        may_act: Callable[[], bool],
        observe: Callable[[float, BaseException | None], None] = lambda _seconds, _error: None,
        workers: int = WORKERS,
    ) -> None:
        self.queue = WorkQueue(clock)
        self._keys, self._step, self._clock = keys, step, clock
        self._may_act, self._observe, self._workers = may_act, observe, workers
        self._failures: dict[Key, int] = {}

    def run(self, stop: Stop) -> None:
        """Until `stop`; steps that are under way are waited for."""
        threads = [
            threading.Thread(target=self._work, args=(stop,), name=f"reconcile-{number}", daemon=True)
            for number in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        while not stop.is_set():
            self.resync()
            stop.wait(RESYNC)
        for thread in threads:
            thread.join(timeout=60.0)

    def resync(self) -> None:
        """Look which tunings there are; every one is due at some time."""
        if not self._may_act():
            return
        try:
            for key in self._keys():
                self.queue.add(key, IDLE)
        except PortError as error:
            _log.warning("the tunings could not be listed: %s", error)

    def once(self, timeout: float) -> bool:
        """Take one step of the next tuning that is due; whether there was one."""
        key = self.queue.take(timeout)
        if key is None:
            return False
        try:
            again = self._try(key)
        finally:
            self.queue.done(key)
        if again is not None:
            self.queue.add(key, again)
        return True

    def _work(self, stop: Stop) -> None:
        while not stop.is_set():
            if self._may_act():
                self.once(timeout=0.5)
            else:
                stop.wait(0.5)

    def _try(self, key: Key) -> float | None:
        started = self._clock.monotonic()
        try:
            again: float | None = self._step(key)
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
        return again
