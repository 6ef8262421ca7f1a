"""What the commands share: where the state is, exit codes, and how errors are shown."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tunewright.clock import SystemClock
from tunewright.domain.state import TuningRecord
from tunewright.exits import Exit
from tunewright.ports import PortError, Refused, Store
from tunewright.store.sqlite import SqliteStore


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
    except PermissionError as error:
        who = "be the user who runs `tunewright tune`, as by sudo -u USER"
        fail(f"{error.filename or 'The machine'}: no permission; {who}, or name another --state", Exit.USAGE)
    except OSError as error:
        fail(f"{error.filename or 'The machine'}: {error.strerror or error}", Exit.UNREACHABLE)


@contextmanager
def opened(state: Path) -> Iterator[Store | None]:
    """The store of a state folder; None where there is none yet: looking must not make one."""
    path = state / "store.sqlite"
    if state.exists() and not state.is_dir():
        raise Refused(f"{state} is a file, not a folder; name another --state")
    if not path.exists():
        yield None
        return
    store = SqliteStore(path, SystemClock())
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_at(state: Path, name: str) -> Iterator[tuple[Store, TuningRecord]]:
    """The store, and the tuning called `name`. Raises `Refused` with the names that there are."""
    with opened(state) as store:
        record = store.load(name) if store is not None else None
        if store is None or record is None:
            names = ", ".join(store.names()) if store is not None else ""
            raise Refused(f"there is no tuning {name!r} in {state}; there are: {names or 'none'}")
        yield store, record


def _names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion, which must never print an error into somebody's command line."""
    try:
        with opened(context.params.get("state") or default_state()) as store:
            return [name for name in (store.names() if store is not None else []) if name.startswith(incomplete)]
    except (Refused, PortError):
        return []


NameArgument = Annotated[
    str, typer.Argument(help="Name of the tuning: `metadata.name` in its file.", autocompletion=_names)
]
