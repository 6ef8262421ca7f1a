"""Faults on demand: `--sim-fault NAME[:ARGUMENT]`, repeatable, or TUNEWRIGHT_SIM_FAULT=NAME[:ARGUMENT],…"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# name -> (what it does, default argument)
KNOWN: dict[str, tuple[str, float]] = {
    "start-crash": ("the engine dies at start; exit code 1", 0),
    "start-oom": ("the engine runs out of memory at start; exit code 1", 0),
    "slow-start": ("starting takes this many seconds more, whatever --sim-speed", 10),
    "hang-start": ("never becomes ready", 0),
    "die-under-load": ("a worker is killed when this many requests have ended", 20),
    "oom-under-load": ("out of memory when this many requests have ended", 20),
    "hang": ("the process stops answering anything, SIGTERM too, when this many requests have ended", 20),
    "no-tokens": ("/health is 200, but nothing is generated, after this many requests", 0),
    "fewer-tokens": ("answers end after this share of the tokens asked for", 0.5),
    "errors": ("this share of requests is answered with status 500", 0.05),
    "slow": ("every step takes this many times as long", 1.5),
    "leaves-engine": ("a child process outlives a SIGKILL of the main one, for at most 10 minutes", 600),
}


class FaultError(ValueError):
    """An unknown fault or a bad argument."""


@dataclass(frozen=True)
class Faults:
    """The faults asked for, by name."""

    arguments: dict[str, float]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def value(self, name: str, otherwise: float) -> float:
        return self.arguments.get(name, otherwise)

    def due(self, name: str, ended: int) -> bool:
        """Whether a fault that waits for a number of ended requests strikes now."""
        return name in self.arguments and ended >= self.arguments[name]


def parse_faults(texts: Sequence[str]) -> Faults:
    """Parses `NAME[:ARGUMENT]`. Raises FaultError with the known names."""
    arguments: dict[str, float] = {}
    for text in texts:
        name, _, argument = text.partition(":")
        if name not in KNOWN:
            raise FaultError(f"unknown fault {name!r}; known: {', '.join(KNOWN)}")
        try:
            arguments[name] = float(argument) if argument else float(KNOWN[name][1])
        except ValueError as error:
            raise FaultError(f"fault {name}: {argument!r} is not a number") from error
    return Faults(arguments)


def leave_engine(seconds: float) -> int:
    """Starts the child that survives its parent, in the same process group, as vLLM's engine does. Its pid."""
    # It must not hold the parent's output open, or whoever reads that would wait for it.
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import time; time.sleep({seconds})", "VLLM::EngineCore"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return child.pid
