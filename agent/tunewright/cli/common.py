"""What the commands share: where the state is, exit codes, and how errors are shown."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tunewright.domain.phases import Phase
from tunewright.ports import PortError, Refused


class Exit(IntEnum):
    """Exit codes, as `tunewright --help` tells them."""

    DONE = 0  # the command did what it says; a tuning is promoted or recommended
    USAGE = 2  # the command line or the file is wrong; nothing was touched
    NO_CHANGE = 3  # the tuning ended without a change: no improvement, infeasible, rejected
    WENT_WRONG = 4  # the tuning failed, or was rolled back
    REFUSED = 5  # the decision can't be taken now: stale, or nothing waits for it
    UNREACHABLE = 6  # something outside did not answer: Prometheus, a server, the store
    INTERRUPTED = 130  # stopped by Ctrl-C; the same command goes on


OF_PHASE = {
    Phase.PROMOTED: Exit.DONE,
    Phase.RECOMMENDED: Exit.DONE,
    Phase.NO_IMPROVEMENT: Exit.NO_CHANGE,
    Phase.INFEASIBLE: Exit.NO_CHANGE,
    Phase.REJECTED: Exit.NO_CHANGE,
    Phase.ROLLED_BACK: Exit.WENT_WRONG,
    Phase.FAILED: Exit.WENT_WRONG,
}


def default_state() -> Path:
    """Where records, logs and reports are kept: `$XDG_STATE_HOME/tunewright`, or its standard place."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "tunewright"


StateOption = Annotated[
    Path,
    typer.Option(
        "--state",
        envvar="TUNEWRIGHT_STATE",
        default_factory=default_state,
        show_default="~/.local/state/tunewright",
        help="Folder of the records, logs and reports.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never jump."""
        return time.monotonic()


def fail(message: str, code: Exit) -> NoReturn:
    """Say what is wrong on stderr and end with `code`."""
    print(message, file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def told() -> Iterator[None]:
    """Errors that a person can act on are told without a traceback."""
    try:
        yield
    except Refused as refusal:
        fail(str(refusal), Exit.USAGE)
    except PortError as error:
        fail(str(error), Exit.UNREACHABLE)
