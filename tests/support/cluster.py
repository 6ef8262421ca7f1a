"""Waiting for what a cluster does in its own time."""

import time
from collections.abc import Callable

import pytest

PATIENCE = 60.0
"""Seconds; a cluster on a slow machine takes its time."""


def wait_for(what: Callable[[], object], why: str) -> None:
    """Ask until it answers something true."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE:g}s: {why}")
        time.sleep(0.1)
