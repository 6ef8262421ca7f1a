"""What a pass over a tuning costs the API server, and what wakes the loop."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_kube import FakeKube, Request, client_of, fake_kube
from kubernetes_store_cases import decision

from tunewright.clock import SystemClock
from tunewright.cluster import Cluster, ClusterSettings
from tunewright.domain.candidate import Candidate
from tunewright.domain.step import update
from tunewright.kube.client import Kube
from tunewright.kube.resources import DEPLOYMENTS, LEASES, TRIALS, TUNINGS
from tunewright.kube.times import format_time
from tunewright.ports import PortError
from tunewright.store.kubernetes import KubernetesStore
from tunewright.store.kubernetes_seen import SeenTunings
from tunewright.store.kubernetes_trials import TrialMemory

sys.path.insert(0, str(Path(__file__).parents[2]))
made_up = importlib.import_module("benchmarks.controller_world")

NS = "team"
KINDS = ("awaiting", "promoted", "searching", "suspended", "rejected", "noImprovement", "failed", "recommended")


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:

        def just_made(request: Request) -> None:
            if request.method == "POST" and request.path.endswith("/pods"):
                key = f"{request.path}/{request.body['metadata']['name']}".strip("/")
                running.objects[key]["metadata"]["creationTimestamp"] = format_time(time.time())

        running.after = just_made
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        made_up.populate(client, NS, KINDS, {"": "http://127.0.0.1:1"}, trials=3)
        yield client


@pytest.fixture
def cluster(fake: FakeKube, kube: Kube) -> Iterator[Cluster]:
    """It leads, and has passed over every tuning once."""
    with ExitStack() as stack:
        made = Cluster(
            ClusterSettings(NS, "image"),
            SystemClock(),
            connect=lambda **more: stack.enter_context(client_of(fake.url, **more)),
        )
        made.election.step()
        fake.requests.clear()
        for one in made_up.names(KINDS):
            made.manager.queue.wake((NS, one.name))
        steps = 0
        while made.manager.once(0.0):
            steps += 1
            assert steps < 50
        assert steps > len(KINDS), "one search has more than one step to take"
        yield made


def store_of(cluster: Cluster) -> KubernetesStore:
    found = cluster.stores.of(NS)
    assert found is not None
    return found


def asked(fake: FakeKube) -> list[str]:
    return [f"{request.method} {request.path.rpartition(f'/{NS}/')[2].partition('/')[0]}" for request in fake.requests]


def passed(fake: FakeKube, cluster: Cluster, kind: str) -> list[str]:
    fake.requests.clear()
    cluster.manager.queue.wake((NS, f"llm-{KINDS.index(kind):03d}"))
    assert cluster.manager.once(0.0)
    return asked(fake)


PRODUCTION = ["GET deployments", "GET deployments", "GET pods", "GET replicasets", "GET pods"]


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("awaiting", ["GET tunings", "GET deployments"]),
        ("promoted", ["GET tunings", *PRODUCTION]),
        ("searching", ["GET tunings", "GET pods"]),
        ("suspended", ["GET tunings", "GET pods"]),
        ("rejected", ["GET tunings"]),
        ("noImprovement", ["GET tunings"]),
        ("failed", ["GET tunings"]),
        ("recommended", ["GET tunings"]),
    ],
)
def test_a_pass_at_rest_reads_each_thing_once_and_writes_nothing(
    fake: FakeKube, cluster: Cluster, kind: str, requests: list[str]
) -> None:
    assert passed(fake, cluster, kind) == requests


def test_all_trials_are_listed_once_for_all_tunings(fake: FakeKube, cluster: Cluster) -> None:
    lists = [r for r in fake.requests if r.method == "GET" and r.path.endswith("/trials")]
    assert len(lists) == 1
    assert "labelSelector" not in lists[0].query


def test_who_leads_again_after_a_gap_reads_the_trials_again(fake: FakeKube, kube: Kube, cluster: Cluster) -> None:
    """Somebody else may have led, and written, meanwhile."""
    name = f"llm-{KINDS.index('searching'):03d}"
    other = KubernetesStore(kube, NS, SystemClock())
    trial = other.trials(name)[-1]
    other.save_trial(name, update(trial, reason="by another"))
    assert [t.reason for t in store_of(cluster).trials(name)][-1] != "by another"
    cluster.election.release()
    lease = kube.get(LEASES, "tunewright", NS)
    assert lease["spec"]["holderIdentity"] == ""
    cluster.election.step()
    assert cluster.election.term == 2
    passed(fake, cluster, "searching")
    assert [t.reason for t in store_of(cluster).trials(name)][-1] == "by another"


def test_a_renewal_in_time_is_the_same_term(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.election.step()
    assert cluster.election.term == 1


def test_a_deleted_tuning_is_forgotten(fake: FakeKube, kube: Kube, cluster: Cluster) -> None:
    name = f"llm-{KINDS.index('rejected'):03d}"
    kube.delete(TUNINGS, name, NS)
    assert passed(fake, cluster, "rejected") == ["GET tunings", *PRODUCTION], "its target is looked at once more"
    assert cluster.manager.once(0.0) is False, "it does not come again by itself"
    assert passed(fake, cluster, "rejected") == [
        "GET tunings", "GET tunings", "GET deployments", "GET httproutes",
    ], "woken once more"  # fmt: skip


def test_the_scrape_asks_the_api_server_nothing(fake: FakeKube, cluster: Cluster) -> None:
    stop = threading.Event()
    cluster.wakes.start(stop)
    try:
        for _ in range(400):
            if b'tunewright_store_readable{namespace="team"} 1.0' in cluster.metrics.exposition():
                break
            stop.wait(0.05)
        before = sum("watch" not in r.query for r in fake.requests)
        text = cluster.metrics.exposition().decode()
        after = sum("watch" not in r.query for r in fake.requests)
    finally:
        stop.set()
    assert after == before
    for one in made_up.names(KINDS):
        assert f'tunewright_tuning_suspended{{namespace="team",tuning="{one.name}"}}' in text
        trials = (
            "tunewright_tuning_trials{" + f'namespace="team",outcome="complete",purpose="search",tuning="{one.name}"'
        )
        assert trials + "} 2.0" in text


# --- what wakes ---


class Told:
    """The watch of Tunings, told by hand."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        self.trouble: str | None = None
        self.trials = TrialMemory()
        self.seen = SeenTunings(NS, self.trials, SystemClock(), lambda: self.trouble)

    def hear(self, name: str, written: int = 0, **metadata: Any) -> bool:
        found = self.kube.get(TUNINGS, name, NS)
        return self.seen.heard((NS, name), {**found, "metadata": {**found["metadata"], **metadata}}, written)


