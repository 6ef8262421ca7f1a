"""The quality gate end to end: simulated servers, the real load test, the verdict."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from simulate_process import Running, serving

from tunewright.domain.answers import Answer, QualityPrompt
from tunewright.domain.candidate import Candidate
from tunewright.domain.promotion import Quality
from tunewright.domain.quality import judge_quality
from tunewright.domain.state import TrialPurpose, TrialRecord
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.job import LoadJob
from tunewright.loadtest.run import execute

QUICK = ("--sim-noise-between", "0", "--sim-noise-within", "0", "--profile", "demo")
BASE, NEW = Candidate(values={"max_num_seqs": 4}), Candidate(values={"max_num_seqs": 8})
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


def answers(server: Running, *, seed: int = 1, prompts: tuple[QualityPrompt, ...] = ()) -> tuple[Answer, ...]:
    workload = Workload(concurrency=2, prompt_tokens=Lengths(fixed=24), output_tokens=Lengths(fixed=8))
    job = LoadJob(
        url=f"http://127.0.0.1:{server.port}",
        workload=workload,
        duration=0.4,
        max_warmup=0.2,
        seed=seed,
        quality_prompts=16,
        quality_max_tokens=24,
        prompts=prompts,
    )
    result = execute(job, lambda _: None)
    assert result.failure is None
    return result.answers


def gate(old: list[tuple[Answer, ...]], new: list[tuple[Answer, ...]], **quality):
    trials = [
        TrialRecord(id=str(n), number=n, purpose=TrialPurpose.CONFIRM, candidate=candidate, answers=found)
        for n, (candidate, found) in enumerate([*((BASE, a) for a in old), *((NEW, a) for a in new)])
    ]
    return judge_quality(BASE, NEW, trials, Quality(**quality))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Answer, ...]]:
    with serving(tmp_path_factory.mktemp("base"), "--max-num-seqs", "4", *QUICK) as server:
        return [answers(server, seed=seed) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("knobs", "passes"),
    [
        (("--max-num-seqs", "16", "--enforce-eager"), True),
        (("--speculative-config", NGRAM), True),
        (("--kv-cache-dtype", "fp8"), False),
    ],
    ids=["lossless", "speculation", "lossy"],
)
def test_what_changes_answers_is_told_from_what_does_not(
    baseline: list[tuple[Answer, ...]], tmp_path: Path, knobs: tuple[str, ...], passes: bool
) -> None:
    with serving(tmp_path, *knobs, *QUICK) as server:
        verdict = gate(baseline, [answers(server)])
    assert verdict.passed is passes, verdict.reason
    assert verdict.agreement is not None
    assert verdict.divergence is not None
    assert (verdict.agreement == 1.0) is passes
    assert (verdict.divergence == 0.0) is passes


def test_a_lossy_server_may_be_judged_by_right_answers_alone(tmp_path: Path) -> None:
    """The right answers are those of the exact server: what the lossy one flips is wrong."""
    asked = [QualityPrompt(prompt=f"question number {n}") for n in range(12)]
    with serving(tmp_path, *QUICK) as server:
        texts = [answer.text for answer in answers(server, prompts=tuple(asked))]
        prompts = tuple(QualityPrompt(prompt=p.prompt, answer=t) for p, t in zip(asked, texts, strict=True))
        old = answers(server, prompts=prompts)
    with serving(tmp_path, "--kv-cache-dtype", "fp8", *QUICK) as server:
        new = answers(server, prompts=prompts)
    verdict = gate([old], [new], min_agreement="0%")
    assert verdict.baseline_accuracy == 1.0
    assert verdict.accuracy is not None
    assert 0 < verdict.accuracy < 1
    assert not verdict.passed
    assert gate([old], [new], min_agreement="0%", max_accuracy_loss="100%").passed


def test_log_probabilities_are_those_of_the_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-logprobs", "7", *QUICK) as server:
        choice = server.complete(prompt="tell me", max_tokens=6, ignore_eos=True, logprobs=3)["choices"][0]
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert choice["text"][told["text_offset"][2] :].startswith(told["tokens"][2])
        for token, own, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert len(top) == 3
            assert max(top, key=lambda name: top[name]) == token
            assert top[token] == own
            assert total(top) < 1
        ids = server.complete(prompt="tell me", max_tokens=6, logprobs=1, return_tokens_as_token_ids=True)
        assert all(token.startswith("token_id:") for token in ids["choices"][0]["logprobs"]["tokens"])
        assert server.complete(prompt="tell me", max_tokens=6)["choices"][0]["logprobs"] is None
        status, body = server.request("/v1/completions", {"prompt": "x", "logprobs": 8})
        assert (status, b"Requested sample logprobs of 8, which is greater than max allowed: 7" in body) == (400, True)


def total(top: Mapping[str, float]) -> float:
    return math.fsum(math.exp(value) for value in top.values())
