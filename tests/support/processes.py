"""For tests that run real processes: a clock, waiting with a deadline, and an end on every path."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tunewright.domain.tuning import Target
from tunewright.platform.process import children, sockets

DEADLINE = 60.0
FAKE = Path(__file__).with_name("fake_vllm.py")
Result = TypeVar("Result")


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ShiftedClock(SystemClock):
    """The machine's clock, `ahead` seconds ahead: deadlines pass without waiting for them."""

    ahead = 0.0

    def now(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def wait_for(what: Callable[[], Result | None], why: str = "") -> Result:
    """Call until it answers something true; the deadline is long because CI machines are slow."""
    deadline = time.monotonic() + DEADLINE
    while True:
        result = what()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {DEADLINE:g} s: {why or what}"
        time.sleep(0.02)


class Killed(BaseException):
    """Stands for kill -9: nothing in the product catches it."""


@contextmanager
def killed_at_writes(monkeypatch: pytest.MonkeyPatch, every: int) -> Iterator[None]:
    """Every so many files written, we are killed: in turns just before and just after the file is there."""
    count = 0
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count % (2 * every) == 0:
            raise Killed
        result = replace(self, target)
        if count % every == 0:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        yield


def first_port() -> int:
    """A range of our own, so that tests that run beside each other do not race for ports."""
    return sockets.free_port(random.randrange(20000, 31000))


def fake_command(*more: str) -> tuple[str, ...]:
    return (sys.executable, "-S", str(FAKE), "serve", "fake", "--port", "{port}", *more)


def fake_target(*more: str, **fields: object) -> Target:
    values: dict[str, object] = {"first_port": first_port(), "start_timeout": "60s", "drain_timeout": "20s", **fields}
    return Target.model_validate({"command": fake_command(*more), **values})


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Kill whatever was started below `directory`, also when the test fails."""
    try:
        yield
    finally:
        deadline = time.monotonic() + DEADLINE
        while (pids := children.find_marked(directory)) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        for record in directory.rglob("child.json"):  # reaps them
            child = children.load(record)
            if child is not None:
                children.end(child, grace=0.0)
