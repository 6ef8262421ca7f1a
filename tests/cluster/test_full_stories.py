"""The long rest of the cluster's stories: deleted in every other phase, somebody else writing all the time."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from cluster_production import Traffic
from cluster_story import (
    NAMESPACE,
    arguments,
    follow,
    half_rolled,
    kubectl,
    made_for,
    production,
    reached,
    ready,
    trials_of,
    tuning,
    vllm,
)

from cluster import wait_for
from tunewright.kube.client import Kube, PatchType
from tunewright.kube.errors import KubeError
from tunewright.kube.resources import DEPLOYMENTS, NAMESPACES, TRIALS, TUNINGS

pytestmark = [pytest.mark.cluster_full, pytest.mark.timeout(1800)]

LONG = 900.0
ROLLED = ("Watching", "Promoted")
OTHERS = ("Pending", "Baselining", "Confirming", "AwaitingApproval", *ROLLED)


def test_deleted_in_every_other_phase_all_goes_and_production_serves(installed: Kube, prometheus: str) -> None:
    """The four that are asked for most are in the end-to-end story; `Watching` leaves the winner too."""
    with ThreadPoolExecutor(len(OTHERS)) as people:
        told = [people.submit(_deleted_in, installed, prometheus, phase) for phase in OTHERS]
    for each in told:
        each.result()


def _deleted_in(kube: Kube, prometheus: str, phase: str) -> None:
    name = f"gone-{phase.lower()}"
    address = production(kube, name, vllm())
    with Traffic(address, clients=1).running() as traffic:
        mode = "approve" if phase == "AwaitingApproval" else "auto"
        kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode=mode, trials=1))
        if phase != "Pending":  # that one is deleted as soon as it was applied
            follow(kube, name, reached(phase), LONG)
        kubectl("-n", NAMESPACE, "delete", "tuning", name, "--timeout=30s")
        wait_for(lambda: made_for(kube, name) == [] and trials_of(kube, name) == [], f"what {name} owned is gone", 240)
        wait_for(lambda: ready(kube, name) == 2, f"{name} serves", 240)
    assert traffic.failures == []
    # What ends half-way goes back; what has been rolled out whole stays.
    wait_for(
        lambda: ("--max-num-seqs 4" in " ".join(arguments(kube, name))) == (phase not in ROLLED), "it is as wanted"
    )
    assert not kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"].get("paused")


def test_deleted_while_no_controller_runs_all_goes_and_the_next_one_repairs_production(
    installed: Kube, prometheus: str
) -> None:
    kube, name = installed, "gone-alone"
    address = production(kube, name, vllm())
    with Traffic(address, clients=1).running() as traffic:
        kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto", trials=1))
        follow(kube, name, half_rolled, LONG)
        _controllers(kube, 0)
        kubectl("-n", NAMESPACE, "delete", "tuning", name, "--timeout=30s")
        wait_for(lambda: made_for(kube, name) == [], "what it owned is gone", 240)
        _controllers(kube, 1)
        wait_for(lambda: "--max-num-seqs 4" in " ".join(arguments(kube, name)), "production goes back", 240)
        wait_for(lambda: ready(kube, name) == 2, f"{name} serves", 240)
    assert traffic.failures == []
    spec = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]
    assert not spec.get("paused")
    assert not spec.get("minReadySeconds")


def test_somebody_who_writes_all_the_time_holds_nothing_up(installed: Kube, prometheus: str) -> None:
    """Every write of ours that names a version meets a newer one: each is read again, and nothing is done twice."""
    kube, name = installed, "busy"
    address = production(kube, name, vllm())
    with Traffic(address, clients=1).running() as traffic, _always_writing(kube, name):
        kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto", trials=2))
        follow(kube, name, reached("Promoted"), LONG)
    assert traffic.failures == []
    done = [trial["spec"] for trial in trials_of(kube, name)]
    assert len({(t["purpose"], t["round"], str(t["candidate"])) for t in done}) == len(done), "one ran twice"
    assert made_for(kube, name) == []


def test_the_namespace_can_be_deleted_in_the_middle(installed: Kube, prometheus: str) -> None:
    """Nothing of ours keeps it: no finalizer, nothing made again. The last test: the controller goes with it."""
    kube, name = installed, "last"
    address = production(kube, name, vllm())
    with Traffic(address, clients=1).running():
        kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto", trials=2))
        follow(kube, name, reached("Searching"), LONG)
    kube.delete(NAMESPACES, NAMESPACE)
    wait_for(lambda: NAMESPACE not in {n["metadata"]["name"] for n in kube.list(NAMESPACES).items}, "it is gone", 240)


@contextmanager
def _always_writing(kube: Kube, name: str) -> Iterator[None]:
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.02):
            note = {"metadata": {"annotations": {"example.com/seen": str(time.time_ns())}}}
            with suppress(KubeError):  # not there yet, or just written by the controller
                kube.patch(TUNINGS, name, note, NAMESPACE, type=PatchType.MERGE)
                kube.patch(DEPLOYMENTS, name, note, NAMESPACE, type=PatchType.MERGE)
                for trial in trials_of(kube, name)[-1:]:
                    kube.patch(TRIALS, trial["metadata"]["name"], note, NAMESPACE, type=PatchType.MERGE)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join(timeout=30)


def _controllers(kube: Kube, replicas: int) -> None:
    wanted = {"spec": {"replicas": replicas}}
    kube.patch(DEPLOYMENTS, "tunewright", wanted, NAMESPACE, type=PatchType.MERGE, subresource="scale")
    wait_for(lambda: ready(kube, "tunewright") == replicas, f"{replicas} controllers are ready")
