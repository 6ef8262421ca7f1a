"""Files that a person names: read no further than they can be meant, whatever stands behind the name."""

import errno
import os
from pathlib import Path


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
