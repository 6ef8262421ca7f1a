"""Files that a person names: read no further than they can be meant, whatever stands behind the name."""

import errno
import os
from pathlib import Path

MAX_KEY = 64 * 1024
"""Bytes of a file that holds one token; a service account's is about one KiB."""


def read_bounded(path: Path, most: int) -> bytes:
    """What is in `path`, of at most `most` bytes. Raises `OSError`, also for a larger file.

    Nothing hangs on a pipe that nobody writes to, and a device that never ends is no trap.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        data = file.read(most + 1)
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {size}")
    return data


def read_key(path: Path) -> str:
    """The one token that a file holds, without the white space around it. Raises `OSError`; never quotes it."""
    try:
        key = read_bounded(path, MAX_KEY).decode().strip()
    except UnicodeDecodeError as error:
        raise OSError(errno.EINVAL, "it is no text in UTF-8") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OSError(errno.EINVAL, "it must hold one token of plain characters, and nothing else")
    return key
