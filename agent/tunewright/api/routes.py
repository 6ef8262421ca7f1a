"""The routes under `/api/v1alpha1`. They read records and keep decisions; they change nothing else."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from pydantic import Field
from starlette.responses import HTMLResponse

from tunewright.api.auth import Caller
from tunewright.api.decide import keep, pending
from tunewright.api.problems import FieldError, ProblemError
from tunewright.api.promotion import PromotionView, promotion_view
from tunewright.api.views import (
    DecisionList,
    TrialList,
    TrialView,
    TuningList,
    TuningSummary,
    TuningView,
    decision_views,
    summary,
    trial_view,
    tuning_view,
)
from tunewright.controller.decisions import Action, bound
from tunewright.domain.model import Model
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.state import Decision, TuningRecord
from tunewright.ports import Clock, Store

PREFIX = "/api/v1alpha1"

NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
TRIAL = r"^[0-9]{3,9}-[0-9a-f]{10}$"
HASH = r"^[0-9a-f]{10}$"
_CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
# Reasons are shown on terminals: no control characters, nor any that change the direction of writing.
REASON = rf"^[^\s{_CONTROLS}][^{_CONTROLS}]*$"

WANTED = {
    NAME: "a name of lower-case letters, digits and dashes is wanted, at most 63 characters",
    TRIAL: "a trial's id is wanted, as 003-0123456789",
    HASH: "a hash of ten hex digits is wanted, as the promotion's `bind` has it",
    REASON: "one line of text without control characters is wanted, beginning with a visible one",
}
"""In words, what each pattern wants."""

Name = Annotated[str, Path(pattern=NAME, description="Name of the tuning.")]
Limit = Annotated[int, Query(ge=1, le=200, description="Items at most.")]
Hash = Annotated[str, Field(pattern=HASH)]
Reason = Annotated[str, Field(pattern=REASON, max_length=1000, description="Why: one line, kept with the decision.")]


class Approval(Model):
    """An approval or rejection, bound to what was looked at: the promotion's `bind`."""

    candidate: Hash
    spec: Hash
    baseline: Hash
    reason: Reason


class Reasoned(Model):
    """A decision that needs no binding."""

    reason: Reason


def caller_of(request: Request) -> Caller:
    """Who the guard let in. Without a guard before it there is nobody, and no decision."""
    found = getattr(request.state, "caller", None)
    if not isinstance(found, Caller):
        raise ProblemError("unauthenticated", "nobody was let in")
    return found


By = Annotated[Caller, Depends(caller_of)]


