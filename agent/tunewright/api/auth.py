"""Who calls (authentication) and whether they may (authorisation). Whatever can't be settled is a no."""

import hmac
import os
import pwd
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import mkstemp
from typing import Protocol

from tunewright.ports import Refused

MIN_TOKEN = 32
"""A shorter token is refused: the file was cut off or written by hand."""


class Verb(StrEnum):
    """What a caller wants to do."""

    READ = "read"
    DECIDE = "decide"


@dataclass(frozen=True)
class Caller:
    """Somebody who proved who they are. `name` is kept with every decision of theirs.

    `uid` and `extra` are what the authenticator says besides, as the scopes that a token is limited to.
    """

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Unauthenticated(Exception):
    """The caller did not prove who they are; answered with 401."""


class Unavailable(Exception):
    """It can't be found out who the caller is, or what they may do: answered with 503, never with a yes."""


class Authenticator(Protocol):
    """Tells who calls. Returns within its own time-out; the API gives up on it after `guard.AUTH_TIMEOUT` anyway."""

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller, from the value of the Authorization header (None: there was none).

        Raises `Unauthenticated` when it proves nothing, `Unavailable` when that can't be found out.
        """
        ...


class Authorizer(Protocol):
    """Tells whether a caller may do something."""

    def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:
        """Whether `caller` may. Raises `Unavailable`.

        `namespace` is None where the path names none, `tuning` for what is about no single one.
        """
        ...


class OwnerMayAll:
    """On one machine the user who runs the agent may do everything: it is their own tuning."""

    def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:  # noqa: ARG002
        """Yes, to this user, as `TokenFile` names them; no to anybody else."""
        return caller.name == own_name()


class TokenFile:
    """Knows its user by a token that only they can read. The file is read at every call: a new token counts at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def authenticate(self, authorization: str | None) -> Caller:
        """The user who owns the file."""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthenticated(
                "the Authorization header must carry the token of the token file, under the scheme Bearer"
            )
        try:
            token = read_token(self._path)
        except Refused as refusal:
            raise Unavailable(str(refusal)) from refusal
        if not hmac.compare_digest(given.strip().encode(errors="replace"), token.encode()):
            raise Unauthenticated("the token is not the one in the token file")
        return Caller(name=own_name())


def read_token(path: Path) -> str:
    """The token in `path`. Raises `Refused` unless it is a plain file of this user that nobody else can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"the token file {path} can't be read: {error.strerror}") from error
    try:
        # Of the open file, not of the path: what is checked is what is read.
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Refused(f"the token file {path} is no plain file: remove it and start again: a new one is made")
        if facts.st_uid != os.geteuid():
            raise Refused(
                f"the token file {path} belongs to another user: remove it and start again: a new one is made"
            )
        if facts.st_mode & 0o077:
            raise Refused(
                f"the token file {path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o}), so its token "
                "is no secret any more: remove it and start again: a new one is made"
            )
        token = os.read(descriptor, 4096).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if len(token) < MIN_TOKEN:
        raise Refused(f"the token file {path} holds no whole token: remove it and start again: a new one is made")
    return token


def ensure_token(path: Path) -> str:
    """The token in `path`; the file (mode 0600) and its folder (0700) are made when they are not there.

    Two processes that start at once come to the same token. Raises `Refused` as `read_token` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.path.lexists(path):
            _write_new(path, secrets.token_urlsafe(32))
    except OSError as error:
        raise Refused(f"the token file {path} can't be written: {error.strerror}") from error
    return read_token(path)


def _write_new(path: Path, token: str) -> None:
    """Whole or not at all, and never over another's: the file gets its name once it is complete."""
    descriptor, temporary = mkstemp(dir=path.parent, prefix=".token-")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()


def own_name() -> str:
    """The name of the user who runs this process."""
    user = os.geteuid()
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # containers often run under an id that has no name
        return f"uid {user}"
