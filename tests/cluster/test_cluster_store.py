"""The store's cases against a real API server."""

import pytest
from kubernetes_store_cases import NAME, KubernetesStoreCases, fresh
from restapi import trials, waiting
from test_store import StoreContract
from world import FakeClock

from cluster import wait_for
from tunewright.kube.client import Kube
from tunewright.kube.resources import TRIALS
from tunewright.store.kubernetes import KubernetesStore

pytestmark = pytest.mark.cluster


class TestKubernetesStoreOnACluster(KubernetesStoreCases):
    """The same as against the fake."""

    def test_trials_go_with_their_tuning(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        store.save(waiting())
        store.save_trial(NAME, trials()[0])
        store.delete(NAME)
        wait_for(lambda: not kube.list(TRIALS, namespace).items, "the garbage collector takes the trials")

    def test_status_is_not_too_large_for_a_real_one(self, store: KubernetesStore) -> None:
        record = store.save(waiting(sentence="x" * 100_000))
        assert fresh(store) == record


class TestKubernetesStoreByTheContract(StoreContract):
    """What every store keeps to."""

    @pytest.fixture
    def store(self, kube: Kube, namespace: str) -> KubernetesStore:
        return KubernetesStore(kube, namespace, FakeClock())
