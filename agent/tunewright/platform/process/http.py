"""Short HTTP calls to servers: each has one deadline for all of it and a bound on the answer's size."""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx

from tunewright.ports import PortError

MAX_ANSWER = 32 * 1024 * 1024


class Unreachable(PortError):
    """No whole answer came. `refused` when nobody listens there, which says more than a time-out does."""

    def __init__(self, message: str, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    text: str


def call(
    method: str, url: str, timeout: float, *, json: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Ask, within `timeout` seconds in all. Raises `Unreachable`; an answer of any status is an answer."""
    deadline = time.monotonic() + timeout
    body = bytearray()
    try:
        with _client().stream(method, url, json=json, headers=headers, timeout=timeout) as response:
            for part in response.iter_bytes():
                body += part
                if time.monotonic() > deadline or len(body) > MAX_ANSWER:
                    raise Unreachable(f"{method} {url}: the answer does not end; look at the server", refused=False)
            return Answer(response.status_code, body.decode(errors="replace"))
    except httpx.ConnectError as error:
        raise Unreachable(f"{method} {url}: {error}; is the server up?", refused=True) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = str(error) or type(error).__name__
        raise Unreachable(f"{method} {url}: {what} (waited {timeout:g} s at most)", refused=False) from error


@lru_cache(maxsize=1)
def _client() -> httpx.Client:
    # No proxies from the environment: servers are beside us. No connection is kept: a dead server must show.
    return httpx.Client(
        trust_env=False,
        verify=ssl.create_default_context(),
        limits=httpx.Limits(max_keepalive_connections=0),
        follow_redirects=False,
    )
