"""The quality gate as a pure function of recorded answers."""

import math
import random

import pytest

from tunewright.domain.answers import Answer, is_correct
from tunewright.domain.candidate import Candidate
from tunewright.domain.promotion import Quality
from tunewright.domain.quality import compare, divergence, judge_quality
from tunewright.domain.state import TrialPurpose, TrialRecord

BASE, NEW = Candidate(values={"max_num_seqs": 4}), Candidate(values={"kv_cache_dtype": "fp8"})
SURE = {"a": math.log(0.9), "b": math.log(0.09)}


def answer(prompt: str = "p", tokens: str = "abcd", top: dict[str, float] | None = SURE, **more) -> Answer:
    told = (top,) * len(tokens) if top is not None else ()
    return Answer(prompt=prompt, text=" ".join(tokens), tokens=tuple(tokens), top=told, **more)


def run(candidate: Candidate, answers: tuple[Answer, ...], number: int) -> TrialRecord:
    purpose = TrialPurpose.CONFIRM
    return TrialRecord(id=f"{number}", number=number, purpose=purpose, candidate=candidate, answers=answers)


def judged(old: list[tuple[Answer, ...]], new: list[tuple[Answer, ...]], **quality):
    trials = [run(c, a, n) for n, (c, a) in enumerate([*((BASE, a) for a in old), *((NEW, a) for a in new)])]
    return judge_quality(BASE, NEW, trials, Quality(**quality))


def seen(one: Answer, other: Answer) -> tuple[float, float | None]:
    pair = compare((one,), (other,))
    assert pair is not None
    return pair.agreement, pair.divergence


def test_the_same_answers_agree_and_do_not_diverge():
    assert seen(answer(), answer()) == (1.0, 0.0)


def test_agreement_ends_at_the_first_difference():
    assert seen(answer(tokens="abcd"), answer(tokens="abxd"))[0] == 0.5
    assert seen(answer(tokens="abcd"), answer(tokens="abcdef"))[0] == pytest.approx(4 / 6)


def test_divergence_is_taken_up_to_the_first_difference_and_not_beyond():
    far = {"x": 0.0}
    one = Answer(prompt="p", text="", tokens=("a", "b", "c"), top=(SURE, SURE, SURE))
    other = Answer(prompt="p", text="", tokens=("a", "x", "y"), top=(SURE, SURE, far))
    assert seen(one, other) == (pytest.approx(1 / 3), 0.0)


@pytest.mark.parametrize(
    "other",
    [(), (answer("q"),), (answer(), answer("q")), (answer(), answer())],
    ids=["none", "another", "one more", "twice"],
)
def test_runs_over_other_prompts_can_not_be_compared(other):
    assert compare((answer(),), other) is None


def test_prompts_are_matched_by_name_not_by_place():
    pair = compare((answer("p", "ab"), answer("q", "xy")), (answer("q", "xy"), answer("p", "ab")))
    assert pair is not None
    assert pair.agreement == 1.0


def test_where_one_side_tells_no_tokens_words_are_compared():
    plain = Answer(prompt="p", text="a b  c x")
    assert seen(answer(tokens="abcd"), plain) == (0.75, None)
    assert seen(Answer(prompt="p", text="日本語"), Answer(prompt="p", text="日本人"))[0] == pytest.approx(2 / 3)


def test_divergence_is_symmetric_and_grows_with_the_difference():
    one, near, far = ({"a": math.log(p), "b": math.log(1 - p)} for p in (0.9, 0.85, 0.5))
    assert divergence(one, near) == pytest.approx(divergence(near, one))
    assert 0 < divergence(one, near) < divergence(one, far)
    exact = 0.4 * math.log(0.9 / 0.5) / 2 - 0.4 * math.log(0.1 / 0.5) / 2
    assert divergence(one, far) == pytest.approx(exact, rel=1e-3)


def test_a_token_that_one_side_does_not_list_gets_part_of_what_is_left():
    """One side lists a and b, the other a and c: nothing is infinitely unlikely, and it is apart."""
    one, other = {"a": math.log(0.9), "b": math.log(0.06)}, {"a": math.log(0.9), "c": math.log(0.06)}
    # 4 % are left: 2 % for the token that is not listed, 2 % for all else.
    assert divergence(one, other) == pytest.approx((0.06 - 0.02) * math.log(0.06 / 0.02), rel=1e-6)
    assert divergence({"a": 0.0}, {"b": 0.0}) < 20, "bounded, also where nothing is left"


