"""What another process was given in its environment. Read from /proc: nothing for other users' processes."""

import os
from collections.abc import Iterator
from pathlib import Path


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
