"""How a canary goes out of its HTTPRoute: by its tuning, by whoever ends that, and by the next controller.

Where the route can't be asked or written, the canary stays: requests may still come to it.
"""

from dataclasses import dataclass
from functools import partial

from tunewright.kube.client import FIELD_MANAGER, Json, Kube
from tunewright.kube.errors import Forbidden, KubeError, NotAdmitted, NotFound
from tunewright.kube.resources import DEPLOYMENTS, HTTP_ROUTES
from tunewright.platform.kubernetes import httproute
from tunewright.platform.kubernetes.canary import ROUTE, Stays, staying
from tunewright.platform.kubernetes.httproute import RECORD_ANNOTATION, Record
from tunewright.platform.kubernetes.names import owner_uids


@dataclass(frozen=True)
class Weighed:
    """The HTTPRoute that gives a canary its share, read once per step."""

    name: str
    route: Json | None  # None: it is gone, or can't be read
    record: Record | None  # ours, on the route: the canary is in it
    unknown: str = ""  # why it can't be read, so that it may be sending the canary requests; what to do


def see(kube: Kube, found: Json) -> Weighed | None:
    """The route that this canary's Deployment names; None for a canary without one."""
    metadata = found["metadata"]
    name = (metadata.get("annotations") or {}).get(ROUTE)
    if not name:
        return None
    try:
        route = kube.get(HTTP_ROUTES, name, metadata["namespace"])
    except NotFound:
        return Weighed(name, None, None)
    except KubeError as error:
        return Weighed(name, None, None, held(name, error))
    record = Record.read(route)
    if record is None and httproute.has(route, metadata["name"]):  # somebody took the annotation alone
        return Weighed(name, route, Record.lost(metadata["name"]))
    ours = record is not None and record.uid in owner_uids(found) and record.service == metadata["name"]
    return Weighed(name, route, record if ours else None)


def give_back(kube: Kube, weighed: Weighed) -> bool:
    """Let the route be as it was, and its rules belong to whom they belonged. Whether anything was written.

    Raises `Stays` where the canary can't be taken out: it may go on getting requests.
    """
    route, record = weighed.route, weighed.record
    if weighed.unknown:
        raise Stays(weighed.unknown)
    if route is None or record is None:
        return False
    told = httproute.stuck(route, record)
    if told:
        raise Stays(told)
    with staying(partial(held, weighed.name)):
        write(kube, route, httproute.without(route, record), None, manager=record.manager)
    return True


def release(kube: Kube, found: Json) -> str | None:
    """Take a canary that nobody looks after any more out of its route, and delete it. What was done; None: nothing.

    Raises `Stays`.
    """
    weighed, metadata = see(kube, found), found["metadata"]
    if weighed is None:
        return None
    give_back(kube, weighed)
    kube.delete(DEPLOYMENTS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
    return taken_out(weighed)


def release_orphan(kube: Kube, namespace: str, name: str) -> str | None:
    """Take a canary out of its route whose Deployment is gone. What was done; None: there is no such canary in it."""
    route = kube.get(HTTP_ROUTES, name, namespace)
    record = Record.read(route)
    if record is None:
        return None
    try:
        if record.uid in owner_uids(kube.get(DEPLOYMENTS, record.service, namespace)):
            return None
    except NotFound:
        pass
    left = Weighed(name, route, record)
    if httproute.stuck(route, record):
        return f"HTTPRoute {name} sends all of a rule's requests to {record.service}, which is gone: weigh another"
    give_back(kube, left)
    return taken_out(left)


def taken_out(weighed: Weighed) -> str:
    """As people are told of it."""
    return f"HTTPRoute {weighed.name} is without the canary again"


def write(
    kube: Kube,
    route: Json,
    wanted: httproute.Backends,
    record: str | None,
    *,
    manager: str = FIELD_MANAGER,
    dry_run: bool = False,
) -> Json:
    """Weights and record in one write, refused where the route changed since it was read."""
    metadata = route["metadata"]
    patch: Json = {
        "metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": {RECORD_ANNOTATION: record}}
    }
    if wanted != httproute.backends(route):
        patch["spec"] = {"rules": httproute.rules_with(route, wanted)}
    return kube.patch(HTTP_ROUTES, metadata["name"], patch, metadata["namespace"], manager=manager, dry_run=dry_run)


def held(name: str, error: KubeError) -> str:
    """Why a canary can't be taken out of its route, what that means, and what to do."""
    asks_rights = isinstance(error, Forbidden) and not isinstance(error, NotAdmitted)
    why = needs(name, error) if asks_rights else f"HTTPRoute {name} can't be read or written: {error}"
    return f"{why}. Until then the canary stays, since the route may send it requests; then it goes on by itself"


def needs(name: str, error: KubeError) -> str:
    """Which right is missing, and what grants it."""
    return (
        f"the share by HTTPRoute {name} needs more rights ({error.message}): `kubectl apply -k deploy/gateway-api`, "
        "with Helm gatewayApi.enabled"
    )
