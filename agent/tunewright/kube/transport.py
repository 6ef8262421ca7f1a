"""HTTP to the API server, on the official client's configuration and connection pool, without its typed models."""

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Semaphore
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes.client.configuration import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.config import ConfigException
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from tunewright.kube.counting import Observer, asked
from tunewright.kube.errors import Fenced, KubeError, Unavailable, from_answer

MAX_ANSWER = 64 * 2**20
"""Bytes; lists are paged, so a larger answer is a fault."""

KEPT = 32
"""Connections that are kept open between calls: making one costs more than a call."""

_CHUNK = 64 * 1024


@dataclass(frozen=True)
class TimeOuts:
    """In seconds. `total` bounds one call with all its tries; `read` the time between two bytes."""

    connect: float = 5.0
    read: float = 15.0
    total: float = 30.0
    tries: int = 4


class Transport:
    """Sends requests and reads answers. May be used from several threads."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        time_outs: TimeOuts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        may_write: Callable[[], bool] = lambda: True,
        observe: Observer = lambda _verb, _resource, _status: None,
        at_once: int | None = None,
    ) -> None:
        # urllib3's own retries know nothing of what is idempotent in Kubernetes, nor of our deadline.
        configuration.retries = urllib3.Retry(total=False, redirect=False)
        configuration.keep_alive = True
        configuration.connection_pool_maxsize = KEPT
        self._configuration = configuration
        self._pool = RESTClientObject(configuration).pool_manager
        self._time_outs = time_outs or TimeOuts()
        self._monotonic, self._sleep, self._may_write, self._observe = monotonic, sleep, may_write, observe
        self._credentials = Lock()
        self._turns = Semaphore(at_once) if at_once is not None else None

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        repeatable: bool = True,
        total: float | None = None,
    ) -> bytes:
        """One call; the body of a 2xx answer. Raises a `KubeError` otherwise.

        Tried again, within `total` seconds: when nothing was sent (connection refused), on 429, and if `repeatable`
        when the answer did not come or was a 5xx. `repeatable` says that doing it twice is doing it once.
        """
        deadline = self._monotonic() + (total if total is not None else self._time_outs.total)
        pause = 0.2
        for left in reversed(range(self._time_outs.tries)):
            try:
                with self._turn(method, path, deadline):
                    return self._once(method, path, query or {}, body, content_type, accept, deadline)
            except _Failed as failed:
                wait = failed.error.retry_after if failed.error.retry_after is not None else pause
                again = failed.unsent or (repeatable and failed.transient)
                if not left or not again or self._monotonic() + wait >= deadline:
                    raise failed.error from failed.__cause__
                self._sleep(wait)
                pause *= 2
        raise AssertionError("tries must be at least 1")

    def stream(self, path: str, query: Mapping[str, str], *, silence: float) -> Iterator[bytes]:
        """The lines of a long answer as they come. No byte for `silence` seconds raises `Unavailable`."""
        try:
            response = self._send("GET", path, query, None, "", "application/json", self._time_outs.connect, silence)
        except _Failed as failed:
            raise failed.error from failed.__cause__
        try:
            if response.status >= 300:
                wait = _retry_after(response.headers.get("Retry-After"))
                raise from_answer("GET", path, response.status, response.read1(_CHUNK) or b"", retry_after=wait)
            rest = b""
            while chunk := response.read1(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line for line in lines if line.strip())
                if len(rest) > MAX_ANSWER:
                    raise Unavailable("GET", path, f"a line of the stream is larger than {MAX_ANSWER} bytes")
            if rest.strip():
                yield rest
        except (HTTPError, OSError) as error:
            raise Unavailable("GET", path, _told(error)) from error
        finally:
            # The rest of a stream is never read, so its connection can't be used again.
            response.close()

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    @contextmanager
    def _turn(self, method: str, path: str, deadline: float) -> Iterator[None]:
        """Wait until few enough other calls are under way, which is before the fence is asked."""
        if self._turns is None:
            yield
            return
        if not self._turns.acquire(timeout=max(deadline - self._monotonic(), 0.05)):
            raise _Failed(Unavailable(method, path, "not sent: too many other calls are under way"))
        try:
            yield
        finally:
            self._turns.release()

    def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        content_type: str,
        accept: str,
        deadline: float,
    ) -> bytes:
        if method != "GET" and not self._may_write():
            raise _Failed(Fenced(method, path, "not sent: this process does not hold the Lease now"))
        left = max(deadline - self._monotonic(), 0.05)
        connect, read = min(self._time_outs.connect, left), min(self._time_outs.read, left)
        response = self._send(method, path, query, body, content_type, accept, connect, read)
        try:
            answer = self._read(response, method, path, deadline)
        except (HTTPError, OSError) as error:
            response.close()
            raise _Failed(Unavailable(method, path, _told(error)), transient=True) from error
        except KubeError as error:
            response.close()
            raise _Failed(error, transient=True) from error
        response.release_conn()
        if response.status < 300:
            return answer
        wait = _retry_after(response.headers.get("Retry-After"))
        refused = from_answer(method, path, response.status, answer, retry_after=wait)
        # 429: the server threw it away unread, so that also a create may be sent again.
        raise _Failed(refused, unsent=response.status == 429, transient=response.status >= 500)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        content_type: str,
        accept: str,
        connect: float,
        read: float,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": accept, "User-Agent": "tunewright", **self._authorization(method, path)}
        if body is not None:
            headers["Content-Type"] = content_type
        url = self._configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        status: int | None = None
        try:
            response = self._pool.request(
                method,
                url,
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=connect, read=read),
                preload_content=False,
            )
            status = response.status
            return response
        except SSLError as error:
            raise _Failed(Unavailable(method, path, f"TLS: {_told(error)}")) from error
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise _Failed(Unavailable(method, path, _told(error)), unsent=True) from error
        except (HTTPError, OSError) as error:
            raise _Failed(Unavailable(method, path, _told(error)), transient=True) from error
        finally:
            self._observe(*asked(method, path, query), status)

    def _authorization(self, method: str, path: str) -> dict[str, str]:
        """The bearer token, read again when it has run out (the pool holds client certificates)."""
        try:
            with self._credentials:
                settings: dict[str, Any] = dict(self._configuration.auth_settings())
        except (ConfigException, OSError, ValueError) as error:
            raise _Failed(Unavailable(method, path, f"our own credentials can't be read: {error}")) from error
        return {
            setting["key"]: setting["value"].strip()
            for setting in settings.values()
            if setting["in"] == "header" and setting["value"]
        }

    def _read(self, response: urllib3.BaseHTTPResponse, method: str, path: str, deadline: float) -> bytes:
        """The whole body. A server that sends a byte now and then does not hold us past the deadline."""
        answer = bytearray()
        while chunk := response.read1(_CHUNK):
            answer += chunk
            if len(answer) > MAX_ANSWER:
                raise KubeError(method, path, f"the answer is larger than {MAX_ANSWER} bytes")
            if self._monotonic() > deadline:
                raise Unavailable(method, path, "the answer did not come whole in time")
        return bytes(answer)


class _Failed(Exception):
    """One try that failed, and whether another may help."""

    def __init__(self, error: KubeError, *, unsent: bool = False, transient: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.unsent, self.transient = error, unsent, transient


def _retry_after(header: str | None) -> float | None:
    """Seconds; the API server never sends the form with a date."""
    return float(header) if header and header.isascii() and header.isdigit() else None


def _told(error: Exception) -> str:
    if isinstance(error, SSLError | ssl.SSLError):
        return f"{error}; check certificate-authority in the kubeconfig"
    # urllib3 puts the connection object's repr before the text.
    return str(error).rpartition(">: ")[2] or type(error).__name__
