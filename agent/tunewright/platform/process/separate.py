"""Whether production and each spare are on GPUs of their own: a trial on production's GPU would be an outage."""

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations

from tunewright.domain.tuning import Spare, Target
from tunewright.platform.process.command import REPLICA

VISIBLE = "CUDA_VISIBLE_DEVICES"


def spare_environment(target: Target, spare: Spare, slot: int = 0) -> dict[str, str]:
    """What a trial on spare `slot` gets beside the agent's own environment."""
    return _filled({**target.environment, **spare.environment}, target.replicas + slot)


def shared_gpus(target: Target, spare: Spare) -> str:
    """Why trials would run on a GPU of production's or of another trial's; empty when they would not.

    Empty also where nothing is known of GPUs: without `nvidia-smi`, and of servers that somebody else runs. Without
    replicas there is nobody of production's to share with.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    ours = target.command and target.replicas > 0 and not simulated(target.command)
    if ours and (found := _shared_with_production(target, spare)):
        return found
    return "" if simulated(spare.command or target.command) else _shared_by_spares(target, spare)


def _shared_with_production(target: Target, spare: Spare) -> str:
    where = f"set {VISIBLE} in spec.target.environment, and another GPU in spec.spare.environment"
    for slot in range(spare.parallelism):
        which = f"spare {slot}" if spare.parallelism > 1 else "the spare"
        devices = _devices(spare_environment(target, spare, slot))
        if devices is None:
            return f"{which} has no {VISIBLE}, so that trials would run on production's GPU: {where}"
        for index in range(target.replicas):
            own = _devices(_filled(target.environment, index))
            if own is None and devices:
                return f"production has no {VISIBLE}, so that it may take the spare's GPU: {where}"
            common = sorted(set(own or ()) & set(devices))
            if common:
                return f"replica {index} and {which} are both on GPU {', '.join(common)}: {where}"
    return ""


def _shared_by_spares(target: Target, spare: Spare) -> str:
    where = f"with spec.spare.parallelism above 1, set {VISIBLE}: '{{replica}}' in spec.spare.environment"
    devices = [_devices(spare_environment(target, spare, slot)) for slot in range(spare.parallelism)]
    for (one, mine), (other, theirs) in combinations(enumerate(devices), 2):
        if mine is None or theirs is None:
            return f"the spares have no {VISIBLE}, so that all would run on the same GPU: {where}"
        common = sorted(set(mine) & set(theirs))
        if common:
            return f"spares {one} and {other} are both on GPU {', '.join(common)}: {where}"
    return ""


def simulated(command: Sequence[str]) -> bool:
    """Whether the servers are simulated: then this machine's own GPUs are not theirs."""
    return any("tunewright" in word for word in command[:3])


def _filled(environment: Mapping[str, str], replica: int) -> dict[str, str]:
    return {name: text.replace(REPLICA, str(replica)) for name, text in environment.items()}


def _devices(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that are named; none at all for an empty value; None when the variable is not set."""
    text = environment.get(VISIBLE, os.environ.get(VISIBLE))
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
