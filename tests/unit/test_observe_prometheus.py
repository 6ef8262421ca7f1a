"""Queries to Prometheus, and what every kind of bad answer becomes."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from metricsites import Site, site

from tunewright.observe.names import ALL_METRICS, FINISHED, RUNNING
from tunewright.observe.prometheus import MAX_POINTS, PrometheusSource
from tunewright.ports import PortError, Refused


def matrix(*series: tuple[dict[str, str], list[tuple[float, str]]], **more: Any) -> bytes:
    result = [{"metric": metric, "values": values} for metric, values in series]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}, **more}).encode()


def source(server: Site | str, selector: str = 'job="vllm"', **more: Any) -> PrometheusSource:
    url = server if isinstance(server, str) else server.url
    return PrometheusSource(url, selector, **({"interval": 15.0, "timeout": 5.0} | more))


@pytest.fixture
def empty() -> Iterator[Site]:
    with site(lambda path: (200, matrix())) as server:
        yield server


def asked(server: Site) -> list[dict[str, str]]:
    return [{k: v[0] for k, v in parse_qs(urlsplit(path).query).items()} for path, _ in server.asked]


def test_samples_come_as_numbers_with_their_labels(empty: Site) -> None:
    empty.answer = lambda path: (200, matrix(({"__name__": "c", "pod": "p"}, [(15, "1"), (30, "NaN"), (45, "+Inf")])))
    window = source(empty).fetch(["c"], 0, 60)
    (series,) = window.series
    assert series.labels == {"__name__": "c", "pod": "p"}
    assert [at for at, _ in series.samples] == [15, 30, 45]
    assert [str(value) for _, value in series.samples] == ["1.0", "nan", "inf"]
    assert window.queries == ['{__name__=~"c",job="vllm"}']


def test_the_step_is_the_interval_and_the_last_point_the_end(empty: Site) -> None:
    source(empty).fetch(["c"], 1000.5, 1600.25)
    (query,) = asked(empty)
    assert (query["step"], query["end"]) == ("15.000", "1600.250")
    assert float(query["start"]) == 1600.25 - 39 * 15


def test_a_long_window_asks_for_no_more_points(empty: Site) -> None:
    source(empty).fetch(["c"], 0, 86400)
    (query,) = asked(empty)
    assert float(query["step"]) == 86400 / MAX_POINTS


def test_a_window_of_one_moment_is_one_point(empty: Site) -> None:
    """As at the first look at a canary."""
    source(empty).fetch(["c"], 60, 60)
    (query,) = asked(empty)
    assert (query["start"], query["end"]) == ("60.000", "60.000")


def test_long_lists_are_asked_for_in_parts(empty: Site) -> None:
    names = [f"vllm:a_metric_with_a_long_name_{i:03}" for i in range(100)]
    window = source(empty).fetch(names, 0, 60)
    queries = [query["query"] for query in asked(empty)]
    assert len(queries) == len(window.queries) > 1
    assert max(len(path) for path, _ in empty.asked) < 4000
    assert [n for q in queries for n in q.split('"')[1].split("|")] == names


def test_everything_that_is_read_is_one_or_two_queries(empty: Site) -> None:
    source(empty).fetch(ALL_METRICS, 0, 60)
    assert len(empty.asked) <= 2


def test_values_are_escaped_and_names_checked(empty: Site) -> None:
    prometheus = source(empty, "")
    assert prometheus.query(["c"], {"pod": 'a"b\\c\nd'}) == '{__name__=~"c",pod="a\\"b\\\\c\\nd"}'
    with pytest.raises(ValueError, match="not a metric's name"):
        prometheus.fetch(['c"}'], 0, 60)
    with pytest.raises(ValueError, match="not a label's name"):
        prometheus.fetch(["c"], 0, 60, {'a"': "b"})
    with pytest.raises(ValueError, match=r"ends .* before it starts"):
        prometheus.fetch(["c"], 60, 59)
    assert empty.asked == []


@pytest.mark.parametrize("written", ['job="vllm"', '{job="vllm"}', ' {job="vllm",} '])
def test_a_selector_may_have_braces(written: str) -> None:
    assert source("http://x", written).query(["c"], None) == '{__name__=~"c",job="vllm"}'


def test_warnings_are_kept(empty: Site) -> None:
    empty.answer = lambda path: (200, matrix(warnings=["slow store"], infos=["a hint"]))
    assert source(empty).fetch(["c"], 0, 60).warnings == ["Prometheus: slow store", "Prometheus: a hint"]


def test_whole_answers_are_asked_for(empty: Site) -> None:
    source(empty).fetch(["c"], 0, 60)
    (query,) = asked(empty)
    assert (query["partial_response"], query["deny_partial_response"]) == ("false", "1")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b"<html>Log in</html>", "its answer is not JSON: '<html>Log in</html>'; check that metrics.prometheus"),
        (200, b"", "its answer is not JSON: it is empty"),
        (200, b"[1, 2]", "its answer has no result"),
        (200, b'{"status": "success"}', "its answer has no result"),
        (200, b'{"status": "error", "errorType": "execution", "error": "too many"}', "execution: too many"),
        (200, matrix(isPartial=True), "its answer is partial"),
        (200, b'{"status": "success", "data": {"result": [{"metric": {}, "values": [["x"]]}]}}', "no matrix of"),
        (200, b'{"status": "success", "data": {"result": [{"values": [[1, "2"]]}]}}', "no matrix of samples"),
        (400, b'{"status": "error", "errorType": "bad_data", "error": "bad"}', "400: bad_data: bad; check metrics.sel"),
        (401, b"who are you", "401: 'who are you'; check metrics.bearerTokenFile"),
        (403, b"", "403: it is empty; check metrics.bearerTokenFile"),
        (404, b"404 page not found", "check the path in metrics.prometheus"),
        (500, b"oops", "500: 'oops'; look at its log"),
        (503, b'{"status": "error", "errorType": "timeout", "error": "too long"}', "503: timeout: too long"),
    ],
)  # fmt: skip
def test_a_bad_answer_is_an_error_that_says_what_where_and_what_to_do(
    empty: Site, status: int, body: bytes, told: str
) -> None:
    empty.answer = lambda path: (status, body)
    with pytest.raises(PortError) as caught:
        source(empty).fetch(["c"], 0, 60)
    message = str(caught.value)
    assert message.startswith(f"Prometheus at {empty.url} gave no metrics: ")
    assert told in message
    assert message.endswith('Query: {__name__=~"c",job="vllm"}')
    assert len(empty.asked) == 1  # no retries: the loop looks again by itself


def test_a_refused_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortError, match=r"there is no connection \(.*refused.*\); check metrics.prometheus"):
            source(url).fetch(["c"], 0, 60)


def test_a_black_hole_is_left_after_the_time_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # accepted by the kernel, never answered
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PortError, match=r"did not answer within 0.2s"):
            source(url, timeout=0.2).fetch(["c"], 0, 60)


def test_an_answer_that_trickles_in_is_left_by_a_deadline() -> None:
    """Each byte would start the read time-out anew, for ever."""
    done = threading.Event()
    with socket.socket() as slow:
        slow.bind(("127.0.0.1", 0))
        slow.listen(8)

        def trickle() -> None:
            connection, _ = slow.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while not done.wait(0.02):
                    try:
                        connection.sendall(b"1\r\n \r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        try:
            with pytest.raises(PortError, match="did not answer within"):
                source(f"http://127.0.0.1:{slow.getsockname()[1]}", timeout=0.2).fetch(["c"], 0, 60)
        finally:
            done.set()
            thread.join(10)


def test_an_answer_that_breaks_off() -> None:
    with socket.socket() as broken:
        broken.bind(("127.0.0.1", 0))
        broken.listen(8)

        def half() -> None:
            connection, _ = broken.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"status": "succ')

        thread = threading.Thread(target=half, daemon=True)
        thread.start()
        with pytest.raises(PortError, match="its answer broke off"):
            source(f"http://127.0.0.1:{broken.getsockname()[1]}").fetch(["c"], 0, 60)
        thread.join(10)


def test_the_token_is_read_at_each_request_and_never_told(empty: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    prometheus = source(empty, bearer_token_file=token)
    for secret in ("first", "second"):
        token.write_text(f"{secret}\n")
        prometheus.fetch(["c"], 0, 60)
    assert [headers["Authorization"] for _, headers in empty.asked] == ["Bearer first", "Bearer second"]
    empty.answer = lambda path: (403, b"")
    with pytest.raises(PortError) as caught:
        prometheus.fetch(["c"], 0, 60)
    assert "second" not in str(caught.value)
    token.unlink()
    with pytest.raises(PortError, match=r"check metrics\.bearerTokenFile"):
        prometheus.fetch(["c"], 0, 60)


def test_credentials_in_the_url_are_not_shown(empty: Site) -> None:
    prometheus = source(f"http://me:secret@{empty.address}/")
    prometheus.fetch(["c"], 0, 60)
    assert empty.asked[0][1]["Authorization"].startswith("Basic ")
    assert prometheus.describe() == f"Prometheus at {empty.url}"


def test_check_names_what_is_missing(empty: Site) -> None:
    empty.answer = lambda path: (200, matrix(({"__name__": RUNNING}, [(15, "1")])))
    (problem,) = source(empty).check()
    assert f'has no recent {FINISHED} under metrics.selector (job="vllm")' in problem
    empty.answer = lambda path: (200, matrix(*(({"__name__": n}, [(15, "1")]) for n in (RUNNING, FINISHED))))
    assert source(empty).check() == []


def test_check_refuses_a_selector_that_is_no_selector(empty: Site) -> None:
    empty.answer = lambda path: (400, b'{"status": "error", "errorType": "bad_data", "error": "unexpected ="}')
    with pytest.raises(Refused, match=r"unexpected =; check metrics\.selector"):
        source(empty, "job==vllm").check()
    empty.answer = lambda path: (500, b"")
    with pytest.raises(PortError):
        source(empty).check()
