"""What each knob of a winner is worth, as far as the trials can tell: an additive ridge model of the log objective.

Each difference from the baseline is one effect; the noise is taken from repeated runs where there are any. An effect
that the trials do not separate from others, or saw once, keeps a wide interval, and so its knob.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import TrialRecord
from tunewright.propose.lessons import machine_fault

NOISE = 0.05
"""Log-sd between two starts of one configuration, where the trials do not tell it (5 % was seen on one H200)."""

_PRIOR = 0.3
"""Sd that an effect is given before it was seen: a knob may well be worth a third."""

_WIDTH = 1.645
"""Half-width of the interval in sds: an effect is above its upper end once in twenty."""

Array = npt.NDArray[np.float64]
Effect = tuple[str, KnobValue | None]


@dataclass(frozen=True)
class Fit:
    """Effects with their joint uncertainty, and the noise they are judged by."""

    effects: tuple[Effect, ...]
    mean: Array
    covariance: Array
    noise: float

    def upper(self, chosen: Sequence[Effect]) -> float:
        """The most that these effects together may be worth (in log objective)."""
        if any(effect not in self.effects for effect in chosen):
            return math.inf
        mask = np.array([1.0 if effect in chosen else 0.0 for effect in self.effects])
        variance = float(mask @ self.covariance @ mask)
        return float(mask @ self.mean) + _WIDTH * math.sqrt(max(0.0, variance))

    def middle(self, chosen: Sequence[Effect]) -> float:
        """What these effects together are expected to be worth; 0 for one that was never seen."""
        return sum(float(self.mean[self.effects.index(effect)]) for effect in chosen if effect in self.effects)


def fit_effects(baseline: Candidate, trials: Sequence[TrialRecord]) -> Fit | None:
    """Fit the effects to every measured trial; None when nothing was measured, or the objective changes its sign."""
    runs = [
        (trial.candidate, trial.objective)
        for trial in trials
        if trial.objective is not None and trial.failure is None and not machine_fault(trial)
    ]
    signs = {value > 0 for _, value in runs}
    if not runs or len(signs) != 1 or any(value == 0 for _, value in runs):
        return None
    # A latency counts negative, and the shorter one is the better: the log turns over with it.
    sign = 1.0 if signs == {True} else -1.0
    outcomes = np.array([sign * math.log(abs(value)) for _, value in runs])
    effects = tuple(sorted({effect for candidate, _ in runs for effect in effects_of(candidate, baseline)}, key=str))
    design = np.zeros((len(runs), len(effects) + 1))
    design[:, 0] = 1.0
    for row, (candidate, _) in enumerate(runs):
        own = set(effects_of(candidate, baseline))
        design[row, 1:] = [1.0 if effect in own else 0.0 for effect in effects]
    noise = _noise(runs, outcomes)
    precision = np.diag([1e-6, *([1 / _PRIOR**2] * len(effects))])
    centre = float(outcomes.mean())
    mean = covariance = np.zeros(0)
    for _ in range(3):  # what the additive model misses (interactions) counts as noise too
        covariance = np.asarray(np.linalg.inv(precision + design.T @ design / noise**2), dtype=np.float64)
        mean = covariance @ design.T @ (outcomes - centre) / noise**2
        residual = outcomes - centre - design @ mean
        freedom = max(1.0, len(runs) - float(np.trace(covariance @ design.T @ design)) / noise**2)
        noise = max(noise, math.sqrt(float(residual @ residual) / freedom))
    return Fit(effects, mean[1:], covariance[1:, 1:], _noise(runs, outcomes))


def effects_of(candidate: Candidate, baseline: Candidate) -> list[Effect]:
    """The candidate's differences from the baseline, each as (knob, value there)."""
    return [(name, own) for name, (own, _) in candidate.differences(baseline).items()]


def _noise(runs: Sequence[tuple[Candidate, float]], outcomes: Array) -> float:
    """Log-sd of repeated runs, drawn towards `NOISE` as if it had been seen on four runs more."""
    groups: dict[str, list[float]] = {}
    for (candidate, _), outcome in zip(runs, outcomes, strict=True):
        groups.setdefault(candidate.hash, []).append(float(outcome))
    squares = sum(float(np.var(group)) * len(group) for group in groups.values())
    freedom = sum(len(group) - 1 for group in groups.values())
    return math.sqrt((squares + 4 * NOISE**2) / (freedom + 4))
