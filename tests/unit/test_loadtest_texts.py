"""Text prompts of a file: each once, then again and told; as long as they are; and nothing said twice."""

import json
from pathlib import Path

import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.checks import check_load_file
from tunewright.domain.load import Load
from tunewright.domain.tuning import Tuning
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.gathering import _can_split
from tunewright.loadtest.job import LoadFailure, LoadJob, LoadResult
from tunewright.loadtest.run import execute, main
from tunewright.loadtest.texts import TextSource
from tunewright.ports import LoadRequest, Refused

TEXTS = [f'Question "{i}":\nwhat is {i} + é?' for i in range(30)]


def written(folder: Path, texts: list[str] = TEXTS) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": "42"}) for text in texts))
    return str(path)


def job(file: str, url: str = "http://x", **more) -> LoadJob:
    lengths = {"prompt_tokens": Lengths(fixed=5000), "output_tokens": Lengths(fixed=8)}
    workload = Workload(concurrency=4, prompts_file=file, **lengths)
    return LoadJob(url=url, workload=workload, **{"seed": 1, "duration": 0.6, "max_warmup": 0.3, **more})


def sent(source: TextSource, count: int) -> list[str]:
    return [json.loads(source.next().body)["prompt"] for _ in range(count)]


def test_every_text_comes_once_before_any_comes_again(tmp_path):
    file = written(tmp_path)
    source = TextSource(job(file), "m", 4096)
    first, second = sent(source, 30), sent(source, 30)
    assert sorted(first) == sorted(second) == sorted(TEXTS)
    assert first not in (TEXTS, second)
    assert first == sent(TextSource(job(file), "m"), 30)
    assert first != sent(TextSource(job(file, seed=2), "m"), 30)


def test_reuse_is_told_and_only_then(tmp_path):
    source = TextSource(job(written(tmp_path)), "m")
    assert len(source.remarks(30)) == 1
    assert "30 prompts, sha256 of their texts" in source.remarks(30)[0]
    assert "31 requests were sent: the prompts were used again" in source.remarks(31)[1]


def test_bodies_are_texts_with_exact_output_lengths(tmp_path):
    file = written(tmp_path)
    completion = TextSource(job(file), "m").next(shorten=0.5)
    body = json.loads(completion.body)
    assert body["prompt"] in TEXTS
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0)
    sampled = job(file)
    sampled = sampled.model_copy(update={"workload": sampled.workload.model_copy(update={"temperature": 0.5})})
    assert json.loads(TextSource(sampled, "m").next().body)["temperature"] == 0.5
    chat = json.loads(TextSource(job(file, endpoint="chat"), "m").next().body)
    assert chat["messages"][0]["content"] in TEXTS
    assert chat["max_completion_tokens"] == 8


def measured(asked: LoadJob) -> LoadResult:
    return execute(asked, lambda _: None)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_texts_are_measured_by_the_server_s_usage(endpoint, tmp_path):
    behaviour = Behaviour()
    file = written(tmp_path, [f"{i:040d}" + "x" * 360 for i in range(2000)])
    with stream_server(behaviour) as server:
        result = measured(job(file, server.url, endpoint=endpoint))
    found = result.measurement
    assert found is not None, result.failure
    assert not any("server counts" in reason for reason in found.void)
    each = 400 if endpoint == "completions" else 1 + 3  # as the server there counts letters, and words
    prompted = round(found.input_tokens_per_second * found.duration)
    assert prompted > 0
    assert prompted % each == 0
    bodies = [json.dumps(body.get("prompt", body.get("messages"))) for body in behaviour.bodies]
    assert len(set(bodies)) == len(bodies)
    assert "2000 prompts" in result.notes[0]
    assert not any("used again" in note for note in result.notes)


def test_a_short_file_is_used_again_and_the_result_says_so(tmp_path):
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        result = measured(job(written(tmp_path, TEXTS[:3]), server.url))
    assert any(f"{len(behaviour.bodies)} requests were sent: the prompts were used again" in n for n in result.notes)


def test_a_bad_file_ends_the_run_before_anything_is_sent(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}')
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        result = measured(job(str(tmp_path / "bad.jsonl"), server.url))
    assert result.failure is not None
    assert "bad.jsonl, line 2: unknown field `text`" in result.failure
    assert behaviour.bodies == []
    with pytest.raises(LoadFailure, match=r"none\.jsonl can't be read"):
        TextSource(job(str(tmp_path / "none.jsonl")), "m")


def test_texts_are_not_shared_out_to_processes_that_would_send_them_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    asked = job(written(tmp_path))
    assert not _can_split(asked, 2)
    plain = asked.workload.model_copy(update={"prompts_file": None})
    assert _can_split(asked.model_copy(update={"workload": plain}), 2)


NORMAL = {"mean": 5, "standardDeviation": 1, "most": 9}


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"promptTokens": 5, "prefixReuse": "5%"}, "promptTokens and prefixReuse can't be with promptsFile"),
        ({"lengths": {"prompt": NORMAL}}, r"lengths\.prompt can't be with promptsFile"),
        ({"lengths": {"trace": {"file": "t"}}}, r"lengths\.trace can't be with promptsFile"),
        ({"mode": "trace", "trace": {"file": "t"}}, "promptsFile can't be with mode trace"),
        ({"mode": "highestRate"}, "its cache knows them|whose cache knows them"),
    ],
)
def test_what_the_texts_say_themselves_is_refused(load, said):
    with pytest.raises(ValueError, match=said):
        Load.model_validate({"promptsFile": "p", **load})
    assert Load.model_validate({"promptsFile": "p", "lengths": {"output": NORMAL}}).source.field == "promptsFile"


def test_the_tuning_file_names_prompts(tmp_path, monkeypatch):
    spec = {"target": {"deployment": "d"}, "objective": {"maximize": "goodput"}, "load": {"promptsFile": "p.jsonl"}}
    head = {"apiVersion": "tunewright.dev/v1alpha1", "kind": "Tuning", "metadata": {"name": "t"}}
    with pytest.raises(ValueError, match=r"load\.promptsFile is a file on this machine, which the pods"):
        Tuning.model_validate(head | {"spec": spec})
    spec["target"] = {"command": ["vllm", "serve", "m", "--port", "{port}"]}
    monkeypatch.chdir(tmp_path)
    tuning = Tuning.model_validate(head | {"spec": spec})
    with pytest.raises(Refused, match=r"^load\.promptsFile: p\.jsonl can't be read"):
        check_load_file(tuning)
    Path(written(tmp_path)).rename("p.jsonl")
    assert check_load_file(tuning) == "30 prompts, 30 of them with the right answer"
    workload = job("p.jsonl").workload
    made = LoadJob.of(LoadRequest("http://x", workload, None, job("x").slo, 1.0, 1.0, 1))
    assert made.workload.prompts_file == str(tmp_path / "p.jsonl")


def test_by_hand(tmp_path, capsys):
    file = written(tmp_path)
    with stream_server() as server:
        words = [server.url, "--prompts", file, "--output-tokens", "3", "--concurrency", "2"]
        assert main([*words, "--duration", "500ms", "--max-warmup", "100ms", "--json"]) in (0, 3)
    assert "30 prompts" in json.loads(capsys.readouterr().out)["notes"][0]
