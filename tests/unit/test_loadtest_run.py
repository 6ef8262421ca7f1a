import json
import re
from pathlib import Path

import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.domain.answers import QualityPrompt
from tunewright.domain.load import Load
from tunewright.domain.profile import Source
from tunewright.domain.traffic import Normal, Pair, Ramp, TraceFile
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest import arguments, session, statistics
from tunewright.loadtest.job import LoadJob, LoadResult, Progress
from tunewright.loadtest.run import execute, main, progress_path

CERTIFICATE = Path(__file__).parents[1] / "fixtures" / "loadtest" / "test-only-localhost.pem"
FOUR = Workload(concurrency=4, prompt_tokens=Lengths(fixed=24), output_tokens=Lengths(fixed=8))

NORMAL = Normal(mean=500, standard_deviation=100, most=900)
PAIRS = (Pair(prompt_tokens=100, output_tokens=5, weight=3), Pair(prompt_tokens=10, output_tokens=50))


def job(url: str, workload: Workload = FOUR, **more) -> LoadJob:
    given = {"duration": 0.6, "max_warmup": 0.3, "seed": 1, **more}
    return LoadJob(url=url, workload=workload, **given)


def run(asked: LoadJob) -> LoadResult:
    return execute(asked, lambda _: None)


def measured(behaviour: Behaviour, **more):
    with stream_server(behaviour) as server:
        result = run(job(server.url, **more))
    assert result.measurement is not None, result.failure
    return result.measurement


def test_a_closed_loop_is_measured_and_reconciled():
    behaviour = Behaviour()
    found = measured(behaviour)
    assert found.void == ()
    assert found.completed > 0
    assert found.failed == 0
    assert found.source is Source.CPU
    assert found.vllm_version == "0.32.0+cpu"
    assert found.generator.asked == 4
    assert found.generator.achieved > 3.6
    low, high = found.output_tokens_per_second.low, found.output_tokens_per_second.high
    assert low < found.output_tokens_per_second.value < high
    assert found.ttft.p50 >= behaviour.token_seconds
    assert found.itl.p50 >= behaviour.token_seconds * 0.9
    assert found.tpot.p50 == pytest.approx((found.e2e.p50 - found.ttft.p50) / 7, rel=0.5)
    assert found.goodput is None
    assert found.server is not None
    assert found.server.prefix_hit_rate == pytest.approx(0.5)
    assert found.server.kv_cache_usage_max == 0.25


def test_a_steady_server_ends_the_warm_up_before_its_limit():
    found = measured(Behaviour(), max_warmup=30.0)
    assert found.warmup_settled
    assert found.warmup < 25


def test_over_tls_the_authority_is_checked_and_the_loop_s_time_noted():
    with stream_server(certificate=CERTIFICATE) as server:
        refused = run(job(server.url))
        trusted = run(job(server.url, ca_file=str(CERTIFICATE)))
    assert refused.failure is not None
    assert "certificate verify failed" in refused.failure
    assert trusted.measurement is not None
    assert trusted.measurement.completed > 0
    assert any("no kernel time stamp" in note for note in trusted.notes)


def test_requests_ask_for_exact_lengths_and_are_new_in_each_run():
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        first = run(job(server.url, duration=0.3))
        before = len(behaviour.bodies)
        second = run(job(server.url, duration=0.3))
    assert first.content_seed != second.content_seed
    body = behaviour.bodies[4]
    assert body["max_tokens"] == 8
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 24
    assert all(100 <= token < 20_000 for token in body["prompt"])
    prompts = [tuple(body["prompt"]) for body in behaviour.bodies]
    assert len(set(prompts)) == len(prompts) > before


@pytest.mark.parametrize("split", [1, 7])
def test_events_split_across_reads_are_counted_once(split):
    found = measured(Behaviour(split=split, token_seconds=0.01))
    assert found.void == ()
    assert found.generator.merged_reads < 0.5
    assert found.output_tokens_per_second.value == pytest.approx(found.requests_per_second * 8, rel=0.3)


def test_text_that_looks_like_an_event_and_speculation_are_counted_by_usage():
    found = measured(Behaviour(per_event=4))
    assert found.void == ()
    assert found.output_tokens_per_second.value == pytest.approx(found.requests_per_second * 8, rel=0.3)


def test_merged_reads_are_counted_and_void_what_can_not_be_seen():
    found = measured(Behaviour(merge=8))
    assert found.generator.merged_reads == 1.0
    assert any("ITL could not be seen" in reason for reason in found.void)


def test_chat_counts_no_token_for_the_role():
    found = measured(Behaviour(), endpoint="chat")
    assert found.void == ()
    assert found.generator.merged_reads < 0.5


