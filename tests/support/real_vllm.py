"""A real vLLM on the CPU for the tests marked `vllm`: where it is, how it is run, and what it may have left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

BINARY = Path(os.environ.get("TUNEWRIGHT_VLLM", "/nonexistent"))
MODEL = Path(os.environ.get("TUNEWRIGHT_VLLM_MODEL", "/nonexistent"))
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
START_TIMEOUT = 240.0
"""Seconds: a start takes 30 to 50 on a core of its own, and CI's cores are shared."""

Result = TypeVar("Result")

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not (os.access(BINARY, os.X_OK) and (MODEL / "config.json").is_file()),
        reason=f"needs a real vLLM: TUNEWRIGHT_VLLM ({BINARY}) and TUNEWRIGHT_VLLM_MODEL ({MODEL}); "
        "`make test-vllm` installs them",
    ),
]


def serve(core: int, *flags: str, model: Path = MODEL) -> list[str]:
    """A server's command, on one core."""
    pinned = ["taskset", "-c", str(core), str(BINARY), "serve", str(model), "--served-model-name", "small"]
    return [*pinned, "--enforce-eager", *flags, "--host", "127.0.0.1", "--port", "{port}"]


def shared_memory() -> set[str]:
    """Names of the segments of shared memory: they are memory that outlives the processes that made it."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def until(what: Callable[[], Result | None], seconds: float, why: Callable[[], str]) -> Result:
    """Call until it answers something true, or fail with `why` once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {why()}"
        time.sleep(0.5)  # the cores are for the servers
    return result
