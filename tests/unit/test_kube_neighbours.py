"""Who else drives tunings: never two controllers one tuning, and never nobody for long."""

from collections.abc import Iterator

import pytest
from fake_kube import Drop, FakeKube, Request, client_of, fake_kube
from world import FakeClock

from tunewright.kube.client import Kube
from tunewright.kube.errors import KubeError
from tunewright.kube.lease import LeaderElection
from tunewright.kube.neighbours import LOOK, Neighbours, scope_labels
from tunewright.kube.resources import LEASES

NAME = "tunewright"


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


class Controller:
    """One controller with its Lease; all of them on one clock, which they do not know."""

    def __init__(self, kube: Kube, clock: FakeClock, namespace: str, *, everywhere: bool) -> None:
        self.namespace, self.clock = namespace, clock
        self.election = LeaderElection(
            kube,
            clock,
            namespace=namespace,
            name=NAME,
            identity=f"{namespace}-1",
            labels=scope_labels(everywhere=everywhere),
        )
        self.neighbours = Neighbours(kube, clock, own=namespace, lease=NAME)
        self.everywhere = everywhere

    def drives(self, namespace: str) -> bool:
        """Whether it would act on a tuning of this namespace."""
        if not self.election.acting:
            return False
        return self.neighbours.instead(namespace) is None if self.everywhere else namespace == self.namespace


def test_alone_it_drives_all(kube: Kube) -> None:
    wide = Controller(kube, FakeClock(), "b", everywhere=True)
    wide.election.step()
    assert all(wide.drives(namespace) for namespace in ("a", "b", "c"))


def test_the_controller_of_one_namespace_goes_before_it_there(fake: FakeKube, kube: Kube) -> None:
    clock = FakeClock()
    wide = Controller(kube, clock, "b", everywhere=True)
    one = Controller(kube, clock, "c", everywhere=False)
    for each in (wide, one):
        each.election.step()
    assert "c-1, the controller of namespace c" in (wide.neighbours.instead("c") or "")
    assert [wide.drives(namespace) for namespace in "abcd"] == [True, True, False, True]


def test_of_two_for_all_namespaces_one_drives_each(kube: Kube) -> None:
    clock = FakeClock()
    both = [Controller(kube, clock, namespace, everywhere=True) for namespace in ("a", "b")]
    for each in both:
        each.election.step()
    for namespace in ("a", "b", "c"):
        assert sum(each.drives(namespace) for each in both) == 1, namespace
    assert "a-1, which serves all namespaces from a" in (both[1].neighbours.instead("c") or "")


def test_one_that_died_is_waited_out_by_our_own_clock(fake: FakeKube, kube: Kube) -> None:
    clock = FakeClock()
    wide, one = (Controller(kube, clock, "b", everywhere=True), Controller(kube, clock, "c", everywhere=False))
    one.election.step()
    wide.election.step()
    for _ in range(7):
        assert not wide.drives("c"), "it may still act"
        clock.advance(2)
        wide.election.step()
    clock.advance(2)
    wide.election.step()
    assert wide.drives("c")
    fake.objects[LEASES.path("c", NAME).strip("/")]["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
    one.election.step()
    clock.advance(LOOK)
    wide.election.step()
    assert not wide.drives("c"), "it is back"


def test_one_that_was_taken_down_is_followed_at_once(kube: Kube) -> None:
    clock = FakeClock()
    wide, one = (Controller(kube, clock, "b", everywhere=True), Controller(kube, clock, "c", everywhere=False))
    one.election.step()
    wide.election.step()
    assert not wide.drives("c")
    one.election.release()
    clock.advance(LOOK)
    assert wide.drives("c")


def test_one_that_becomes_a_namespaces_own_says_so_in_its_lease(kube: Kube) -> None:
    clock = FakeClock()
    first = Controller(kube, clock, "a", everywhere=True)
    first.election.step()
    first.election.release()
    Controller(kube, clock, "a", everywhere=False).election.step()
    other = Controller(kube, clock, "b", everywhere=True)
    other.election.step()
    assert [other.drives(namespace) for namespace in "abc"] == [False, True, True]


def test_leases_of_others_mean_nothing(kube: Kube) -> None:
    clock = FakeClock()
    wide = Controller(kube, clock, "b", everywhere=True)
    wide.election.step()
    kube.create(LEASES, {"metadata": {"name": "kube-scheduler"}, "spec": {"holderIdentity": "x"}}, "a")
    kube.create(LEASES, {"metadata": {"name": NAME}}, "c")
    assert [wide.drives(namespace) for namespace in "abc"] == [True] * 3


def test_it_is_looked_at_now_and_then_and_what_is_not_known_is_an_error(fake: FakeKube, kube: Kube) -> None:
    clock = FakeClock()
    neighbours = Neighbours(kube, clock, own="b", lease=NAME)
    for _ in range(10):
        neighbours.instead("a")
    assert fake.count("GET") == 1
    assert neighbours.instead("b") is None

    def down(request: Request) -> None:
        raise Drop

    fake.before = down
    clock.advance(LOOK)
    for _ in range(2):
        with pytest.raises(KubeError):
            neighbours.instead("a")
