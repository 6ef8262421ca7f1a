"""`explain-failure`: why a vLLM did not start, for anyone whose vLLM doesn't."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import JsonOption, fail
from tunewright.domain.oneline import clean_lines
from tunewright.domain.redact import redact
from tunewright.domain.state import Failure
from tunewright.exits import Exit
from tunewright.knobs.failures import explain

_MOST = 64 * 1024 * 1024
"""Bytes that are read of each stream, from its end: the cause stands near it."""


def explain_failure(
    exit_code: Annotated[
        int | None,
        typer.Option("--exit-code", help="As a shell (137) or Python (-9) tells it; leave it out while it still runs."),
    ] = None,
    stdout: Annotated[
        Path | None, typer.Option("--stdout", help="Its standard output, or its whole log; - reads the pipe.")
    ] = None,
    stderr: Annotated[Path | None, typer.Option("--stderr", help="Its standard error, where it is apart.")] = None,
    under_load: Annotated[bool, typer.Option("--under-load", help="It had served requests before it died.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say why a vLLM server did not start or died: the cause, whose fault it is, and what to change.

    Examples:

        tunewright explain-failure --stdout server.log --exit-code 1

        tunewright explain-failure --stdout - --json < server.log
    """
    if stdout is None and stderr is None:
        fail("Name what it wrote: --stdout FILE, --stderr FILE, or both.", Exit.USAGE)
    failure = explain(exit_code, _read(stdout), _read(stderr), under_load=under_load)
    print(json.dumps(_document(failure), indent=2) if as_json else _sentence(failure))


def _document(failure: Failure) -> dict[str, object]:
    return {
        "kind": failure.kind.value,
        "fault": "machine" if failure.machine_fault else "configuration",
        "cause": redact(failure.cause),
        "advice": failure.advice,
        "limits": failure.limits,
        "exitCode": failure.exit_code,
    }


def _sentence(failure: Failure) -> str:
    whose = "the machine, not the configuration" if failure.machine_fault else "the configuration, on this machine"
    lines = [f"{failure.kind.value}: {redact(failure.cause)}", f"  at fault: {whose}"]
    lines += [f"  bound: {knob} at most {limit:g}" for knob, limit in failure.limits.items()]
    lines += [f"  change: {failure.advice}"] if failure.advice else []
    return "\n".join(clean_lines(lines))


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    if str(path) == "-":
        end = b""
        while more := sys.stdin.buffer.read(_MOST):  # a log may be larger than memory; its end tells
            end = (end + more)[-_MOST:]
        return end.decode(errors="replace")
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST))
            return file.read(_MOST).decode(errors="replace")
    except OSError as error:
        fail(f"{path} can't be read: {error.strerror or error}", Exit.USAGE)
