"""What the commands share: where the state is, exit codes, and how errors are shown."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tunewright.exits import Exit
from tunewright.ports import PortError, Refused


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