def test_an_open_loop_sends_by_the_clock():
    workload = Workload(rate=60, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=2))
    found = measured(Behaviour(), workload=workload, duration=2.0)
    assert not any("saturated" in reason for reason in found.void)
    assert found.generator.asked == 60
    assert 20 < found.generator.achieved < 120


def test_an_open_loop_past_saturation_says_so():
    workload = Workload(rate=200, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=50))
    found = measured(Behaviour(token_seconds=0.03), workload=workload, duration=5.0, max_warmup=0.0)
    assert any("saturated" in reason for reason in found.void)
    assert not found.warmup_settled


def test_counters_that_disagree_void_the_measurement():
    found = measured(Behaviour(miscount=1.5))
    assert any("somebody else uses the server" in reason for reason in found.void)
    found = measured(Behaviour(miscount=0.5))
    assert any("another server" in reason for reason in found.void)


def test_goodput_counts_only_what_met_the_slo():
    slo = Slo.model_validate({"ttft_p95": "1us", "ttft_p99": "2us"})
    assert measured(Behaviour(), slo=slo).goodput == 0
    slo = Slo.model_validate({"ttft_p99": "60s", "itl_p99": "60s", "tpot_p50": "1us", "tpot_p99": "60s"})
    found = measured(Behaviour(), slo=slo)
    assert found.goodput == pytest.approx(found.requests_per_second)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(status=400), r"all failed: http 400 .*no such thing"),
        (Behaviour(usage=False), "no usage in the answer"),
        (Behaviour(error_event=True), "error in the stream"),
        (Behaviour(token_seconds=1.0), "take longer than the window"),
        (Behaviour(die_after=4), "is gone: connection refused"),
    ],
    ids=["refused", "no usage", "error event", "too slow", "dies"],
)
def test_no_completions_are_a_failure_with_the_reason(behaviour, reason, monkeypatch):
    monkeypatch.setattr(session, "DRAIN", 0.2)
    with stream_server(behaviour) as server:
        result = run(job(server.url, duration=5.0 if behaviour.die_after or behaviour.status != 200 else 0.5))
    assert result.measurement is None
    assert result.failure is not None
    assert re.search(reason, result.failure), result.failure


def test_a_server_that_is_not_there_fails_at_once():
    with stream_server() as server:
        url = server.url
    failure = run(job(url)).failure
    assert failure is not None
    assert "/v1/models can't be read" in failure


def test_a_server_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(session, "_SILENCE", 0.3)
    with stream_server(Behaviour(hang=True)) as server:
        failure = run(job(server.url, duration=30.0)).failure
    assert failure is not None
    assert "has sent nothing for" in failure


def test_a_server_that_closes_each_connection_is_measured():
    assert measured(Behaviour(close_each=True)).void == ()


def test_a_prompt_that_does_not_fit_is_refused_before_any_load():
    behaviour = Behaviour(max_model_len=30)
    with stream_server(behaviour) as server:
        failure = run(job(server.url)).failure
    assert failure is not None
    assert "max_model_len of 30" in failure
    assert behaviour.bodies == []


