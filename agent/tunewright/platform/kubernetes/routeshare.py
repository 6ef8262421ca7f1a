"""The canary's share by the weights of an HTTPRoute (Gateway API), while it is judged.

Its pod is then no server of the target's Service: a Service of its own selects it, and the route's rules name that one
beside the target's. The weight comes once the pod has completed a token and its endpoint is known, and goes before
anything of the canary does. For the roll the canary joins the target's Service, as without a route.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, Forbidden, Invalid, KubeError, NotAdmitted, NotFound
from tunewright.kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, HTTP_ROUTES, SERVICES
from tunewright.platform.kubernetes import httproute, pods
from tunewright.platform.kubernetes.canary import Canary
from tunewright.platform.kubernetes.fields import owned_elsewhere
from tunewright.platform.kubernetes.httproute import Record
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.routeback import Weighed, give_back, needs, release, see, taken_out, write
from tunewright.ports import PortError, Refused

_PORT_FIELDS = ("name", "protocol", "port", "targetPort", "appProtocol")
_LEAVE_OUT = "or leave promotion.canary.httpRoute out"


class RouteShare:
    """Every call is one idempotent step. Without a route's `name` nothing is to be done for new canaries."""

    def __init__(
        self, kube: Kube, owner: Owner, namespace: str, canary: Canary, name: str | None, take_over: bool
    ) -> None:
        self._kube, self._owner, self._namespace, self._canary = kube, owner, namespace, canary
        self.name, self._take_over = name, take_over

    def see(self, found: Json | None) -> Weighed | None:
        """The route that this canary's Deployment names; None for a canary without one. Where somebody deleted that
        Deployment: the route of the plan, if a canary of ours is still in it."""
        if found is not None:
            return see(self._kube, found)
        if self.name is None:
            return None
        try:
            route = self._kube.get(HTTP_ROUTES, self.name, self._namespace)
        except KubeError:
            return None  # pre-flight tells; what is left in it is found when it can be read again
        record = Record.read(route)
        left = record is not None and (record.uid, record.service) == (self._owner.uid, self._canary.name)
        return Weighed(self.name, route, record) if left else None

    # --- steps ---

    def let_in(self, weighed: Weighed, found: Json, deployment: Json, its_pods: Sequence[Json], share: float) -> None:
        """Give the canary its weight, once it has completed a token; only where the route can be read.

        Raises `Refused` where the route has no place.
        """
        pod, _ = self._canary.proven(its_pods)
        if pod is None or self._canary.serves(pod):
            return
        if weighed.record is None:
            route, service = self._place(weighed, deployment)
            with _rights(weighed.name):
                if not self._service_there(found, service) or not self._routed(pod):
                    return
                record = Record.of(self._owner, route, service["metadata"]["name"], self._canary.name, share)
                write(self._kube, route, record.after, record.text())
        self._canary.mark(deployment, pod)

    def before(
        self,
        weighed: Weighed,
        found: Json,
        deployment: Json,
        its_pods: Sequence[Json],
        *,
        by_weight: bool,
        leaving: bool,
        alive: bool,
    ) -> bool:
        """What the route needs before the canary or the target may take their own step. Whether there was something.

        Raises `Stays` where the canary can't be taken out of it.
        `by_weight`: it is to have its share by weight. `leaving`: it is to go. `alive`: it can answer.
        """
        ending = bool(found["metadata"].get("deletionTimestamp"))
        if not leaving and not ending and not by_weight and self._joins(deployment, its_pods):
            return True
        if weighed.record is None:
            if ending or (by_weight and not leaving):
                return False
            self._canary.unroute(found)
            return True
        in_vain = by_weight and not (alive and _goes_with(self._own_service(), found))
        if not (leaving or ending or not by_weight or in_vain):
            return False
        if in_vain:
            self._canary.unmark(its_pods)
        give_back(self._kube, weighed)
        return True

    def give_back(self, weighed: Weighed | None) -> bool:
        """Take the canary out of the route, if it is in one. Whether anything was written. Raises `Stays`."""
        return weighed is not None and give_back(self._kube, weighed)

    def release(self, found: Json | None) -> str | None:
        """For a tuning that ends or was deleted half-way. What was done; None when there was nothing to do.

        Raises `Stays` where the route may go on sending the canary requests.
        """
        if found is not None:
            return release(self._kube, found)
        left = self.see(None)
        return taken_out(left) if left is not None and give_back(self._kube, left) else None

    def _joins(self, deployment: Json, its_pods: Sequence[Json]) -> bool:
        """Let it into the target's Service before its weight is taken away. Whether that is still to be waited for."""
        waits = any(self._canary.by_route(pod) and pods.is_ready(pod) and not pods.ending(pod) for pod in its_pods)
        if waits:
            self._canary.let_in(deployment, its_pods)
        return waits

    def _place(self, weighed: Weighed, deployment: Json) -> tuple[Json, Json]:
        """The route, and the one Service of the target's that it sends to."""
        if weighed.route is None:
            raise Refused(f"HTTPRoute {weighed.name} is gone, which was to give the canary its share")
        services = {each["metadata"]["name"]: each for each in self._canary.services(deployment)}
        found = httproute.named(weighed.route, list(services))
        if len(found) != 1:
            raise Refused(_no_place(weighed.name, list(services), found))
        return weighed.route, services[found[0]]

    def _service_there(self, found: Json, theirs: Json) -> bool:
        """Whether the canary's own Service is there; it is made where it is missing, and goes with the Deployment."""
        mine = self._own_service()
        if mine is None:
            body = self._service(theirs)
            metadata = found["metadata"]
            body["metadata"]["ownerReferences"] = [DEPLOYMENTS.owner(metadata["name"], metadata["uid"])]
            self._kube.create(SERVICES, body, self._namespace)
            return False
        if not mine["metadata"].get("ownerReferences"):
            raise PortError(f"Service {self._canary.name} is not of Tuning {self._owner.name}; delete it")
        return _goes_with(mine, found)  # else an earlier canary's, which is about to go

    def _own_service(self) -> Json | None:
        listed = self._kube.list(SERVICES, self._namespace).items
        return next((each for each in listed if each["metadata"]["name"] == self._canary.name), None)

    def _service(self, theirs: Json) -> Json:
        ports = [
            {field: port[field] for field in _PORT_FIELDS if field in port}
            for port in theirs["spec"].get("ports") or []
        ]
        metadata = {"name": self._canary.name, "labels": self._canary.own_labels()}
        return {"metadata": metadata, "spec": {"selector": self._canary.own_labels(), "ports": ports}}

    def _routed(self, pod: Json) -> bool:
        """Whether gateways can know where the canary is: a weight without an endpoint would be refused requests."""
        return any(
            (endpoint.get("targetRef") or {}).get("name") == pods.name_of(pod)
            and (endpoint.get("conditions") or {}).get("ready") is not False
            for each in self._slices()
            for endpoint in each.get("endpoints") or []
        )

    def _slices(self) -> Sequence[Json]:
        served = self._kube.served(*ENDPOINT_SLICES) or ENDPOINT_SLICES[0]
        chosen = f"kubernetes.io/service-name={self._canary.name}"
        return self._kube.list(served, self._namespace, labels=chosen).items

    # --- telling ---

    def foreign(self, weighed: Weighed, its_pods: Sequence[Json], *, by_weight: bool) -> str | None:
        """What somebody else changed in the route that holds the rollout; None when nothing does."""
        route, record = weighed.route, weighed.record
        if record is None or route is None:
            taken = by_weight and any(self._canary.by_route(pod) for pod in its_pods)
            how = f"removed HTTPRoute {weighed.name}" if route is None else f"took the canary out of {weighed.name}"
            return f"somebody else {how}: it gets no requests any more" if taken else None
        return httproute.changed(route, record) if by_weight else httproute.stuck(route, record)

    def obstacles(self, deployment: Json) -> Iterator[str]:
        """Why the route could not give a canary its share. Reads, and writes dry."""
        if self.name is None:
            return
        try:
            yield from self._obstacles(self.name, deployment)
        except Forbidden as error:
            yield f"{needs(self.name, error)}; {_LEAVE_OUT}"

    def _obstacles(self, name: str, deployment: Json) -> Iterator[str]:
        try:
            route = self._kube.get(HTTP_ROUTES, name, self._namespace)
        except NotFound:
            installed = self._kube.served(HTTP_ROUTES) is not None
            missing = f"there is no HTTPRoute {name} in namespace {self._namespace}: name it right, {_LEAVE_OUT}"
            yield missing if installed else f"this cluster has no Gateway API (v1), and so no HTTPRoute: {_LEAVE_OUT}"
            return
        yield from (f"HTTPRoute {name}: {each}; {_LEAVE_OUT}" for each in owned_elsewhere(route))
        record, theirs = Record.read(route), httproute.managers(route)
        if record is not None:
            yield f"Tuning {record.tuning} has its canary in HTTPRoute {name}, or left it there: let it end first"
        elif httproute.has(route, self._canary.name):
            yield f"HTTPRoute {name} sends to Service {self._canary.name} already: take that backendRef out of it"
        if theirs and not self._take_over:
            yield (
                f"{', '.join(theirs)} owns .spec.rules of HTTPRoute {name}: with promotion.takeOver: true they are "
                "taken over while the canary is judged, and given back"
            )
        if any(self._counted_in(service, deployment) for service in self._canary.services(deployment)):
            yield "promotion.canary.labels let the target's Service select the canary beside its weight: leave one out"
        try:
            yield from self._dry(route, deployment)
        except Refused as refused:
            yield str(refused)

    def _counted_in(self, service: Json, deployment: Json) -> bool:
        labels = self._canary.routed_labels(deployment) | self._canary.own_labels()
        return bool(service["spec"]["selector"].items() <= labels.items())

    def _dry(self, route: Json, deployment: Json) -> Iterator[str]:
        name = route["metadata"]["name"]
        _, service = self._place(Weighed(name, route, None), deployment)
        record = Record.of(self._owner, route, service["metadata"]["name"], self._canary.name, 0.5)
        self._slices()  # whether they may be read
        try:
            self._kube.create(SERVICES, self._service(service), self._namespace, dry_run=True)
            answer = write(self._kube, route, record.after, record.text(), dry_run=True)
        except AlreadyExists:
            yield f"Service {self._canary.name} is there already: wait for it to go, or delete it"
            return
        except (Invalid, NotAdmitted) as error:
            yield f"the API server would refuse the canary in HTTPRoute {name}: {error}"
            return
        if httproute.backends(answer) != record.after:
            yield f"something (a webhook?) changes the weights that are written into HTTPRoute {name}: {_LEAVE_OUT}"

    def notes(self, deployment: Json) -> Iterator[str]:
        """What whoever approves should know of it."""
        if self.name is None:
            return
        try:
            route = self._kube.get(HTTP_ROUTES, self.name, self._namespace)
        except (NotFound, Forbidden):
            return  # an obstacle, told as such
        yield (
            f"HTTPRoute {self.name} sends the canary's share by weight: should it die while no controller runs, that "
            "share is refused until one does"
        )
        theirs = httproute.managers(route)
        if theirs:
            yield f"{', '.join(theirs)} owns its rules: an apply of theirs meanwhile takes the canary out of it"
        if not httproute.accepted(route):
            yield f"no Gateway has accepted HTTPRoute {self.name}: the canary would get no requests"
        hidden = self._canary.production_labels(deployment).keys() - self._canary.routed_labels(deployment).keys()
        if hidden:
            yield f"meanwhile the canary has no label {', '.join(sorted(hidden))}: monitors must find it by others"


@contextmanager
def _rights(name: str) -> Iterator[None]:
    """A right that is missing in the middle of a rollout is named with what grants it."""
    try:
        yield
    except NotAdmitted:
        raise
    except Forbidden as error:
        raise PortError(f"{needs(name, error)}; until then the canary gets no share") from error


def _goes_with(service: Json | None, found: Json) -> bool:
    """Whether the garbage collector takes this Service away with that Deployment, and not before."""
    owners = service["metadata"].get("ownerReferences") or [] if service is not None else []
    return found["metadata"]["uid"] in {each.get("uid") for each in owners}


def _no_place(name: str, services: Sequence[str], found: Sequence[str]) -> str:
    if not services:
        return f"no Service selects the target's pods, so HTTPRoute {name} can't name it: {_LEAVE_OUT}"
    if not found:
        told = " or ".join(services)
        return f"no rule of HTTPRoute {name} sends requests to Service {told}: name the route that does, {_LEAVE_OUT}"
    return f"HTTPRoute {name} sends to several Services of the target ({', '.join(found)}): let it name one of them"
