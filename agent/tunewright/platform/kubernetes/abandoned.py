"""Rollouts that nobody finishes any more, because their Tuning was deleted while no controller was there."""

import logging
from collections.abc import Container

from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import DEPLOYMENTS, TUNING_LABEL
from tunewright.platform.kubernetes.canary import ROUTE
from tunewright.platform.kubernetes.fields import Note
from tunewright.platform.kubernetes.names import Owner, owner_uids
from tunewright.platform.kubernetes.routeshare import release
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import Clock, Conflict, PortError, Refused

_TRIES = 5
"""A route that somebody writes meanwhile is read again so often."""

_log = logging.getLogger(__name__)


def release_abandoned(kube: Kube, namespace: str | None, live: Container[str], clock: Clock) -> list[str]:
    """Bring every Deployment of the namespace back whose rollout belongs to no Tuning of `live` (uids), and every
    HTTPRoute with a canary of one.

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
    return done


def _canary_released(kube: Kube, found: Json, live: Container[str]) -> list[str]:
    """What was done of a canary in an HTTPRoute, if that is what `found` is and its Tuning is gone."""
    metadata = found["metadata"]
    if ROUTE not in (metadata.get("annotations") or {}) or any(uid in live for uid in owner_uids(found)):
        return []
    tuning = f"{metadata['namespace']}/{(metadata.get('labels') or {}).get(TUNING_LABEL)}"
    for left in reversed(range(_TRIES)):
        try:
            told = release(kube, found)
        except PortError as error:
            if not (isinstance(error, Conflict) and left):
                _log.warning("the canary of Tuning %s can't be taken out of its HTTPRoute: %s", tuning, error)
                break
        else:
            return [f"{told}: Tuning {tuning} was deleted half-way"] if told else []
    return []
