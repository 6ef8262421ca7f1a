"""The direct scrape: what is kept, what a failing server leaves, and when it says that it is blind."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exposed import Exposed
from metricsites import Site, site
from prometheus_client.parser import text_string_to_metric_families
from world import FakeClock

from tunewright.observe.names import ALL_METRICS, FINISHED, RUNNING
from tunewright.observe.scrape import ScrapeSource, ScrapeTarget
from tunewright.ports import PortError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vllm"
T0 = FakeClock().now()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server() -> Iterator[Site]:
    metrics = Exposed()
    with site(lambda path: (200, metrics.text().encode()) if path == "/metrics" else (404, b"")) as running:
        yield running


@pytest.fixture
def make(clock: FakeClock) -> Iterator[Callable[..., ScrapeSource]]:
    made: list[ScrapeSource] = []

    def build(*targets: ScrapeTarget, **more: object) -> ScrapeSource:
        made.append(ScrapeSource(lambda: targets, 15.0, clock, **more))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_real_metrics_are_read_as_the_reference_parser_reads_them(clock: FakeClock, make) -> None:  # type: ignore[no-untyped-def]
    for version in ("vllm-0.26-h200-under-load", "vllm-0.32-cpu"):
        text = (FIXTURES / f"{version}.metrics.txt").read_text()
        with site(lambda path, text=text: (200, text.encode())) as server:  # type: ignore[misc]
            source = make(ScrapeTarget(server.url))
            source.poll()
            window = source.fetch(ALL_METRICS, T0 - 1, T0)
        found = {tuple(sorted(s.labels.items())): s.samples[0][1] for s in window.series}
        expected = {
            tuple(sorted({**s.labels, "__name__": s.name, "instance": server.address}.items())): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name in ALL_METRICS
        }
        assert found == expected
        assert len(found) > 50


def test_each_poll_is_a_sample_at_its_time(clock: FakeClock, make, server: Site) -> None:  # type: ignore[no-untyped-def]
    source = make(ScrapeTarget(server.url, {"pod": "p"}))
    for _ in range(4):
        source.poll()
        clock.advance(15)
    window = source.fetch([RUNNING], T0 + 15, T0 + 30)
    (series,) = window.series
    assert [at - T0 for at, _ in series.samples] == [15, 30]
    assert (series.labels["pod"], series.labels["instance"]) == ("p", server.address)
    assert window.queries == [f"scrape {server.url}/metrics"]
    assert source.describe() == "direct scrape of 1 server"


def test_labels_of_the_server_give_way_as_in_prometheus(make) -> None:  # type: ignore[no-untyped-def]
    text = f'{RUNNING}{{instance="liar",pod="x"}} 1\n'.encode()
    with site(lambda path: (200, text)) as server:
        source = make(ScrapeTarget(server.url, {"pod": "p"}))
        source.poll()
        (series,) = source.fetch([RUNNING], T0 - 1, T0).series
    assert series.labels == {
        "__name__": RUNNING, "instance": server.address, "pod": "p", "exported_instance": "liar", "exported_pod": "x",
    }  # fmt: skip


def test_a_server_that_fails_has_no_sample_and_is_told(clock: FakeClock, make, server: Site) -> None:  # type: ignore[no-untyped-def]
    with site(server.answer) as other:
        source = make(ScrapeTarget(server.url), ScrapeTarget(other.url))
        source.poll()
        clock.advance(15)
        other.answer = lambda path: (500, b"")
        source.poll()
        window = source.fetch([RUNNING], T0 - 1, T0 + 15)
    seen = {s.labels["instance"]: [at - T0 for at, _ in s.samples] for s in window.series}
    assert seen == {server.address: [0, 15], other.address: [0]}
    assert window.warnings == [f"{other.url}: it answered 500 to /metrics"]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (503, b"", "answered 503"),
        (200, b"<html>hello</html>", "none of vLLM's metrics"),
        (200, b"", "none of vLLM's metrics"),
        (200, f"{RUNNING}{{engine=".encode(), "can't be read"),
        (200, f"{RUNNING} one".encode(), "can't be read"),
        (200, b"\xff\xfe" + RUNNING.encode(), "can't be read"),
        (302, b"", "answered 302"),
    ],
)
def test_what_is_no_metrics_is_told(make, status: int, body: bytes, told: str) -> None:  # type: ignore[no-untyped-def]
    with site(lambda path: (status, body)) as server:
        source = make(ScrapeTarget(server.url))
        source.poll()
        with pytest.raises(PortError, match=f"no server gave metrics in the window .*{told}"):
            source.fetch([RUNNING], T0 - 1, T0)


def test_a_black_hole_costs_one_time_out_and_not_the_others(make, server: Site) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        source = make(ScrapeTarget(url), ScrapeTarget(server.url), timeout=0.2)
        source.poll()
    window = source.fetch([RUNNING], T0 - 1, T0)
    assert [s.labels["instance"] for s in window.series] == [server.address]
    assert window.warnings == [f"{url}: it did not answer within 0.2s"]


def test_blindness_is_an_error_not_an_empty_window(clock: FakeClock, make, server: Site) -> None:  # type: ignore[no-untyped-def]
    source = make(ScrapeTarget(server.url))
    with pytest.raises(PortError, match="nothing was scraped yet"):
        source.fetch([RUNNING], T0 - 60, T0)
    source.poll()
    clock.advance(600)
    with pytest.raises(PortError, match="last scrape was 600s before the end"):
        source.fetch([RUNNING], T0 - 60, T0 + 600)
    assert source.fetch([RUNNING], T0 - 60, T0 + 15).series  # an old window is still known


def test_no_server_is_an_error(make) -> None:  # type: ignore[no-untyped-def]
    source = make()
    source.poll()
    with pytest.raises(PortError, match="there is no server to scrape"):
        source.fetch([RUNNING], T0 - 60, T0)


def test_a_list_of_servers_that_fails_is_told(clock: FakeClock) -> None:
    def unknown() -> list[ScrapeTarget]:
        raise PortError("the proxy is away")

    source = ScrapeSource(unknown, 15.0, clock)
    source.poll()
    with pytest.raises(PortError, match=r"nothing was scraped yet .*the proxy is away"):
        source.fetch([RUNNING], T0 - 60, T0)
    source.close()


def test_history_is_bounded_and_gone_servers_leave(clock: FakeClock, server: Site) -> None:
    targets = [ScrapeTarget(server.url)]
    source = ScrapeSource(lambda: targets, 15.0, clock, history=60.0)
    for _ in range(20):
        source.poll()
        clock.advance(15)
    assert {len(samples) for samples in source._samples.values()} == {5}
    targets.clear()
    for _ in range(6):
        source.poll()
        clock.advance(15)
    assert source._samples == {}
    source.close()


def test_what_is_not_kept_is_a_fault_of_the_caller(make, server: Site) -> None:  # type: ignore[no-untyped-def]
    source = make(ScrapeTarget(server.url), names=[RUNNING])
    source.poll()
    with pytest.raises(ValueError, match=FINISHED):
        source.fetch([RUNNING, FINISHED], T0 - 1, T0)


def test_the_token_goes_along(make, server: Site, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    token = tmp_path / "key"
    token.write_text("secret\n")
    source = make(ScrapeTarget(f"{server.url}/"), bearer_token_file=token)
    source.poll()
    path, headers = server.asked[0]
    assert (path, headers["Authorization"]) == ("/metrics", "Bearer secret")


def test_it_runs_until_it_is_stopped(make, server: Site) -> None:  # type: ignore[no-untyped-def]
    source, stop = make(ScrapeTarget(server.url)), threading.Event()
    thread = threading.Thread(target=source.run, args=(stop,), daemon=True)
    answer, first = server.answer, threading.Event()

    def noticed(path: str) -> tuple[int, bytes]:
        first.set()
        return answer(path)

    server.answer = noticed
    thread.start()
    assert first.wait(30)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert source.fetch([RUNNING], T0 - 1, T0).series


@pytest.mark.parametrize(
    ("url", "instance"),
    [("http://h:8000", "h:8000"), ("http://h/", "h:80"), ("https://h/v", "h:443"), ("http://[::1]:8000", "[::1]:8000")],
)
def test_the_instance_is_host_and_port(url: str, instance: str) -> None:
    assert ScrapeTarget(url).instance == instance
