"""Metrics from Prometheus, or anything that speaks its HTTP API (Thanos, VictoriaMetrics, Mimir)."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.auth import AuthBase
from urllib3.util.retry import Retry

from tunewright.bounded import read_key
from tunewright.observe.names import FINISHED, RUNNING
from tunewright.ports import PortError, Refused, Series, SeriesWindow

MAX_POINTS = 240
"""Points asked for per series: a long window is read with a coarser step, never with a larger answer."""

MAX_NAMES_LENGTH = 1200
"""Characters of metric names in one query: URLs stay below what proxies take (8 KiB at most places)."""

READ_TIMEOUTS = 3
"""The body must be whole after this many time-outs."""

MAX_BYTES = 256 * 2**20
"""A larger answer would be no window of one target's metrics."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

WHOLE_ANSWERS = {"partial_response": "false", "deny_partial_response": "1"}
"""Thanos and VictoriaMetrics otherwise leave out what a store did not answer; Prometheus ignores both."""


class PrometheusSource:
    """Reads series with `query_range`; safe to use from several threads.

    `selector` is a list of label matchers such as `job="vllm"`, with or without braces. `interval` is the scrape
    interval in seconds. `timeout` holds for connecting and for each read, in seconds. The token file is read at each
    request, since tokens are rotated; `ca_file` is trusted instead of the system's authorities.
    """

    def __init__(
        self,
        url: str,
        selector: str,
        *,
        interval: float,
        timeout: float = 10.0,
        bearer_token_file: Path | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._selector = _bare(selector)
        self._interval = interval
        self._timeout = timeout
        self._token_file = bearer_token_file
        self._ca_file = ca_file

    def describe(self) -> str:
        """`Prometheus at URL`, without credentials."""
        return f"Prometheus at {self._shown_url()}"

    def fetch(
        self, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
    ) -> SeriesWindow:
        """Samples of the series called one of `names`, at steps of the scrape interval or coarser up to `end`."""
        if end < start:
            raise ValueError(f"the window ends ({end}) before it starts ({start})")
        step = max(self._interval, (end - start) / MAX_POINTS)
        # Counted back from the end, so that the latest samples are in; Prometheus knows milliseconds.
        last = math.floor(end * 1000) / 1000
        first = last - math.floor((last - start) / step) * step
        series: list[Series] = []
        warnings: list[str] = []
        queries = [self.query(chunk, matchers) for chunk in _chunks(names)]
        for query in queries:
            found, told = self._range(query, first, last, step)
            series += found
            warnings += told
        return SeriesWindow(start, end, series, queries, list(dict.fromkeys(warnings)))

    def check(self, names: Sequence[str] = (RUNNING, FINISHED)) -> list[str]:
        """Whether it answers and has fresh samples of `names`; what is missing, for people.

        Raises `PortError` when it does not answer, and `Refused` when it does not understand the selector.
        """
        now = datetime.now(UTC).timestamp()
        query = self.query(names, None)
        found, _ = self._range(query, now - self._interval, now, self._interval, invalid=Refused)
        there = {series.name for series in found}
        hint = f" under metrics.selector ({self._selector})" if self._selector else ""
        return [
            f"{self.describe()} has no recent {name}{hint}; check that it scrapes production's servers"
            for name in names
            if name not in there
        ]

    def query(self, names: Sequence[str], matchers: Mapping[str, str] | None) -> str:
        """The selector of all series called one of `names` with these labels."""
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"not a metric's name: {name!r}")
        parts = [f'__name__=~"{"|".join(names)}"']
        for label, value in sorted((matchers or {}).items()):
            if not _LABEL.fullmatch(label):
                raise ValueError(f"not a label's name: {label!r}")
            parts.append(f'{label}="{_escaped(value)}"')
        if self._selector:
            parts.append(self._selector)
        return "{" + ",".join(parts) + "}"

    def _range(
        self, query: str, start: float, end: float, step: float, invalid: type[Exception] = PortError
    ) -> tuple[list[Series], list[str]]:
        answer = _Answer(self._timeout)
        with requests.Session() as session:
            if self._ca_file is not None:
                session.verify = str(self._ca_file)
            session.hooks["response"].append(answer.keep)
            client = PrometheusConnect(
                url=self._url,
                session=session,
                retry=Retry(0, read=False),
                auth=_Bearer(self._token_file) if self._token_file is not None else None,
                timeout=(self._timeout, self._timeout),
            )
            # The client rounds times to seconds; the exact ones go in as parameters, which win.
            exact = {"start": f"{start:.3f}", "end": f"{end:.3f}", "timeout": f"{self._timeout:g}s"}
            try:
                client.custom_query_range(
                    query,
                    datetime.fromtimestamp(start, UTC),
                    datetime.fromtimestamp(end, UTC),
                    f"{step:.3f}",
                    params=exact | WHOLE_ANSWERS,
                )
            except requests.Timeout as error:
                raise self._late(query) from error
            except requests.exceptions.JSONDecodeError as error:
                raise self._failed(
                    query,
                    f"its answer is not JSON: {answer.beginning()}",
                    "check that metrics.prometheus is the URL of its API, not of a login page or a path below it",
                ) from error
            except requests.exceptions.SSLError as error:
                raise self._failed(
                    query, f"its certificate is not trusted: {error}", "trust its authority, or use its right name"
                ) from error
            except requests.exceptions.ChunkedEncodingError as error:
                raise self._failed(
                    query, "its answer broke off", "try again; look at the proxies on the way"
                ) from error
            except requests.ConnectionError as error:
                root = _root(error)
                if isinstance(root, TimeoutError):
                    raise self._late(query) from error
                raise self._failed(
                    query, f"there is no connection ({root})", "check metrics.prometheus and that it runs"
                ) from error
            except requests.RequestException as error:
                raise self._failed(query, str(error), "check metrics.prometheus") from error
            except (OSError, UnicodeDecodeError) as error:
                raise self._failed(query, str(error), "check metrics.bearerTokenFile and the authorities") from error
            except PrometheusApiClientException as error:
                failure = self._failed(query, f"it answered {answer.status}: {answer.error()}", answer.advice())
                raise (invalid(str(failure)) if answer.status in (400, 422) else failure) from error
            except (KeyError, TypeError) as error:
                reason = answer.error() if answer.is_error() else f"its answer has no result: {answer.beginning()}"
                raise self._failed(query, reason, "check that metrics.prometheus speaks Prometheus' API") from error
        return self._read(query, answer)

    def _read(self, query: str, answer: "_Answer") -> tuple[list[Series], list[str]]:
        body = answer.body
        if body.get("status") != "success":
            raise self._failed(query, answer.error(), "look at its log")
        if body.get("isPartial"):
            raise self._failed(query, "its answer is partial: a storage node did not answer", "look at its stores")
        try:
            series = [_series(one) for one in body["data"]["result"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._failed(
                query, f"its answer is no matrix of samples ({error!r})", "check that it speaks Prometheus' API"
            ) from error
        told = [*(body.get("warnings") or ()), *(body.get("infos") or ())]
        return [one for one in series if one.samples], [f"Prometheus: {text}" for text in told]

    def _late(self, query: str) -> PortError:
        return self._failed(
            query, f"it did not answer within {self._timeout:g}s", "look at its load, or shorten metrics.window"
        )

    def _failed(self, query: str, what: str, advice: str) -> PortError:
        return PortError(f"{self.describe()} gave no metrics: {what}; {advice}. Query: {query}")

    def _shown_url(self) -> str:
        parts = urlsplit(self._url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Answer:
    """Keeps what the client library drops: warnings, and the body of errors. One per request."""

    def __init__(self, timeout: float) -> None:
        self.status = 0
        self.body: dict[str, Any] = {}
        self._text = ""
        self._timeout = timeout

    def keep(self, response: requests.Response, *_args: object, **_kwargs: object) -> None:
        """Read the whole answer, by a deadline: the time-out of requests starts again with every byte."""
        deadline = time.monotonic() + self._timeout * READ_TIMEOUTS
        chunks: list[bytes] = []
        size = 0
        for chunk in response.iter_content(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if time.monotonic() > deadline:
                raise requests.ReadTimeout("the answer trickles in")
            if size > MAX_BYTES:
                raise requests.RequestException(f"the answer is larger than {MAX_BYTES >> 20} MiB")
        content = b"".join(chunks)
        response._content = content  # where requests looks for what was read already
        self.status = response.status_code
        self._text = content[:200].decode(errors="replace")
        try:
            body = response.json()
        except ValueError:
            return  # of a good answer the client says so itself; of an error the text is kept
        self.body = body if isinstance(body, dict) else {}

    def beginning(self) -> str:
        return repr(self._text) if self._text else "it is empty"

    def is_error(self) -> bool:
        return self.body.get("status") == "error"

    def error(self) -> str:
        told = ": ".join(str(self.body[key]) for key in ("errorType", "error") if self.body.get(key))
        return told or self.beginning()

    def advice(self) -> str:
        if self.status in (401, 403):
            return "check metrics.bearerTokenFile and what its token may read"
        if self.status in (400, 422):
            return "check metrics.selector"
        if self.status == 404:
            return "check the path in metrics.prometheus"
        return "look at its log, or at the proxies before it"


class _Bearer(AuthBase):
    """The token as it is in the file at this moment; an explicit authorization also keeps a .netrc out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {read_key(self._path)}"
        return request


def _series(one: Mapping[str, Any]) -> Series:
    samples = [(float(at), float(value)) for at, value in one.get("values", ())]
    return Series({str(key): str(value) for key, value in one["metric"].items()}, samples)


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for name in dict.fromkeys(names):
        if chunk and sum(len(n) + 1 for n in chunk) + len(name) > MAX_NAMES_LENGTH:
            yield chunk
            chunk = []
        chunk.append(name)
    if chunk:
        yield chunk


def _bare(selector: str) -> str:
    text = selector.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    return text.strip().strip(",")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _root(error: BaseException) -> BaseException:
    """The innermost reason: what the layers above say is mostly their own names."""
    for _ in range(10):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error
