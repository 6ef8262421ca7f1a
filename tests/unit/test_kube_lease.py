"""Leader election on a clock that only the test moves."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fake_kube import Drop, FakeKube, Request, client_of, fake_kube
from world import FakeClock

from tunewright.kube.lease import LeaderElection, LeaseTimes, Role
from tunewright.kube.resources import LEASES

NS, NAME = "team", "tunewright"
PATH = LEASES.path(NS, NAME).strip("/")


class Two:
    """Two candidates for one Lease, each with a clock of its own."""

    def __init__(self, fake: FakeKube, stack: ExitStack) -> None:
        self.fake = fake
        self.clocks = {"a": FakeClock(), "b": FakeClock()}
        self.clocks["b"].time = 5.0  # the clocks of two machines have nothing to do with each other
        self.a, self.b = (
            LeaderElection(
                stack.enter_context(client_of(fake.url)),
                self.clocks[who],
                namespace=NS,
                name=NAME,
                identity=who,
            )
            for who in "ab"
        )

    def wait(self, seconds: float) -> None:
        for clock in self.clocks.values():
            clock.advance(seconds)

    @property
    def lease(self) -> dict[str, object]:
        return self.fake.objects[PATH]["spec"]


@pytest.fixture
def two() -> Iterator[Two]:
    with fake_kube() as fake, ExitStack() as stack:
        yield Two(fake, stack)


def down(request: Request) -> None:
    raise Drop


def test_the_first_leads_and_the_second_waits(two: Two) -> None:
    two.a.step()
    two.b.step()
    assert (two.a.acting, two.b.acting) == (True, False)
    assert two.b.holder == "a"
    for _ in range(30):
        two.wait(2)
        two.a.step()
        two.b.step()
    assert (two.a.role, two.b.role) == (Role.LEADER, Role.CANDIDATE)
    assert two.lease["leaseTransitions"] == 0


def test_a_leader_that_died_is_followed_after_the_lease_ran_out(two: Two) -> None:
    two.a.step()
    two.b.step()
    two.wait(15)
    two.b.step()
    assert not two.b.acting, "not a moment before the whole duration"
    two.wait(0.1)
    two.b.step()
    assert two.b.acting
    assert two.lease["holderIdentity"] == "b"
    assert two.lease["leaseTransitions"] == 1


def test_a_candidate_counts_from_what_it_saw_itself(two: Two) -> None:
    two.a.step()
    two.wait(1000)
    two.b.step()
    assert not two.b.acting, "it may have been renewed just now, for all that b knows"


def test_never_do_both_act_however_the_leader_hangs(two: Two) -> None:
    two.a.step()
    two.b.step()
    acted = []
    for _ in range(80):
        two.wait(0.5)
        two.b.step()
        acted.append((two.a.acting, two.b.acting))
    assert (True, True) not in acted
    assert (True, False) in acted
    assert (False, False) in acted
    assert acted[-1] == (False, True)


def test_without_renewals_it_stops_acting_at_the_deadline_and_keeps_trying(two: Two) -> None:
    two.a.step()
    two.fake.before = down
    two.wait(9.9)
    two.a.step()
    assert two.a.acting
    two.wait(0.1)
    assert not two.a.acting
    two.wait(600)
    two.a.step()
    assert two.a.role is Role.LEADER, "alive, only not acting"
    two.fake.before = lambda request: None
    two.a.step()
    assert two.a.acting, "nobody else took it meanwhile"


def test_a_renewal_counts_from_before_it_was_sent(two: Two) -> None:
    two.a.step()
    two.wait(2)

    def slow(request: Request) -> None:
        if request.method == "PUT":
            two.clocks["a"].advance(9)

    two.fake.before = slow
    two.a.step()
    assert two.a.acting
    two.wait(1)
    assert not two.a.acting


def test_seeing_another_holder_ends_it_for_good(two: Two) -> None:
    two.a.step()
    two.b.step()
    two.wait(16)
    two.b.step()
    assert two.b.acting
    two.a.step()
    assert (two.a.role, two.a.acting) == (Role.LOST, False)
    two.b.release()
    two.a.step()
    assert two.a.role is Role.LOST
    assert two.lease["holderIdentity"] == ""


def test_a_released_lease_is_taken_at_once(two: Two) -> None:
    two.a.step()
    two.b.step()
    two.a.release()
    assert not two.a.acting
    two.b.step()
    assert two.b.acting


def test_a_release_never_takes_the_lease_from_another(two: Two) -> None:
    two.a.step()
    two.b.step()
    two.wait(16)
    two.b.step()
    two.a.release()
    assert two.lease["holderIdentity"] == "b"


def test_two_that_take_it_at_once_do_not_both_lead(two: Two) -> None:
    """b reads the free Lease, a takes it, then b writes: the write is refused."""
    two.a.step()
    two.a.release()

    def meanwhile(request: Request) -> None:
        if request.method == "PUT" and request.body["spec"]["holderIdentity"] == "b":
            two.fake.before = lambda request: None
            lease = two.fake.objects[PATH]
            two.fake._store(PATH, {**lease, "spec": {**lease["spec"], "holderIdentity": "a"}}, "MODIFIED")

    two.fake.before = meanwhile
    two.b.step()
    assert two.b.role is Role.CANDIDATE
    assert two.lease["holderIdentity"] == "a"


def test_a_renewal_whose_answer_got_lost_is_no_other_holder(two: Two) -> None:
    two.a.step()
    two.wait(2)

    def lose(request: Request) -> None:
        if request.method == "PUT":
            raise Drop

    two.fake.after = lose
    two.a.step()
    assert two.a.role is Role.LEADER
    two.fake.after = lambda request: None
    two.a.step()
    assert two.a.acting


def test_a_lease_that_was_deleted_is_made_again(two: Two) -> None:
    two.a.step()
    with two.fake.changed:
        two.fake._remove(PATH)
    two.wait(2)
    two.a.step()
    assert two.a.acting


def test_run_releases_at_the_end(two: Two) -> None:
    class Once:
        def is_set(self) -> bool:
            return two.a.acting

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == LeaseTimes().retry
            return False

    two.a.run(Once())
    assert two.lease["holderIdentity"] == ""
    assert not two.a.acting


def test_times_that_would_let_two_act_are_refused() -> None:
    with pytest.raises(ValueError, match="renew_deadline"):
        LeaseTimes(duration=10, renew_deadline=10.0)
