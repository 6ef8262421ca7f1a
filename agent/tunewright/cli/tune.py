"""`tune`, `check`, `stop` and `demo`: commands that act."""

import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import JsonOption, StateOption, fail, told
from tunewright.clock import SystemClock
from tunewright.domain.tuning import Tuning
from tunewright.exits import OF_PHASE, Exit, exit_of
from tunewright.ports import PortError, Refused, Target

FileArgument = Annotated[Path, typer.Argument(help="The tuning file (YAML); see docs/tuning.md.", metavar="FILE")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Plain lines, as in a log.")]


def read_file(file: Path) -> Tuning:
    """The tuning in `file`; raises `Refused` with what to change."""
    from tunewright.tuningfile import MAX_BYTES, read_tuning

    try:
        with file.open("rb") as opened:  # no more than is needed to see that it is too large: it may be a device
            raw = opened.read(MAX_BYTES + 1)
        text = raw.decode(errors="strict" if len(raw) <= MAX_BYTES else "replace")
    except OSError as error:
        raise Refused(f"{file} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{file} can't be read: it is no text in UTF-8 (byte {error.start})") from error
    tuning = read_tuning(text, str(file))
    if tuning.spec.target.deployment is not None:
        raise Refused(
            f"{file}: spec.target.deployment is for the controller in a cluster; here command or urls is wanted"
        )
    return tuning


def tune(
    file: FileArgument,
    state: StateOption,
    plain: PlainOption = False,
    listen: Annotated[
        str, typer.Option(help="Where to serve the REST API; a port of 0 is chosen freely.", metavar="HOST:PORT")
    ] = "127.0.0.1:0",
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Stay after the end: supervise production, watch for drift.")
    ] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Let a tuning that has ended begin again.")] = False,
) -> None:
    """Tune what FILE describes: start production, learn its traffic, search, confirm, ask, and roll out.

    Stop it with Ctrl-C at any time and start it again: it goes on where it was, and production keeps serving.
    An edited file counts from the next start on. Only `tunewright stop FILE` ends production.

    Examples:

        tunewright check workstation.yaml

        tunewright tune workstation.yaml

        tunewright tune workstation.yaml --keep-going --plain --listen 127.0.0.1:8765
    """
    from tunewright.checks import check_load_file
    from tunewright.local import LocalTuning
    from tunewright.serving import serve_api
    from tunewright.telemetry.console import Console

    with told():
        tuning = read_file(file)
        check_load_file(tuning)
    stop = stop_on_signals()
    with told(), LocalTuning(state, tuning, SystemClock()) as local:
        if anew:
            local.start_anew()
        before = local.record
        with serve_api(local, listen) as api, Console(plain=plain or None) as console:
            console.tell(f"Production: {local.target.describe()}")
            console.tell(f"REST API: {api.url} with the token in {api.token_file}; docs at {api.url}/docs")
            record = local.run(
                stop,
                lambda record, live: console.update(record, local.store.trials(record.name), live),
                keep_going=keep_going,
            )
        if record is None:
            fail(f"{file}: the tuning was deleted meanwhile", Exit.WENT_WRONG)
        if record.phase not in OF_PHASE:
            kept = "" if tuning.spec.offline else f"; {_left(local.target)}"
            print(f"Stopped in {record.phase}. The same command goes on{kept}.")
            raise typer.Exit(Exit.INTERRUPTED)
        if (record.phase, record.phase_since) == (before.phase, before.phase_since):
            again = f"tunewright tune {file} --anew"
            print(f"It had ended before, in {record.phase}: nothing was tried. To begin again: {again}")
        raise typer.Exit(exit_of(record))


def _left(target: Target) -> str:
    """What clients meet while no `tune` runs."""
    try:
        ready = [server for server in target.observe().replicas if server.ready]
    except (PortError, Refused) as error:
        return f"what serves is not known: {error}"
    if not ready:
        return "no server of production is ready yet"
    canary = ", the canary as well" if any(server.canary for server in ready) else ""
    return f"production keeps serving, unsupervised{canary}"


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C ends at once."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def check(file: FileArgument, state: StateOption, as_json: JsonOption = False) -> None:
    """Check FILE and its surroundings without touching anything: fields, commands, binaries, GPUs, metrics, the spare.

    Ends with 0 when all is well, with 2 when something has to be changed first.

    Example:

        tunewright check workstation.yaml
    """
    from tunewright.checks import run_checks

    with told():
        tuning = read_file(file)
        found = run_checks(tuning, state, SystemClock())
    if as_json:
        print(json.dumps([line._asdict() for line in found], indent=2))
    else:
        for line in found:
            print(f"{'ok  ' if line.good else 'FAIL'} {line.what}: {line.detail}")
    if not all(line.good for line in found):
        raise typer.Exit(Exit.USAGE)


def stop(file: FileArgument, state: StateOption) -> None:
    """Stop production and the spare of FILE: servers and proxy end once their requests have, and the ports are free.

    Stop `tunewright tune` first (Ctrl-C). Clients get no answer from then on; `tunewright tune FILE` starts it again.

    Example:

        tunewright stop workstation.yaml
    """
    from tunewright.local import stop_servers

    with told():
        tuning = read_file(file)
        there = stop_servers(state, tuning, SystemClock())
    name = tuning.metadata.name
    what = "the spare is free" if tuning.spec.offline else "production is stopped"
    print(f"{name}: {what}." if there else f"{name}: nothing of it was ever started in {state}.")


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for everything the demo writes; emptied first.")] = Path(
        ".tunewright/demo"
    ),
    plain: PlainOption = False,
) -> None:
    """Take two badly configured simulated servers from watched to promoted, in some four minutes.

    Example:

        tunewright demo --folder demo-files
    """
    from tunewright.demo.run import run_demo

    stop = stop_on_signals()
    try:
        code = run_demo(folder.absolute(), SystemClock(), stop, plain=plain)
    except (Refused, PortError, subprocess.SubprocessError, OSError) as error:
        fail(f"The demo could not be run: {error}", Exit.WENT_WRONG)
    raise typer.Exit(code)
