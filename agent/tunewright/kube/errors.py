"""What can go wrong between us and the API server; each says what was asked, what came back and what to do."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tunewright import ports
from tunewright.domain.redact import redact


@dataclass(frozen=True)
class Cause:
    """One field that the API server refused."""

    field: str
    message: str


class KubeError(ports.PortError):
    """A call to the API server that failed. `status` is the HTTP status, None when there was no answer."""

    advice = "look at the API server's answer and its log"

    def __init__(
        self,
        method: str,
        path: str,
        message: str,
        *,
        status: int | None = None,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        self.method, self.path, self.status, self.reason = method, path, status, reason
        self.causes, self.retry_after = causes, retry_after
        self.message = redact(" ".join(message.split()))[:1000]
        answered = f" ({status}{f' {reason}' if reason else ''})" if status is not None else ""
        super().__init__(f"{method} {path}: {self.message}{answered}; {self.advice}")


class NotFound(KubeError):
    """The object, or the kind of object, is not there (404)."""

    advice = "it may have been deleted; if the whole kind is unknown, install the CRDs of deploy/crds"


class KubeConflict(KubeError, ports.Conflict):
    """The object was changed since it was read, or a field belongs to another manager (409)."""

    advice = "read it again and decide again"


class AlreadyExists(KubeConflict):
    """An object of this name is there already (409)."""

    advice = "read it and go on from what is there"


class Unauthorized(KubeError):
    """The API server does not know us (401)."""

    advice = "check the kubeconfig, or that the ServiceAccount's token is mounted and its account still exists"


class Forbidden(KubeError):
    """We may not do this (403)."""

    advice = "grant it to the ServiceAccount: `kubectl auth can-i --list --as system:serviceaccount:NAMESPACE:NAME`"


class NotAdmitted(Forbidden):
    """We may, but a rule about the object itself refuses it (403): Pod Security, a quota, a webhook."""

    advice = "a rule of the cluster refuses it, not a right that is missing: change what it names, or ask who set it"


class Invalid(KubeError):
    """The API server refused the object (400, 422); `causes` names the fields where it told them."""

    advice = "change the named field"


class Gone(KubeError):
    """The resource version is too old to go on from (410): list again."""

    advice = "list again"


class Unavailable(KubeError):
    """No answer in time, or the API server can't serve now (429, 5xx, connection errors)."""

    advice = "it is tried again; if it stays, check that the API server is up and can be reached from here"


class Fenced(KubeError):
    """A write that was not sent, because this process may not act now."""

    advice = "it goes on once the Lease is renewed"


_NO_RIGHT = re.compile(r'\b[Uu]ser "[^"]*" cannot ')
"""How RBAC says no; whatever else answers 403 to a write looks at what is written."""

_BY_STATUS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: KubeConflict,
    410: Gone,
    422: Invalid,
    429: Unavailable,
}


def from_answer(method: str, path: str, status: int, body: bytes, *, retry_after: float | None = None) -> KubeError:
    """The error for an answer; `body` is a Kubernetes Status, or whatever a proxy in between wrote."""
    try:
        told: Any = json.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        told = {"message": body[:300].decode("utf-8", "replace") or "no message"}
    reason = str(told.get("reason") or "")
    kind = AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(status)
    if (
        kind is Forbidden
        and method != "GET"
        and reason == "Forbidden"
        and not _NO_RIGHT.search(str(told.get("message")))
    ):
        kind = NotAdmitted
    if kind is None:
        kind = Unavailable if status >= 500 else KubeError
    details = told.get("details")
    found = details.get("causes") if isinstance(details, dict) else None
    causes = tuple(
        Cause(field=str(cause.get("field") or ""), message=str(cause.get("message") or ""))
        for cause in (found if isinstance(found, list) else [])
        if isinstance(cause, dict)
    )
    return kind(
        method,
        path,
        str(told.get("message") or "no message"),
        status=status,
        reason=reason,
        causes=causes,
        retry_after=retry_after,
    )
