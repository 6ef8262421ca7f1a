"""Agent sessions: what is sent turn by turn, how conversations are kept running, and what is refused."""

import asyncio
import json

import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.domain.load import Load
from tunewright.domain.traffic import Sessions
from tunewright.domain.workload import Workload, workload_for
from tunewright.loadtest.client import Client
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.protocol import Server
from tunewright.loadtest.recording import Record, Recorder
from tunewright.loadtest.run import execute, main
from tunewright.loadtest.sessions import SessionLoop, SessionSource, answer_text

SHAPE = {"concurrency": 4, "turns": 3, "first_prompt": 40, "shared_prompt": 10, "per_turn": 12, "output": 5}


def shape(**more) -> Sessions:
    return Sessions.model_validate(SHAPE | {"pause": "20ms", "spread": "0%"} | more)


def job(url: str = "http://x", sessions: Sessions | None = None, **more) -> LoadJob:
    given = {"duration": 1.0, "max_warmup": 0.5, "seed": 1, "endpoint": "chat", **more}
    return LoadJob(url=url, workload=Workload.of_sessions(sessions or shape()), **given)


def source(limit: int | None = None, words: float = 1.0, **more) -> SessionSource:
    return SessionSource(job(sessions=shape(**more)), "m", 7, limit, words)


def messages(planned: Planned) -> list[tuple[str, int]]:
    """(role, words) of each message."""
    return [(m["role"], len(m["content"].split())) for m in json.loads(planned.body)["messages"]]


def answered(planned: Planned, text: str = "hello", prompt: int = 40, output: int = 5) -> Record:
    record = Record(planned, 0, ramp=False)
    event = b'data: {"choices":[{"delta":{"content":%b}}]}\n\n' % json.dumps(text).encode()
    record.body = b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
    record.ending = b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (prompt, output)
    record.finished_ns = 1
    return record


def test_context_grows_by_what_was_answered_until_the_last_turn():
    made = source()
    conversation = made.begin()
    first = made.request(conversation)
    assert messages(first) == [("user", 40)]
    assert first.whole
    assert made.go_on(conversation, answered(first, 'two "words"'))
    second = made.request(conversation)
    assert messages(second) == [("user", 40), ("assistant", 2), ("user", 12)]
    assert json.loads(second.body)["messages"][1]["content"] == 'two "words"'
    assert second.prompt_tokens == 40 + 5 + 12
    assert made.go_on(conversation, answered(second))
    assert not made.go_on(conversation, answered(made.request(conversation)))


def test_turns_are_sampled_as_the_workload_says():
    workload = Workload.of_sessions(shape(), temperature=0.7)
    warm = SessionSource(job().model_copy(update={"workload": workload}), "m", 7, None)
    assert json.loads(warm.request(warm.begin()).body)["temperature"] == 0.7
    greedy = source()
    assert json.loads(greedy.request(greedy.begin()).body)["temperature"] == 0


def test_conversations_share_the_system_prompt_and_nothing_else():
    made = source()
    one, two = (json.loads(made.request(made.begin()).body)["messages"][0]["content"].split() for _ in range(2))
    assert one[:10] == two[:10]
    assert one[10:] != two[10:]


def test_a_conversation_may_begin_in_the_middle():
    planned = (made := source()).request(made.begin(turn=2))
    assert messages(planned) == [("user", 40), ("assistant", 5), ("user", 12), ("assistant", 5), ("user", 12)]
    assert planned.prompt_tokens == 74


def test_lengths_are_in_the_server_s_tokens_and_spread_around_their_mean():
    assert messages((made := source(words=2.0)).request(made.begin())) == [("user", 20)]
    wide = source(spread="50%")
    drawn = [wide.request(wide.begin()).output_tokens for _ in range(200)]
    assert 2 <= min(drawn) < 4 < 6 < max(drawn) <= 8
    pauses = [wide.pause() for _ in range(200)]
    assert 0.01 <= min(pauses) < 0.013 < 0.027 < max(pauses) <= 0.03


def test_what_can_not_fit_is_refused_and_what_might_not_ends_early():
    longest = shape().longest
    assert longest == 40 + 2 * (12 + 5) + 5
    with pytest.raises(
        LoadFailure, match=f"come to {longest} tokens, which do not fit .* max_model_len of {longest - 1}"
    ):
        source(limit=longest - 1)
    made = source(limit=longest)
    conversation = made.begin()
    # The server counts more tokens for the answer than were asked for.
    assert not made.go_on(conversation, answered(made.request(conversation), prompt=60, output=5))
    assert made.cut_short == 1


@pytest.mark.parametrize("separator", [":", ": "])
def test_text_is_read_from_raw_chunks(separator):
    pieces = ["a\nb", 'say "content"', "\\", "日本", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]
    body = b"\r\n"
    for piece in ["", *pieces]:
        event = f'data: {{"choices":[{{"delta":{{"content"{separator}{json.dumps(piece)}}}}}]}}\n\n'.encode()
        for part in (event[:30], event[30:]):  # an event split over two chunks
            body += b"%x\r\n%b\r\n" % (len(part), part)
    assert json.loads(b'"' + answer_text(body + b"0\r\n\r\n") + b'"') == "".join(pieces)


