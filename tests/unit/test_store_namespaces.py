"""The stores of all namespaces: made as they are asked for, dropped with the last Tuning."""

from collections.abc import Iterator

import pytest
from fake_kube import Drop, FakeKube, Request, client_of, fake_kube
from kubernetes_store_cases import NAME, manifest
from restapi import trials, waiting
from tunings import tuning
from world import FakeClock

from tunewright.domain.phases import Phase
from tunewright.domain.state import PhaseChange
from tunewright.domain.step import update
from tunewright.kube.client import Kube
from tunewright.kube.resources import EVENTS, TRIALS, TUNINGS
from tunewright.ports import Conflict, PortError
from tunewright.store.kubernetes_trials import TrialMemory
from tunewright.store.memory import MemoryStore
from tunewright.store.namespaces import KubernetesStores
from tunewright.store.one import OneStore


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


def wide(kube: Kube, memory: TrialMemory | None = None) -> KubernetesStores:
    return KubernetesStores(kube, "own", FakeClock(), everywhere=True, trials=memory)


def apply(kube: Kube, *namespaces: str) -> None:
    for namespace in namespaces:
        kube.create(TUNINGS, manifest(), namespace)


def test_all_namespaces_are_listed_at_once(fake: FakeKube, kube: Kube) -> None:
    apply(kube, "b", "a", "own")
    fake.requests.clear()
    assert wide(kube).tunings() == [("a", NAME), ("b", NAME), ("own", NAME)]
    assert [request.path for request in fake.requests] == [TUNINGS.path(None)]
    one = KubernetesStores(kube, "own", FakeClock())
    assert one.tunings() == [("own", NAME)]
    assert one.of("a") is None
    assert one.of("own") is not None


def test_records_of_one_name_are_kept_apart(kube: Kube) -> None:
    apply(kube, "a", "b")
    stores = wide(kube)
    for namespace in ("a", "b"):
        store = stores.of(namespace)
        assert store is not None
        record = store.load(NAME)
        assert record is not None
        store.save(update(record, sentence=f"In {namespace}."))
        store.save_trial(NAME, trials()[0])
    for namespace in ("a", "b"):
        store = stores.of(namespace)
        assert store is not None
        record = store.load(NAME)
        assert record is not None
        assert record.sentence == f"In {namespace}."
        assert len(kube.list(TRIALS, namespace).items) == 1


def test_a_store_is_dropped_with_the_last_tuning_of_its_namespace(kube: Kube) -> None:
    apply(kube, "a", "b")
    stores = wide(kube)
    a, b = stores.of("a"), stores.of("b")
    stores.tunings()
    assert (stores.of("a"), stores.of("b")) == (a, b)
    kube.delete(TUNINGS, NAME, "b")
    stores.tunings()
    assert stores.of("a") is a
    assert stores.of("b") is not b
    for number in range(50):
        stores.of(f"nowhere-{number}")
    stores.tunings()
    assert len(stores._stores) == 1, "what callers make up is not kept"


def test_a_pass_that_holds_a_dropped_store_writes_to_no_other_tuning(kube: Kube) -> None:
    apply(kube, "a")
    stores = wide(kube)
    old = stores.of("a")
    assert old is not None
    record = old.load(NAME)
    assert record is not None
    kube.delete(TUNINGS, NAME, "a")
    stores.tunings()
    apply(kube, "a")
    with pytest.raises(Conflict):
        old.save(update(record, sentence="of the one that is gone"))
    old.save_trial(NAME, trials()[0])
    new = stores.of("a")
    assert new is not None
    assert new.load(NAME) is not None
    assert new.trials(NAME) == [], "it is owned by the Tuning that is gone, and goes with it"


def test_what_is_remembered_of_a_deleted_tuning_is_forgotten(kube: Kube) -> None:
    apply(kube, "a")
    other = manifest(tuning())
    kube.create(TUNINGS, {**other, "metadata": {"name": "other"}}, "a")
    stores = wide(kube, TrialMemory())
    store = stores.of("a")
    assert store is not None
    record = store.load(NAME)
    assert record is not None
    store.save(record)
    store.save_trial(NAME, trials()[0])
    assert store.trials(NAME) == trials()[:1]
    kube.delete(TUNINGS, NAME, "a")
    stores.tunings()
    assert stores.of("a") is store
    assert store._told == {}


def test_a_tuning_of_the_same_name_has_events_of_its_own(kube: Kube) -> None:
    change = PhaseChange(at=1.0, phase=Phase.REJECTED, sentence="No.")
    stores = wide(kube)
    for uid in range(2):
        apply(kube, "a")
        store = stores.of("a")
        assert store is not None
        record = store.load(NAME)
        assert record is not None
        store.save(update(record, history=(change,)))
        told = {event["involvedObject"]["uid"] for event in kube.list(EVENTS, "a").items}
        assert len(told) == uid + 1
        kube.delete(TUNINGS, NAME, "a")


def test_a_trial_whose_write_was_not_answered_is_read_again(fake: FakeKube, kube: Kube) -> None:
    """The loop takes trials from memory: it must not act on what it was before."""
    apply(kube, "a")
    store = wide(kube, TrialMemory()).of("a")
    assert store is not None
    store.save(waiting())
    store.save_trial(NAME, trials()[0])
    assert store.trials(NAME) == trials()[:1]
    changed = trials()[0].model_copy(update={"reason": "changed"})

    def after(request: Request) -> None:
        if request.method == "PATCH":
            raise Drop

    fake.after = after
    with pytest.raises(PortError):
        store.save_trial(NAME, changed)
    fake.after = lambda request: None
    assert store.trials(NAME) == [changed]


def test_one_store_is_that_of_its_namespace_alone() -> None:
    store = MemoryStore()
    store.save(waiting())
    local, own = OneStore(store), OneStore(store, "own")
    assert (local.own, local.of(""), local.of("own"), local.tunings()) == ("", store, None, [("", NAME)])
    assert (own.own, own.of("own"), own.of(""), own.tunings()) == ("own", store, None, [("own", NAME)])
    assert not local.everywhere
