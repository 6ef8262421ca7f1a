"""What every metrics source keeps to, by the direct scrape. Prometheus inherits the same in tests/prometheus."""

from collections.abc import Iterator

import pytest
from metrics_source_contract import Fleet, MetricsSourceContract
from metricsites import Site, site
from world import FakeClock

from tunewright.observe.scrape import ScrapeSource, ScrapeTarget
from tunewright.ports import MetricsSource


class ScrapedFleet(Fleet):
    """Two servers, scraped on a fake clock."""

    def __init__(self, sites: tuple[Site, Site]) -> None:
        super().__init__(sites)
        self.clock = FakeClock()
        targets = [ScrapeTarget(self.url(name), {"pod": name}) for name in self.servers]
        self.scrape = ScrapeSource(lambda: targets, 1.0, self.clock, timeout=5.0)

    def source(self) -> MetricsSource:
        return self.scrape

    def now(self) -> float:
        return self.clock.now()

    def settle(self, samples: int = 3) -> None:
        for _ in range(samples):
            self.clock.advance(1.0)
            self.scrape.poll()


class TestScrapeSource(MetricsSourceContract):
    @pytest.fixture
    def fleet(self) -> Iterator[Fleet]:
        with site(lambda path: (200, b"")) as one, site(lambda path: (200, b"")) as two:
            made = ScrapedFleet((one, two))
            yield made
            made.scrape.close()
