"""Processes known by what they were given in their environment. Read from /proc: nothing for other users' processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tunewright.ports import PortError


def variable(pid: int, name: str) -> str | None:
    """The variable that `pid` was started with; None when it is not set, or not ours to read."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return None
    prefix = name.encode() + b"="
    if prefix not in environment:
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def values(name: str) -> Iterator[str]:
    """What every living process has in this variable."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - called often
        value = variable(int(entry), name) if entry.isdigit() else None
        if value is not None:
            yield value


def kill(pid: int, name: str, value: str) -> None:
    """SIGKILL, if it still has this value in this variable. Raises `PortError` if that is not allowed."""
    try:
        descriptor = os.pidfd_open(pid)  # pins it, so that no other process with the same pid is hit
    except ProcessLookupError:
        return
    except OSError as error:
        raise PortError(f"can't open process {pid} to end it: {error}") from error
    try:
        if variable(pid, name) == value:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise PortError(f"not allowed to end process {pid}: end it by hand") from error
    finally:
        os.close(descriptor)
