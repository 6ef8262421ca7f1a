"""The extra server beside the replicas: a one-replica Deployment of ours behind the target's Service.

Its pod gets the labels by which Services and monitors know production only once it has completed a token, and loses
them before it ends: so it never gets a request that it can't answer, and the target never counts it among its own.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from tunewright.domain.candidate import Candidate
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, Fenced, KubeConflict, KubeError, NotFound
from tunewright.kube.resources import DEPLOYMENTS, GROUP, PODS, SERVICES
from tunewright.kube.times import format_time, parse_time
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.names import OWNER_ANNOTATION, Owner, joined
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.steps import Extra
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides, own_pods, tie_to_node, tied_node
from tunewright.platform.process.http import call
from tunewright.ports import Clock, PortError

CANARY = "canary"
LEAVING = 5.0
"""Seconds until every node has learned that a pod gets no more requests."""

ROUTE = f"{GROUP}/http-route"
"""Annotation of the canary's Deployment: the HTTPRoute that gives it its share. Such a one has no owner reference: the
garbage collector would take away what the route still sends requests to, where no controller runs. Once the route is
known to send it nothing and is to send it nothing more, the annotation goes and the owner reference comes."""

_SERVES = f"{GROUP}/serves"
_BY_SERVICE, _BY_ROUTE = "true", "route"
_CANDIDATE, _RETIRED, _CONTAINER = f"{GROUP}/candidate", f"{GROUP}/retired", f"{GROUP}/container"
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class Stays(PortError):
    """The extra server can't be taken away now. The message says why, and what to do; all else may go on."""


