"""Waiting for what a cluster does in its own time."""

import time
from collections.abc import Callable

import pytest

PATIENCE = 120.0
"""Seconds; a cluster on a slow machine takes its time."""


def wait_for(what: Callable[[], object], why: str, seconds: float = PATIENCE) -> None:
    """Ask until it answers something true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g}s: {why}")
        time.sleep(0.1)
