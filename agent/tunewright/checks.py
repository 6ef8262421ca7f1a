"""`tunewright check`: everything that can be known before a tuning starts, without touching anything."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tunewright.domain.tuning import Tuning
from tunewright.knobs import binary, commandline
from tunewright.loadtest.job import LoadFailure
from tunewright.loadtest.trace import read_trace
from tunewright.local import model_facts
from tunewright.observe.prometheus import PrometheusSource
from tunewright.platform.process import children, gpu, sockets
from tunewright.platform.process.adopted import AdoptedTarget
from tunewright.platform.process.command import Command
from tunewright.platform.process.separate import shared_gpus, spare_environment
from tunewright.platform.process.spare import ProcessSpare
from tunewright.ports import Clock, PortError, Refused
from tunewright.promptsfile import LOAD, QUALITY, Bounds, read_prompts
from tunewright.propose.space import build_space, check_search

VERSION_TIMEOUT = 120.0
"""Seconds: the first import of vLLM from a cold disk takes long."""

NOT_FOUND = 127
"""What wrappers (`taskset`, `env`, a shell) end with when there is no such program."""

MOSTLY_FREE = 0.1
"""Share of the spare GPU's memory that others may hold before a tuning starts."""


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    good: bool
    detail: str


def run_checks(tuning: Tuning, state: Path, clock: Clock) -> list[Finding]:
    """All checks in the order in which a tuning would meet them."""
    spec = tuning.spec
    checks: list[tuple[str, Callable[[], str]]] = [("state", partial(_state, state))]
    checks.append(("search", partial(_search, tuning)))
    if (source := spec.load.source) is not None:
        checks.append((f"load.{source.field}", partial(check_load_file, tuning)))
    if spec.quality.prompts_file is not None:
        checks.append(("quality prompts", partial(_prompts, spec.quality.prompts_file, "quality.promptsFile", QUALITY)))
    for name, words in _commands(tuning):
        environment = {**spec.target.environment, **(spec.spare.environment if name == "spare" else {})}
        checks.append((f"{name} command", partial(_command, words, environment)))
        checks.append((f"{name} binary", partial(_version, words, environment)))
        checks.append((f"{name} flags", partial(_flags, words, environment, state)))
    checks.append(("production", partial(_production, tuning, state, clock)))
    checks.append(("spare", partial(_spare, tuning, state, clock)))
    checks.append(("GPUs", partial(_gpus, tuning)))
    checks.append(("metrics", partial(_metrics, tuning)))
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


