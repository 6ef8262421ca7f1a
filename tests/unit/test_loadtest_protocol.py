"""Bytes to records, without a network."""

import asyncio
import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.domain.tuning import Slo
from tunewright.loadtest.measure import answers, samples, token_flow
from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.protocol import Connection, PlainConnection, Server, error_kind
from tunewright.loadtest.recording import Record, Recorder, pack_stamp, unpack_stamp

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = 6


def chunk(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKEN = chunk('{"choices":[{"text":" \\"usage\\":{\\"completion_tokens\\":99} data: x","finish_reason":null}]}')
USAGE = chunk('{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}' % TOKENS)  # noqa: UP031 - braces
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
STREAM = HEAD + TOKEN * TOKENS + USAGE + DONE


class Wire(Connection):
    """A connection whose bytes a test moves, one millisecond a read."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.ended: list[Record] = []
        self.lost: list[tuple[str, bool]] = []
        self.clock = 1_000_000_000
        super().__init__(
            self.recorder,
            lambda _, record: self.ended.append(record),
            lambda _, record, reason, untouched: self.lost.append((reason, untouched)),
        )

    def ask(self) -> Record:
        record = Record(Planned(0, 5, TOKENS, b""), self.clock, ramp=False)
        self.recorder.begin(record)
        self.send(record, b"")
        record.sent_ns = self.clock
        return record

    def get(self, data: bytes) -> None:
        self.clock += 1_000_000
        self._received(data, pack_stamp(self.clock))

    def eof(self) -> None:
        self._closed("connection closed early")

    def close(self) -> None:
        self.open = False

    def _write(self, payload: bytes) -> None:
        pass


def parse(record: Record, endpoint="completions"):
    (answer,) = answers([record], endpoint, 1_000_000_000, from_intended=False)
    return answer


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True, max_size=40))
@settings(max_examples=200, deadline=None)
def test_tokens_are_counted_the_same_wherever_reads_end(places):
    wire = Wire()
    record = wire.ask()
    for part in cut(STREAM, places):
        wire.get(part)
    assert wire.ended == [record]
    assert wire.recorder.in_flight == 0
    answer = parse(record)
    assert answer.error is None
    assert (answer.output_tokens, answer.prompt_tokens) == (TOKENS, 5)
    assert answer.events.sum() == TOKENS
    assert wire.recorder.events == TOKENS + 2


def test_every_byte_alone_gives_each_token_its_own_time():
    wire = Wire()
    record = wire.ask()
    for byte in STREAM:
        wire.get(bytes([byte]))
    answer = parse(record)
    assert list(answer.events) == [1] * TOKENS
    assert answer.ttft == pytest.approx((len(HEAD) + len(TOKEN) - 2) * 1e-3)
    assert answer.gaps == pytest.approx([len(TOKEN) * 1e-3] * (TOKENS - 1))
    assert answer.tpot == pytest.approx(len(TOKEN) * 1e-3)
    assert answer.e2e == pytest.approx(answer.ttft + 5 * len(TOKEN) * 1e-3)


def test_a_connection_is_used_again_from_a_clean_start():
    wire = Wire()
    for _ in range(2):
        record = wire.ask()
        wire.get(STREAM)
        assert parse(record).events.sum() == TOKENS
    assert len(wire.ended) == 2


def test_the_usage_event_in_the_last_token_s_read_is_no_merged_token():
    wire = Wire()
    record = wire.ask()
    wire.get(HEAD)
    for _ in range(TOKENS - 1):
        wire.get(TOKEN)
    wire.get(TOKEN + USAGE + DONE)
    answer = parse(record)
    assert list(answer.events) == [1] * TOKENS
    assert samples([answer], Slo(), 0.0, 10.0).merged == 0.0


def test_a_separate_finish_event_is_no_token():
    wire = Wire()
    record = wire.ask()
    for part in [HEAD, *[TOKEN] * TOKENS, chunk('{"choices":[{"text":"","finish_reason":"length"}]}'), USAGE, DONE]:
        wire.get(part)
    assert parse(record).e2e == pytest.approx((1 + TOKENS) * 1e-3)


def test_a_chat_s_role_is_no_token():
    wire = Wire()
    record = wire.ask()
    for part in [HEAD + TOKEN, *[TOKEN] * TOKENS, USAGE, DONE]:
        wire.get(part)
    answer = parse(record, "chat")
    assert answer.ttft == pytest.approx(2e-3)
    assert list(answer.events) == [1] * TOKENS


def delta(told: str) -> bytes:
    return chunk('{"choices":[{"index":0,"delta":{%s},"finish_reason":null}]}' % told)  # noqa: UP031 - braces


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_deltas_of_reasoning_and_of_tools_are_tokens_too(field):
    """The first token of a model that thinks is its first thought: its TTFT is not that of the answer."""
    deltas = [
        delta(f'"{field}":"Let"'),
        delta(f'"{field}":" me see"'),
        delta('"content":"It"'),
        delta('"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"run","arguments":""}}]'),
        delta('"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\": 1}"}}]'),
        chunk('{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"tool_calls"}]}'),
    ]
    wire = Wire()
    record = wire.ask()
    for part in [HEAD + delta('"role":"assistant","content":""'), *deltas, USAGE, DONE]:
        wire.get(part)
    answer = parse(record, "chat")
    assert answer.ttft == pytest.approx(2e-3)
    assert answer.e2e == pytest.approx(7e-3)
    assert list(answer.events) == [1] * TOKENS
    assert answer.output_tokens == TOKENS
    _, weights = token_flow([answer])
    assert weights.sum() == TOKENS


def test_tokens_of_a_speculating_server_are_weighed_by_its_usage():
    wire = Wire()
    record = wire.ask()
    for part in [HEAD, TOKEN, TOKEN, USAGE, DONE]:
        wire.get(part)
    times, weights = token_flow([parse(record)])
    assert list(weights) == [3.0, 3.0]
    assert len(times) == 2


def test_an_answer_that_is_an_error_keeps_its_text_and_the_connection():
    wire = Wire()
    record = wire.ask()
    for part in cut(b'HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\n{"error": 1}\n', [9, 30, 50]):
        wire.get(part)
    assert record.error == "http 404"
    assert record.ending == b'{"error": 1}\n'
    assert wire.open
    assert wire.ended == [record]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "the answer is no stream"),
        (b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n", "http 503"),
        (b"SSH-2.0\r\n\r\n0\r\n\r\n", "not http"),
    ],
)
def test_what_is_no_stream_is_an_error(data, error):
    wire = Wire()
    record = wire.ask()
    wire.get(data)
    wire.eof()
    assert record.error == error


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (HEAD + TOKEN * 2 + DONE, "no usage in the answer"),
        (HEAD + chunk('{"error": {"message": "x"}}') + DONE, "error in the stream"),
        (HEAD + TOKEN + chunk('{"choices":[{"text":"","finish_reason":"abort"}]}') + USAGE + DONE, "finished by abort"),
        (HEAD + USAGE + DONE, "no tokens in the answer"),
        (HEAD + b"0\r\n\r\n", "no usage in the answer"),
    ],
)
def test_a_stream_that_ends_without_what_it_needs_is_an_error(stream, error):
    wire = Wire()
    record = wire.ask()
    wire.get(stream)
    assert parse(record).error == error


def test_a_stream_cut_off_is_lost_and_an_idle_connection_that_closed_is_tried_again():
    wire = Wire()
    wire.ask()
    wire.get(HEAD + TOKEN)
    wire.eof()
    assert wire.lost == [("connection closed early", False)]
    wire = Wire()
    wire.ask()
    wire.get(STREAM)
    wire.ask()
    wire.eof()
    assert wire.lost == [("connection closed early", True)]


def test_a_stream_without_chunks_ends_with_its_connection():
    wire = Wire()
    record = wire.ask()
    wire.get(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    for _ in range(TOKENS):
        wire.get(b"data: {}\n\n")
    wire.get(b'data: {"usage":{"completion_tokens":6}}\n\ndata: [DONE]\n\n')
    wire.eof()
    assert wire.ended == [record]
    assert parse(record).events.sum() == TOKENS
    assert not wire.open


def test_stamps_are_the_kernel_s_format():
    assert unpack_stamp(pack_stamp(1_790_000_000_123_456_789)) == 1_790_000_000_123_456_789


def test_a_request_s_bytes():
    server = Server.of("http://127.0.0.1:8000/base/", "/v1/completions", "key", None)
    text = server.request("id-1", b"{}").decode()
    assert text.startswith("POST /base/v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert "\r\nAuthorization: Bearer key\r\n" in text
    assert text.endswith("\r\nX-Request-Id: id-1\r\nContent-Length: 2\r\n\r\n{}")


def test_kinds_of_errors_are_few_words():
    assert error_kind(ConnectionRefusedError(111, "x")) == "connection refused"
    assert error_kind(TimeoutError()) == "connecting timed out"
    assert error_kind(OSError(113, "x")) == "no route to host"


def test_a_large_request_is_sent_whole_to_a_slow_reader():
    payload = bytes(8 << 20)

    async def scenario() -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            connection = PlainConnection(loop, ours, Recorder(), lambda *_: None, lambda *_: None)
            connection.send(Record(Planned(0, 1, 1, b""), 0, ramp=False), payload)
            got = 0
            async with asyncio.timeout(30):
                while got < len(payload):
                    got += len(await loop.sock_recv(theirs, 1 << 20))
            connection.close()
            return got

    assert asyncio.run(scenario()) == len(payload)
