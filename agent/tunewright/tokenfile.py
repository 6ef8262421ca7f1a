"""Files with a token, named by whoever writes a tuning: read in bounds, and anew at each use, since tokens rotate."""

import os
import stat
from pathlib import Path

from tunewright.ports import PortError, Refused

MOST = 16 * 1024
"""Bytes; a token of a cloud's identity provider has a few thousand."""


def read_token(path: Path, what: str) -> str:
    """The token in `path`; `what` names the field in messages, which never quote what was read. Raises `PortError`."""
    try:
        # Without waiting: opening a pipe that nobody writes to would never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PortError(f"{what} {path} is no plain file; name a file that holds one token")
            text = os.read(descriptor, MOST + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PortError(f"{what} {path} can't be read: {error.strerror or error}") from error
    if len(text) > MOST:
        raise PortError(f"{what} {path} is larger than {MOST // 1024} KiB: that is no token")
    token = text.decode("ascii", "replace").strip()
    if not token or not all("!" <= char <= "~" for char in token):
        raise PortError(f"{what} {path} must hold one token and nothing else")
    return token


def credential(folder: Path, named: str, what: str) -> Path:
    """The file `named`, which must lie in `folder`, links followed. Raises `Refused`.

    For a process that reads files for others: whoever names them could else have it send any file it can read, as its
    own ServiceAccount's token, to a server of theirs.
    """
    path = Path(named)
    if not path.is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{what} names {named}, but the controller reads only files in {folder}; mount the Secret there")
    return path