def _state(state: Path) -> str:
    """The folder need not be there yet; then it is made in the nearest one that is."""
    there = next(each for each in (state, *state.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Refused(f"{there} is no folder that you may write to; use another --state")
    return f"in {state}"


def _search(tuning: Tuning) -> str:
    check_search(tuning.spec.search)
    facts = model_facts(tuning)
    command = tuning.spec.target.command or tuning.spec.spare.command
    baseline = Command(command, tuning.spec.target.environment).baseline
    space = build_space(tuning.spec.search, facts, baseline)
    if not space.axes:
        raise Refused("no knob is left to search: look at spec.search.include and exclude")
    return f"{len(space.axes)} knobs: {', '.join(axis.name for axis in space.axes)}"


def check_load_file(tuning: Tuning) -> str:
    """Read the trace or the prompts that the load tests are to read. Raises `Refused` with the lines that are wrong."""
    source = tuning.spec.load.source
    if source is None or source.file is None:
        return "none"
    if source.recording is None:
        return _prompts(source.file, "load.promptsFile", LOAD)
    try:
        recording = read_trace(source.recording)
    except LoadFailure as failure:
        raise Refused(str(failure)) from failure
    return recording.summary


def _prompts(file: str, field: str, bounds: Bounds) -> str:
    found = read_prompts(Path(file), field, bounds)
    judged = sum(prompt.answer is not None for prompt in found)
    return f"{len(found)} prompts, {judged} of them with the right answer"


def _command(words: tuple[str, ...], environment: dict[str, str]) -> str:
    command = Command(words, environment)
    problems = command.problems(command.baseline)
    named = commandline.model_of(words) or ""
    if named.startswith(("/", "./", "../")) and not Path(named).exists():
        problems.append(f"there is no model at {named}")
    if problems:
        raise Refused("; ".join(problems))
    knobs = ", ".join(f"{k}={v}" for k, v in command.baseline.values.items()) or "none: all of vLLM's defaults"
    return f"knobs it sets: {knobs}"


def _version(words: tuple[str, ...], environment: dict[str, str]) -> str:
    """Ask the binary itself: what stands before `serve` is the program."""
    command = Command(words, environment)
    filled, variables = command.filled(command.baseline, port=0, replica=0)
    program = filled[: filled.index("serve")] if "serve" in filled else filled[:1]
    asked = [*program, "--version"]
    env = {**os.environ, **variables}
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=False, env=env)
    except FileNotFoundError:
        raise Refused(f"there is no program {program[0]} on the PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{shlex.join(asked)}: {error}") from None
    lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or ["no answer"]
    if answer.returncode != 0:
        hint = "; give the full path of vllm in the command" if answer.returncode == NOT_FOUND else ""
        raise Refused(f"{shlex.join(asked)} ended with {answer.returncode}: {lines[-1]}{hint}")
    return lines[-1]


def _flags(words: tuple[str, ...], environment: dict[str, str], state: Path) -> str:
    """Every flag of the command must be one that this very vLLM takes, for it ends at once on any other."""
    command = Command(words, environment)
    filled, variables = command.filled(command.baseline, port=0, replica=0)
    with tempfile.TemporaryDirectory() as nowhere:  # a check leaves no state where there was none
        flags, unknown = binary.ask(filled, variables, state / "binaries" if state.is_dir() else Path(nowhere))
    if flags is None:
        return f"not checked: {unknown}"
    if refused := flags.unknown(filled):
        raise Refused(f"this vLLM does not know {', '.join(refused)}; see `vllm serve --help=all`")
    return "this vLLM takes all of them"


def _production(tuning: Tuning, state: Path, clock: Clock) -> str:
    """Servers of others must answer; for our own the address that clients use must be free, or ours already."""
    target = tuning.spec.target
    if target.urls:
        status = AdoptedTarget(target, tuning.spec.spare, clock).observe()
        if not status.settled:
            raise PortError(status.detail)
        return status.detail
    if tuning.spec.offline:
        return "none: the command is tuned on the spare alone"
    folder = state / tuning.metadata.name / "production"
    host, _, port = target.listen.rpartition(":")
    if sockets.listening_sockets(int(port)) and not children.find_marked(folder / "proxy"):
        raise Refused(
            f"{target.listen} is taken by another program: end it (your present vLLM, maybe), or change target.listen"
        )
    if not sockets.is_here(host):
        raise Refused(f"{host} is no address of this machine: change target.listen; 0.0.0.0 stands for all that it has")
    if children.find_marked(folder):
        return f"runs already, behind {target.listen}"
    return f"{target.replicas} to be started, behind {target.listen}, which is free"


def _spare(tuning: Tuning, state: Path, clock: Clock) -> str:
    folder = state / tuning.metadata.name / "spare"
    if not folder.exists():
        return "nothing was ever started on it"
    held = ProcessSpare(folder, tuning.spec.target, tuning.spec.spare, clock).occupied()
    if held:
        raise Refused(f"it is not free: {held}. A running `tunewright tune` holds it, or `tunewright stop` ends it")
    return "nothing of an earlier trial is on it"


def _gpus(tuning: Tuning) -> str:
    """Production and spares must not share a GPU, and the spares' must have room."""
    target, spare = tuning.spec.target, tuning.spec.spare
    shared = shared_gpus(target, spare)
    if shared:
        raise Refused(shared)
    memory: list[gpu.GpuMemory] = []
    for slot in range(spare.parallelism):
        found = gpu.memory({**os.environ, **spare_environment(target, spare, slot)})
        if found is None:
            return "not known: no nvidia-smi, or the spare has no CUDA_VISIBLE_DEVICES"
        memory += found
    used = [f"GPU {device.gpu} has {device.used:.0f} of {device.total:.0f} MiB in use" for device in memory]
    who, whose = ("the spare is", "the spare's") if spare.parallelism == 1 else ("the spares are", "the spares'")
    if any(device.used > MOSTLY_FREE * device.total for device in memory):
        raise Refused(f"{who} not free: {', '.join(used)}; see `nvidia-smi` for who holds it")
    return f"{whose}: {', '.join(used)}"


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
