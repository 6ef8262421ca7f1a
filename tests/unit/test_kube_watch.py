"""List and watch: every change wakes, none is missed over 410, errors and silence."""

from collections.abc import Callable, Iterator

import pytest
from fake_kube import Drop, FakeKube, Request, client_of, fake_kube, refuse

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Unavailable
from tunewright.kube.resources import CONFIG_MAPS
from tunewright.kube.watch import MAX_BACKOFF, MAX_WAIT, SHORTEST, Key, Watcher

NS = "team"


class Turns:
    """Stops after so many questions, and waits for nothing."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.waited: list[float | None] = []

    def is_set(self) -> bool:
        self.turns -= 1
        return self.turns < 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return False


class Never(Turns):
    def __init__(self) -> None:
        super().__init__(10**6)


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


class Seen:
    """A watcher with a short watch, and what it told."""

    def __init__(self, kube: Kube, silence: float = 20.0) -> None:
        self.told: list[tuple[str, bool]] = []
        self.time = 0.0
        self.on_change: Callable[[Key, Json | None], None] = lambda key, found: None
        self.watcher = Watcher(
            kube, CONFIG_MAPS, self._take, namespace=NS, monotonic=lambda: self.time, seconds=1, silence=silence
        )

    def _take(self, key: Key, found: Json | None) -> None:
        assert key[0] == NS
        self.told.append((key[1], found is not None))
        self.on_change(key, found)

    def once(self) -> list[tuple[str, bool]]:
        self.told.clear()
        self.watcher.once(Never())
        return list(self.told)


def make(kube: Kube, *names: str) -> None:
    for name in names:
        kube.create(CONFIG_MAPS, {"metadata": {"name": name}}, NS)


def test_what_is_there_then_what_changes(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a", "b")
    seen = Seen(kube)
    assert seen.once() == [("a", True), ("b", True)]
    make(kube, "c")
    kube.delete(CONFIG_MAPS, "a", NS)
    assert seen.once() == [("c", True), ("a", False)]
    assert fake.count("GET") == 3, "the second watch goes on from the first's version, without a list"


def test_too_old_a_version_lists_again_and_finds_what_went_meanwhile(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a", "b")
    seen = Seen(kube)
    seen.once()
    kube.delete(CONFIG_MAPS, "a", NS)
    make(kube, "c")
    fake.forget_events()
    assert seen.once() == []
    assert seen.once() == [("c", True), ("a", False)]


def test_an_object_that_did_not_change_is_not_told_again(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a")
    seen = Seen(kube)
    seen.once()
    fake.before = failing(refuse(500, "InternalError"), "watch")
    with pytest.raises(Unavailable):
        seen.once()
    fake.before = lambda request: None
    lists = sum("watch" not in request.query for request in fake.requests)
    assert seen.once() == []
    assert sum("watch" not in request.query for request in fake.requests) == lists + 1, "it listed again"


def failing(error: Exception, what: str) -> Callable[[Request], None]:
    def before(request: Request) -> None:
        if what in request.query:
            raise error

    return before


def test_a_silent_watch_is_left_and_listed_again(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a")
    seen = Seen(kube, silence=0.2)
    fake.silent.set()
    with pytest.raises(Unavailable):
        seen.once()
    make(kube, "b")  # nobody heard of it
    fake.silent.clear()
    seen.on_change = lambda key, found: fake.released.set()
    assert seen.once() == [("b", True)]


def test_how_long_it_has_been_silent(kube: Kube) -> None:
    seen = Seen(kube)
    assert seen.watcher.silent_for() is None
    seen.once()
    seen.time = 90.0
    assert seen.watcher.silent_for() == 90.0


def test_while_the_api_server_is_down_tries_are_spaced_and_never_end(fake: FakeKube, kube: Kube) -> None:
    def before(request: Request) -> None:
        raise Drop

    fake.before = before
    seen, stop = Seen(kube), Turns(9)
    seen.watcher.run(stop)
    assert stop.waited[:4] == [0.5, 1.0, 2.0, 4.0]
    assert stop.waited[-1] == MAX_BACKOFF
    assert len(stop.waited) == 9


def test_after_a_failure_it_recovers_and_waits_no_more(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a")
    left = [Drop()] * 4

    def before(request: Request) -> None:
        if left:
            raise left.pop()

    fake.before = before
    fake.released.set()
    seen, stop = Seen(kube), Turns(3)
    seen.watcher.run(stop)
    assert stop.waited == [0.5, SHORTEST, SHORTEST]
    assert seen.told == [("a", True)]


def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_end(fake: FakeKube, kube: Kube) -> None:
    fake.released.set()
    seen, stop = Seen(kube), Turns(4)
    seen.watcher.run(stop)
    assert stop.waited == [SHORTEST] * 4


def test_nor_is_one_whose_versions_are_always_too_old(fake: FakeKube, kube: Kube) -> None:
    fake.before = failing(refuse(410, "Expired"), "watch")
    seen, stop = Seen(kube), Turns(4)
    seen.watcher.run(stop)
    assert stop.waited == [SHORTEST] * 4


def test_a_watch_that_lasted_is_taken_up_again_at_once(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a")
    fake.released.set()
    seen, stop = Seen(kube), Turns(3)
    seen.on_change = lambda key, found: setattr(seen, "time", seen.time + 45.0)
    seen.watcher.run(stop)
    assert stop.waited == [SHORTEST] * 2, "the first one lasted"


def test_a_server_that_asks_for_patience_gets_it_and_no_list_on_top(fake: FakeKube, kube: Kube) -> None:
    """Priority and fairness throws a request away unread: what it is about can be gone on from."""
    make(kube, "a")
    fake.released.set()
    seen = Seen(kube)
    seen.once()
    busy = refuse(429, "TooManyRequests", "too many requests, please try again later")
    busy.headers = {"Retry-After": "7"}
    fake.before = failing(busy, "watch")
    fake.requests.clear()
    stop = Turns(2)
    seen.watcher.run(stop)
    assert stop.waited == [7.0, 7.0]
    assert all(request.query.get("watch") for request in fake.requests), "a list would have cost it more"
    busy.headers = {"Retry-After": "86400"}
    stop = Turns(1)
    seen.watcher.run(stop)
    assert stop.waited == [MAX_WAIT]
    make(kube, "b")
    fake.before = lambda request: None
    assert seen.once() == [("b", True)]


def test_a_mistake_in_what_is_told_does_not_end_the_watch(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a")
    fake.released.set()
    seen, stop = Seen(kube), Turns(2)
    mistakes = [KeyError("status")]

    def stumble(key: Key, found: Json | None) -> None:
        if mistakes:
            raise mistakes.pop()

    seen.on_change = stumble
    seen.watcher.run(stop)
    assert stop.waited[0] == MAX_BACKOFF
    make(kube, "b")
    assert ("b", True) in seen.once(), "it goes on"


def test_it_stops_with_the_next_event(fake: FakeKube, kube: Kube) -> None:
    seen = Seen(kube)
    seen.once()
    make(kube, "a", "b")
    seen.watcher.once(Turns(0))
    assert seen.told == [("a", True)]


def test_all_that_is_there_is_told_page_by_page_before_it_says_so(fake: FakeKube, kube: Kube) -> None:
    make(kube, "a", "b", "c")
    told: list[str] = []
    watcher = Watcher(
        kube,
        CONFIG_MAPS,
        lambda key, found: told.append(key[1]),
        namespace=NS,
        page=2,
        on_listed=lambda: told.append("listed"),
        monotonic=lambda: 0.0,
        seconds=1,
    )
    watcher.once(Never())
    assert told == ["a", "b", "c", "listed"]
    assert [r.query["limit"] for r in fake.requests if "limit" in r.query] == ["2", "2"]
    watcher.once(Never())
    assert told == ["a", "b", "c", "listed"], "the watch goes on without a list"
