"""What stands before every route: no page of another origin, no stranger and no flood gets past it.

Closed by default: a route that is added later needs the token too, unless its path is made public here.
"""

import logging
import re
from asyncio import timeout
from collections.abc import Collection
from functools import partial
from threading import BoundedSemaphore

from anyio.to_thread import run_sync
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunewright.api.auth import Authenticator, Authorizer, Caller, Unauthenticated, Unavailable, Verb
from tunewright.api.problems import ProblemError
from tunewright.ports import PortError

log = logging.getLogger(__name__)

PUBLIC = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Paths that need no token: they tell nothing of any tuning, and probes and browsers can't send one."""

MAX_BODY = 16 * 1024
"""Bytes; a decision is a few hundred."""

BODY_TIMEOUT = 10.0
"""Seconds in which a body must have arrived."""

AUTH_TIMEOUT = 10.0
"""Seconds in which it must be settled who calls and whether they may."""

MAX_AUTH = 16
"""Calls of the authenticator at once, those that were given up included: a hung one can't pile up threads."""

SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""On every answer: no script runs on this origin, nobody frames it, nothing is cached. There is no CORS."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")
_PLACE = re.compile(r"/api/v1alpha1(?:/namespaces/(?P<namespace>[^/]+))?(?:/tunings(?:/(?P<tuning>[^/]+))?)?(?:/|$)")


class Guard:
    """ASGI middleware: checks host, origin, media type, caller and size, in this order, before the app sees anything.

    `allowed_hosts` are names without port, IPv6 addresses in brackets. The caller is left in the scope's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        authorizer: Authorizer,
        allowed_hosts: Collection[str],
        public_metrics: bool,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._public = PUBLIC | {"/metrics"} if public_metrics else PUBLIC
        self._slots = BoundedSemaphore(MAX_AUTH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] != "http":
            return  # there are no websockets here, and nothing to do at start or end

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SAFE_HEADERS)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            changes = scope["method"] not in ("GET", "HEAD")
            _check_origin(headers, changes=changes)
            if changes:
                _check_media_type(headers)
            if scope["path"] not in self._public:
                caller = await self._admit(scope, headers, Verb.DECIDE if changes else Verb.READ)
                scope.setdefault("state", {})["caller"] = caller
            if changes:
                receive = _replay(await _read(headers, receive), receive)
        except ProblemError as error:
            note(scope, error)
            await error.response()(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _check_host(self, headers: Headers) -> None:
        """A page that points its own name at this address (DNS rebinding) still sends its own name."""
        given = headers.getlist("host")
        found = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        if found is None or found[1] not in self._hosts:
            raise ProblemError(
                "wrong-host", "call it by a name it was started for; the Host header is checked against them"
            )

    async def _admit(self, scope: Scope, headers: Headers, verb: Verb) -> Caller:
        given = headers.getlist("authorization")
        authorization = given[0] if len(given) == 1 else None
        found = _PLACE.match(scope["path"])
        place = (found["namespace"], found["tuning"]) if found else (None, None)
        ask = partial(self._ask, authorization, verb, *place)
        try:
            async with timeout(AUTH_TIMEOUT):
                return await run_sync(ask, abandon_on_cancel=True)
        except Unauthenticated as refusal:
            challenge = {"WWW-Authenticate": 'Bearer realm="tunewright"'}
            raise ProblemError("unauthenticated", str(refusal), headers=challenge) from refusal
        except (Unavailable, PortError, TimeoutError) as failure:
            # The cause can name files and servers: it goes to the log, not to somebody unknown.
            log.warning("nobody is let in: %s", failure or f"no answer within {AUTH_TIMEOUT:g} s")
            raise ProblemError(
                "unavailable",
                "who calls can't be checked at the moment, so nobody is let in: see the agent's log",
                headers={"Retry-After": "5"},
            ) from failure

    def _ask(self, authorization: str | None, verb: Verb, namespace: str | None, tuning: str | None) -> Caller:
        # In the thread itself, so that a call that was given up keeps its slot until it has really ended.
        if not self._slots.acquire(blocking=False):
            raise Unavailable(f"{MAX_AUTH} callers are being checked already")
        try:
            caller = self._authenticator.authenticate(authorization)
            if not self._authorizer.allows(caller, verb, namespace, tuning):
                where = f" in namespace {namespace}" if namespace else ""
                raise ProblemError("forbidden", f"{caller.name} may not {verb} {tuning or 'this'}{where}")
            return caller
        finally:
            self._slots.release()


def _check_origin(headers: Headers, *, changes: bool) -> None:
    """Only pages name an origin; none but this very server's may call. Refused for reads too: there is no CORS.

    A link that a person follows from another page is a `cross-site` read without an origin; it carries no token.
    """
    host, origins = headers["host"].lower(), headers.getlist("origin")
    own = all(origin.lower() in (f"http://{host}", f"https://{host}") for origin in origins)
    foreign = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    if len(origins) > 1 or not own or (foreign and (origins or changes)):
        raise ProblemError("cross-origin", "pages of other sites may not call this: leave out the Origin header")


def _check_media_type(headers: Headers) -> None:
    """A form of any page can be posted anywhere without asking; JSON can't."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ProblemError("not-json", "send the body with the header Content-Type: application/json")


async def _read(headers: Headers, receive: Receive) -> bytes:
    """The whole body, bounded in size and time."""
    length = headers.get("content-length", "0")
    too_large = ProblemError("too-large", f"a body of at most {MAX_BODY} bytes is taken")
    if not re.fullmatch(r"\d{1,20}", length, re.ASCII):
        raise ProblemError("bad-request", "Content-Length is not a number")
    if int(length) > MAX_BODY:
        raise too_large
    body = bytearray()
    try:
        async with timeout(BODY_TIMEOUT):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ProblemError("bad-request", "the caller hung up before the body was whole")
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as late:
        raise ProblemError("too-slow", f"the body must arrive within {BODY_TIMEOUT:g} seconds") from late


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def note(scope: Scope, error: ProblemError) -> None:
    """An attempt that is turned away is kept in the log: who from, what, why. `%r` keeps hostile text on one line."""
    client = (scope.get("client") or ("unknown",))[0]
    log.warning(
        "turned away: %s %r from %s: %d %s",
        scope["method"], scope["path"], client, error.problem.status, error.problem.detail,
    )  # fmt: skip
