"""Files that a person names: read no further than they can be meant, whatever stands behind the name."""

import errno
import gzip
import io
import os
import zlib
from pathlib import Path

_GZIP = b"\x1f\x8b"
"""No text in UTF-8 begins so."""


def read_bounded(path: Path, most: int) -> bytes:
    """What is in `path`, of at most `most` bytes. Raises `OSError`, also for a larger file.

    Nothing hangs on a pipe that nobody writes to, and a device that never ends is no trap.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        data = file.read(most + 1)
    return _bounded(data, most)


def unpacked(data: bytes, most: int) -> bytes:
    """What is in `data` where that is gzip, else `data` itself; at most `most` bytes. Raises `OSError`."""
    if not data.startswith(_GZIP):
        return _bounded(data, most)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _bounded(file.read(most + 1), most)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"it is damaged gzip ({error})") from error


def _bounded(data: bytes, most: int) -> bytes:
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {size}")
    return data
