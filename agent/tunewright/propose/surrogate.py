"""A Gaussian process over the trials: the beliefs' additive effects, and a residual for what knobs do only together."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from tunewright.propose.beliefs import Beliefs, Feature
from tunewright.propose.encoding import Array, Rows

_TOGETHER = 0.12
"""Sd of what no sum of single effects explains, in log objective."""
_ANYWHERE = 4.0
"""Variance of the level itself: it is told by the first trial."""
_SHIFT = 1.0
"""Sd of an earlier tuning's level against this one's: other traffic, another day."""
_OTHERWISE = 0.5
"""Variance of what a run elsewhere had of its own, over that of effects: a knob may be worth more or less here."""
_SCALES = (0.6, 1.0, 1.6)
"""Factors on the beliefs' sds that are weighed against the data."""
_NOISES = (0.015, 0.03, 0.06)


@dataclass(frozen=True)
class Posterior:
    """Mean and sd of the log objective without noise, one of each row."""

    mean: Array
    sd: Array


@dataclass(frozen=True)
class Elsewhere:
    """Outcomes of earlier tunings, each run of them a group with a level of its own, which tells nothing here."""

    rows: Rows
    outcomes: Array
    groups: Rows


class Surrogate:
    """Fitted to rows and their outcomes (logs). `mean` of the beliefs is taken off first where `prior_mean` is on."""

    def __init__(
        self,
        beliefs: Beliefs,
        rows: Rows,
        outcomes: Array,
        *,
        prior_mean: bool = True,
        widen: float = 1.0,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._beliefs = beliefs
        self._prior_mean = prior_mean
        self._carried = {id(feature): _carried(feature) for feature in beliefs.features}
        own = len(rows)
        together = np.zeros((own, own))
        if elsewhere is not None:
            rows, outcomes = np.vstack([rows, elsewhere.rows]), np.concatenate([outcomes, elsewhere.outcomes])
            groups = np.concatenate([np.full(own, -1), elsewhere.groups])
            together = ((groups[:, None] == groups[None, :]) & (groups[:, None] >= 0)).astype(np.float64)
        self._rows = rows
        rest = outcomes - self._offset(rows)
        best: tuple[float, float, float] | None = None
        base = self._kernel(rows, rows, 1.0)

        def gram(scale: float, noise: float) -> Array:
            known = base * scale**2
            otherwise = together * (_OTHERWISE * known + _SHIFT**2)
            return np.asarray(known + otherwise + _ANYWHERE + noise**2 * np.eye(len(rest)), dtype=np.float64)

        for scale in _SCALES:
            for noise in _NOISES:
                score = _likelihood(gram(widen * scale, noise), rest) - _unlikely(scale)
                if best is None or score > best[0]:
                    best = (score, widen * scale, noise)
        self._scale, self.noise = best[1:] if best is not None else (widen, _NOISES[1])
        self._inverse = np.linalg.inv(gram(self._scale, self.noise))
        self._weights = self._inverse @ rest

    def at(self, rows: Rows) -> Posterior:
        """What is known of these rows."""
        cross = self._kernel(rows, self._rows, self._scale) + _ANYWHERE
        mean = self._offset(rows) + cross @ self._weights
        own = self._variance(rows) * self._scale**2 + _ANYWHERE
        # Not by `@`: on matrices of this size the threads of BLAS cost more than they bring, many times over on a
        # machine that is busy, as one that serves is.
        variance = own - np.sum(np.einsum("ij,jk->ik", cross, self._inverse) * cross, axis=1)
        return Posterior(mean, np.sqrt(np.maximum(variance, 1e-8)))

    def _offset(self, rows: Rows) -> Array:
        return self._beliefs.mean(rows) if self._prior_mean else np.zeros(len(rows))

    def _kernel(self, left: Rows, right: Rows, scale: float) -> Array:
        total = np.zeros((len(left), len(right)))
        alike = np.ones_like(total)
        for feature in self._beliefs.features:
            at, other = feature.level(left)[:, None], feature.level(right)[None, :]
            total += feature.covariance[at, other]
            alike *= self._carried[id(feature)][at, other]
        return np.asarray((total + _TOGETHER**2 * alike) * scale**2, dtype=np.float64)

    def _variance(self, rows: Rows) -> Array:
        total = np.full(len(rows), _TOGETHER**2)
        for feature in self._beliefs.features:
            total += np.diag(feature.covariance)[feature.level(rows)]
        return total


def _carried(feature: Feature) -> Array:
    """A knob that hardly matters hardly separates two candidates."""
    weight = min(1.0, float(np.sqrt(np.diag(feature.covariance).max())) / 0.1)
    return np.asarray(feature.likeness**weight, dtype=np.float64)


def _likelihood(gram: Array, rest: Array) -> float:
    factor = cho_factor(gram, lower=True)
    return float(-0.5 * rest @ cho_solve(factor, rest) - np.log(np.diag(factor[0])).sum())


def _unlikely(scale: float) -> float:
    return 2.0 * math.log(scale) ** 2
