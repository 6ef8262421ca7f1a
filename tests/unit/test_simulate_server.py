"""The serving process from outside: HTTP, streams, usage, aborts, faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulate_process import Running, serving

QUICK = ("--sim-noise-between", "0", "--sim-noise-within", "0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    arguments = ("--served-model-name", "tiny", "alias", "--max-num-seqs", "32", "--enable-prompt-tokens-details")
    with serving(tmp_path_factory.mktemp("server"), *arguments, *QUICK) as running:
        yield running


def raw(server: Running, path: str, body: dict[str, Any]) -> tuple[str, list[bytes]]:
    """A streamed answer's head, and its chunks as framed on the wire."""
    data = json.dumps({"stream": True, "temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: r1\r\nConnection: close\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head.encode() + data)
        received = b""
        while part := client.recv(65536):
            received += part
    top, _, rest = received.partition(b"\r\n\r\n")
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    return top.decode(), chunks


def test_completion_chunks_are_vllms_bytes(server: Running) -> None:
    head, chunks = raw(
        server, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "stream_options": {"include_usage": True}}
    )
    assert head.startswith("HTTP/1.1 200 OK\r\ndate: ")
    assert "content-type: text/event-stream; charset=utf-8" in head
    assert "transfer-encoding: chunked" in head
    created = json.loads(chunks[0][6:])["created"]
    top = f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"tiny","choices":['
    assert all(chunk.startswith(top.encode()) for chunk in chunks[:-2])
    middle = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
    assert chunks[0].endswith(middle)
    assert b'"finish_reason":"length","stop_reason":null' in chunks[2]
    assert json.loads(chunks[3][6:])["usage"]["completion_tokens"] == 3
    assert b'"system_fingerprint":"vllm-0.32.0-' in chunks[3]
    assert chunks[4:] == [b"data: [DONE]\n\n", b""]


def test_chat_chunks_are_vllms_bytes(server: Running) -> None:
    _, chunks = raw(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    assert b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' in chunks[0]
    assert chunks[0].endswith(b',"prompt_token_ids":null,"prompt_text":null}\n\n')
    assert chunks[1].endswith(b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n')
    assert b'"finish_reason":"length","stop_reason":null,"token_ids":null}]}' in chunks[2]
    assert chunks[3:] == [b"data: [DONE]\n\n", b""]


def test_continuous_usage_counts_up(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = raw(server, "/v1/completions", {"prompt": "abcdefgh", "max_tokens": 3, "stream_options": options})
    counts = [json.loads(chunk[6:])["usage"]["completion_tokens"] for chunk in chunks[:4]]
    assert counts == [1, 2, 3, 3]


def test_answers_are_deterministic_and_depend_on_the_prompt(server: Running) -> None:
    one = server.complete(prompt="tell me a story", max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    two = server.complete(prompt="tell me a story", max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    other = server.complete(prompt="tell me a joke!", max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    warm = server.complete(prompt="tell me a story", max_tokens=20, ignore_eos=True, temperature=1)["choices"][0][
        "text"
    ]
    assert one == two
    assert len({one, other, warm}) == 3


def test_lossy_knobs_flip_a_small_fixed_share(server: Running, tmp_path: Path) -> None:
    def words(of: Running) -> list[str]:
        answer = of.complete(prompt=[[7, n] for n in range(16)], max_tokens=24, ignore_eos=True)
        return [word for choice in answer["choices"] for word in choice["text"].split()]

    with serving(tmp_path, "--kv-cache-dtype", "fp8", "--max-num-seqs", "16", *QUICK) as lossy:
        changed = words(lossy)
        assert words(lossy) == changed
    with serving(tmp_path, "--max-num-seqs", "4", "--enforce-eager", "--no-async-scheduling", *QUICK) as exact:
        assert words(exact) == words(server)
    pairs = list(zip(words(server), changed, strict=False))
    assert 0 < sum(a != b for a, b in pairs) / len(pairs) < 0.1


def test_usage_lists_and_cached_tokens(server: Running) -> None:
    ids = [list(range(1000, 1100)), list(range(2000, 2050))]
    answer = server.complete(prompt=ids, max_tokens=4, ignore_eos=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 150
    assert answer["usage"]["completion_tokens"] == 8
    again = server.complete(prompt=ids[0], max_tokens=1)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}


def test_min_tokens_and_natural_ends(server: Running) -> None:
    def ask(prompts: list[list[int]], **more: Any) -> Any:
        return server.complete(prompt=prompts, max_tokens=100, **more)

    prompts = [[n] for n in range(24)]
    ends = [choice["finish_reason"] for choice in ask(prompts)["choices"]]
    assert set(ends) == {"stop", "length"}
    short = prompts[ends.index("stop")]
    assert ask([short])["usage"]["completion_tokens"] < 100
    assert ask([short], min_tokens=100)["usage"]["completion_tokens"] == 100
    assert ask([short], ignore_eos=True)["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"prompt": [1] * 5000}, 400, "BadRequestError", "maximum context length is 4096 tokens"),
        ({"prompt": "a", "max_tokens": 9999}, 400, "BadRequestError", "requested 9999 output tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1"),
        ({"prompt": []}, 400, "BadRequestError", "prompt"),
        ({"model": "other", "prompt": "a"}, 404, "NotFoundError", "The model `other` does not exist."),
    ],
)
def test_refused_requests(server: Running, body: dict[str, Any], status: int, kind: str, words: str) -> None:
    got, answer = server.request("/v1/completions", body)
    error = json.loads(answer)["error"]
    assert (got, error["code"], error["type"]) == (status, status, kind)
    assert words in error["message"]


def test_the_rest_of_the_interface(server: Running) -> None:
    assert [m["id"] for m in server.get("/v1/models")["data"]] == ["tiny", "alias"]
    assert server.request("/health")[0] == 200
    assert server.request("/nowhere")[0] == 404
    assert server.request("/v1/completions", {"model": "alias", "prompt": "x", "max_tokens": 1})[0] == 200
    status, body = server.request("/tokenize", {"prompt": "abcdefgh"})
    assert (status, json.loads(body)["count"]) == (200, 2)
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}' in server.metrics()
    assert set(server.get("/sim/state")) >= {"profile", "late_ratio", "void", "requests"}


def test_a_client_that_leaves_is_an_abort(tmp_path: Path) -> None:
    with serving(tmp_path, *QUICK) as server:
        data = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        assert client.recv(100)
        server.wait_metric("vllm:num_requests_running{", 1)
        client.close()
        server.wait_metric("vllm:num_requests_running{", 0)
        assert server.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.complete(prompt="still here", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_metrics_count_what_was_served(tmp_path: Path) -> None:
    spec = '{"method":"mtp","num_speculative_tokens":2}'
    with serving(tmp_path, "--max-num-seqs", "8", "--speculative-config", spec, "--api-key", "k", *QUICK) as server:
        assert server.request("/v1/completions", {"prompt": "a"})[0] == 401
        body = {"prompt": [5] * 64, "max_tokens": 50, "ignore_eos": True}
        assert server.request("/v1/completions", body, {"Authorization": "Bearer k"})[0] == 200
        assert server.metric("vllm:prompt_tokens_total") == 64
        assert server.metric("vllm:generation_tokens_total") == 50
        assert server.metric('vllm:request_success_total{engine="0",finished_reason="length"') == 1
        drafts = server.metric("vllm:spec_decode_num_drafts_total")
        assert server.metric("vllm:inter_token_latency_seconds_count") == drafts < 49
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= 2 * drafts
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 1


def test_server_info_only_in_development_mode(server: Running, tmp_path: Path) -> None:
    assert server.request("/server_info")[0] == 404
    with serving(tmp_path, "--max-num-seqs", "9", env={"VLLM_SERVER_DEV_MODE": "1"}) as developer:
        assert developer.get("/server_info")["vllm_config"]["max_num_seqs"] == 9


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"), [("start-crash", "Engine core initialization failed"), ("start-oom", "OutOfMemory")]
)
def test_dies_at_start(fault: str, words: str, tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", fault, ready=False) as server:
        assert server.wait_end() == 1
        assert words in server.output()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die-under-load:2", "Worker proc VllmWorker-0 died unexpectedly"),
        ("oom-under-load:2", "torch.OutOfMemoryError"),
    ],
)
def test_dies_under_load_as_recorded(fault: str, words: str, tmp_path: Path) -> None:
    """/health 200, then 503 for a while, then nothing listens, then the process is gone."""
    with serving(tmp_path, "--sim-speed", "4", env={"TUNEWRIGHT_SIM_FAULT": fault}) as server:
        for _ in range(2):
            server.complete(prompt="x", max_tokens=2)
        assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 50})[0] == 500
        assert server.request("/health")[0] == 503
        assert server.wait_end() == 0
        with pytest.raises(OSError, match="refused"):
            server.request("/health")
        assert words in server.output()
        assert "EngineDeadError" in server.output()


def test_utilisation_without_room_dies_under_load(tmp_path: Path) -> None:
    with serving(tmp_path, "--gpu-memory-utilization", "0.99", "--max-num-seqs", "4", *QUICK) as server:
        status, _ = server.request("/v1/completions", {"prompt": [[n] for n in range(8)], "max_tokens": 60})
        assert status == 500
        server.wait_end()
        assert "torch.OutOfMemoryError" in server.output()


def test_healthy_but_generates_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", "no-tokens:1") as server:
        server.complete(prompt="x", max_tokens=2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}')
            server.wait_metric("vllm:num_requests_waiting{", 1)
            assert server.request("/health")[0] == 200
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_a_hang_ignores_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", "hang:1") as server:
        server.complete(prompt="x", max_tokens=1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}')
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(100)
        server.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(timeout=0.5)


def test_never_ready(tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", "hang-start", ready=False) as server:
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(timeout=1.0)
        with pytest.raises(OSError, match="refused"):
            server.request("/health")


def test_fewer_tokens_and_errors(tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", "fewer-tokens:0.5", "--sim-fault", "errors:0.5", "--sim-seed", "1") as server:
        answers = [
            server.request("/v1/completions", {"prompt": "x", "max_tokens": 10, "ignore_eos": True}) for _ in range(30)
        ]
    good = [json.loads(body) for status, body in answers if status == 200]
    assert 5 < len(good) < 25
    assert {answer["usage"]["completion_tokens"] for answer in good} == {5}
    assert {status for status, _ in answers} == {200, 500}


def test_slow_faults(tmp_path: Path) -> None:
    with serving(tmp_path, "--sim-fault", "slow:3", "--sim-fault", "slow-start:0.2", *QUICK) as slow:
        slow.complete(prompt="x", max_tokens=30, ignore_eos=True)
        third = slow.metric("vllm:inter_token_latency_seconds_sum")
    with serving(tmp_path, *QUICK) as plain:
        plain.complete(prompt="x", max_tokens=30, ignore_eos=True)
        # The engine's own clock, so exact whatever the machine does.
        assert third == pytest.approx(3 * plain.metric("vllm:inter_token_latency_seconds_sum"), rel=0.01)


def test_a_machine_that_is_too_slow_gives_no_time_to_first_token_below_zero(tmp_path: Path) -> None:
    """The engine's clock lags then, and a request must not be answered before it came."""

    def send(tokens: int) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        body = json.dumps({"prompt": "x", "max_tokens": tokens, "ignore_eos": True}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return client

    with serving(tmp_path, *QUICK) as server:
        first = send(300)
        server.wait_metric("vllm:time_to_first_token_seconds_count", 1)
        before = server.metric("vllm:time_to_first_token_seconds_sum")
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        second = send(1)
        os.kill(server.process.pid, signal.SIGCONT)
        server.wait_metric("vllm:time_to_first_token_seconds_count", 2)
        assert server.metric("vllm:time_to_first_token_seconds_sum") > before
        first.close()
        second.close()


def test_a_log_on_a_full_disk_costs_no_request(tmp_path: Path) -> None:
    with serving(tmp_path, *QUICK, log=Path("/dev/full")) as server:
        assert server.complete(prompt=[1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
        assert server.complete(prompt=[1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
