"""How often the confirm test is right, and what it costs, on simulated starts whose noise is an input.

`python -m benchmarks.decision --json FILE [--comparisons N] [--quick]`. The test is the real one
(`tunewright.domain.settle`), fed as Confirming feeds it: fresh starts in turns whose order turns round by round. Beside
it, on the same starts: one run each, and three runs with a t-test. Some three minutes; `--quick` is 200 comparisons a
case.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv
from scipy.stats import ttest_ind

from tunewright.domain.settle import settle
from tunewright.domain.state import ConfirmStatus
from tunewright.domain.tuning import Confirm

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """Log-sd of throughput between starts of one configuration, and within one start.

    `drift` is the correlation of a start's level with that of the start before; `tails` the degrees of freedom of
    Student's t that both are drawn from (None: normal), scaled to the same sd.
    """

    name: str
    between: float
    within: float
    drift: float = 0.0
    tails: float | None = None
    goals: bool = True
    """Whether the goals are set for it. At 15 % no test can meet them: see `best_possible`."""

    def starts(self, rng: np.random.Generator, count: int) -> Floats:
        """The log noise of `count` starts in the order of time."""
        level, levels = 0.0, np.empty(count)
        for number in range(count):
            fresh = self._draw(rng) * self.between
            level = fresh if number == 0 else self.drift * level + math.sqrt(1 - self.drift**2) * fresh
            levels[number] = level + self._draw(rng) * self.within
        return levels

    def _draw(self, rng: np.random.Generator) -> float:
        if self.tails is None:
            return float(rng.standard_normal())
        return float(rng.standard_t(self.tails)) * math.sqrt((self.tails - 2) / self.tails)

    @property
    def total(self) -> float:
        """Log-sd of one measurement."""
        return math.hypot(self.between, self.within)


NOISES = (
    Noise("GPU: 3 % between starts, 2.5 % within", 0.03, 0.025),
    Noise("GPU, drifting: each start 60 % like the last", 0.03, 0.025, drift=0.6),
    Noise("GPU, heavy-tailed: Student's t with 3 degrees of freedom", 0.03, 0.025, tails=3.0),
    Noise("shared CPU: 15 % in all", 0.12, 0.09, goals=False),
    Noise("shared CPU, drifting", 0.12, 0.09, drift=0.6, goals=False),
)
GAINS = (0.0, 0.05, 0.10, 0.15, 0.20)
FOUND = {0.10: 0.60, 0.15: 0.90, 0.20: 0.99}
"""Least share of gains that must be found with 12 starts."""
WRONG = 0.01
UNLIMITED_ROUNDS, UNLIMITED_GAIN, UNLIMITED_MIN_GAIN, UNLIMITED_FOUND = 50, 0.05, 0.025, 0.90

Rule = Callable[[Floats, Floats], tuple[str, int]]
"""(values of the baseline, of the candidate) by round to the verdict and the starts that it took."""


def confirm_rule(min_gain: float, min_rounds: int, max_rounds: int) -> Rule:
    """The real test, look by look."""

    def rule(baseline: Floats, candidate: Floats) -> tuple[str, int]:
        for rounds in range(min_rounds, max_rounds + 1):
            gain = settle(
                baseline[:rounds].tolist(),
                candidate[:rounds].tolist(),
                min_gain=min_gain,
                min_rounds=min_rounds,
                max_rounds=max_rounds,
            )
            if gain.status is not ConfirmStatus.RUNNING:
                return gain.status.value, 2 * rounds
        raise AssertionError("the last round settles it, as not settled if nothing else")

    return rule


def one_run(baseline: Floats, candidate: Floats) -> tuple[str, int]:
    """Better, if one run of it is by the least gain."""
    return _called(candidate[0] / baseline[0] - 1 >= Confirm().min_gain), 2


def three_runs(baseline: Floats, candidate: Floats) -> tuple[str, int]:
    """Better, if a t-test on three runs each says so at 5 %."""
    higher = candidate[:3].mean() > baseline[:3].mean()
    return _called(higher and ttest_ind(candidate[:3], baseline[:3]).pvalue < 0.05), 6


def _called(better: bool | np.bool_) -> str:
    return ConfirmStatus.BETTER.value if better else ConfirmStatus.NOT_BETTER.value


def compare(noise: Noise, gain: float, rule: Rule, rounds: int, comparisons: int, seed: int) -> dict[str, Any]:
    """One rule on `comparisons` comparisons of a candidate that is better by `gain`."""
    verdicts: list[str] = []
    starts: list[int] = []
    for number in range(comparisons):
        rng = np.random.default_rng([seed, number])  # so that every rule sees the very same starts
        levels = noise.starts(rng, 2 * rounds)
        order = [(2 * r, 2 * r + 1) if r % 2 == 0 else (2 * r + 1, 2 * r) for r in range(rounds)]
        baseline = np.exp([levels[old] for old, _ in order])
        candidate = (1 + gain) * np.exp([levels[new] for _, new in order])
        verdict, took = rule(baseline, candidate)
        verdicts.append(verdict)
        starts.append(took)
    hits = verdicts.count(ConfirmStatus.BETTER.value)
    return {
        "better": hits / comparisons,
        "better_upper_95": _upper(hits, comparisons),
        "not_better": verdicts.count(ConfirmStatus.NOT_BETTER.value) / comparisons,
        "not_settled": verdicts.count(ConfirmStatus.NOT_SETTLED.value) / comparisons,
        "starts_median": statistics.median(starts),
        "starts_mean": statistics.mean(starts),
    }


def _upper(hits: int, of: int) -> float:
    """Clopper and Pearson's one-sided 95 % upper bound of a share."""
    return float(betaincinv(hits + 1, of - hits, 0.95)) if hits < of else 1.0


