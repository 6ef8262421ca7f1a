"""Two candidates for one Lease on a real API server; the clocks are the test's own."""

import threading

import pytest
from world import FakeClock

from tunewright.kube.client import Kube
from tunewright.kube.lease import LeaderElection, Role
from tunewright.kube.resources import LEASES

pytestmark = pytest.mark.cluster

NAME = "tunewright"


def candidate(kube: Kube, namespace: str, identity: str) -> tuple[LeaderElection, FakeClock]:
    clock = FakeClock()
    return LeaderElection(kube, clock, namespace=namespace, name=NAME, identity=identity), clock


def test_one_leads_the_other_follows_and_the_first_ends_for_good(kube: Kube, namespace: str) -> None:
    (a, a_time), (b, b_time) = candidate(kube, namespace, "a"), candidate(kube, namespace, "b")
    a.step()
    b.step()
    assert (a.acting, b.acting) == (True, False)
    a_time.advance(2)
    a.step()
    b_time.advance(14)
    b.step()
    b_time.advance(14)
    b.step()
    assert not b.acting, "it was renewed in between"
    b_time.advance(2)
    b.step()
    assert b.acting
    a_time.advance(28)
    assert not a.acting
    a.step()
    assert a.role is Role.LOST
    spec = kube.get(LEASES, NAME, namespace)["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("b", 15, 1)
    b.release()
    (c, _) = candidate(kube, namespace, "c")
    c.step()
    assert c.acting, "a released Lease is taken at once"


def test_of_many_that_start_at_once_one_leads(kube: Kube, namespace: str) -> None:
    candidates = [candidate(kube, namespace, f"c{number}")[0] for number in range(5)]
    start = threading.Barrier(len(candidates))

    def run(each: LeaderElection) -> None:
        start.wait(30)
        for _ in range(3):
            each.step()

    threads = [threading.Thread(target=run, args=(each,)) for each in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(each.acting for each in candidates) == 1
    assert Role.LOST not in {each.role for each in candidates}
