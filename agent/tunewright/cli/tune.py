"""`tune`, `check`, `stop` and `demo`: commands that act."""

import signal
import subprocess
import threading
from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import StateOption, fail, told
from tunewright.clock import SystemClock
from tunewright.domain.tuning import Tuning
from tunewright.exits import OF_PHASE, Exit
from tunewright.ports import PortError, Refused

FileArgument = Annotated[Path, typer.Argument(help="The tuning file (YAML); see docs/tuning.md.", metavar="FILE")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Plain lines, as in a log.")]


def read_file(file: Path) -> Tuning:
    """The tuning in `file`; raises `Refused` with what to change."""
    from tunewright.tuningfile import read_tuning

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file} can't be read: {error}") from error
    return read_tuning(text, str(file))


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
) -> None:
    """Tune what FILE describes: start production, learn its traffic, search, confirm, ask, and roll out.

    Stop it with Ctrl-C at any time and start it again: it goes on where it was, and production keeps serving.
    """
    from tunewright.local import LocalTuning
    from tunewright.serving import serve_api
    from tunewright.telemetry.console import Console

    stop = stop_on_signals()
    with told(), LocalTuning(state, read_file(file), SystemClock()) as local:
        with serve_api(local, listen) as api, Console(plain=plain or None) as console:
            print(f"REST API: {api.url} with the token in {api.token_file}; docs at {api.url}/docs")
            record = local.run(
                stop,
                lambda record, live: console.update(record, local.store.trials(record.name), live),
                keep_going=keep_going,
            )
        if record is None:
            fail(f"{file}: the tuning was deleted meanwhile", Exit.WENT_WRONG)
        if record.phase not in OF_PHASE:
            print(f"Stopped in {record.phase}. The same command goes on; production keeps serving.")
            raise typer.Exit(Exit.INTERRUPTED)
        raise typer.Exit(OF_PHASE[record.phase])


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C ends at once."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def check(file: FileArgument, state: StateOption) -> None:
    """Check FILE and its surroundings without touching anything: fields, commands, binaries, metrics, the spare."""
    from tunewright.checks import run_checks

    with told():
        tuning = read_file(file)
        found = run_checks(tuning, state, SystemClock())
    for line in found:
        print(f"{'ok  ' if line.good else 'FAIL'} {line.what}: {line.detail}")
    if not all(line.good for line in found):
        raise typer.Exit(Exit.USAGE)


def stop(file: FileArgument, state: StateOption) -> None:
    """Stop production and the spare of FILE: its servers and its proxy end, and their ports are free again."""
    from tunewright.local import LocalTuning
    from tunewright.platform.process.target import ProcessTarget

    with told(), LocalTuning(state, read_file(file), SystemClock()) as local:
        local.context.spare.sweep(keep=[])
        if not isinstance(local.target, ProcessTarget):
            raise Refused("target.urls names servers that somebody else runs: there is nothing to stop")
        local.target.stop_all()
    print(f"{local.tuning.metadata.name}: production is stopped.")


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for everything the demo writes; emptied first.")] = Path(
        ".tunewright/demo"
    ),
    plain: PlainOption = False,
) -> None:
    """Take two badly configured simulated servers from watched to promoted, in some four minutes."""
    from tunewright.demo.run import run_demo

    stop = stop_on_signals()
    try:
        code = run_demo(folder.absolute(), SystemClock(), stop, plain=plain)
    except (Refused, PortError, subprocess.SubprocessError, OSError) as error:
        fail(f"The demo could not be run: {error}", Exit.WENT_WRONG)
    raise typer.Exit(code)
