"""Everything fails once around one tuning, and it is promoted all the same; deleted half-way, nothing is left."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cluster_production import Traffic
from cluster_story import (
    NAMESPACE,
    arguments,
    controller_pods,
    follow,
    in_phase,
    kubectl,
    made_for,
    phase,
    production,
    ready,
    status,
    trials_of,
    tuning,
    vllm,
)

from cluster import wait_for
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.errors import KubeError
from tunewright.kube.resources import DEPLOYMENTS, LEASES, TUNINGS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

MINUTE = 60.0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process answers nobody, and closes no connection: what a network that swallows packets looks like."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_controller(kube: Kube) -> None:
    """As a node that dies: no time to say goodbye."""
    names = controller_pods(kube)
    kubectl("-n", NAMESPACE, "delete", "pod", *names, "--grace-period=0", "--force")
    wait_for(lambda: set(controller_pods(kube)) - set(names), "another controller pod is made")


def holder(kube: Kube) -> str:
    """Who holds the lease."""
    return str(kube.get(LEASES, "tunewright", NAMESPACE)["spec"].get("holderIdentity") or "")


def scaled(kube: Kube, replicas: int) -> None:
    """So many controllers."""
    kube.patch(
        DEPLOYMENTS,
        "tunewright",
        {"spec": {"replicas": replicas}},
        NAMESPACE,
        type=PatchType.MERGE,
        subresource="scale",
    )
    wait_for(lambda: ready(kube, "tunewright") == replicas, f"{replicas} controllers are ready")


def test_two_controllers_killed_ones_and_outages_repeat_nothing_and_end_promoted(
    installed: Kube, prometheus_server: tuple[subprocess.Popen[bytes], str]
) -> None:
    kube, (prometheus, url) = installed, prometheus_server
    address = production(kube, "faults", vllm())
    with Traffic(address).running() as traffic:
        scaled(kube, 2)
        first = holder(kube)
        kubectl("apply", "-f", "-", stdin=tuning("faults", url, mode="auto", trials=2))
        follow(kube, "faults", in_phase("Profiling"), MINUTE)
        kubectl("-n", NAMESPACE, "delete", "pod", next(p for p in controller_pods(kube) if first.startswith(p)))
        wait_for(lambda: holder(kube) not in ("", first), "the other controller takes over")
        follow(kube, "faults", in_phase("Searching"), 5 * MINUTE)
        scaled(kube, 1)
        kill_controller(kube)
        server = os.environ.get("TUNEWRIGHT_APISERVER_PID")
        if server:
            with stopped(int(server)):
                time.sleep(MINUTE)
        follow(kube, "faults", in_phase("Confirming"), 5 * MINUTE)
        kill_controller(kube)
        follow(kube, "faults", in_phase("Canary"), 8 * MINUTE)
        with stopped(prometheus.pid):
            time.sleep(MINUTE)
        kill_controller(kube)
        follow(kube, "faults", in_phase("Rolling"), 5 * MINUTE)
        kill_controller(kube)
        follow(kube, "faults", in_phase("Promoted"), 8 * MINUTE)
    if not server:  # while the API server is silent, its own controllers take nodes and endpoints for dead
        assert traffic.failures == []
    assert traffic.answered["all"] > 200
    done = [t["spec"] for t in trials_of(kube, "faults")]
    assert len({(t["purpose"], t["round"], str(t["candidate"])) for t in done}) == len(done), "a trial was repeated"
    assert made_for(kube, "faults") == []
    assert "--max-num-seqs 4" not in " ".join(arguments(kube, "faults"))
    assert ready(kube, "faults") == 2


@pytest.mark.parametrize("when", ["Profiling", "Searching", "Canary", "Rolling"])
def test_deleted_in_any_phase_everything_goes_and_production_serves(
    installed: Kube, prometheus: str, when: str
) -> None:
    kube, name = installed, f"gone-{when.lower()}"
    address = production(kube, name, vllm())
    before = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]
    with Traffic(address).running() as traffic:
        kubectl("apply", "-f", "-", stdin=tuning(name, prometheus, mode="auto", trials=1))
        follow(kube, name, reached(when), 8 * MINUTE)
        kubectl("-n", NAMESPACE, "delete", "tuning", name, "--timeout=30s")
        wait_for(lambda: made_for(kube, name) == [] and trials_of(kube, name) == [], "all that it owned is gone", 150)
        wait_for(lambda: settled(kube, name), "production has settled", 150)
    assert traffic.failures == []
    after = kube.get(DEPLOYMENTS, name, NAMESPACE)["spec"]
    for field in ("paused", "strategy", "minReadySeconds", "replicas"):
        assert after.get(field) == before.get(field), field
    assert after["template"]["spec"] == before["template"]["spec"]
    kubectl("-n", NAMESPACE, "delete", "deployment,service", name, "--wait=false")


def reached(when: str) -> Callable[[Json], object]:
    """A point at which something is under way that deletion must clean up."""
    if when == "Rolling":  # half of production is new
        return lambda now: now.get("phase") == "Rolling" and "1 of 2" in str(now.get("sentence"))
    return in_phase(when)


def settled(kube: Kube, name: str) -> bool:
    """Whether all its pods are of the present template and ready."""
    found = kube.get(DEPLOYMENTS, name, NAMESPACE)
    now = found.get("status") or {}
    seen = now.get("observedGeneration") == found["metadata"]["generation"]
    counts = {now.get(key) for key in ("replicas", "updatedReplicas", "readyReplicas")}
    return seen and counts == {2} and not found["spec"].get("paused")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slo": {"ttftP95": "soon"}}, "ttftP95"),
        ({"objective": {"maximize": "happiness"}}, "maximize"),
        ({"budget": {"trials": 0}}, "trials"),
        ({"load": {"mode": "sometimes"}}, "mode"),
    ],
)
def test_what_the_schema_can_say_is_refused_by_the_api_server(installed: Kube, change: Json, named: str) -> None:
    body = tuning("wrong", "http://prometheus:9090", target="nobody")
    body["spec"] |= change
    with pytest.raises(KubeError, match=named):
        installed.create(TUNINGS, body, NAMESPACE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"load": {"mode": "closedLoop"}}, "concurrency"),
        ({"search": {"include": ["max_seqs"]}}, "max_seqs"),
        ({"target": {"deployment": "nobody"}}, "nobody"),
    ],
)
def test_what_only_the_controller_can_tell_is_stalled_at_once_with_the_field(
    installed: Kube, change: Json, named: str
) -> None:
    kube = installed
    body = tuning("stalled", "http://prometheus:9090", target="nobody")
    body["spec"] |= change
    kube.create(TUNINGS, body, NAMESPACE)
    try:
        wait_for(lambda: named in stalled(kube), f"Stalled names {named}")
    finally:
        kube.delete(TUNINGS, "stalled", NAMESPACE)
        wait_for(lambda: phase(kube, "stalled") == "None", "it is gone")


def stalled(kube: Kube) -> str:
    """What the condition Stalled says while it is true."""
    for condition in status(kube, "stalled").get("conditions") or []:
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return str(condition["message"])
    return ""
