"""Rollouts that nobody finishes any more, because their Tuning was deleted while no controller was there."""

import logging
from collections.abc import Container

from tunewright.kube.client import Kube
from tunewright.kube.resources import DEPLOYMENTS
from tunewright.platform.kubernetes.fields import Note
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.platform.kubernetes.workload import DeploymentRef
from tunewright.ports import Clock, PortError, Refused

_log = logging.getLogger(__name__)


def release_abandoned(kube: Kube, namespace: str | None, live: Container[str], clock: Clock) -> list[str]:
    """Bring every Deployment of the namespace back whose rollout belongs to no Tuning of `live` (uids).

    `namespace` None: of all namespaces. To be called by the leader when it begins. What was done; what can't be done
    is logged, and hinders nothing.
    """
    done = []
    for deployment in kube.list(DEPLOYMENTS, namespace).items:
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
