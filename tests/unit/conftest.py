"""What the tests of the Kubernetes platform share: a fake cluster, and the vLLM servers that its pods seem to run."""

import pytest
from fake_cluster import FakeCluster
from fake_production import Servers, new_cluster


@pytest.fixture
def cluster() -> FakeCluster:
    """One with nodes, and nothing on them."""
    return new_cluster()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    """They answer what the test says."""
    return Servers(monkeypatch)
