"""Errors as problem details (RFC 9457). Each says what is wrong and, where it can be told, what to do."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from starlette.responses import Response

from tunewright.domain.model import Model
from tunewright.domain.redact import redact_all

MEDIA_TYPE = "application/problem+json"
TYPE = "https://tunewright.dev/problems/"

KINDS: dict[str, tuple[int, str]] = {
    "bad-request": (400, "The request can't be understood"),
    "unauthenticated": (401, "Who calls is not known"),
    "forbidden": (403, "The caller may not do this"),
    "cross-origin": (403, "A web page of another origin may not call this"),
    "not-found": (404, "There is nothing under this address"),
    "method-not-allowed": (405, "This address does not take this method"),
    "too-slow": (408, "The request did not arrive in time"),
    "not-now": (409, "This can't be decided now"),
    "stale": (409, "The decision is about something that changed"),
    "too-large": (413, "The request is too large"),
    "not-json": (415, "The body must be application/json"),
    "wrong-host": (421, "The Host header names another server"),
    "invalid": (422, "A field of the request is not valid"),
    "internal": (500, "A fault of Tunewright"),
    "unavailable": (503, "Something that is needed does not answer"),
}
"""Status and title by the last part of the problem's type."""


class FieldError(Model):
    """One field that is not valid."""

    field: str = Field(description="Where it is, as `body.candidate`, `path.name` or `query.limit`.")
    message: str = Field(description="What is wrong with it.")


class Change(Model):
    """One thing that is no longer what the decision was about."""

    what: str = Field(description="`candidate`, `spec` or `baseline`.")
    decided: str = Field(description="The hash that the decision names.")
    now: str = Field(description="The hash as it is now.")


class Problem(Model):
    """Problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] | None = Field(default=None, description="With `invalid`: the fields.")
    changed: tuple[Change, ...] | None = Field(default=None, description="With `stale`: what changed.")


class ProblemError(Exception):
    """Ends a request with a problem."""

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        errors: Sequence[FieldError] | None = None,
        changed: Sequence[Change] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        status, title = KINDS[kind]
        self.headers = dict(headers or {})
        self.problem = Problem(
            type=TYPE + kind,
            title=title,
            status=status,
            detail=detail,
            errors=None if errors is None else tuple(errors),
            changed=None if changed is None else tuple(changed),
        )

    def response(self) -> Response:
        """The answer."""
        return Response(
            render(self.problem.model_dump(mode="json", exclude_none=True)),
            status_code=self.problem.status,
            media_type=MEDIA_TYPE,
            headers=self.headers,
        )


def render(content: Any) -> bytes:
    """JSON without secrets. Escaped to ASCII, so that no text in it can play tricks on a terminal."""
    return json.dumps(redact_all(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