def only_known_parameters(request: Request) -> None:
    """A misspelt parameter is refused, never ignored; one that is given twice says nothing clear."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    given = [name for name, _ in request.query_params.multi_items()]
    errors = [
        FieldError(field=f"query.{name}", message="given twice" if name in known else "there is no such parameter")
        for name in dict.fromkeys(given)
        if name not in known or given.count(name) > 1
    ]
    if errors:
        detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
        raise ProblemError("invalid", detail, errors=errors)


def router(store: Store, clock: Clock, report: Callable[[str], str | None] | None) -> APIRouter:
    """The routes over one store."""
    routes = APIRouter(prefix=PREFIX, dependencies=[Depends(only_known_parameters)])

    def known(name: str) -> TuningRecord:
        record = store.load(name)
        if record is None:
            raise ProblemError("not-found", f"there is no tuning called {name}; GET {PREFIX}/tunings lists them")
        return record

    @routes.get("/tunings", summary="List tunings", tags=["tunings"])
    def list_tunings(
        limit: Limit = 100,
        after: Annotated[str | None, Query(pattern=NAME, description="Names after this one.")] = None,
    ) -> TuningList:
        names = [name for name in store.names() if after is None or name > after]
        records = [record for name in names[:limit] if (record := store.load(name)) is not None]
        items = tuple(TuningSummary.model_validate(summary(record)) for record in records)
        return TuningList(items=items, next=names[limit - 1] if len(names) > limit else None)

    @routes.get("/tunings/{name}", summary="Read a tuning", tags=["tunings"])
    def read_tuning(name: Name) -> TuningView:
        return tuning_view(known(name), len(store.trials(name)))

    @routes.get("/tunings/{name}/trials", summary="List a tuning's trials", tags=["trials"])
    def list_trials(
        name: Name,
        limit: Limit = 50,
        after: Annotated[int, Query(ge=-1, le=10**9, description="Numbers after this one.")] = -1,
    ) -> TrialList:
        known(name)
        trials = [trial for trial in store.trials(name) if trial.number > after]
        items = tuple(trial_view(trial) for trial in trials[:limit])
        return TrialList(items=items, next=items[-1].number if len(trials) > limit else None)

    @routes.get("/tunings/{name}/trials/{trial}", summary="Read a trial", tags=["trials"])
    def read_trial(
        name: Name, trial: Annotated[str, Path(pattern=TRIAL, description="Id of the trial, as the list has it.")]
    ) -> TrialView:
        known(name)
        found = next((t for t in store.trials(name) if t.id == trial), None)
        if found is None:
            raise ProblemError("not-found", f"{name} has no trial {trial}")
        return trial_view(found)

    @routes.get("/tunings/{name}/profile", summary="Read the traffic profile", tags=["tunings"])
    def read_profile(name: Name) -> TrafficProfile:
        record = known(name)
        if record.profile is None:
            raise ProblemError("not-found", f"the traffic of {name} is not known yet: it is {record.phase}")
        return record.profile

    @routes.get("/tunings/{name}/promotion", summary="Read all that is needed to decide", tags=["promotion"])
    def read_promotion(name: Name) -> PromotionView:
        record = known(name)
        return promotion_view(record, store.trials(name), pending(store, record), clock.now())

    @routes.get("/tunings/{name}/decisions", summary="List who decided what, when and why", tags=["promotion"])
    def list_decisions(
        name: Name,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=-1, le=10**9, description="Numbers after this one.")] = -1,
    ) -> DecisionList:
        record = known(name)
        views = decision_views(store.decisions(name), len(record.decisions))[after + 1 :]
        return DecisionList(items=tuple(views[:limit]), next=views[limit - 1].number if len(views) > limit else None)

    @routes.get(
        "/tunings/{name}/report",
        summary="Read the report as a page",
        tags=["tunings"],
        response_class=HTMLResponse,
    )
    def read_report(name: Name) -> HTMLResponse:
        known(name)
        page = report(name) if report is not None else None
        if page is None:
            raise ProblemError("not-found", f"there is no report of {name} here")
        return HTMLResponse(page)

    def kept(name: str, action: Action, by: Caller, given: Approval | Reasoned) -> Decision:
        record = known(name)
        decision = bound(record, action, at=clock.now(), by=by.name, reason=given.reason)
        if isinstance(given, Approval):
            named = {"candidate": given.candidate, "spec": given.spec, "baseline": given.baseline}
            decision = decision.model_copy(update=named)
        return keep(store, record, decision)

    @routes.post("/tunings/{name}/approve", status_code=202, summary="Approve the winner", tags=["decisions"])
    def approve(name: Name, by: By, given: Annotated[Approval, Body()]) -> Decision:
        return kept(name, "approve", by, given)

    @routes.post("/tunings/{name}/reject", status_code=202, summary="Reject the winner", tags=["decisions"])
    def reject(name: Name, by: By, given: Annotated[Approval, Body()]) -> Decision:
        return kept(name, "reject", by, given)

    @routes.post("/tunings/{name}/suspend", status_code=202, summary="Hold it where it is", tags=["decisions"])
    def suspend(name: Name, by: By, given: Annotated[Reasoned, Body()]) -> Decision:
        return kept(name, "suspend", by, given)

    @routes.post("/tunings/{name}/resume", status_code=202, summary="Go on", tags=["decisions"])
    def resume(name: Name, by: By, given: Annotated[Reasoned, Body()]) -> Decision:
        return kept(name, "resume", by, given)

    @routes.post(
        "/tunings/{name}/abort",
        status_code=202,
        summary="End it; production goes back where it was changed",
        tags=["decisions"],
    )
    def abort(name: Name, by: By, given: Annotated[Reasoned, Body()]) -> Decision:
        return kept(name, "abort", by, given)

    @routes.post(
        "/tunings/{name}/rollback",
        status_code=202,
        summary="Return production to the baseline",
        tags=["decisions"],
    )
    def rollback(name: Name, by: By, given: Annotated[Reasoned, Body()]) -> Decision:
        return kept(name, "rollback", by, given)

    return routes
