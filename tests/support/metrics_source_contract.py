"""The contract of `ports.MetricsSource`, inherited by one test class per adapter."""

from __future__ import annotations

import pytest
from exposed import Exposed
from metricsites import Site

from tunewright.domain.profile import Source
from tunewright.observe import names
from tunewright.observe.learn import learn_profile
from tunewright.ports import MetricsSource, PortError, SeriesWindow


class Fleet:
    """Two servers, `one` and `two`, whose metrics the test moves by hand; an adapter says how they are scraped."""

    def __init__(self, sites: tuple[Site, Site]) -> None:
        self.servers = {name: Exposed() for name in ("one", "two")}
        self._sites = dict(zip(self.servers, sites, strict=True))
        for name, server in self.servers.items():
            self._sites[name].answer = lambda path, s=server: (200, s.text().encode())

    def url(self, name: str) -> str:
        """Where a server is."""
        return self._sites[name].url

    def address(self, name: str) -> str:
        """Its `instance`."""
        return self._sites[name].address

    def fail(self, name: str) -> None:
        """From now on it answers with an error."""
        self._sites[name].answer = lambda path: (503, b"")

    def shown(self) -> list[tuple[int, bytes]]:
        """What the servers answer now."""
        return [one.answer("/metrics") for one in self._sites.values()]

    def source(self) -> MetricsSource:
        raise NotImplementedError

    def now(self) -> float:
        raise NotImplementedError

    def settle(self, samples: int = 3) -> None:
        """Wait until the servers as they are now have been scraped this often."""
        raise NotImplementedError

    def fetch(self, *metrics: str, seconds: float = 60.0, **matchers: str) -> SeriesWindow:
        """The last seconds."""
        now = self.now()
        return self.source().fetch(metrics, now - seconds, now, matchers or None)


class MetricsSourceContract:
    """Inherited by one class per adapter, which gives `fleet`."""

    def test_raw_samples_in_order_inside_the_window(self, fleet: Fleet) -> None:
        fleet.servers["one"].set(names.RUNNING, 7)
        fleet.settle()
        now = fleet.now()
        window = fleet.source().fetch([names.RUNNING], now - 30, now)
        assert (window.start, window.end) == (now - 30, now)
        assert window.queries
        assert {s.labels["instance"] for s in window.series} == {fleet.address("one"), fleet.address("two")}
        for series in window.series:
            times = [at for at, _ in series.samples]
            assert times == sorted(set(times))
            assert now - 30 <= times[0]
            assert times[-1] <= now
            assert series.samples[-1][1] == (7 if series.labels["instance"] == fleet.address("one") else 0)

    def test_only_what_is_asked_for(self, fleet: Fleet) -> None:
        fleet.settle()
        window = fleet.fetch(names.RUNNING, names.FINISHED)
        assert {s.name for s in window.series} == {names.RUNNING, names.FINISHED}

    def test_series_that_are_not_there_are_absent(self, fleet: Fleet) -> None:
        fleet.settle()
        assert list(fleet.fetch(names.DRAFTS).series) == []

    def test_matchers_must_be_equal(self, fleet: Fleet) -> None:
        fleet.settle()
        by_instance = fleet.fetch(names.FINISHED, instance=fleet.address("two"), finished_reason="stop")
        assert [(s.labels["instance"], s.labels["finished_reason"]) for s in by_instance.series] == [
            (fleet.address("two"), "stop")
        ]
        assert list(fleet.fetch(names.FINISHED, finished_reason="sto").series) == []
        assert list(fleet.fetch(names.FINISHED, finished_reason='st"op\\').series) == []
        assert {s.labels["pod"] for s in fleet.fetch(names.RUNNING, pod="one").series} == {"one"}

    def test_a_window_before_everything_is_empty(self, fleet: Fleet) -> None:
        fleet.settle()
        now = fleet.now()
        window = fleet.source().fetch([names.RUNNING], now - 86400 * 30, now - 86400 * 29)
        assert list(window.series) == []

    def test_a_server_that_stops_answering_has_no_later_samples(self, fleet: Fleet) -> None:
        fleet.settle()
        fleet.fail("two")
        fleet.settle(samples=4)
        last = {s.labels["instance"]: s.samples[-1][0] for s in fleet.fetch(names.RUNNING).series}
        assert last[fleet.address("two")] <= last[fleet.address("one")] - 2

    def test_a_profile_is_learned_from_it(self, fleet: Fleet) -> None:
        fleet.settle()
        for server in fleet.servers.values():
            server.finish(100, prompt=150, cached=75)
        fleet.settle()
        now = fleet.now()
        window = fleet.source().fetch(names.PROFILE_METRICS, now - 60, now)
        profile = learn_profile(window, via=fleet.source().describe(), source=Source.SIMULATED, min_requests=200)
        assert profile.finished_requests == 200
        assert profile.replicas == 2
        assert profile.prompt_tokens_mean == 150
        assert profile.prefix_reuse == pytest.approx(0.5)

    def test_it_says_what_it_is(self, fleet: Fleet) -> None:
        fleet.settle()
        assert fleet.source().describe()

    def test_no_answer_is_an_error(self, fleet: Fleet) -> None:
        """Before anything was scraped, or from a source that is not there: never an empty window."""
        with pytest.raises(PortError):
            self.unanswered(fleet).fetch([names.RUNNING], fleet.now() - 60, fleet.now())

    def unanswered(self, fleet: Fleet) -> MetricsSource:
        """A source that has no answer."""
        return fleet.source()