def test_the_bearer_token_is_sent_and_never_shown(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret-token\n")
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        result = run(job(server.url, duration=0.3, api_key_file=str(key)))
    assert {headers["authorization"] for headers in behaviour.headers} == {"Bearer secret-token"}
    assert "secret-token" not in result.model_dump_json()
    failure = run(job("http://127.0.0.1:9", api_key_file=str(tmp_path / "none"))).failure
    assert failure is not None
    assert "can't be read" in failure


def test_quality_answers_are_the_same_prompts_whatever_the_seed():
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        results = [
            run(job(server.url, duration=0.3, seed=seed, quality_prompts=3, quality_max_tokens=5)) for seed in (1, 2)
        ]
    asked = [body["prompt"] for body in behaviour.bodies if not body.get("stream")]
    assert len(asked) == 6
    assert asked[:3] == asked[3:]
    assert asked[0] != asked[1]
    assert [[answer.tokens for answer in result.answers] for result in results] == [[(" one", " two")] * 3] * 2
    assert results[0].answers == results[1].answers
    assert len({answer.prompt for answer in results[0].answers}) == 3


def test_the_user_s_prompts_are_asked_as_they_are_and_judged():
    prompts = (QualityPrompt(prompt="count", answer="one two three"), QualityPrompt(prompt="q", answer="four"))
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        result = run(job(server.url, quality_prompts=9, quality_max_tokens=5, prompts=prompts))
    assert [body["prompt"] for body in behaviour.bodies if not body.get("stream")] == ["count", "q"]
    assert [answer.correct for answer in result.answers] == [True, False]


def test_a_server_that_refuses_log_probabilities_is_asked_without_and_it_is_said():
    behaviour = Behaviour(refuses_logprobs=True)
    with stream_server(behaviour) as server:
        result = run(job(server.url, quality_prompts=2, quality_max_tokens=5))
    assert [(answer.text, answer.tokens, answer.top) for answer in result.answers] == [(" one two three", (), ())] * 2
    assert [note for note in result.notes if "refuses log-probabilities (400)" in note]
    asked = [body for body in behaviour.bodies if not body.get("stream")]
    assert ["logprobs" in body for body in asked] == [True, False, False], "it is not asked again"


def test_a_server_without_log_probabilities_answers_as_text():
    with stream_server(Behaviour(logprobs=False, text="日本語")) as server:
        result = run(job(server.url, quality_prompts=1, quality_max_tokens=5))
    assert [(answer.text, answer.tokens) for answer in result.answers] == [("日本語", ())]


def test_the_command_writes_result_and_progress(tmp_path: Path):
    request, result = tmp_path / "request.json", tmp_path / "result.json"
    with stream_server() as server:
        request.write_text(job(server.url, duration=1.5).model_dump_json())
        assert main(["--request", str(request), "--result", str(result)]) == 0
    assert LoadResult.model_validate_json(result.read_bytes()).measurement is not None
    assert Progress.model_validate_json(progress_path(result).read_bytes()).share > 0


def test_the_command_fails_with_status_and_reason(tmp_path: Path, capsys):
    request, result = tmp_path / "request.json", tmp_path / "result.json"
    request.write_text(job("http://127.0.0.1:9").model_dump_json())
    assert main(["--request", str(request), "--result", str(result)]) == 1
    assert LoadResult.model_validate_json(result.read_bytes()).failure in capsys.readouterr().err
    request.write_text("{}")
    assert main(["--request", str(request), "--result", str(result)]) == 2


def test_people_get_a_table_or_json(capsys):
    with stream_server(Behaviour(version="0.32.0+simulated")) as server:
        words = [server.url, "--concurrency", "4", "--prompt-tokens", "20", "--output-tokens", "4"]
        words += ["--duration", "1s", "--max-warmup", "100ms", "--prefix-reuse", "50%"]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "vLLM 0.32.0+simulated, simulated" in out
        assert "TTFT" in out
        assert "(not settled)" in out
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["measurement"]["completed"] > 0


@pytest.mark.parametrize(
    "words", [[], ["http://x", "--request", "f"], ["--request", "f"], ["x"], ["http://x", "--duration", "5"]]
)
def test_wrong_arguments_are_named(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_estimates_are_told_before_the_window_is_over_where_they_are_wanted(wanted):
    told: list[Progress] = []
    with stream_server(Behaviour()) as server:
        result = execute(job(server.url, duration=2.5, interim=wanted), told.append)
    whole, found = result.measurement, [news.interim for news in told if news.interim is not None]
    assert whole is not None
    assert whole.void == ()
    assert bool(found) is wanted
    for interim in found:
        part = interim.measurement
        assert part.void == ()
        assert 0.3 * 2.5 < part.duration < 2.5
        assert part.started_at == whole.started_at
        assert 0 < part.completed < whole.completed
        assert part.output_tokens_per_second.value == pytest.approx(whole.output_tokens_per_second.value, rel=0.5)
        assert 0 < interim.at_least["ttftP50"] <= part.ttft.p50


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://[::1"], "url: no URL that can be called"),
        (["http://a", "--rate", "nan"], "rate: a finite number is wanted, not `nan`"),
        (["http://a", "--slo", "a=1s"], "unknown field `a`; known here: ttftP50"),
    ],
)
def test_wrong_values_are_told_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"tunewright load: error: {said}")


def test_a_window_in_which_the_rate_moved_was_warm_up_and_another_one_is_measured(monkeypatch):
    found = iter([0.3, None])
    monkeypatch.setattr(statistics, "moved", lambda _: next(found))
    once = measured(Behaviour(), max_warmup=30.0)
    assert once.warmup_settled
    assert once.void == ()
    assert once.warmup > 2.0 + 0.6  # the shortest warm-up, and the window that was none
    assert once.duration == pytest.approx(0.6, abs=0.01)


def test_a_rate_that_moves_again_is_told_and_the_run_does_not_count_as_warmed_up(monkeypatch):
    monkeypatch.setattr(statistics, "moved", lambda _: -0.12)
    with stream_server(Behaviour()) as server:
        result = run(job(server.url, max_warmup=30.0))
    assert result.measurement is not None
    assert not result.measurement.warmup_settled
    assert any("throughput moved by -12%" in note for note in result.notes)