def best_possible(noise: Noise, gain: float, starts: int) -> float:
    """Power of the best test of all at `WRONG`, which knows the noise without an estimate and looks only once."""
    normal = statistics.NormalDist()
    effect = math.log1p(gain) / (noise.total * math.sqrt(4 / starts))
    return normal.cdf(effect - normal.inv_cdf(1 - WRONG))


def limited(noise: Noise, comparisons: int) -> list[dict[str, Any]]:
    """With at most 12 starts, at the defaults of the tuning file, beside the simple rules."""
    confirm = Confirm()
    rules: dict[str, tuple[Rule, int]] = {
        "tunewright": (confirm_rule(confirm.min_gain, confirm.min_rounds, confirm.max_rounds), confirm.max_rounds),
        "one run each": (one_run, confirm.max_rounds),
        "three runs, t-test": (three_runs, confirm.max_rounds),
    }
    cases = []
    for gain in GAINS:
        for name, (rule, rounds) in rules.items():
            case = {"noise": noise.name, "gain": gain, "rule": name, "max_starts": 2 * rounds}
            case |= compare(noise, gain, rule, rounds, comparisons, seed=1)
            if noise.drift == 0 and noise.tails is None and gain:
                case["best_possible"] = best_possible(noise, gain, 2 * rounds)
            cases.append(case)
            print(line(case), flush=True)
    return cases


def unlimited(noise: Noise, comparisons: int) -> dict[str, Any]:
    """A gain of 5 % with as many rounds as the file allows, where half of it is wanted at least."""
    rule = confirm_rule(UNLIMITED_MIN_GAIN, Confirm().min_rounds, UNLIMITED_ROUNDS)
    case = {"noise": noise.name, "gain": UNLIMITED_GAIN, "rule": "tunewright", "max_starts": 2 * UNLIMITED_ROUNDS}
    case |= compare(noise, UNLIMITED_GAIN, rule, UNLIMITED_ROUNDS, comparisons, seed=2)
    print(line(case), flush=True)
    return case


def line(case: dict[str, Any]) -> str:
    """One case for people."""
    best = f" (no test above {case['best_possible']:.0%})" if "best_possible" in case else ""
    return (
        f"{case['noise']:<57} {case['gain']:>4.0%} better, at most {case['max_starts']:>3} starts, {case['rule']:<18} "
        f"better {case['better']:>6.1%} (under {case['better_upper_95']:.1%}), not better {case['not_better']:>5.1%}, "
        f"not settled {case['not_settled']:>5.1%}; {case['starts_mean']:.1f} starts on average{best}"
    )


def goals(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals on each noise; where no test of all could meet one, that is said instead."""
    judged = []
    for noise in NOISES:
        for case in cases:
            if case["noise"] != noise.name or case["rule"] != "tunewright":
                continue
            if case["max_starts"] > 12:
                wanted = UNLIMITED_FOUND
            elif case["gain"] == 0:
                judged.append(_goal(case, f"called better in at most {WRONG:.0%}", case["better"] <= WRONG))
                continue
            elif case["gain"] in FOUND:
                wanted = FOUND[case["gain"]]
            else:
                continue
            if noise.goals:
                judged.append(_goal(case, f"found in at least {wanted:.0%}", case["better"] >= wanted))
    return judged


def _goal(case: dict[str, Any], what: str, met: bool) -> dict[str, Any]:
    figure = f"{case['better']:.1%}, {case['starts_mean']:.1f} starts"
    if case["gain"] == 0:
        figure = f"{case['better']:.2%}, under {case['better_upper_95']:.2%}"
    limit = f"at most {case['max_starts']} starts"
    return {"goal": f"{case['noise']}: {case['gain']:.0%} better, {limit}: {what}", "figure": figure, "met": met}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.decision", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--comparisons", type=int, default=1000, help="per case (1000)")
    parser.add_argument("--quick", action="store_true", help="200 comparisons per case")
    given = parser.parse_args(argv)
    comparisons = 200 if given.quick else given.comparisons
    cases = [case for noise in NOISES for case in limited(noise, comparisons)]
    cases += [unlimited(noise, comparisons) for noise in NOISES if noise.goals]
    judged = goals(cases)
    for goal in judged:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['figure']}")
    if given.json:
        result = {"comparisons": comparisons, "cases": cases, "goals": judged}
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(goal["met"] for goal in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