def test_equal_answers_pass_and_the_reason_says_what_was_seen():
    verdict = judged([(answer(),)] * 3, [(answer(),)] * 3)
    assert verdict.passed
    assert "100.0% of answer tokens agree" in verdict.reason
    assert "two starts of the baseline agree in 100.0%" in verdict.reason


def test_other_answers_do_not_pass():
    assert not judged([(answer(),)] * 3, [(answer(tokens="axcd"),)] * 3).passed


def test_nondeterminism_of_the_baseline_is_not_blamed_on_the_candidate():
    """Two starts of the baseline agree in half: a candidate that does so too is no worse, one that agrees less is."""
    old = [(answer(tokens="abcd"),), (answer(tokens="abxx"),)]
    assert judged(old, [(answer(tokens="abyy"),)]).passed
    assert not judged(old, [(answer(tokens="yyyy"),)]).passed


def test_probabilities_may_diverge_as_far_as_the_baseline_s_own_do():
    calm, moved, gone = ({"a": math.log(p), "b": math.log(1 - p)} for p in (0.9, 0.7, 0.3))
    assert not judged([(answer(top=calm),)] * 2, [(answer(top=moved),)]).passed
    assert judged([(answer(top=calm),), (answer(top=moved),)], [(answer(top=moved),)]).passed
    assert not judged([(answer(top=calm),), (answer(top=moved),)], [(answer(top=gone),)]).passed
    assert judged([(answer(top=calm),)] * 2, [(answer(top=moved),)], max_divergence=1.0).passed


def test_without_log_probabilities_it_is_said_and_a_limit_that_was_asked_for_is_not_met():
    old, new = [(answer(top=None),)] * 2, [(answer(top=None),)]
    verdict = judged(old, new)
    assert verdict.passed
    assert verdict.divergence is None
    assert "the servers tell no log-probabilities" in verdict.reason
    assert not judged(old, new, max_divergence=0.1).passed
    assert not judged([(answer(),)] * 2, new, max_divergence=0.1).passed, "told by one side alone is not told"


def test_right_answers_may_not_be_lost():
    right, wrong = answer(correct=True), answer(correct=False)
    verdict = judged([(right,)] * 2, [(wrong,)])
    assert not verdict.passed
    assert (verdict.accuracy, verdict.baseline_accuracy) == (0.0, 1.0)
    assert judged([(right,)] * 2, [(wrong,)], max_accuracy_loss="100%").passed
    assert judged([(right,), (wrong,)], [(wrong,)]).passed, "the baseline's own starts differ as much"
    assert judged([(answer(),)] * 2, [(answer(),)]).accuracy is None


@pytest.mark.parametrize("old", [[], [(answer(),)]])
def test_no_answers_are_no_pass(old):
    assert not judged(old, []).passed
    assert "no answers of" in judged(old, []).reason


def test_prompts_that_changed_meanwhile_are_no_pass():
    verdict = judged([(answer("p"),), (answer("q"),)], [(answer("p"),)])
    assert not verdict.passed
    assert "the prompts were changed meanwhile" in verdict.reason


def test_an_empty_answer_is_unlike_any_other():
    assert not judged([(answer(),)] * 2, [(Answer(prompt="p", text=""),)]).passed
    assert not judged([(Answer(prompt="p", text=""),)] * 2, [(Answer(prompt="p", text=""),)]).passed


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        (" 42\n", "42", True),
        (" 42\nQ: what else", "42", True),
        ("42 or so", "42", False),
        ("a\nb\nc", "a\nb", True),
        ("a", "a\nb", False),
        ("", "42", False),
    ],
)
def test_a_right_answer_is_an_exact_match_of_as_many_lines(text, wanted, right):
    assert is_correct(text, wanted) is right


@pytest.mark.parametrize(("noise", "more"), [(0.0, 0.03), (0.01, 0.04)])
def test_the_gate_lets_the_good_through_and_holds_the_bad_also_where_answers_vary(noise: float, more: float):
    """200 gates each: 16 prompts of 32 tokens, 3 starts a side, a share of tokens that differs by chance."""

    def starts(share: float) -> list[tuple[Answer, ...]]:
        def tokens() -> str:
            return "".join(rng.choice("xyz") if rng.random() < share else "a" for _ in range(32))

        return [tuple(answer(str(n), tokens(), top=None) for n in range(16)) for _ in range(3)]

    rng, runs = random.Random(1), 200
    good = sum(judged(starts(noise), starts(noise)).passed for _ in range(runs))
    bad = sum(judged(starts(noise), starts(noise + more)).passed for _ in range(runs))
    assert good >= 0.95 * runs
    assert bad <= 0.05 * runs
