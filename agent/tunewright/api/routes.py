"""The routes under `/api/v1alpha1`. They read records and keep decisions; they change nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from pydantic import Field
from starlette.responses import HTMLResponse

from tunewright.api.auth import Caller
from tunewright.api.decide import keep, pending
from tunewright.api.problems import FieldError, ProblemError
from tunewright.api.promotion import PromotionView, promotion_view
from tunewright.api.views import (
    PREFIX,
    DecisionList,
    ParetoView,
    TrialList,
    TrialView,
    TuningList,
    TuningSummary,
    TuningView,
    collection,
    decision_views,
    pareto_view,
    summary,
    trial_view,
    tuning_view,
)
from tunewright.controller.decisions import Action, bound
from tunewright.domain.model import Model
from tunewright.domain.oneline import MOST_REASON, MOST_VALUE, ONE_LINE
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.state import Decision, TuningRecord
from tunewright.ports import Clock, Refused, Store, Stores
from tunewright.propose.asked import read_asked
from tunewright.rollout.recommend import Form, Recommendation, recommendation

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAME = rf"^{_LABEL}$"
PLACE = rf"^({_LABEL}/)?{_LABEL}$"
TRIAL = r"^[0-9]{3,9}-[0-9a-f]{10}$"
HASH = r"^[0-9a-f]{10}$"
KNOB = r"^[a-z][a-z0-9_]{0,62}$"

WANTED = {
    NAME: "a name of lower-case letters, digits and dashes is wanted, at most 63 characters",
    PLACE: "the `next` of the page before is wanted: a name, or namespace/name",
    TRIAL: "a trial's id is wanted, as 003-0123456789",
    KNOB: "a knob's name is wanted, as max_num_seqs",
    HASH: "a hash of ten hex digits is wanted, as the promotion's `bind` has it",
    ONE_LINE: "one line of text without control characters is wanted, beginning with a visible one",
}
"""In words, what each pattern wants."""

REASONED: dict[Action, str] = {
    "suspend": "Hold it where it is",
    "resume": "Go on",
    "abort": "End it; production goes back where it was changed",
    "rollback": "Return production to the baseline",
}
"""Decisions that need no binding, in words."""

Report = Callable[[Store, TuningRecord], str | None]
"""Makes the page of one tuning from its store and its record; None where there is none."""

Name = Annotated[str, Path(pattern=NAME, description="Name of the tuning.")]
Limit = Annotated[int, Query(ge=1, le=200, description="Items at most.")]
Hash = Annotated[str, Field(pattern=HASH)]
Reason = Annotated[
    str, Field(pattern=ONE_LINE, max_length=MOST_REASON, description="Why: one line, kept with the decision.")
]


class Approval(Model):
    """An approval or rejection, bound to what was looked at: the promotion's `bind`."""

    candidate: Hash
    spec: Hash
    baseline: Hash
    reason: Reason


class Reasoned(Model):
    """A decision that needs no binding."""

    reason: Reason


@dataclass(frozen=True)
class Found:
    """One tuning, and where it was found; outside of a cluster the namespace is empty."""

    namespace: str
    store: Store
    record: TuningRecord


def caller_of(request: Request) -> Caller:
    """Who the guard let in. Without a guard before it there is nobody, and no decision."""
    found = getattr(request.state, "caller", None)
    if not isinstance(found, Caller):
        raise ProblemError("unauthenticated", "nobody was let in")
    return found


class Proposed(Model):
    """A candidate to be tried: these knobs, laid over what production runs."""

    values: Annotated[
        dict[Annotated[str, Field(pattern=KNOB)], Annotated[str, Field(pattern=ONE_LINE, max_length=MOST_VALUE)]],
        Field(
            min_length=1,
            max_length=50,
            description="Knob names of the catalogue with their values as text.",
            json_schema_extra={"additionalProperties": False},  # keys of another pattern are refused
        ),
    ]
    reason: Reason


By = Annotated[Caller, Depends(caller_of)]


def namespace_in_path(namespace: Annotated[str, Path(pattern=NAME, description="Namespace of the tuning.")]) -> str:
    """Checks and documents what `named_namespace` reads."""
    return namespace


