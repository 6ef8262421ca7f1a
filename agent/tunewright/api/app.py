"""The REST API: tunings to read, decisions to take. It knows the records through ports alone."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from tunewright.api.auth import Authenticator, Authorizer
from tunewright.api.docspage import docs_page
from tunewright.api.guard import PUBLIC, SAFE_HEADERS, Guard, note
from tunewright.api.openapi import complete
from tunewright.api.problems import FieldError, ProblemError, render
from tunewright.api.routes import WANTED, Report, router
from tunewright.domain.model import Model
from tunewright.ports import Clock, PortError, Refused, Stores

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The names by which this machine calls itself."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class Json(JSONResponse):
    """JSON without secrets."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return render(content)


class Health(Model):
    """What a probe is told."""

    status: str


class Api(FastAPI):
    """FastAPI with a schema that tells of problems, tokens and media types as they are."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi(), public=PUBLIC)
        return self.openapi_schema


def create_app(
    stores: Stores,
    clock: Clock,
    *,
    authenticator: Authenticator,
    authorizer: Authorizer,
    allowed_hosts: Collection[str],
    ready: Callable[[], str | None],
    metrics: Callable[[], bytes] | None = None,
    public_metrics: bool = False,
    report: Report | None = None,
) -> FastAPI:
    """The API over `stores`.

    `allowed_hosts` are the names (without port) that a Host header may hold. `ready` tells why this process is not
    ready, or None. `metrics` gives the exposition in Prometheus' text format; `public_metrics` lets it be scraped
    without a token. `report` makes the page of one tuning. All of them must be safe to call from several threads.
    """
    app = Api(
        title="Tunewright",
        version="v1alpha1",
        description="Tunings of vLLM to read, and decisions to take. Errors are problem details (RFC 9457).",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Json,
    )
    app.add_middleware(
        Guard,
        authenticator=authenticator,
        authorizer=authorizer,
        allowed_hosts=allowed_hosts,
        public_metrics=public_metrics,
    )
    _answer_problems(app)
    app.include_router(router(stores, clock, report))

    @app.get("/healthz", summary="Whether this process lives", tags=["probes"])
    def healthz() -> Health:
        return Health(status="ok")

    @app.get("/readyz", summary="Whether it does its work", tags=["probes"])
    def readyz() -> Health:
        why_not = ready()
        if why_not is not None:
            raise ProblemError("unavailable", why_not)
        return Health(status="ready")

    @app.get("/metrics", summary="Metrics for Prometheus", tags=["probes"], response_class=Response)
    def read_metrics() -> Response:
        if metrics is None:
            raise ProblemError("not-found", "metrics are not served here")
        return Response(metrics(), headers={"Content-Type": METRICS_TYPE})

    @app.get("/docs", include_in_schema=False)
    def read_docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    return app


def _answer_problems(app: FastAPI) -> None:
    """Whatever goes wrong is answered with problem details."""
    kinds = {404: "not-found", 405: "method-not-allowed"}

    async def problem(request: Request, error: Exception) -> Response:
        match error:
            case ProblemError():
                answer = error
            case RequestValidationError():
                answer = _invalid(error.errors())
            case HTTPException():
                kind = kinds.get(error.status_code, "bad-request")
                answer = ProblemError(
                    kind, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
                )
            case PortError() | Refused():
                answer = ProblemError("unavailable", str(error), headers={"Retry-After": "5"})
            case _:
                detail = "the agent's log says what happened; nothing was decided"
                answer = ProblemError("internal", detail, headers=SAFE_HEADERS)
        if request.method != "GET":
            note(request.scope, answer)
        return answer.response()

    handler: Callable[[Request, Exception], Awaitable[Response]] = problem
    for kind in (ProblemError, RequestValidationError, HTTPException, PortError, Refused, Exception):
        app.add_exception_handler(kind, handler)


def _invalid(faults: Sequence[Any]) -> ProblemError:
    """Each field by its place; what was sent is not repeated."""
    errors = []
    for fault in faults:
        place, message = ".".join(str(part) for part in fault["loc"]), fault["msg"]
        if fault["type"] == "json_invalid":
            place, message = "body", "this is not JSON"
        elif fault["type"] == "string_pattern_mismatch":
            message = WANTED.get(fault["ctx"]["pattern"], message)
        errors.append(FieldError(field=place, message=message))
    detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
    return ProblemError("invalid", detail, errors=errors)
