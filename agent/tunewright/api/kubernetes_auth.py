"""Who calls, by TokenReview, and whether they may, by SubjectAccessReview. Whatever can't be settled is a no."""

import logging
from typing import Any

from tunewright.api.auth import Caller, Unauthenticated, Unavailable, Verb
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import KubeError
from tunewright.kube.resources import SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, TUNINGS, Resource

AUDIENCE = "tunewright"
"""A token made for somebody else, as every pod's own for the API server, proves nothing here."""

REVIEW_SECONDS = 4.0
"""For one review; both fit into the time that the API allows for authentication."""

_MAX_TOKEN = 16 * 1024

_log = logging.getLogger(__name__)


class TokenReviewer:
    """Knows callers by tokens of the cluster (ServiceAccounts, OIDC) that were made for our audience."""

    def __init__(self, kube: Kube, audience: str = AUDIENCE) -> None:
        self._kube, self._audience = kube, audience

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller as the API server knows them."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > _MAX_TOKEN:
            raise Unauthenticated(
                "the Authorization header must carry a token of the cluster under the scheme Bearer: "
                f"`kubectl create token SERVICEACCOUNT --audience {self._audience}` makes one"
            )
        spec = {"token": token, "audiences": [self._audience]}
        status = _review(self._kube, TOKEN_REVIEWS, spec, "who calls")
        # Only a plain true counts: where the token is not valid the field is missing.
        if status.get("authenticated") is not True:
            raise Unauthenticated(
                f"the token is unknown to the API server, has expired, or is not for the audience {self._audience}"
            )
        # An API server that knows nothing of audiences names none; then the token was not checked for ours.
        audiences = status.get("audiences")
        if not isinstance(audiences, list) or self._audience not in audiences:
            raise Unauthenticated(f"the token is not for the audience {self._audience}")
        user = status.get("user")
        if not isinstance(user, dict) or not isinstance(user.get("username"), str) or not user["username"]:
            raise Unavailable("the API server's TokenReview names no user")
        groups = user.get("groups") or []
        if not _is_texts(groups):
            raise Unavailable("the API server's TokenReview names no groups that can be read")
        extra, uid = user.get("extra") or {}, user.get("uid") or ""
        if not isinstance(uid, str) or not isinstance(extra, dict) or not all(map(_is_texts, extra.values())):
            raise Unavailable("the API server's TokenReview says of the user what can't be read")
        # With all of it, or a token that is limited to less than its owner's rights would have them all.
        told = tuple((str(key), tuple(values)) for key, values in extra.items())
        return Caller(name=user["username"], groups=tuple(groups), uid=uid, extra=told)


class AccessReviewer:
    """Asks the API server what a caller may in the namespace that a request is about: reading one tuning is
    `get tunings`, all of them `list tunings`, deciding `update tunings/approval`.

    Where no namespace is named it is the controller's own; with `everywhere`, all tunings are those of all namespaces.
    """

    def __init__(self, kube: Kube, namespace: str, *, everywhere: bool = False) -> None:
        self._kube, self._own, self._everywhere = kube, namespace, everywhere

    def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:
        """Whether `caller` may; `tuning` None asks for all of them."""
        if namespace is None:
            # An empty namespace asks for the right in the whole cluster, which no RoleBinding gives.
            namespace = "" if self._everywhere and tuning is None else self._own
        reading = {"verb": "list" if tuning is None else "get"}
        attributes = {
            "namespace": namespace,
            "group": TUNINGS.group,
            "version": TUNINGS.version,
            "resource": TUNINGS.plural,
            "name": tuning or "",
            **(reading if verb is Verb.READ else {"verb": "update", "subresource": "approval"}),
        }
        spec: Json = {"user": caller.name, "groups": list(caller.groups), "resourceAttributes": attributes}
        spec |= {"uid": caller.uid} if caller.uid else {}
        spec |= {"extra": {key: list(values) for key, values in caller.extra}} if caller.extra else {}
        status = _review(self._kube, SUBJECT_ACCESS_REVIEWS, spec, f"what {caller.name} may do")
        return status.get("allowed") is True and not status.get("denied")


def _is_texts(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _review(kube: Kube, kind: Resource, spec: Json, what: str) -> dict[str, Any]:
    try:
        answer = kube.create(kind, {"spec": spec}, total=REVIEW_SECONDS)
    except KubeError as error:
        # Also 401 and 403: those are about our own ServiceAccount. The caller, still unknown, is not told details.
        _log.warning("the API server can't be asked %s: %s", what, error)
        raise Unavailable(f"the API server can't be asked {what}; the controller's log says why") from error
    status = answer.get("status")
    if not isinstance(status, dict):
        raise Unavailable(f"the API server was asked {what}, and its {kind.kind} has no status")
    return status
