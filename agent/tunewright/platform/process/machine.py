"""What the GPUs of a server are, where `nvidia-smi` is there to ask: vLLM's defaults and limits hang on it."""

import os
from collections.abc import Mapping
from dataclasses import replace

from tunewright.knobs.facts import ModelFacts
from tunewright.platform.process import gpu
from tunewright.ports import PortError


def with_machine(facts: ModelFacts, environment: Mapping[str, str]) -> ModelFacts:
    """`facts` with the GPUs that a server with this environment sees; as they were where that can't be told.

    Unlike GPUs count as the least of them. Never raises: a search knows less then, and asks the servers themselves.
    """
    try:
        found = gpu.kinds({**os.environ, **environment})
    except PortError:
        return facts
    if not found:
        return facts
    return replace(
        facts,
        gpu_count=len(found),
        gpu_name=min(found, key=lambda kind: kind.memory_gib).name,
        gpu_memory_gib=min(kind.memory_gib for kind in found),
        compute_capability=min(kind.capability for kind in found),
    )
