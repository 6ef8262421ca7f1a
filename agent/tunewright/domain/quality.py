"""The quality gate: do the answers stay the same, and as right? Pure.

What is compared, over the greedy answers of several fresh starts of each side:
- *agreement*: the mean share of an answer's tokens before the first difference. Greedy decoding goes its own way after
  one different token, so what comes later says nothing more.
- *divergence*: the mean symmetric Kullback-Leibler divergence of the next token's probabilities, in nats, over the
  positions up to the first difference (there both sides have read the same). Only the most likely tokens are told, so
  it is taken over the union of both sides' and one bucket for all else. A token that one side does not list gets an
  equal part of what that side's list leaves over, at most what its least likely listed token has; the rest goes to the
  bucket; nothing is below `FLOOR`.
- *accuracy*: the share of right answers, where the prompts have them.

The baseline is compared with itself in the same way: what differs there is nondeterminism (batching, kernels), and no
candidate is held to more. How far that is known is told by how its agreement varies from prompt to prompt.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate
from tunewright.domain.promotion import Quality
from tunewright.domain.state import TrialRecord

Answers = Sequence[Answer]

FLOOR = 1e-6
"""No token is taken to be less likely: a log-probability that is not told is not known to be minus infinity."""

MAX_DIVERGENCE = 0.05
"""The limit in nats where the tuning names none: some ten times what an FP8 cache costs a sound model."""

OWN_SLACK = 1.5
"""A candidate may diverge so many times as far as two starts of the baseline, which are few to know it by."""


OWN_ERRORS = 2.0
"""The baseline's agreement with itself is taken to be so many standard errors lower than it was seen."""


class Comparison(NamedTuple):
    """Two runs over the same prompts. `shares` is the agreement by prompt; `divergence` is None where a side tells no
    log-probabilities."""

    shares: Mapping[str, float]
    divergence: float | None

    @property
    def agreement(self) -> float:
        """Mean over the prompts."""
        return _mean(list(self.shares.values()))


class QualityVerdict(NamedTuple):
    """Whether the gate is passed, and why. No answers are no pass."""

    passed: bool
    reason: str
    agreement: float | None = None
    divergence: float | None = None
    accuracy: float | None = None
    baseline_accuracy: float | None = None


def compare(one: Answers, other: Answers) -> Comparison | None:
    """Two runs, prompt by prompt; None where they did not answer the same prompts, or nothing at all."""
    right = {answer.prompt: answer for answer in other}
    if len(one) != len(other) or {answer.prompt for answer in one} != right.keys() or len(right) != len(other):
        return None
    shares: dict[str, float] = {}
    apart: list[float] = []
    told = True
    for answer in one:
        left_words, right_words = _words(answer, right[answer.prompt])
        length = max(len(left_words), len(right_words))
        if length == 0:
            continue
        same = _common(left_words, right_words)
        shares[answer.prompt] = same / length
        pairs = list(zip(answer.top[: same + 1], right[answer.prompt].top[: same + 1], strict=False))
        told = told and bool(pairs)
        apart += [divergence(a, b) for a, b in pairs if a and b]
    if not shares:
        return None
    return Comparison(shares, _mean(apart) if told and apart else None)


def divergence(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Half the sum of both Kullback-Leibler divergences, in nats, between two lists of top log-probabilities."""
    union = sorted(one.keys() | other.keys())
    return math.fsum(
        (p - q) * math.log(p / q) / 2 for p, q in zip(_filled(one, union), _filled(other, union), strict=True)
    )


def judge_quality(
    baseline: Candidate, candidate: Candidate, trials: Sequence[TrialRecord], quality: Quality
) -> QualityVerdict:
    """Every run of the candidate against every run of the baseline, held to the tuning's thresholds."""
    old = [t.answers for t in trials if t.candidate.hash == baseline.hash and t.answers]
    new = [t.answers for t in trials if t.candidate.hash == candidate.hash and t.answers]
    if not old or not new:
        return QualityVerdict(False, f"no answers of {'the candidate' if old else 'the baseline'} were recorded")
    across = [compare(a, b) for a in old for b in new]
    found = [pair for pair in across if pair is not None]
    if len(found) < len(across):
        return QualityVerdict(False, "not every run answered the same prompts: the prompts were changed meanwhile")
    own = [pair for a, b in combinations(old, 2) if (pair := compare(a, b)) is not None]
    agreed = _mean([pair.agreement for pair in found])
    wanted = quality.min_agreement * _own_agreement(own)
    failed = agreed < wanted
    said = [f"{agreed:.1%} of answer tokens agree with the baseline's, {wanted:.1%} are wanted"]
    diverged, limit = _divergence(found, own, quality)
    if diverged is not None:
        failed = failed or diverged > limit
        said.append(f"the probabilities diverge by {diverged:.2g} nats, {limit:.2g} are allowed")
    else:
        failed = failed or quality.max_divergence is not None
        said.append("the servers tell no log-probabilities, so their divergence is not known")
    right, base_right = _accuracy(new), _accuracy(old)
    if right is not None and base_right is not None:
        singles = [share for run in old if (share := _accuracy([run])) is not None]
        lost, allowed = base_right - right, max(quality.max_accuracy_loss, max(singles) - min(singles))
        failed = failed or lost > allowed + 1e-9
        said.append(f"{right:.1%} of the answers are right, {base_right:.1%} of the baseline's")
    own_said = (
        f"two starts of the baseline agree in {_mean([pair.agreement for pair in own]):.1%}"
        if own
        else "the baseline's agreement with itself is not known"
    )
    return QualityVerdict(not failed, f"{'; '.join(said)} ({own_said})", agreed, diverged, right, base_right)


def _own_agreement(own: Sequence[Comparison]) -> float:
    """What the baseline's starts agree in with each other, as far as that is sure; all of it where that is unknown."""
    if not own:
        return 1.0
    prompts = own[0].shares.keys()
    means = [_mean([pair.shares.get(prompt, 0.0) for pair in own]) for prompt in prompts]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return max(0.0, _mean(means) - OWN_ERRORS * error)


def _divergence(found: Sequence[Comparison], own: Sequence[Comparison], quality: Quality) -> tuple[float | None, float]:
    told = [pair.divergence for pair in found if pair.divergence is not None]
    limit = quality.max_divergence or MAX_DIVERGENCE
    limit = max(limit, OWN_SLACK * max((pair.divergence or 0.0 for pair in own), default=0.0))
    return (_mean(told) if len(told) == len(found) else None), limit


def _accuracy(runs: Sequence[Answers]) -> float | None:
    judged = [answer.correct for run in runs for answer in run if answer.correct is not None]
    return sum(judged) / len(judged) if judged else None


def _words(one: Answer, other: Answer) -> tuple[Sequence[str], Sequence[str]]:
    """What is compared: tokens where both sides tell them, else words; characters in scripts without spaces."""
    if one.tokens and other.tokens:
        return one.tokens, other.tokens
    left, right = one.text.split(), other.text.split()
    if max(len(left), len(right)) <= 1:
        return one.text.strip(), other.text.strip()
    return left, right


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """How many tokens they have in common from the start on."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _filled(known: Mapping[str, float], union: Sequence[str]) -> list[float]:
    listed = {token: math.exp(value) for token, value in known.items()}
    left = max(0.0, 1.0 - math.fsum(listed.values()))
    missing = len(union) - len(listed)
    each = min(min(listed.values()), left / (missing + 1))
    return [max(FLOOR, listed.get(token, each)) for token in union] + [max(FLOOR, left - each * missing)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
