"""Reading a failed server's output: what went wrong first, whose fault it is, and what to do."""

import re
import signal
from collections.abc import Iterator

from tunewright.domain.state import Failure, FailureKind
from tunewright.knobs.failure_rules import AFTER_START, RULES, SEGMENTATION, WORKER_DIED, WRAPPER

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"^\([\w .-]+ pid=\d+\)\s?")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning))\b(?::\s*(.*))?$")
_PYDANTIC = re.compile(r"^\d+ validation errors? for (\w+)")
_NOISE = re.compile(r'^(INFO: |  File "|    |Traceback \(|\[W|W\d{4} |usage: )')  # four spaces: quoted source
_ENGINE_DIED = re.compile(
    r"EngineCore (failed to start|encountered a fatal error)|EngineDeadError|initialization failed"
)
_FREE = re.compile(r"\(([\d.]+)/([\d.]+) GiB\)")
_NEEDED = re.compile(r"requested memory for kv \(([\d.]+) GiB\)")
_OTHERS = re.compile(r"Process \d+ has ([\d.]+) (GiB|MiB) memory in use")
_CAUSE_LENGTH = 500
_OWN_SHARE = 0.015
"""Share of a GPU's memory that the driver and the process's own context take: less than that is nobody else's."""

_KILLED_ADVICE = "Something outside ended it (an operator, a deadline, the kernel's out-of-memory killer): try again."


def explain(
    exit_code: int | None, stdout: str, stderr: str, *, under_load: bool = False, hung: bool = False
) -> Failure:
    """Why a server died or did not come up.

    `exit_code` is as `subprocess` (−9) or a shell (137) tells it, None while it lives. `under_load`: it had been
    healthy before. `hung`: it lives but did not answer by its deadline. Both streams may be one (the other empty).
    """
    lines = list(_error_lines(stdout)) + list(_error_lines(stderr))
    failure = _by_memory(lines) or _by_rule(lines, AFTER_START if under_load else None)
    if failure is None and hung:
        heard = _last_line(stdout, stderr)
        silent = "it lives, but stopped answering" if under_load else "it lives, but did not answer by its deadline"
        longer = "" if under_load else "; a longer startTimeout may help"
        failure = Failure(
            kind=FailureKind.HUNG,
            cause=_first_exception(lines) or _cut(f"{silent}; the last line of its log: {heard}" if heard else silent),
            advice=f"It ran but did not answer in time: look at the end of its log{longer}.",
        )
    failure = failure or _by_end(exit_code, lines, stdout, stderr)
    if under_load and failure.kind is FailureKind.OUT_OF_MEMORY:
        failure = failure.model_copy(update={"kind": FailureKind.OUT_OF_MEMORY_UNDER_LOAD})
    return failure.model_copy(update={"exit_code": exit_code})


def _by_memory(lines: list[str]) -> Failure | None:
    """Too little free memory, judged by the numbers: only memory that somebody else holds is the machine's fault."""
    for line in lines:
        desired = "is less than desired GPU memory utilization" in line
        free = _FREE.search(line)
        if desired:
            if free and float(free[2]) - float(free[1]) <= max(1.0, _OWN_SHARE * float(free[2])):
                share = int(float(free[1]) / float(free[2]) * 100) / 100
                return Failure(
                    kind=FailureKind.OUT_OF_MEMORY,
                    cause=_cut(line),
                    advice="The GPU is empty, but this is more than it has free: lower gpu_memory_utilization.",
                    limits={"gpu_memory_utilization": share},
                )
            return _not_clean(line)
        needed = _NEEDED.search(line)
        if needed and free and float(free[1]) < float(needed[1]) <= float(free[2]):
            return _not_clean(line)
        others = sum(float(held) / (1 if unit == "GiB" else 1024) for held, unit in _OTHERS.findall(line))
        if "out of memory" in line.lower() and others > 1:
            return _not_clean(line)
    return None


def _not_clean(line: str) -> Failure:
    return Failure(
        kind=FailureKind.GPU_NOT_CLEAN,
        cause=_cut(line),
        advice="Somebody else holds memory (an engine left over?): end it, then try again. It is not the candidate.",
    )


def _by_rule(lines: list[str], kinds: frozenset[FailureKind] | None) -> Failure | None:
    for rule in RULES:
        if kinds is not None and rule.kind not in kinds:
            continue
        for line in lines:
            if rule.pattern.search(line):
                return Failure(kind=rule.kind, cause=_cut(line), advice=rule.advice, limits=rule.limits(line))
    return None


