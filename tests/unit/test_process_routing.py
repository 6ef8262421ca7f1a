"""Which server gets the next request."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.platform.process.routing import Backend, BadRoutes, Route, Routes, RoutesFile, Table


def table(*routes: tuple[str, float, bool]) -> Table:
    made = Table()
    made.update(Routes(1, tuple(Route(n, f"http://127.0.0.1:{i + 1}", w, c) for i, (n, w, c) in enumerate(routes))))
    return made


def pick(made: Table, number: int) -> list[str]:
    found = []
    for _ in range(number):
        backend = made.choose(set(), now=0.0)
        assert backend is not None
        found.append(backend.name)
    return found


@given(st.integers(1, 60), st.integers(1, 4))
def test_the_canary_gets_its_share_evenly_spread(percent: int, stable: int) -> None:
    share = percent / 100
    names = [(f"s{i}", (1 - share) / stable, False) for i in range(stable)]
    picked = [name == "canary" for name in pick(table(*names, ("canary", share, True)), 400)]
    for end in range(1, len(picked) + 1):
        assert abs(sum(picked[:end]) - share * end) <= 1.0


def test_the_share_holds_whatever_is_in_flight() -> None:
    made = table(("a", 0.75, False), ("canary", 0.25, True))
    made.backends[1].in_flight = 1000  # a canary that is slow gets no less, or it would be judged on easier traffic
    assert Counter(pick(made, 100))["canary"] == 25


def test_stable_servers_take_turns_and_the_idle_one_comes_first() -> None:
    made = table(("a", 1, False), ("b", 1, False))
    assert Counter(pick(made, 10)) == {"a": 5, "b": 5}
    made.backends[0].in_flight = 3
    assert set(pick(made, 10)) == {"b"}


def test_a_new_server_is_not_flooded_to_make_up_for_its_absence() -> None:
    made = table(("a", 1, False))
    pick(made, 1000)
    a, b = Route("a", "http://127.0.0.1:1", 1, False), Route("b", "http://127.0.0.1:2", 1, False)
    made.update(Routes(2, (a, b)))
    assert 4 <= Counter(pick(made, 10))["b"] <= 6


def test_weight_zero_gets_nothing() -> None:
    made = table(("a", 0, False))
    assert made.choose(set(), 0.0) is None
    assert set(pick(table(("a", 0, False), ("b", 1, False)), 20)) == {"b"}


def test_a_server_that_is_down_is_passed_over_while_there_is_another() -> None:
    made = table(("a", 1, False), ("b", 1, False))
    made.backends[0].down_until = 5.0
    assert set(pick(made, 10)) == {"b"}
    made.backends[1].down_until = 5.0
    assert set(pick(made, 10)) == {"a", "b"}


def test_a_server_that_was_tried_is_not_tried_again() -> None:
    made = table(("a", 1, False), ("b", 1, False))
    tried: set[Backend] = set()
    for _ in range(2):
        backend = made.choose(tried, 0.0)
        assert backend is not None
        tried.add(backend)
    assert {backend.name for backend in tried} == {"a", "b"}
    assert made.choose(tried, 0.0) is None


def test_a_removed_server_is_told_of_until_nothing_is_in_flight() -> None:
    made = table(("a", 1, False), ("b", 1, False))
    made.backends[0].in_flight = 1
    removed = made.update(Routes(2, (Route("b", "http://127.0.0.1:2", 1, False),)))
    assert [backend.name for backend in removed] == ["a"]
    made.forget_drained()
    assert [backend.counts()["inFlight"] for backend in made.backends] == [1, 0]
    assert set(pick(made, 10)) == {"b"}
    removed[0].in_flight = 0
    made.forget_drained()
    assert [backend.name for backend in made.backends] == ["b"]


def test_counts_survive_a_change_of_routes() -> None:
    made = table(("a", 1, False))
    made.backends[0].requests = 7
    made.update(Routes(2, (Route("a", "http://127.0.0.1:1", 0.5, False),)))
    assert made.backends[0].counts()["requests"] == 7
    assert made.backends[0].weight == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"generation": 1}',
        '{"generation": 1, "backends": [{"name": "a", "url": "https://h:1", "weight": 1, "canary": false}]}',
        '{"generation": 1, "backends": [{"name": "a", "url": "http://h:1", "weight": NaN, "canary": false}]}',
        '{"generation": 1, "backends": [{"name": "a", "url": "http://h:1", "weight": -1, "canary": false}]}',
        '{"generation": 1, "backends": [{"name": "a", "url": "http://h", "weight": 1, "canary": false}]}',
    ],
)
def test_bad_routes_are_refused(text: str) -> None:
    with pytest.raises(BadRoutes):
        Routes.from_json(text)


def test_routes_read_back_as_written() -> None:
    routes = Routes(3, (Route("a", "http://127.0.0.1:1", 0.25, True),))
    assert Routes.from_json(routes.to_json()) == routes


def test_the_file_is_read_when_it_was_replaced_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    file = RoutesFile(path)
    assert file.changed() is None
    assert file.error is not None
    path.write_text(Routes(1, ()).to_json())
    assert file.changed() == Routes(1, ())
    assert file.changed() is None
    assert file.error is None
    path.write_text("{")
    assert file.changed() is None
    assert "stay in force" in str(file.error)
