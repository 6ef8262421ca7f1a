"""The next candidate by what may be gained: expected improvement, times the chance that it starts and meets the SLO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from tunewright.propose.encoding import Array, Encoding, Rows
from tunewright.propose.memory import MemoryModel
from tunewright.propose.surrogate import Surrogate

_RANDOM_BEGINNINGS = 2
_BEST_BEGINNINGS = 2
_STEPS = 12  # of one climb; each looks at every single change
_LOWEST = 1e-12
_UTILISATION_AT_EASE = 0.92
_UTILISATION_RISK = 8.0
"""Chance lost per unit of utilisation above vLLM's default: what profiling did not see has to fit in the rest."""

Usable = Callable[[Rows], bool]


@dataclass(frozen=True)
class Outlook:
    """What is known once the trials are in: all that acquisition needs."""

    encoding: Encoding
    objective: Surrogate
    slo: Surrogate | None  # of the log of the worst latency over its bound; None: no bound was ever near
    memory: MemoryModel
    feasible: Rows  # measured, and within the SLO
    measured: Rows

    @cached_property
    def incumbent(self) -> float | None:
        """The best mean among what is known to meet the SLO."""
        return float(self.objective.at(self.feasible).mean.max()) if len(self.feasible) else None

    def chance(self, rows: Rows) -> Array:
        """That it starts, stays up and meets the SLO."""
        ok = self.memory.starts(rows)
        above = self.encoding.number(rows, "gpu_memory_utilization", _UTILISATION_AT_EASE) - _UTILISATION_AT_EASE
        ok = ok * np.clip(1 - _UTILISATION_RISK * np.maximum(above, 0.0), 0.2, 1.0)
        if self.slo is not None:
            told = self.slo.at(rows)
            ok = ok * ndtr(-told.mean / np.hypot(told.sd, self.slo.noise))
        return np.asarray(ok, dtype=np.float64)

    def score(self, rows: Rows) -> Array:
        """Larger is more worth a trial (a log)."""
        chance = np.log(np.maximum(self.chance(rows), _LOWEST))
        told, best = self.objective.at(rows), self.incumbent
        if best is None:
            return np.asarray(2 * chance + told.mean, dtype=np.float64)
        gained = _log_improvement((told.mean - best) / told.sd) + np.log(told.sd)
        # A trial that noise would drown teaches little: without this, knobs that do nothing are turned for ever.
        heard = np.log(np.maximum(1 - self.objective.noise / np.hypot(self.objective.noise, told.sd), _LOWEST))
        return np.asarray(gained + heard + chance, dtype=np.float64)


def _log_improvement(z: Array) -> Array:
    """Log of the expected improvement in sds; accurate far below 0 too."""
    density = -0.5 * z**2 - 0.5 * np.log(2 * np.pi)
    near = np.exp(density) + z * ndtr(z)
    far = density - 2 * np.log(np.maximum(-z, 1.0))
    return np.asarray(np.where(z > -5, np.log(np.maximum(near, 1e-300)), far), dtype=np.float64)


def climb(outlook: Outlook, usable: Usable, beginnings: Sequence[Rows], seed: int) -> Rows | None:
    """The best usable row found by steepest ascent from `beginnings` and a few drawn ones; None: there is none."""
    rng = np.random.default_rng(seed)
    lengths = np.array(outlook.encoding.lengths)
    drawn = [rng.integers(0, lengths) for _ in range(_RANDOM_BEGINNINGS)]
    means = outlook.objective.at(outlook.feasible).mean if len(outlook.feasible) else np.zeros(0)
    best = [outlook.feasible[i] for i in np.argsort(-means)[:_BEST_BEGINNINGS]]
    found: list[tuple[float, Rows]] = []
    for row in [*best, *beginnings, *drawn]:
        top = _ascend(outlook, usable, row)
        if top is not None:
            found.append(top)
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _ascend(outlook: Outlook, usable: Usable, row: Rows) -> tuple[float, Rows] | None:
    score = float(outlook.score(row[None, :])[0]) if usable(row) else -np.inf
    for _ in range(_STEPS):
        around = outlook.encoding.around(row)
        scores = outlook.score(around)
        step = next((i for i in np.argsort(-scores) if scores[i] <= score or usable(around[i])), None)
        if step is None or scores[step] <= score:
            break
        row, score = around[step], float(scores[step])
    return (score, row) if np.isfinite(score) else None
