"""Traces: each format, what is wrong by line, what is shared, and when requests go."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.checks import check_load_file
from tunewright.domain.load import Load
from tunewright.domain.traffic import Trace
from tunewright.domain.tuning import Tuning
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.client import Client
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.pacing import Stock
from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.protocol import Server
from tunewright.loadtest.recording import NANO, Record, Recorder
from tunewright.loadtest.run import execute, main
from tunewright.loadtest.trace import TraceLoop, TraceSource, read_trace
from tunewright.ports import LoadRequest, Refused

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,480,44
2023-11-16 18:17:04.0319600,396,109
2023-11-16 18:17:06.0319600,20,0
"""


def mooncake(*rows: tuple, **more) -> str:
    lines = [{"timestamp": at, "input_length": n, "output_length": out, "hash_ids": ids} for at, n, out, ids in rows]
    return "\n".join(json.dumps(line | more) for line in lines)


MOONCAKE = mooncake((1000, 600, 5, [0, 1]), (1500, 1100, 7, [0, 1, 2]), (3000, 512, 9, [3]))


def trace(folder: Path, text: str, name: str = "trace.jsonl", **more) -> Trace:
    (folder / name).write_text(text)
    return Trace.model_validate({"file": str(folder / name)} | more)


def job(trace: Trace, url: str = "http://x", **more) -> LoadJob:
    workload = Workload(trace=trace, prompt_tokens=Lengths(fixed=8), output_tokens=Lengths(fixed=8))
    return LoadJob(url=url, workload=workload, seed=1, **{"duration": 1.0, "max_warmup": 0.2} | more)


def test_mooncake_counts_milliseconds_and_blocks_of_512(tmp_path):
    found = read_trace(trace(tmp_path, MOONCAKE))
    assert [(a.at, a.prompt, a.output, len(a.blocks)) for a in found.arrivals] == [
        (0.0, 600, 5, 2),
        (0.5, 1100, 7, 3),
        (2.0, 512, 9, 1),
    ]
    assert (found.block, found.period) == (512, 3.0)


def test_a_timed_trace_counts_seconds_and_blocks_of_16(tmp_path):
    text = mooncake((1.5, 40, 5, [7, 8, 9]), (2.0, 17, 7, [7, 8]))
    found = read_trace(trace(tmp_path, text))
    assert ([a.at for a in found.arrivals], found.block) == ([0.0, 0.5], 16)


