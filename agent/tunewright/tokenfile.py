"""Files with a token, named by whoever writes a tuning: read in bounds, and anew at each use, since tokens rotate."""

from pathlib import Path

from tunewright.bounded import read_bounded
from tunewright.ports import PortError, Refused

MOST = 16 * 1024
"""Bytes; a token of a cloud's identity provider has a few thousand."""


def read_token(path: Path, what: str) -> str:
    """The token in `path`; `what` names the field in messages, which never quote what was read. Raises `PortError`."""
    try:
        text = read_bounded(path, MOST)
    except OSError as error:
        raise PortError(f"{what} {path} can't be read: {error.strerror or error}") from error
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
