"""One agent per store: an exclusive lock on a file beside it, which the kernel lets go when its holder dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunewright.ports import Refused


def lock_file(state: Path) -> Path:
    """The lock file of the store at `state`. It is never removed: a removed file can be locked twice."""
    return state.with_name(state.name + ".lock")


def held(state: Path) -> bool:
    """Whether an agent works on the store at `state`. It only looks: to try the lock could turn an agent away."""
    path = lock_file(state)
    try:
        folder = Path("/proc", path.read_text().strip() or "none", "fd")
        return any(os.path.realpath(each) == os.path.realpath(path) for each in folder.iterdir())
    except PermissionError:
        return True  # somebody else's process, which can't be looked into
    except OSError:
        return False


@contextmanager
def agent_lock(state: Path) -> Iterator[None]:
    """Hold the store at `state` as its only agent; raises `Refused` at once when another process does.

    Reading, and writing decisions, needs no lock.
    """
    path = lock_file(state)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Refused(f"can't open the lock file {path} ({error.strerror}); use another --state") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Refused(f"{state} is held by process {holder}; stop it or use another --state") from error
        except OSError as error:
            raise Refused(f"{path} can't be locked ({error.strerror}); put --state on a local disk") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
