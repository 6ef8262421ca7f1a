"""What is kept in a server's folder, so that any agent process can take over from it."""

from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.model import Model
from tunewright.domain.state import StartMemory
from tunewright.loadtest.files import write_atomic
from tunewright.ports import PortError

Record = TypeVar("Record", bound=Model)


class Launch(Model):
    """Written before the process is started."""

    name: str
    slot: str = Field(default="", description="Its place in the fleet; on the spares, which of them.")
    candidate: Candidate
    base: str = Field(description="Hash of the command and environment without the knobs.")
    host: str = Field(description="Address it is reached at.")
    port: int
    at: float = Field(description="Seconds since the epoch.")
    start_timeout: float


class Ready(Model):
    """Written once it has answered a real completion and is proven to be the launched one."""

    at: float
    start_seconds: float
    version: str | None = None
    effective: dict[str, KnobValue] = Field(default_factory=dict)
    surprises: tuple[str, ...] = ()
    memory: StartMemory | None = None


class Since(Model):
    """That something has begun: draining, stopping."""

    at: float
    reason: str = ""


def write(path: Path, record: Model) -> None:
    """Write it durably. Raises `PortError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, record.model_dump_json().encode())
    except OSError as error:
        raise PortError(f"can't write {path}: {error}; free space, or correct the permissions") from error


def read(path: Path, kind: type[Record]) -> Record | None:
    """The record, or None when there is none. Raises `PortError` when it can't be read."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise PortError(f"can't read {path}: {error}; restore it, or end what it names and remove it") from error