def _by_end(exit_code: int | None, lines: list[str], stdout: str, stderr: str) -> Failure:
    """No known wording: the way it ended, then the first error that is not just passed on."""
    number = -exit_code if exit_code is not None and exit_code < 0 else (exit_code or 0) - 128
    crashed = next((line for line in lines if SEGMENTATION.search(line)), None)
    cause = crashed or _first_exception(lines)
    engine_died = any(_ENGINE_DIED.search(line) for line in lines)
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and not (cause and engine_died):
        name = signal.Signals(number).name
        return Failure(kind=FailureKind.KILLED, cause=f"ended by signal {name} from outside", advice=_KILLED_ADVICE)
    died = next((line for line in lines if WORKER_DIED.search(line)), None)
    if died and not cause:
        return Failure(kind=FailureKind.KILLED, cause=_cut(died), advice=_KILLED_ADVICE)
    if cause:
        return _exception(cause)
    if 0 < number < 65:
        text = f"ended by signal {number}" + (f" ({signal.strsignal(number)})" if signal.strsignal(number) else "")
        return Failure(kind=FailureKind.CRASHED, cause=text, advice="It crashed: look at the end of its log.")
    last = _last_line(stdout, stderr)
    if exit_code is None:
        return Failure(kind=FailureKind.UNKNOWN, cause=last or "no output", advice="Nothing in its log names a cause.")
    return Failure(
        kind=FailureKind.CRASHED,
        cause=f"ended with exit code {exit_code}" + (f" after: {last}" if last else ", and wrote nothing"),
        advice="Nothing in its log names a cause: start the same command by hand.",
    )


def _exception(cause: str) -> Failure:
    if cause.startswith("Value error, "):
        return Failure(
            kind=FailureKind.INVALID_COMBINATION,
            cause=_cut(cause.removeprefix("Value error, ")),
            advice="vLLM refuses these values together: change one of those that the message names.",
        )
    if ": Input should be " in cause or "[type=" in cause:
        return Failure(
            kind=FailureKind.INVALID_FLAG,
            cause=_cut(cause),
            advice="This vLLM version does not take that value: use one that the message allows.",
        )
    if ": error: " in cause:
        return Failure(kind=FailureKind.INVALID_FLAG, cause=_cut(cause), advice="vLLM does not take this command line.")
    return Failure(kind=FailureKind.CRASHED, cause=_cut(cause), advice="It crashed: look at the end of its log.")


# --- lines -----------------------------------------------------------------------------------------------------------


def _error_lines(text: str) -> Iterator[str]:
    """Lines that may name a cause, without their prefixes; a pydantic error's lines are brought together."""
    pending: str | None = None  # the field that a pydantic error is about; empty: about the whole model
    for raw in _ANSI.sub("", text).splitlines():
        line = _PROCESS.sub("", raw)
        level = _LEVEL.match(line)
        if level:
            line = line[level.end() :]
        if (level and level[1] not in ("ERROR", "CRITICAL")) or not line.strip() or _NOISE.match(line):
            continue
        validation = _PYDANTIC.match(line.split("ValidationError: ")[-1])
        if validation:
            pending = ""
        elif pending is not None and line.startswith("  "):
            yield f"{pending}: {line.strip()}" if pending else line.strip()
            pending = None
        elif pending is not None:
            pending = line.strip()
        else:
            yield line.strip()


def _first_exception(lines: list[str]) -> str | None:
    """The first error that is not just passed on."""
    for line in lines:
        if WRAPPER.search(line):
            continue
        match = _EXCEPTION.match(line)
        known = match and not match[1].endswith("Warning") and match[1] not in ("SystemExit",)
        if known or line.startswith("Value error, ") or "[type=" in line or ": error: " in line:
            return line
    return None


def _last_line(*texts: str) -> str:
    for text in reversed(texts):
        lines = [line for line in text.splitlines() if line.strip()]
        if lines:
            return _cut(_PROCESS.sub("", _ANSI.sub("", lines[-1])))
    return ""


def _cut(line: str) -> str:
    """Fit for a record: without pydantic's dump of every argument."""
    text = re.sub(r"\s*\[type=\w+, input_value=(ArgsKwargs.*|[^\[\]]{60,})\]?$", "", line).removeprefix("Value error, ")
    text = re.sub(r"\s*\[type=\w+, input_value=(.*), input_type=\w+\]$", r" (not \1)", text)
    return text if len(text) <= _CAUSE_LENGTH else text[: _CAUSE_LENGTH - 1] + "…"
