"""Rollouts that nobody finishes any more, because their Tuning was deleted while no controller was there."""

import logging
from collections.abc import Callable, Container
from functools import partial

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Forbidden, KubeError, NotFound
from tunewright.kube.resources import DEPLOYMENTS, HTTP_ROUTES, TUNING_LABEL
from tunewright.platform.kubernetes.canary import CANARY, ROUTE
from tunewright.platform.kubernetes.fields import Note
from tunewright.platform.kubernetes.httproute import Record
from tunewright.platform.kubernetes.names import ROLE_LABEL, Owner, owner_uids
from tunewright.platform.kubernetes.routeback import release, release_orphan
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import Clock, Conflict, PortError, Refused

_TRIES = 5
"""A route that somebody writes meanwhile is read again so often."""

_log = logging.getLogger(__name__)


def release_abandoned(kube: Kube, namespace: str | None, live: Container[str], clock: Clock) -> list[str]:
    """Bring every Deployment of the namespace back whose rollout belongs to no Tuning of `live` (uids), and every
    HTTPRoute whose canary does, or was deleted by somebody.

    `namespace` None: of all namespaces. To be called by the leader when it begins. What was done; what can't be done
    is logged, and hinders nothing.
    """
    done = []
    for deployment in kube.list(DEPLOYMENTS, namespace).items:
        done += _canary_released(kube, deployment, live)
        note = Note.read(deployment)
        if note is None or not note.active or note.uid in live:
            continue
        metadata = deployment["metadata"]
        ref = DeploymentRef(metadata["namespace"], metadata["name"], str(note.leaves["name"]))
        try:
            told = DeploymentTarget(kube, Owner(note.tuning, note.uid), ref, clock).release()
        except (PortError, Refused) as error:
            left = f"{note.tuning} left on {ref.namespace}/{ref.name}"
            _log.warning("the rollout that Tuning %s can't be ended: %s", left, error)
            continue
        if told:
            done.append(f"{told}: Tuning {ref.namespace}/{note.tuning} was deleted half-way")
    return done + _orphans_released(kube, namespace)


def _canary_released(kube: Kube, found: Json, live: Container[str]) -> list[str]:
    """What was done of a canary in an HTTPRoute, if that is what `found` is and its Tuning is gone."""
    metadata, uids = found["metadata"], owner_uids(found)
    labels = metadata.get("labels") or {}
    ours = labels.get(ROLE_LABEL) == CANARY and ROUTE in (metadata.get("annotations") or {})
    if not ours or not uids or any(uid in live for uid in uids):
        return []
    tuning = f"{metadata['namespace']}/{labels.get(TUNING_LABEL)}"
    told = _tried(partial(release, kube, found), tuning)
    return [f"{told}: Tuning {tuning} was deleted half-way"] if told else []


def _orphans_released(kube: Kube, namespace: str | None) -> list[str]:
    """What was done of HTTPRoutes whose canary's Deployment somebody deleted while nobody looked."""
    try:
        routes = kube.list(HTTP_ROUTES, namespace).items
    except (NotFound, Forbidden):  # no Gateway API, or not our business: no canary came into one
        return []
    except KubeError as error:  # a Tuning that lives looks at its own; no leader is kept from beginning by it
        _log.warning("whether an HTTPRoute names a canary that was deleted is not known: %s", error)
        return []
    done = []
    for route in routes:
        record, metadata = Record.read(route), route["metadata"]
        if record is None:
            continue
        tuning = f"{metadata['namespace']}/{record.tuning}"
        told = _tried(partial(release_orphan, kube, metadata["namespace"], metadata["name"]), tuning)
        if told:
            done.append(f"{told}: somebody deleted the canary of Tuning {tuning}")
    return done


def _tried(step: Callable[[], str | None], tuning: str) -> str | None:
    """What the step did. A conflict is tried again; what can't be done is logged."""
    for left in reversed(range(_TRIES)):
        try:
            return step()
        except PortError as error:
            if not (isinstance(error, Conflict) and left):
                _log.warning("the canary of Tuning %s can't be taken out of its HTTPRoute: %s", tuning, error)
                break
    return None