class Canary:
    """Creates it, lets it in, takes it out, deletes it. Every call is one idempotent step."""

    def __init__(
        self,
        kube: Kube,
        owner: Owner,
        target: DeploymentRef,
        clock: Clock,
        prober: Prober,
        overrides: Overrides,
        drain_timeout: float,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`labels` are more labels that its pod gets with production's: what a router finds its servers by."""
        self.labels = dict(labels or {})
        self._kube, self._owner, self._target, self._clock = kube, owner, target, clock
        self._prober, self._overrides, self._drain_timeout = prober, overrides, drain_timeout
        self.name = joined(target.name, CANARY)

    def find(self) -> Json | None:
        """Its Deployment. Raises `PortError` for one of this name that is not ours."""
        try:
            found = self._kube.get(DEPLOYMENTS, self.name, self._target.namespace)
        except NotFound:
            return None
        if not self._owner.owns(found):
            route = (found["metadata"].get("annotations") or {}).get(ROUTE)
            first = f"; take it out of HTTPRoute {route} first" if route else ""
            raise PortError(
                f"Deployment {self.name} is not of Tuning {self._owner.name}; wait for it to go, or delete it{first}"
            )
        return found

    def pods(self) -> list[Json]:
        """Its pods, also while they end."""
        found = self._kube.list(PODS, self._target.namespace, labels=_selector(self.own_labels())).items
        return sorted(found, key=pods.name_of)

    def view(self, found: Json | None, its_pods: Sequence[Json]) -> Extra | None:
        """As the decision sees it; None when nothing of it is left."""
        if found is None:
            return Extra("", ending=True) if its_pods else None
        if found["metadata"].get("deletionTimestamp"):
            return Extra(self._hash(found), ending=True)
        retired = (found["metadata"].get("annotations") or {}).get(_RETIRED)
        serving = [pod for pod in its_pods if pods.is_ready(pod) and self.serves(pod)]
        return Extra(
            self._hash(found),
            ready=bool(serving),
            retiring=bool(retired) and not serving,  # while one still serves, it is to be retired (again)
            drained=bool(retired) and self._drained(parse_time(str(retired)), its_pods),
        )

    def create(
        self, deployment: Json, template: PodTemplate, candidate: Candidate, *, route: str | None = None
    ) -> None:
        """Create it from the target's pod template; `route` is the HTTPRoute that is to give it its share.

        Raises `Refused` where it can't be placed.
        """
        rendered = template.render(candidate)
        spec = rendered["spec"]
        self._overrides.put_on(spec, template.index)
        users = own_pods(self._kube, deployment)
        tie_to_node(spec, tied_node(self._kube, self._target.namespace, spec, users))
        annotations = (rendered.get("metadata") or {}).get("annotations") or {}
        body = {
            "metadata": self._owner.metadata(
                self.name,
                CANARY,
                **{
                    _CANDIDATE: json.dumps(dict(candidate.values), sort_keys=True),
                    _CONTAINER: template.name,
                },
            ),
            "spec": {
                "replicas": 1,
                "revisionHistoryLimit": 0,
                "strategy": {"type": "Recreate"},  # there is one GPU
                "progressDeadlineSeconds": deployment["spec"].get("progressDeadlineSeconds", 600),
                "selector": {"matchLabels": self.own_labels()},
                "template": {
                    "metadata": {"labels": self.own_labels(), "annotations": copy.deepcopy(annotations)},
                    "spec": spec,
                },
            },
        }
        if route is not None:
            body["metadata"]["annotations"] |= {ROUTE: route, OWNER_ANNOTATION: self._owner.uid}
            del body["metadata"]["ownerReferences"]
        try:
            self._kube.create(DEPLOYMENTS, body, self._target.namespace)
        except AlreadyExists:
            self.find()

    def let_in(self, deployment: Json, its_pods: Sequence[Json]) -> str:
        """Give a pod that has completed a token the labels of production. Why none is in yet; empty when one is."""
        pod, told = self.proven(its_pods)
        if pod is not None and self._served(pod) != _BY_SERVICE:
            self._label(pod, {**self.production_labels(deployment), _SERVES: _BY_SERVICE})
        return told

    def mark(self, deployment: Json, pod: Json) -> None:
        """Let it be known that a route sends it requests, with the labels by which monitors know production."""
        self._label(pod, {**self.routed_labels(deployment), _SERVES: _BY_ROUTE})

    def unmark(self, its_pods: Sequence[Json]) -> None:
        """A route sends it requests no more."""
        for pod in its_pods:
            if self.by_route(pod):
                self._label(pod, {_SERVES: None})

    def proven(self, its_pods: Sequence[Json]) -> tuple[Json | None, str]:
        """A pod that has completed a token; or None, and why there is none."""
        told = "its pod is not there yet"
        for pod in its_pods:
            if pods.ending(pod):
                continue
            template = PodTemplate(pod, self._target.container)
            told = pods.waiting_for(pod, template.name) or "it is starting"
            if not pods.is_ready(pod):
                continue
            unproven = self._prober.unproven(pod, template)
            if unproven is None:
                return pod, ""
            told = unproven
        return None, told

    def retire(self, found: Json, deployment: Json, its_pods: Sequence[Json]) -> None:
        """No new requests for it from now on. Raises `Stays`."""
        labels: dict[str, str] = deployment["spec"]["template"]["metadata"].get("labels") or {}
        given = {*labels, *self.labels, _SERVES} - self.own_labels().keys()  # whatever Services there are
        with self._leaving():
            if not (found["metadata"].get("annotations") or {}).get(_RETIRED):
                self._annotate(found, format_time(self._clock.now()))  # first: else a crash here lets it go undrained
            for pod in its_pods:
                if self.serves(pod):
                    self._label(pod, dict.fromkeys(sorted(given)))
            self._annotate(found, format_time(self._clock.now()))  # the time since when nothing new comes

    def keep(self, found: Json) -> None:
        """It is not to go after all; `let_in` gives it requests again."""
        self._annotate(found, None)

    def delete(self, found: Json) -> None:
        """Delete it, and its pod with it. No route may name it any more. Raises `Stays`."""
        with self._leaving():
            self._kube.delete(DEPLOYMENTS, self.name, self._target.namespace, uid=found["metadata"]["uid"])

    def unroute(self, found: Json) -> None:
        """No route names it any more, nor will: from now on it is one as without a route, and goes with its Tuning."""
        metadata = {"annotations": {ROUTE: None, OWNER_ANNOTATION: None}, "ownerReferences": [self._owner.reference]}
        with self._leaving():
            self._kube.patch(DEPLOYMENTS, found["metadata"]["name"], {"metadata": metadata}, self._target.namespace)

    @staticmethod
    def serves(pod: Json) -> bool:
        """Whether it is given requests."""
        return Canary._served(pod) is not None

    @staticmethod
    def by_route(pod: Json) -> bool:
        """Whether it is given requests by a route alone."""
        return Canary._served(pod) == _BY_ROUTE

    def production_labels(self, deployment: Json) -> dict[str, str]:
        """The target's labels without those that its own selector alone wants, which would count it in, and ours."""
        labels: dict[str, str] = deployment["spec"]["template"]["metadata"].get("labels") or {}
        wanted = {key for service in self.services(deployment) for key in service["spec"]["selector"]}
        own = set(deployment["spec"]["selector"].get("matchLabels") or {})
        only_own = own - wanted
        return {key: text for key, text in labels.items() if key not in only_own} | self.labels

    def routed_labels(self, deployment: Json) -> dict[str, str]:
        """Those of them that no Service of the target's selects by."""
        wanted = {key for service in self.services(deployment) for key in service["spec"]["selector"]}
        return {
            key: text for key, text in self.production_labels(deployment).items() if key not in wanted
        } | self.labels

    def services(self, deployment: Json) -> list[Json]:
        """The Services that send requests to the target."""
        labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
        found = self._kube.list(SERVICES, self._target.namespace).items
        return [each for each in found if (chosen := each["spec"].get("selector")) and chosen.items() <= labels.items()]

    def own_labels(self) -> dict[str, str]:
        """The labels by which its pods are found, and nobody else's."""
        return {**self._owner.metadata("", CANARY)["labels"], f"{GROUP}/target": joined(self._target.name)}

    @staticmethod
    def _served(pod: Json) -> str | None:
        return (pod["metadata"].get("labels") or {}).get(_SERVES)

    def _hash(self, found: Json) -> str:
        text = (found["metadata"].get("annotations") or {}).get(_CANDIDATE) or "{}"
        return Candidate(values=json.loads(text)).hash

    def _drained(self, retired: float, its_pods: Sequence[Json]) -> bool:
        since = self._clock.now() - retired
        if since < LEAVING:
            return False
        return since > self._drain_timeout or not any(_busy(pod, self._target.container) for pod in its_pods)

    def _label(self, pod: Json, labels: Mapping[str, str | None]) -> None:
        self._kube.patch(PODS, pods.name_of(pod), {"metadata": {"labels": dict(labels)}}, self._target.namespace)

    def _leaving(self) -> AbstractContextManager[None]:
        return staying(lambda error: f"{self.name} can't be taken away, and stays until it can: {error}")

    def _annotate(self, found: Json, retired: str | None) -> None:
        patch = {"metadata": {"annotations": {_RETIRED: retired}}}
        self._kube.patch(DEPLOYMENTS, found["metadata"]["name"], patch, self._target.namespace)


@contextmanager
def staying(told: Callable[[KubeError], str]) -> Iterator[None]:
    """What the API server refuses of taking a canary away keeps that, and nothing else. Raises `Stays` with `told`."""
    try:
        yield
    except (KubeConflict, Fenced):
        raise
    except KubeError as error:
        raise Stays(told(error)) from error


def _selector(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={text}" for key, text in labels.items())


def _busy(pod: Json, container: str | None) -> bool:
    """Whether requests are in it, by its own gauges. One that does not answer has none that could end well."""
    host = pods.address(pod)
    if host is None or not pods.is_ready(pod):
        return False
    try:
        text = call("GET", f"http://{host}:{PodTemplate(pod, container).port}/metrics", 2.0).text
    except PortError:
        return False
    return any(float(value) > 0 for value in _BUSY.findall(text))