def test_a_warm_up_that_is_shorter_than_two_lives_of_a_request_says_so():
    with stream_server(Behaviour(token_seconds=0.06)) as server:
        result = run(job(server.url, duration=1.2))
    assert any("two lives of a request" in note and "lengthen maxWarmup" in note for note in result.notes)


def test_the_warm_up_does_not_end_in_a_ramp_and_the_asked_rate_is_that_after_it(monkeypatch):
    seen = []

    def settled(rates, ttfts, *, limit, **_) -> bool:
        seen.append((len(rates), limit))
        return True  # at the first look: what is left is the ramp alone

    monkeypatch.setattr(statistics, "settled", settled)
    loop = FOUR.model_copy(update={"concurrency": None, "rate": 40.0, "ramp": Ramp(start_rate=20.0, duration="1500ms")})
    with stream_server(Behaviour()) as server:
        found = run(job(server.url, loop, max_warmup=20.0)).measurement
    assert found is not None
    assert found.warmup_settled
    assert found.warmup >= 1.5
    assert seen[0][1] <= 20.0 - 1.5, "what is left of the longest warm-up"
    assert found.generator.asked == 40.0


def test_a_ramp_fits_into_the_warm_up_and_leads_up():
    loop = FOUR.model_copy(update={"concurrency": None, "rate": 4.0, "ramp": Ramp(start_rate=1.0, duration="3s")})
    with pytest.raises(ValueError, match="the ramp must be shorter than the longest warm-up"):
        job("http://x", loop, max_warmup=3.0)
    with pytest.raises(ValueError, match="a ramp leads from a lower rate"):
        Workload.model_validate(loop.model_dump() | {"rate": 1.0})
    for load, said in (
        ({}, "ramp belongs to mode openLoop"),
        ({"mode": "highestRate", "rate": 9}, "give a low rate for the search to begin with"),
        ({"mode": "openLoop", "rate": 1}, r"ramp\.startRate \(1\) must be below rate \(1\)"),
        ({"mode": "openLoop", "rate": 9, "maxWarmup": "3s"}, r"ramp\.duration \(3s\) must be below maxWarmup \(3s\)"),
        ({"mode": "openLoop", "rate": 9, "ramp": {"startRate": 1, "duration": "0s"}}, "duration must be above 0s"),
    ):
        with pytest.raises(ValueError, match=said):
            Load.model_validate({"ramp": {"startRate": 1, "duration": "3s"}, **load})


@pytest.mark.parametrize(
    ("words", "workload"),
    [
        (["--prompt-normal", "500:100:1:900"], {"prompt_tokens": Lengths(normal=NORMAL)}),
        (["--pair", "100:5:3", "--pair", "10:50"], {"pairs": PAIRS}),
        (["--lengths-of", "t", "--trace-format", "azure"], {"pairs_of": TraceFile(file="t", format="azure")}),
        (["--rate", "4", "--ramp", "0.5:30s"], {"ramp": Ramp(start_rate=0.5, duration="30s")}),
        (["--prompts", "p", "--output-normal", "500:100:1:900"], {"output_tokens": Lengths(normal=NORMAL)}),
    ],
)
def test_arguments_say_what_the_tuning_file_can(words, workload):
    made = arguments.job(arguments.parser().parse_args(["http://x", *words])).workload
    assert {name: getattr(made, name) for name in workload} == workload


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "p", "--prompt-tokens", "5"], "--prompt-tokens can't be with --prompts, which says that itself"),
        (["--prompts", "p", "--prefix-reuse", "5%"], "--prefix-reuse can't be with --prompts"),
        (["--prompts", "p", "--trace", "t"], "--trace can't be with --prompts"),
        (["--pair", "1:2", "--output-tokens", "5"], "--output-tokens can't be with --pair"),
        (["--prompt-tokens", "5", "--prompt-normal", "5:1:1:9"], "--prompt-tokens can't be with --prompt-normal"),
        (["--prompt-normal", "5:1"], "--prompt-normal wants MEAN:SD:LEAST:MOST in numbers, not '5:1'"),
        (["--prompt-normal", "50:1:1:9"], "the mean (50) must be within the bounds"),
        (["--pair", "a:b"], "--pair wants PROMPT:OUTPUT in numbers, not 'a:b'"),
        (["--pair", "1:2:3:4"], "--pair wants PROMPT:OUTPUT:WEIGHT in numbers"),
        (["--ramp", "1:5s"], "a ramp leads from a lower rate"),
        (["--rate", "4", "--ramp", "1"], "a duration with its unit is wanted"),
        (["--sessions", "4", "--prompts", "p"], "--prompts can't be with --sessions"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["http://x", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
