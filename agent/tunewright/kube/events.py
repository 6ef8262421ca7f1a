"""Events (core/v1): what `kubectl describe` shows below an object."""

import logging

from tunewright.domain.candidate import content_hash
from tunewright.domain.redact import redact
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, KubeError
from tunewright.kube.resources import EVENTS
from tunewright.kube.times import format_time

COMPONENT = "tunewright"

_MESSAGE_LIMIT = 1024
"""What the API server takes."""

_log = logging.getLogger(__name__)


def emit(kube: Kube, about: Json, *, reason: str, message: str, at: float, warning: bool = False) -> bool:
    """Tell an Event about a whole object; False when that failed, which is logged and hinders nothing.

    Its name follows from what it says, so that telling it again does nothing.
    """
    metadata = about["metadata"]
    name = f"{metadata['name']}.{content_hash([metadata['uid'], reason, message, at])}"
    message = redact(message)
    event: Json = {
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message if len(message) <= _MESSAGE_LIMIT else f"{message[: _MESSAGE_LIMIT - 4]} ...",
        "firstTimestamp": format_time(at),
        "lastTimestamp": format_time(at),
        "count": 1,
        "source": {"component": COMPONENT},
    }
    try:
        kube.create(EVENTS, event, metadata["namespace"])
    except AlreadyExists:
        return True
    except KubeError as error:
        _log.warning("the Event %s of %s could not be told: %s", reason, metadata["name"], error)
        return False
    return True
