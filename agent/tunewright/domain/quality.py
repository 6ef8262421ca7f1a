"""The quality gate: do the answers stay the same?"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import TrialRecord
from tunewright.domain.tuning import Quality

Answers = Sequence[Sequence[str]]


class QualityVerdict(NamedTuple):
    """Whether the gate is passed, and why. No answers are no pass."""

    passed: bool
    reason: str
    agreement: float | None


def agreement(one: Answers, other: Answers) -> float | None:
    """Mean share of an answer's tokens before the first difference; None when there is nothing to compare.

    Greedy decoding goes its own way after one different token, so what comes later says nothing more.
    """
    shares = []
    for left, right in zip(one, other, strict=False):
        length = max(len(left), len(right))
        if length == 0:
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        shares.append(same / length)
    return sum(shares) / len(shares) if shares else None


def judge_quality(
    baseline: Candidate, candidate: Candidate, trials: Sequence[TrialRecord], quality: Quality
) -> QualityVerdict:
    """Compare the greedy answers of the confirming runs, round by round.

    Two starts of the baseline bound what agreement can be expected at all: batching makes greedy answers differ
    a little, and a candidate is not held to more than the baseline's agreement with itself.
    """
    old = [t.answers for t in trials if t.candidate.hash == baseline.hash and t.answers]
    new = [t.answers for t in trials if t.candidate.hash == candidate.hash and t.answers]
    shares = [share for a, b in zip(old, new, strict=False) if (share := agreement(a, b)) is not None]
    if not shares:
        return QualityVerdict(False, "no answers were recorded to compare", None)
    own = [share for a, b in pairwise(old) if (share := agreement(a, b)) is not None]
    measured = sum(shares) / len(shares)
    wanted = min(quality.min_agreement, sum(own) / len(own)) if own else quality.min_agreement
    reason = f"{measured:.1%} of answer tokens agree with the baseline's, {wanted:.1%} are wanted"
    return QualityVerdict(measured >= wanted, reason, measured)