class Sink(Client):
    """Takes requests and sends them nowhere."""

    def __init__(self) -> None:
        super().__init__(Server.of("http://127.0.0.1:9", "/v1/chat/completions", None, None), Recorder(), "t")
        self.sent: list[Record] = []

    def submit(self, planned: Planned, intended_ns: int, ramp: bool = False) -> Record:
        self.sent.append(Record(planned, intended_ns, ramp))
        return self.sent[-1]


def test_the_next_turn_comes_after_the_pause_and_a_new_conversation_after_the_last_turn():
    async def scenario() -> None:
        client, recorder = Sink(), Recorder()
        loop = SessionLoop(client, recorder, source(concurrency=1, turns=2))
        loop.prepare()
        loop.start()
        (record,) = client.sent
        assert record.ramp
        began_at_second = len(json.loads(client_body(loop, record))) > 1
        while not began_at_second or len(client.sent) < 3:
            finish(record)
            loop.ended(record)
            count = len(client.sent)
            async with asyncio.timeout(20):
                while len(client.sent) == count:
                    await asyncio.sleep(0.005)
            began_at_second = True
            record = client.sent[-1]
        assert {until - since for since, until in recorder.pauses} == {20_000_000}
        loop.stop()
        loop.ended(client.sent[-1])
        await asyncio.sleep(0.05)
        assert len(client.sent) == 3

    def finish(record: Record) -> None:
        done = answered(Planned(0, 1, 1, b""))
        record.body, record.ending, record.finished_ns = done.body, done.ending, record.intended_ns + 1

    def client_body(loop: SessionLoop, record: Record) -> bytes:
        return b"[" + b",".join(loop._running[record].messages) + b"]"

    asyncio.run(scenario())


def test_sessions_are_measured_and_reconciled():
    behaviour = Behaviour(word_tokens=1.5)
    with stream_server(behaviour) as server:
        result = execute(job(server.url), lambda _: None)
    found = result.measurement
    assert found is not None, result.failure
    assert not any("server counts" in reason for reason in found.void)
    assert found.generator.asked == 4
    in_flight = found.requests_per_second * found.e2e.mean
    assert found.generator.achieved > 1.2 * in_flight  # a pause is no lack of load
    turns = [body for body in behaviour.bodies if body.get("stream")]
    longest = max(turns, key=lambda body: len(body["messages"]))
    assert [m["role"] for m in longest["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    sent_back = {m["content"] for body in turns for m in body["messages"] if m["role"] == "assistant"}
    assert "".join(f' data: "é{i}"\n\n' for i in range(1, 6)) in sent_back
    assert len(longest["messages"][0]["content"].split()) == round(30 / 1.5) + round(10 / 1.5)


def test_a_server_without_a_chat_template_is_refused_before_any_load():
    behaviour = Behaviour(status=400)
    with stream_server(behaviour) as server:
        failure = execute(job(server.url), lambda _: None).failure
    assert failure is not None
    assert "sessions need a model with a chat template" in failure
    assert not any(body.get("stream") for body in behaviour.bodies)


def test_people_ask_for_sessions(capsys):
    words = ["--sessions", "2", "--turns", "2", "--prompt-tokens", "30", "--per-turn", "8", "--output-tokens", "4"]
    with stream_server() as server:
        words += ["--pause", "10ms", "--duration", "1s", "--max-warmup", "200ms"]
        assert main([server.url, *words]) == 0
    assert "2 sessions of 2 turns" in capsys.readouterr().out


def test_the_file_asks_for_sessions():
    block = {"concurrency": 32, "firstPrompt": 6000, "perTurn": 800, "output": 300}
    load = Load.model_validate({"mode": "sessions", "sessions": block})
    workload = workload_for(load, None)  # type: ignore[arg-type]  # nothing of the profile is asked
    assert (workload.concurrency, workload.output_tokens.fixed) == (32, 300)
    assert workload.prompt_tokens.fixed == 6000 + 5.5 * 1100
    assert 0.8 < workload.prefix_reuse < 0.95
    for wrong, reason in (
        ({"mode": "sessions"}, "belong together"),
        ({"sessions": block}, "belong together"),
        ({"mode": "sessions", "sessions": block, "promptTokens": 5}, "promptTokens can't be with mode sessions"),
        ({"mode": "sessions", "sessions": block | {"sharedPrompt": 6000}}, "must be below firstPrompt"),
        ({"mode": "sessions", "sessions": block | {"spread": "101%"}}, "above 100%"),
    ):
        with pytest.raises(ValueError, match=reason):
            Load.model_validate(wrong)
