"""Whether production and the spare are on GPUs of their own: a trial on production's GPU would be an outage."""

import os
import shutil
from collections.abc import Mapping

from tunewright.domain.tuning import Spare, Target
from tunewright.platform.process.command import REPLICA

VISIBLE = "CUDA_VISIBLE_DEVICES"


def spare_environment(target: Target, spare: Spare) -> dict[str, str]:
    """What a trial gets beside the agent's own environment."""
    return _filled({**target.environment, **spare.environment}, target.replicas)


def shared_gpus(target: Target, spare: Spare) -> str:
    """Why trials would run on a GPU of production's; empty when they would not, or where nothing is known of GPUs.

    Without `nvidia-smi` nothing is known, and of servers that somebody else runs neither. Without replicas there is
    nobody to share with.
    """
    nobody_else = not target.command or target.replicas == 0
    if nobody_else or _simulated(target.command) or shutil.which("nvidia-smi") is None:
        return ""
    where = f"set {VISIBLE} in spec.target.environment, and another GPU in spec.spare.environment"
    spares = _devices(spare_environment(target, spare))
    if spares is None:
        return f"the spare has no {VISIBLE}, so that trials would run on production's GPU: {where}"
    for index in range(target.replicas):
        own = _devices(_filled(target.environment, index))
        if own is None and spares:
            return f"production has no {VISIBLE}, so that it may take the spare's GPU: {where}"
        common = sorted(set(own or ()) & set(spares))
        if common:
            return f"replica {index} and the spare are both on GPU {', '.join(common)}: {where}"
    return ""


def _simulated(command: tuple[str, ...]) -> bool:
    return any("tunewright" in word for word in command[:3])


def _filled(environment: Mapping[str, str], replica: int) -> dict[str, str]:
    return {name: text.replace(REPLICA, str(replica)) for name, text in environment.items()}


def _devices(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that are named; none at all for an empty value; None when the variable is not set."""
    text = environment.get(VISIBLE, os.environ.get(VISIBLE))
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