def named_namespace(request: Request) -> str | None:
    """The namespace in the path; None in the form of a path that has none."""
    found: str | None = request.path_params.get("namespace")
    return found


In = Annotated[str | None, Depends(named_namespace)]


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


def router(stores: Stores, clock: Clock, report: Report | None) -> APIRouter:
    """The routes, in two forms: with the namespace in the path, and without it for the program's own."""
    routes = APIRouter()

    def served(namespace: str | None) -> tuple[str, Store]:
        namespace = stores.own if namespace is None else namespace
        store = stores.of(namespace)
        if store is None:
            here = f"only those of namespace {stores.own}" if stores.own else "there are no namespaces here"
            raise ProblemError("not-found", f"tunings of namespace {namespace} are not served: {here}")
        return namespace, store

    def known(namespace: str | None, name: str) -> Found:
        namespace, store = served(namespace)
        record = store.load(name)
        if record is None:
            where = f" in namespace {namespace}" if namespace else ""
            lists = f"GET {collection(namespace)} lists them"
            raise ProblemError("not-found", f"there is no tuning called {name}{where}; {lists}")
        return Found(namespace, store, record)

    @routes.get("/tunings", summary="List tunings", tags=["tunings"])
    def list_tunings(
        namespace: In,
        limit: Limit = 100,
        after: Annotated[str | None, Query(pattern=PLACE, description="Those after this one: a page's `next`.")] = None,
    ) -> TuningList:
        if namespace is None and stores.everywhere:
            places = {f"{where}/{name}": (where, name) for where, name in stores.tunings()}
        else:
            namespace, store = served(namespace)
            places = {name: (namespace, name) for name in store.names()}
        left = sorted(place for place in places if after is None or place > after)
        found = [(where, stores.of(where), name) for where, name in (places[place] for place in left[:limit])]
        items = tuple(
            TuningSummary.model_validate(summary(record, where))
            for where, store, name in found
            if store is not None and (record := store.load(name)) is not None
        )
        return TuningList(items=items, next=left[limit - 1] if len(left) > limit else None)

    @routes.get("/tunings/{name}", summary="Read a tuning", tags=["tunings"])
    def read_tuning(namespace: In, name: Name) -> TuningView:
        found = known(namespace, name)
        return tuning_view(found.record, len(found.store.trials(name)), found.namespace)

    @routes.get("/tunings/{name}/trials", summary="List a tuning's trials", tags=["trials"])
    def list_trials(
        namespace: In,
        name: Name,
        limit: Limit = 50,
        after: Annotated[int, Query(ge=-1, le=10**9, description="Numbers after this one.")] = -1,
    ) -> TrialList:
        trials = [trial for trial in known(namespace, name).store.trials(name) if trial.number > after]
        items = tuple(trial_view(trial) for trial in trials[:limit])
        return TrialList(items=items, next=items[-1].number if len(trials) > limit else None)

    @routes.get("/tunings/{name}/trials/{trial}", summary="Read a trial", tags=["trials"])
    def read_trial(
        namespace: In,
        name: Name,
        trial: Annotated[str, Path(pattern=TRIAL, description="Id of the trial, as the list has it.")],
    ) -> TrialView:
        found = next((t for t in known(namespace, name).store.trials(name) if t.id == trial), None)
        if found is None:
            raise ProblemError("not-found", f"{name} has no trial {trial}")
        return trial_view(found)

    @routes.get("/tunings/{name}/profile", summary="Read the traffic profile", tags=["tunings"])
    def read_profile(namespace: In, name: Name) -> TrafficProfile:
        record = known(namespace, name).record
        if record.profile is None:
            raise ProblemError("not-found", f"the traffic of {name} is not known yet: it is {record.phase}")
        return record.profile

    @routes.get("/tunings/{name}/promotion", summary="Read all that is needed to decide", tags=["promotion"])
    def read_promotion(namespace: In, name: Name) -> PromotionView:
        found = known(namespace, name)
        trials, waiting = found.store.trials(name), pending(found.store, found.record)
        return promotion_view(found.record, trials, waiting, clock.now(), found.namespace)

    @routes.get("/tunings/{name}/recommendation", summary="Read the winner as files", tags=["promotion"])
    def read_recommendation(
        namespace: In,
        name: Name,
        form: Annotated[Form, Query(alias="as", description="What the files are for.")] = Form.ARGS,
    ) -> Recommendation:
        try:
            return recommendation(known(namespace, name).record, form)
        except Refused as refusal:
            raise ProblemError("not-found", str(refusal)) from refusal

    @routes.get("/tunings/{name}/pareto", summary="Read the Pareto front of what was measured", tags=["trials"])
    def read_pareto(namespace: In, name: Name) -> ParetoView:
        found = known(namespace, name)
        return pareto_view(found.record, found.store.trials(name))

    @routes.get("/tunings/{name}/decisions", summary="List who decided what, when and why", tags=["promotion"])
    def list_decisions(
        namespace: In,
        name: Name,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=-1, le=10**9, description="Numbers after this one.")] = -1,
    ) -> DecisionList:
        found = known(namespace, name)
        views = decision_views(found.store.decisions(name), len(found.record.decisions))[after + 1 :]
        return DecisionList(items=tuple(views[:limit]), next=views[limit - 1].number if len(views) > limit else None)

    @routes.get(
        "/tunings/{name}/report",
        summary="Read the report as a page",
        tags=["tunings"],
        response_class=HTMLResponse,
    )
    def read_report(namespace: In, name: Name) -> HTMLResponse:
        found = known(namespace, name)
        page = report(found.store, found.record) if report is not None else None
        if page is None:
            raise ProblemError("not-found", f"there is no report of {name} here")
        return HTMLResponse(page)

    def kept(namespace: str | None, name: str, action: Action, by: Caller, given: Approval | Reasoned) -> Decision:
        found = known(namespace, name)
        decision = bound(found.record, action, at=clock.now(), by=by.name, reason=given.reason)
        if isinstance(given, Approval):
            named = {"candidate": given.candidate, "spec": given.spec, "baseline": given.baseline}
            decision = decision.model_copy(update=named)
        return keep(found.store, found.record, decision, found.namespace)

    @routes.post("/tunings/{name}/approve", status_code=202, summary="Approve the winner", tags=["decisions"])
    def approve(namespace: In, name: Name, by: By, given: Annotated[Approval, Body()]) -> Decision:
        return kept(namespace, name, "approve", by, given)

    @routes.post("/tunings/{name}/reject", status_code=202, summary="Reject the winner", tags=["decisions"])
    def reject(namespace: In, name: Name, by: By, given: Annotated[Approval, Body()]) -> Decision:
        return kept(namespace, name, "reject", by, given)

    def reasoned(action: Action) -> Callable[..., Decision]:
        def decide(namespace: In, name: Name, by: By, given: Annotated[Reasoned, Body()]) -> Decision:
            return kept(namespace, name, action, by, given)

        return decide

    for action, words in REASONED.items():
        routes.post(
            f"/tunings/{{name}}/{action}", status_code=202, name=action, summary=words, tags=["decisions"]
        )(reasoned(action))  # fmt: skip

    @routes.post(
        "/tunings/{name}/candidates", status_code=202, summary="Ask for a candidate to be tried", tags=["decisions"]
    )
    def propose(namespace: In, name: Name, by: By, given: Annotated[Proposed, Body()]) -> Decision:
        found = known(namespace, name)
        try:
            read_asked(found.record.tuning.spec.search, given.values, "body.values")
        except Refused as refusal:
            message = str(refusal).removeprefix("body.values: ")
            raise ProblemError("invalid", message, errors=[FieldError(field="body.values", message=message)]) from None
        decision = bound(found.record, "propose", at=clock.now(), by=by.name, reason=given.reason, values=given.values)
        return keep(found.store, found.record, decision, found.namespace)

    both = APIRouter(prefix=PREFIX, dependencies=[Depends(only_known_parameters)])
    both.include_router(routes)
    both.include_router(routes, prefix="/namespaces/{namespace}", dependencies=[Depends(namespace_in_path)])
    return both
