"""The metrics source against a real Prometheus."""

import socket
import time

import pytest
from conftest import PrometheusServer
from metrics_source_contract import Fleet, MetricsSourceContract

from tunewright.observe.names import DRAFTS, FINISHED, RUNNING
from tunewright.observe.prometheus import PrometheusSource
from tunewright.observe.window import clean
from tunewright.ports import MetricsSource, Refused

pytestmark = pytest.mark.prometheus

DEADLINE = 60.0


class PrometheusFleet(Fleet):
    """Two servers that Prometheus scrapes every second."""

    def __init__(self, server: PrometheusServer) -> None:
        super().__init__(server.pairs.pop())
        self.prometheus = server
        self.selector = f'instance=~"{"|".join(self.address(name) for name in self.servers)}"'
        self._settled = self.shown()  # a server without traffic, as those of the pool are from the start
        self._since = server.started

    def source(self) -> MetricsSource:
        return PrometheusSource(self.prometheus.url, self.selector, interval=1.0, timeout=10.0)

    def now(self) -> float:
        return time.time()

    def settle(self, samples: int = 3) -> None:
        """Scrapes of what the servers answer now; `up` counts those that failed too."""
        if self.shown() != self._settled:
            self._settled, self._since = self.shown(), time.time()
        deadline = time.monotonic() + DEADLINE
        names = [self.address(name) for name in self.servers]
        while time.monotonic() < deadline:
            seconds = max(1, int(time.time() - self._since))
            found = self.prometheus.query(f"count_over_time(up{{{self.selector}}}[{seconds}s])")
            counts = {one["metric"]["instance"]: float(one["value"][1]) for one in found}  # type: ignore[index]
            if all(counts.get(name, 0) >= samples for name in names):
                return
            time.sleep(0.1)
        pytest.fail(f"prometheus did not scrape {names} within {DEADLINE:g}s")


@pytest.fixture
def fleet(prometheus_server: PrometheusServer) -> PrometheusFleet:
    return PrometheusFleet(prometheus_server)


class TestPrometheusSource(MetricsSourceContract):
    def unanswered(self, fleet: Fleet) -> MetricsSource:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return PrometheusSource(f"http://127.0.0.1:{free.getsockname()[1]}", "", interval=1.0, timeout=5.0)


def test_check_against_a_real_one(fleet: PrometheusFleet) -> None:
    """Sound, missing, and refused: as Prometheus itself words it."""
    fleet.settle()
    source = PrometheusSource(fleet.prometheus.url, fleet.selector, interval=1.0)
    assert source.check() == []
    (problem,) = source.check([RUNNING, DRAFTS])
    assert DRAFTS in problem
    with pytest.raises(Refused, match="parse error"):
        PrometheusSource(fleet.prometheus.url, "job==vllm", interval=1.0).check()


def test_a_restart_of_a_server_loses_no_requests(fleet: PrometheusFleet) -> None:
    server = fleet.servers["one"]
    fleet.settle()
    server.finish(50)
    fleet.settle(2)
    server.restart()
    server.finish(20)
    fleet.settle(2)
    window = fleet.fetch(FINISHED, instance=fleet.address("one"))
    assert clean(window).increase(FINISHED) == 70
