"""Who calls and whether they may: whatever can't be settled is a no."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_kube import Answer, Drop, FakeKube, Request, client_of, fake_kube, refuse

from tunewright.api.auth import Caller, Unauthenticated, Unavailable, Verb
from tunewright.api.guard import AUTH_TIMEOUT
from tunewright.api.kubernetes_auth import REVIEW_SECONDS, AccessReviewer, TokenReviewer
from tunewright.kube.client import Kube

ANNA = {"username": "anna", "uid": "1", "groups": ["team", "system:authenticated"]}
GOOD = {"authenticated": True, "user": ANNA, "audiences": ["tunewright"]}


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


def answering(fake: FakeKube, answer: Any, status: int = 201) -> None:
    def before(request: Request) -> None:
        raise Answer(status, answer)

    fake.before = before


def test_a_good_token_names_its_owner(fake: FakeKube, kube: Kube) -> None:
    answering(fake, {"status": GOOD})
    caller = TokenReviewer(kube).authenticate("Bearer t0ken")
    assert caller == Caller(name="anna", groups=("team", "system:authenticated"), uid="1")
    (request,) = fake.requests
    assert request.path == "/apis/authentication.k8s.io/v1/tokenreviews"
    assert request.body["spec"] == {"token": "t0ken", "audiences": ["tunewright"]}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "t0ken", f"Bearer {'x' * 20000}"])
def test_what_is_no_token_is_not_even_asked_about(fake: FakeKube, kube: Kube, header: str | None) -> None:
    with pytest.raises(Unauthenticated, match="--audience tunewright"):
        TokenReviewer(kube).authenticate(header)
    assert fake.requests == []


@pytest.mark.parametrize(
    "change",
    [
        {"authenticated": False},
        {"authenticated": None},
        {"authenticated": "true"},
        {"authenticated": 1},
        {"audiences": None},
        {"audiences": []},
        {"audiences": ["https://kubernetes.default.svc"]},
        {"audiences": "tunewright"},
    ],
)
def test_anything_but_a_plain_yes_is_a_no(fake: FakeKube, kube: Kube, change: dict[str, Any]) -> None:
    answering(fake, {"status": GOOD | change})
    with pytest.raises(Unauthenticated):
        TokenReviewer(kube).authenticate("Bearer t0ken")


def test_a_missing_yes_is_a_no(fake: FakeKube, kube: Kube) -> None:
    answering(fake, {"status": {"user": ANNA, "audiences": ["tunewright"], "error": "token expired"}})
    with pytest.raises(Unauthenticated):
        TokenReviewer(kube).authenticate("Bearer t0ken")


@pytest.mark.parametrize(
    "user", [None, {}, {"username": ""}, {"username": 7}, "anna", {"username": "a", "groups": "g"},
             {"username": "a", "groups": [1]}, {"username": "a", "uid": 1}, {"username": "a", "extra": ["scopes"]},
             {"username": "a", "extra": {"scopes": "user:info"}}, {"username": "a", "extra": {"scopes": [1]}}],
)  # fmt: skip
def test_a_user_that_can_not_be_read_is_nobody(fake: FakeKube, kube: Kube, user: Any) -> None:
    answering(fake, {"status": GOOD | {"user": user}})
    with pytest.raises(Unavailable):
        TokenReviewer(kube).authenticate("Bearer t0ken")


FAULTS = [
    refuse(401, "Unauthorized"),
    refuse(403, "Forbidden", "may not create tokenreviews: token t0ken"),
    refuse(404, "NotFound"),
    refuse(429, "TooManyRequests"),
    refuse(500, "InternalError"),
    Answer(201, b"<html>"),
    Answer(201, b"[]"),
    Answer(201, {}),
    Answer(201, {"status": None}),
    Answer(201, {"status": [True]}),
    Drop(),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault} {getattr(fault, 'body', '')}"[:40])
def test_a_review_that_fails_lets_nobody_in(fake: FakeKube, kube: Kube, fault: Exception) -> None:
    def before(request: Request) -> None:
        raise fault

    fake.before = before
    with pytest.raises(Unavailable) as caught:
        TokenReviewer(kube).authenticate("Bearer t0ken")
    assert "t0ken" not in str(caught.value)
    with pytest.raises(Unavailable):
        AccessReviewer(kube, "team").allows(Caller(name="anna"), Verb.DECIDE, None, "demo")


def test_reviews_end_before_the_api_gives_up() -> None:
    assert 2 * REVIEW_SECONDS < AUTH_TIMEOUT


def test_what_is_asked_for_reading_and_deciding(fake: FakeKube, kube: Kube) -> None:
    answering(fake, {"status": {"allowed": True}})
    anna = Caller(name="anna", groups=("g",))
    asked = [(Verb.READ, None), (Verb.READ, "demo"), (Verb.DECIDE, "demo")]
    for reviewer, named, namespace in (
        (AccessReviewer(kube, "team"), None, "team"),
        (AccessReviewer(kube, "team"), "other", "other"),
        (AccessReviewer(kube, "team", everywhere=True), "other", "other"),
    ):
        fake.requests.clear()
        assert all(reviewer.allows(anna, verb, named, tuning) for verb, tuning in asked)
        lists, reads, decides = (request.body["spec"] for request in fake.requests)
        common = {"namespace": namespace, "group": "tunewright.dev", "version": "v1alpha1", "resource": "tunings"}
        assert lists == {"user": "anna", "groups": ["g"], "resourceAttributes": common | {"verb": "list", "name": ""}}
        assert reads["resourceAttributes"] == common | {"verb": "get", "name": "demo"}
        assert decides["resourceAttributes"] == common | {"verb": "update", "subresource": "approval", "name": "demo"}


def test_a_token_that_is_limited_is_asked_about_with_its_limits(fake: FakeKube, kube: Kube) -> None:
    """OpenShift's scopes, a cloud's sessions: without them the question would be about all that its owner may."""
    extra = {"scopes.authorization.openshift.io": ["user:info"], "authentication.kubernetes.io/pod-name": ["x"]}
    answering(fake, {"status": GOOD | {"user": ANNA | {"extra": extra}}})
    caller = TokenReviewer(kube).authenticate("Bearer t0ken")
    answering(fake, {"status": {"allowed": True}})
    assert AccessReviewer(kube, "team").allows(caller, Verb.DECIDE, None, "demo")
    asked = fake.requests[-1].body["spec"]
    assert (asked["extra"], asked["uid"], asked["groups"]) == (extra, "1", ANNA["groups"])


def test_all_tunings_of_the_cluster_need_a_right_in_the_whole_cluster(fake: FakeKube, kube: Kube) -> None:
    answering(fake, {"status": {"allowed": True}})
    reviewer = AccessReviewer(kube, "team", everywhere=True)
    for verb, tuning in ((Verb.READ, None), (Verb.READ, "demo"), (Verb.DECIDE, "demo")):
        assert reviewer.allows(Caller(name="anna"), verb, None, tuning)
    namespaces = [request.body["spec"]["resourceAttributes"]["namespace"] for request in fake.requests]
    assert namespaces == ["", "team", "team"], "one tuning without a namespace is of the controller's own"


@pytest.mark.parametrize(
    "status", [{}, {"allowed": False}, {"allowed": None}, {"allowed": "true"}, {"allowed": 1},
               {"allowed": True, "denied": True}, {"allowed": False, "evaluationError": "webhook down"}],
)  # fmt: skip
def test_only_a_plain_allowed_allows(fake: FakeKube, kube: Kube, status: dict[str, Any]) -> None:
    answering(fake, {"status": status})
    assert AccessReviewer(kube, "team").allows(Caller(name="anna"), Verb.DECIDE, None, "demo") is False