@pytest.fixture
def told(kube: Kube) -> Told:
    made = Told(kube)
    for one in made_up.names(KINDS):
        assert made.hear(one.name), "one that was not there"
    return made


AWAITING = f"llm-{KINDS.index('awaiting'):03d}"


def test_an_edit_a_decision_and_a_deletion_wake(fake: FakeKube, kube: Kube, told: Told) -> None:
    assert not told.hear(AWAITING), "nothing happened"
    fake.edit(TUNINGS.path(NS, AWAITING), suspend=True)
    assert told.hear(AWAITING)
    KubernetesStore(kube, NS, SystemClock()).decide(AWAITING, decision("ana"))
    assert told.hear(AWAITING)
    assert told.hear(AWAITING, deletionTimestamp="2026-01-01T00:00:00Z")
    assert told.seen.heard((NS, AWAITING), None)
    assert (NS, AWAITING) not in told.seen.known()
    assert not told.seen.knows((NS, AWAITING))


def test_the_echo_of_our_own_write_does_not_wake_and_anothers_does(kube: Kube, told: Told) -> None:
    store = KubernetesStore(kube, NS, SystemClock())
    record = store.load(AWAITING)
    assert record is not None
    saved = store.save(update(record, sentence="more"))
    assert not told.hear(AWAITING, written=saved.version)
    store.save(update(saved, sentence="still more"))
    assert told.hear(AWAITING, written=saved.version), "somebody else wrote the record"


def test_its_version_changes_with_the_tuning_and_with_its_trials(kube: Kube, told: Told) -> None:
    before = told.seen.of(NS).version(AWAITING)
    assert told.seen.of(NS).version(AWAITING) == before
    store = KubernetesStore(kube, NS, SystemClock())
    trial = store.trials(AWAITING)[0]
    store.save_trial(AWAITING, update(trial, reason="another"))
    for found in kube.list(TRIALS, NS).items:
        told.trials.heard((NS, found["metadata"]["name"]), found)
    between = told.seen.of(NS).version(AWAITING)
    assert between != before
    assert told.seen.of(NS).trials(AWAITING)[0].reason == "another"
    store.decide(AWAITING, decision("ana"))
    told.hear(AWAITING)
    assert told.seen.of(NS).version(AWAITING) != between
    assert told.seen.of(NS).load(AWAITING) == store.load(AWAITING)


def test_while_a_watch_is_silent_nothing_is_shown(told: Told) -> None:
    assert told.seen.tunings() == told.seen.known()
    told.trouble = "the watch of tunings is silent"
    with pytest.raises(PortError, match="silent"):
        told.seen.tunings()


def test_the_benchmarks_mix_has_every_kind_that_is_tested_here() -> None:
    assert {*KINDS, "profiling"} == set(made_up.MIX)
    assert {"awaiting", "promoted", "searching", "suspended", "profiling"} <= set(made_up.MIX[:10])
    made = made_up.deployment("a", Candidate(values={"max_num_seqs": 4}), replicas=0)
    assert made["spec"]["replicas"] == 0
    assert DEPLOYMENTS.kind == "Deployment"
