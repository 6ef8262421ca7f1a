"""`tunewright check`: everything that can be known before a tuning starts, without touching anything."""

import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tunewright.domain.tuning import Tuning
from tunewright.local import model_facts
from tunewright.observe.prometheus import PrometheusSource
from tunewright.platform.process.adopted import AdoptedTarget
from tunewright.platform.process.command import Command
from tunewright.platform.process.spare import ProcessSpare
from tunewright.ports import Clock, PortError, Refused
from tunewright.propose.space import build_space, check_search

VERSION_TIMEOUT = 120.0
"""Seconds: the first import of vLLM from a cold disk takes long."""


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    good: bool
    detail: str


def run_checks(tuning: Tuning, state: Path, clock: Clock) -> list[Finding]:
    """All checks in the order in which a tuning would meet them."""
    spec = tuning.spec
    checks: list[tuple[str, Callable[[], str]]] = [("search", lambda: _search(tuning))]
    for name, words in _commands(tuning):
        environment = {**spec.target.environment, **(spec.spare.environment if name == "spare" else {})}
        checks.append((f"{name} command", lambda w=words, e=environment: _command(w, e)))  # type: ignore[misc]
        checks.append((f"{name} binary", lambda w=words: _version(w)))  # type: ignore[misc]
    if spec.target.urls:
        checks.append(("production", lambda: AdoptedTarget(spec.target, spec.spare, clock).observe().detail))
    checks.append(("spare", lambda: _spare(tuning, state, clock)))
    checks.append(("metrics", lambda: _metrics(tuning)))
    return [_found(what, act) for what, act in checks]


def _found(what: str, act: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, act())
    except (Refused, PortError) as error:
        return Finding(what, False, str(error))


def _commands(tuning: Tuning) -> Iterator[tuple[str, tuple[str, ...]]]:
    if tuning.spec.target.command:
        yield "target", tuning.spec.target.command
    if tuning.spec.spare.command:
        yield "spare", tuning.spec.spare.command


def _search(tuning: Tuning) -> str:
    check_search(tuning.spec.search)
    facts = model_facts(tuning)
    command = tuning.spec.target.command or tuning.spec.spare.command
    baseline = Command(command, tuning.spec.target.environment).baseline
    space = build_space(tuning.spec.search, facts, baseline)
    if not space.axes:
        raise Refused("no knob is left to search: look at spec.search.include and exclude")
    return f"{len(space.axes)} knobs: {', '.join(axis.name for axis in space.axes)}"


def _command(words: tuple[str, ...], environment: dict[str, str]) -> str:
    command = Command(words, environment)
    problems = command.problems(command.baseline)
    if problems:
        raise Refused("; ".join(problems))
    knobs = ", ".join(f"{k}={v}" for k, v in command.baseline.values.items()) or "none: all of vLLM's defaults"
    return f"knobs it sets: {knobs}"


def _version(words: tuple[str, ...]) -> str:
    """Ask the binary itself: what stands before `serve` is the program."""
    program = words[: words.index("serve")] if "serve" in words else words[:1]
    asked = [*program, "--version"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=False)
    except FileNotFoundError:
        raise Refused(f"there is no program {program[0]} on the PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{shlex.join(asked)}: {error}") from None
    lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or ["no answer"]
    if answer.returncode != 0:
        raise Refused(f"{shlex.join(asked)} ended with {answer.returncode}: {lines[-1]}")
    return lines[-1]


def _spare(tuning: Tuning, state: Path, clock: Clock) -> str:
    folder = state / tuning.metadata.name / "spare"
    held = ProcessSpare(folder, tuning.spec.target, tuning.spec.spare, clock).occupied()
    if held:
        raise Refused(f"it is not free: {held}")
    return "nothing of an earlier trial is on it"


def _metrics(tuning: Tuning) -> str:
    metrics = tuning.spec.metrics
    if metrics.prometheus is None:
        return "the servers are scraped directly"
    token = Path(metrics.bearer_token_file) if metrics.bearer_token_file else None
    source = PrometheusSource(metrics.prometheus, metrics.selector, interval=metrics.interval, bearer_token_file=token)
    missing = source.check()
    if missing:
        raise Refused("; ".join(missing))
    return f"{source.describe()} answers every query"