def test_azure_s_columns_are_read_by_name(tmp_path):
    found = read_trace(trace(tmp_path, AZURE, "azure.csv"))
    assert [a.at for a in found.arrivals] == pytest.approx([0, 0.052, 2.052], abs=1e-5)
    assert [(a.prompt, a.output) for a in found.arrivals] == [(480, 44), (396, 109), (20, 0)]
    zoned = "GeneratedTokens,TIMESTAMP,ContextTokens\n5,2024-05-10 00:00:00.009930+00:00,2162\n"
    (only,) = read_trace(trace(tmp_path, zoned, "two.csv", format="azure")).arrivals
    assert (only.prompt, only.output) == (2162, 5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MOONCAKE + "\n{", ":4: this is no JSON"),
        (MOONCAKE + "\n[1]", ":4: this is no JSON object"),
        (MOONCAKE + "\n\n" + mooncake((4000, 0, 5, [])), ":5: input_length is 0"),
        (MOONCAKE + "\n" + mooncake((4000, 5, None, [])), ":4: output_length is None"),
        (MOONCAKE + "\n" + mooncake((4000, True, 5, [])), ":4: input_length is True"),
        (MOONCAKE + "\n" + mooncake(("1", 5, 5, [])), ":4: timestamp is '1'"),
        (MOONCAKE + "\n" + mooncake((float("nan"), 5, 5, [])), ":4: timestamp is nan"),
        (MOONCAKE + "\n" + mooncake((2999, 5, 5, [])), ":4: its time is before that of line 3"),
        (MOONCAKE + "\n" + mooncake((4000, 5, 5, "ab")), ":4: hash_ids is no list"),
        (MOONCAKE + "\n" + "[" * 100_000, ":4: this is no JSON"),
        (MOONCAKE + "\n" + mooncake((10**400, 5, 5, [])), ":4: int too large"),
        (AZURE + '"' + "x" * 200_000, "this is no CSV: field larger than field limit"),
        (AZURE + "2023-11-16 18:17:07,1\n", ":5: 2 columns"),
        (AZURE + "yesterday,1,1\n", ":5: 'yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:07,-1,1\n", ":5: '-1' and '1' are no token counts"),
        ("TIMESTAMP,ContextTokens\n", ":1: the header lacks generatedtokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (mooncake((0, 5, 5, [])), "has no hash_ids, so its format can't be told"),
        (mooncake((0, 5, 5, [1])), "hash_ids of either"),
        (mooncake((0, 5, 5, [1, 2])), "hash_ids of neither"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, text, reason):
    with pytest.raises(LoadFailure) as failed:
        read_trace(trace(tmp_path, text))
    assert reason in str(failed.value)


def test_a_named_format_holds_every_line_to_it(tmp_path):
    with pytest.raises(LoadFailure, match=r":1: 2 hash_ids for 600 tokens, where one names 16 tokens"):
        read_trace(trace(tmp_path, MOONCAKE, format="timed"))
    assert len(read_trace(trace(tmp_path, mooncake((0, 5, 5, [])), format="mooncake")).arrivals) == 1


def test_many_wrong_lines_are_counted(tmp_path):
    text = "\n".join([MOONCAKE] + ["x"] * 9)
    with pytest.raises(LoadFailure) as failed:
        read_trace(trace(tmp_path, text))
    assert str(failed.value).endswith("and 4 more lines")


def test_a_wrong_line_or_one_that_does_not_fit_stops_before_anything_is_sent(tmp_path):
    behaviour = Behaviour(max_model_len=1000)
    with stream_server(behaviour) as server:
        long = execute(job(trace(tmp_path, MOONCAKE), server.url), lambda _: None).failure
        wrong = execute(job(trace(tmp_path, MOONCAKE + "\nx"), server.url), lambda _: None).failure
    assert ":2: 1100 prompt and 7 output tokens do not fit the server's max_model_len of 1000" in str(long)
    assert ":4: this is no JSON" in str(wrong)
    assert behaviour.bodies == []


def bodies(source: TraceSource, count: int) -> list[list[int]]:
    return [json.loads(source.next().body)["prompt"] for _ in range(count)]


def test_blocks_with_one_name_are_the_same_tokens_within_a_round(tmp_path):
    recording = read_trace(trace(tmp_path, MOONCAKE))
    asked = job(trace(tmp_path, MOONCAKE))
    one, two, three, again = bodies(TraceSource(asked, "m", [7, 1], recording, 1), 4)
    assert [len(prompt) for prompt in (one, two, three)] == [600, 1100, 512]
    assert one == two[:600]
    assert one[:512] != three
    assert len(again) == 600
    assert again[:16] != one[:16]  # the second round is new: it would else be found in the cache
    warmup = bodies(TraceSource(asked, "m", [7, 0], recording, 0), 1)[0]
    assert warmup[:16] != one[:16]


def test_without_names_nothing_is_shared(tmp_path):
    recording = read_trace(trace(tmp_path, AZURE, "azure.csv"))
    one, two, _ = bodies(TraceSource(job(trace(tmp_path, AZURE, "azure.csv")), "m", [7, 1], recording, 1), 3)
    assert one[:16] != two[:16]


def test_arrivals_are_counted_over_rounds(tmp_path):
    recording = read_trace(trace(tmp_path, MOONCAKE))
    assert [recording.arrivals_within(s) for s in (0.4, 0.6, 3.0, 3.1, 6.6)] == [1, 2, 3, 4, 8]
    asked = Trace(file="t", speed=2)
    assert not any("begun again" in remark for remark in recording.remarks(asked, 1.5))
    assert any("begun again" in remark for remark in recording.remarks(asked, 1.6))


class Sink(Client):
    """Takes requests and sends them nowhere."""

    def __init__(self) -> None:
        super().__init__(Server.of("http://127.0.0.1:9", "/v1/completions", None, None), Recorder(), "t")
        self.sent: list[Record] = []

    def submit(self, planned: Planned, intended_ns: int, ramp: bool = False) -> Record:
        self.sent.append(Record(planned, intended_ns, ramp))
        return self.sent[-1]


def test_requests_go_at_their_times_and_the_window_begins_anew(tmp_path):
    async def scenario() -> None:
        client = Sink()
        asked = job(trace(tmp_path, MOONCAKE))
        recording = read_trace(trace(tmp_path, MOONCAKE))
        stocks = [Stock(TraceSource(asked, "m", [1, part], recording, part), 4) for part in (0, 1)]
        loop = TraceLoop(client, *stocks, recording, speed=20.0)
        loop.prepare()
        loop.start()
        await until(client, 2)
        loop.window()
        begun = len(client.sent)
        await until(client, begun + 4)
        loop.stop()
        loop.close()
        measured = client.sent[begun : begun + 4]
        times = np.array([record.intended_ns for record in measured]) / NANO
        assert times - times[0] == pytest.approx([0, 0.025, 0.1, 0.15], abs=1e-6)
        assert [record.prompt_tokens for record in measured] == [600, 1100, 512, 600]
        assert client.sent[0].number != measured[0].number

    async def until(client: Sink, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(client.sent) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_a_trace_is_measured(tmp_path, capsys):
    rows = [(20 * i, 20, 3, [i]) for i in range(100)]
    trace(tmp_path, mooncake(*rows))
    with stream_server() as server:
        words = [server.url, "--trace", str(tmp_path / "trace.jsonl"), "--trace-format", "mooncake", "--speed", "2"]
        assert main([*words, "--duration", "800ms", "--max-warmup", "200ms", "--json"]) in (0, 3)
    result = json.loads(capsys.readouterr().out)
    assert result["measurement"]["generator"]["asked"] == pytest.approx(100)
    assert "100 requests, sha256" in result["notes"][0]


def test_the_file_asks_for_a_trace(tmp_path, monkeypatch):
    text = {"mode": "trace", "trace": {"file": "t.jsonl", "speed": 2}}
    load = Load.model_validate(text)
    assert load.trace is not None
    with pytest.raises(ValueError, match="mode trace and the block trace belong together"):
        Load.model_validate({"trace": {"file": "t.jsonl"}})
    spec = {"target": {"deployment": "d"}, "objective": {"maximize": "goodput"}, "load": text}
    head = {"apiVersion": "tunewright.dev/v1alpha1", "kind": "Tuning", "metadata": {"name": "t"}}
    with pytest.raises(ValueError, match=r"load\.trace\.file is a file on this machine"):
        Tuning.model_validate(head | {"spec": spec})
    spec["target"] = {"command": ["vllm", "serve", "m", "--port", "{port}"]}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=r"t\.jsonl can't be read"):
        check_load_file(Tuning.model_validate(head | {"spec": spec}))
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    assert check_load_file(Tuning.model_validate(head | {"spec": spec})) == "3 requests over 3s"
    workload = Workload(trace=load.trace, prompt_tokens=Lengths(fixed=1), output_tokens=Lengths(fixed=1))
    request = LoadRequest("http://x", workload, None, LoadJob.model_fields["slo"].default_factory(), 1.0, 1.0, 1)
    made = LoadJob.of(request).workload.trace
    assert made is not None
    assert made.file == str(tmp_path / "t.jsonl")
