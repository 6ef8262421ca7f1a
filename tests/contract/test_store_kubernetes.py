"""The store on custom resources keeps to the contract of every store; tests/cluster runs it on a real API server."""

from collections.abc import Iterator

import pytest
from fake_kube import client_of, fake_kube
from test_store import StoreContract
from world import FakeClock

from tunewright.ports import Store
from tunewright.store.kubernetes import KubernetesStore


class TestKubernetesStoreOnAFake(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with fake_kube() as fake, client_of(fake.url) as kube:
            yield KubernetesStore(kube, "team", FakeClock())
