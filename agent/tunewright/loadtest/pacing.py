"""When requests are sent: closed loop (a number of them at all times) or open loop (by the clock)."""

import asyncio
import ctypes
import math
import os
import time
from collections import deque
from typing import Protocol

import numpy as np

from tunewright.domain.traffic import Ramp
from tunewright.loadtest.client import Client
from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.recording import NANO, Record

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds after a failure, so that a broken server is not hammered
_STOCK_BYTES = 32 << 20


class Pacing(Protocol):
    """Decides when the next request goes."""

    @property
    def built_late(self) -> int:
        """How often a request had to be built at the moment it was due."""
        ...

    def prepare(self) -> None:
        """Build ahead, before the load begins."""
        ...

    def start(self) -> None:
        """Begin to send."""
        ...

    def window(self) -> None:
        """The warm-up is over, the measured window begins."""
        ...

    def stop(self) -> None:
        """Send nothing more; what is in flight goes on."""
        ...

    def ended(self, record: Record) -> None:
        """A request has ended."""
        ...

    def close(self) -> None:
        """Build nothing more."""
        ...


class Source(Protocol):
    """Makes requests, one after the other."""

    def next(self) -> Planned:
        """The next request."""
        ...


class ShortenedSource(Source, Protocol):
    """Can also cut a request's output, so that a closed loop starts out of step."""

    def next(self, shorten: float = 1.0) -> Planned:
        """The next request, with this share of its output."""
        ...


class Stock:
    """Requests built ahead, a few at a time, so that building them never holds up a send."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._size = size
        self._ready: deque[Planned] = deque()
        self._bytes = 0
        self._pending: asyncio.Handle | None = None
        self.empty = 0
        """How often a request had to be built at the moment it was due."""

    def fill(self) -> None:
        """Fill it up at once, before the run."""
        while self._room():
            self._add()

    def take(self) -> Planned:
        """The next request."""
        if not self._ready:
            self.empty += 1
            self._add()
        planned = self._ready.popleft()
        self._bytes -= len(planned.body)
        self._refill_later()
        return planned

    def close(self) -> None:
        """Build no more."""
        self._size = 0
        if self._pending is not None:
            self._pending.cancel()

    def _room(self) -> bool:
        return len(self._ready) < self._size and self._bytes < _STOCK_BYTES

    def _add(self) -> None:
        planned = self._source.next()
        self._ready.append(planned)
        self._bytes += len(planned.body)

    def _refill_later(self) -> None:
        if self._pending is None and self._room():
            self._pending = asyncio.get_running_loop().call_later(0.001, self._refill)

    def _refill(self) -> None:
        self._pending = None
        if self._room():
            self._add()
        self._refill_later()


class _Stocked:
    """A loop whose requests come from a stock."""

    def __init__(self, client: Client, stock: Stock) -> None:
        self._client = client
        self._stock = stock

    @property
    def built_late(self) -> int:
        return self._stock.empty

    def prepare(self) -> None:
        self._stock.fill()

    def window(self) -> None:
        pass

    def close(self) -> None:
        self._stock.close()


class ClosedLoop(_Stocked):
    """Keeps `concurrency` requests running: the next one goes when one has ended.

    The first of each stream has a random share of its output, so that the streams are out of step from the start, as
    they would be after a long time.
    """

    def __init__(self, client: Client, source: ShortenedSource, stock: Stock, concurrency: int, seed: int) -> None:
        super().__init__(client, stock)
        shares = np.random.default_rng([seed, 4]).uniform(0.05, 1.0, concurrency)
        self._ramp = [source.next(shorten=float(share)) for share in shares]
        self._stopped = False
        self._concurrency = concurrency
        self._failures = 0

    def start(self) -> None:
        for planned in self._ramp:
            self._client.submit(planned, time.time_ns(), ramp=True)
        self._ramp.clear()

    def stop(self) -> None:
        self._stopped = True

    def ended(self, record: Record) -> None:
        if self._stopped:
            return
        if record.error is None:
            self._failures = 0
            self._client.submit(self._stock.take(), record.finished_ns)
            return
        self._failures += 1
        pause = min(_FIRST_PAUSE * 2 ** min(self._failures // self._concurrency, 10), _LONGEST_PAUSE)
        asyncio.get_running_loop().call_later(pause, self._replace)

    def _replace(self) -> None:
        if not self._stopped:
            self._client.submit(self._stock.take(), time.time_ns())


def gamma_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> list[float]:
    """Seconds between arrivals. `burstiness` is the variance over the mean of arrivals in long spans, which for gaps
    that don't depend on one another is their squared variation: 1 is Poisson, 2 bunches, near 0 is a metronome."""
    gaps: list[float] = rng.gamma(1.0 / burstiness, burstiness / rate, count).tolist()
    return gaps


class Schedule:
    """Seconds from the start to each arrival. In a ramp the same arrivals come further apart, as the rate then is: how
    they bunch stays the same."""

    def __init__(self, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None) -> None:
        self._rng = np.random.default_rng([seed, 5])
        self._rate, self._burstiness = rate, burstiness
        self._start, self._over = (ramp.start_rate, ramp.duration) if ramp is not None else (rate, 0.0)
        self._ramped = (self._start + rate) / 2 * self._over  # arrivals in the ramp, on average
        self._passed = 0.0  # arrivals that are due by now, on average
        self._gaps: list[float] = []

    def next(self) -> float:
        """When the next one comes."""
        if not self._gaps:
            self._gaps = gamma_gaps(self._rng, 1.0, self._burstiness, 1024)
        self._passed += self._gaps.pop()
        if self._passed >= self._ramped:
            return self._over + (self._passed - self._ramped) / self._rate
        rise = (self._rate - self._start) / self._over  # passed = start * t + rise / 2 * t ** 2
        return 2 * self._passed / (self._start + math.sqrt(self._start**2 + 2 * rise * self._passed))


class OpenLoop(_Stocked):
    """Sends `rate` requests a second, on average and after the ramp, whatever comes back."""

    def __init__(
        self, client: Client, stock: Stock, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None
    ) -> None:
        super().__init__(client, stock)
        self._schedule = Schedule(rate, burstiness, seed, ramp)
        self._timer = Timer(self._due)
        self._began_ns = self._next_ns = 0

    def start(self) -> None:
        self._began_ns = time.time_ns()
        self._plan()
        self._timer.set(self._next_ns)

    def stop(self) -> None:
        self._timer.close()

    def ended(self, record: Record) -> None:
        pass

    def _due(self) -> None:
        now = time.time_ns()
        while self._next_ns <= now:
            self._client.submit(self._stock.take(), self._next_ns)
            self._plan()
        self._timer.set(self._next_ns)

    def _plan(self) -> None:
        self._next_ns = self._began_ns + round(self._schedule.next() * NANO)


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timer:
    """A kernel timer on the loop: the loop's own timers are no finer than a millisecond."""

    _ABSOLUTE = 1  # TFD_TIMER_ABSTIME

    def __init__(self, due: "_Callback") -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ready)

    def set(self, at_ns: int) -> None:
        """Call once at this time since the epoch, at once if it is past."""
        if self._descriptor >= 0:
            spec = _Itimerspec(0, 0, *divmod(max(at_ns, 1), NANO))
            if self._libc.timerfd_settime(self._descriptor, self._ABSOLUTE, ctypes.byref(spec), None):
                raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Never call again."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._due()


class _Callback(Protocol):
    def __call__(self) -> None: ...
