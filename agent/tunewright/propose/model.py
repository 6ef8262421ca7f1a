"""The study, rebuilt in memory from the trials at each proposal, and the sampler that draws from it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from tunewright.domain.candidate import Candidate
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.state import TrialRecord
from tunewright.knobs.facts import ModelFacts
from tunewright.propose.acquire import Outlook, climb
from tunewright.propose.beliefs import Beliefs
from tunewright.propose.encoding import Encoding, Rows
from tunewright.propose.lessons import machine_fault
from tunewright.propose.memory import MemoryModel
from tunewright.propose.prior import Prior
from tunewright.propose.space import Space
from tunewright.propose.surrogate import Elsewhere, Surrogate

optuna.logging.set_verbosity(optuna.logging.ERROR)

_CONSTRAINT = "slo"
_NEAR_A_BOUND = 0.5
"""A latency below this share of its bound in every trial says nothing of where the bound would bite."""
_SLO_WIDER = 1.5
"""Latencies answer to knobs by more than throughput does."""

Distributions = dict[str, optuna.distributions.BaseDistribution]


@dataclass(frozen=True)
class Observation:
    """What is known of one candidate over all its trials. A violation of 0 or less is feasible."""

    candidate: Candidate
    objective: float | None  # larger is better; None: it never ran to a measurement
    violation: float

    @property
    def feasible(self) -> bool:
        """It ran and met the SLO."""
        return self.objective is not None and self.violation <= 0


def observations(trials: Sequence[TrialRecord]) -> list[Observation]:
    """One observation per candidate, in the order of first trials; the machine's faults are not among them."""
    grouped: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if not machine_fault(trial) and trial.outcome is not None:
            grouped.setdefault(trial.candidate.hash, []).append(trial)
    misses = [max(0.0, -(trial.slo_margin or 0.0)) for group in grouped.values() for trial in group]
    worst = max(misses, default=0.0) + 1.0  # not to run at all is worse than any miss of the SLO
    return [_observe(group, worst) for group in grouped.values()]


def _observe(group: Sequence[TrialRecord], worst: float) -> Observation:
    values = [trial.objective for trial in group if trial.objective is not None]
    margins = [trial.slo_margin for trial in group if trial.slo_margin is not None]
    failed = any(trial.failure is not None for trial in group) or not values
    violation = worst if failed else -min(margins, default=0.0)
    return Observation(group[0].candidate, sum(values) / len(values) if values else None, violation)


def best(seen: Sequence[Observation]) -> Observation | None:
    """The best feasible observation; without one, the one nearest to the SLO."""
    measured = [one for one in seen if one.objective is not None]
    if not measured:
        return None
    return max(measured, key=lambda one: (one.feasible, -max(0.0, one.violation), one.objective))


@dataclass(frozen=True)
class Draw:
    """What the sampler wants next, and what it expects of it relative to the best so far."""

    candidate: Candidate
    gain: float
    sd: float


class KnobSampler(optuna.samplers.BaseSampler):
    """A sampler of Optuna's kind: one draw maximises expected improvement under what beliefs and trials tell."""

    def __init__(self, encoding: Encoding, beliefs: Beliefs, memory: MemoryModel, usable: Callable[[Rows], bool],
                 beginnings: Sequence[Rows], pending: Rows, prior: Prior, seed: int) -> None:  # fmt: skip
        self._prior = prior
        self._encoding, self._beliefs, self._memory = encoding, beliefs, memory
        self._usable, self._beginnings, self._pending, self._seed = usable, beginnings, pending, seed
        self.drawn: tuple[Rows, float, float] | None = None

    def infer_relative_search_space(  # the signatures are Optuna's
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: optuna.trial.FrozenTrial,  # noqa: ARG002
    ) -> Distributions:
        """The whole space at once: knobs act together."""
        return distributions(self._encoding.space)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,  # noqa: ARG002
        search_space: Distributions,
    ) -> dict[str, Any]:
        """Positions on the axes; none where nothing usable is left."""
        outlook = self._outlook(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
        row = climb(outlook, self._usable, self._beginnings, self._seed) if outlook is not None else None
        if outlook is None or row is None:
            return {}
        told, reference = outlook.objective.at(row[None, :]), outlook.incumbent
        gain = math.expm1(float(told.mean[0]) - reference) if reference is not None else 0.0
        self.drawn = (row, gain, float(told.sd[0]))
        return {name: int(row[self._encoding.names.index(name)]) for name in search_space}

    def sample_independent(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: optuna.trial.FrozenTrial,  # noqa: ARG002
        param_name: str,  # noqa: ARG002
        param_distribution: optuna.distributions.BaseDistribution,  # noqa: ARG002
    ) -> Any:
        """Only asked for where nothing usable is left; the caller looks at `drawn` first."""
        return 0

    def _outlook(self, trials: Sequence[optuna.trial.FrozenTrial]) -> Outlook | None:
        measured = [trial for trial in trials if trial.user_attrs["measured"]]
        values = np.array([trial.value for trial in measured], dtype=np.float64)
        if not len(values) or not (np.all(values > 0) or np.all(values < 0)):
            return None
        outcomes = np.log(values) if values[0] > 0 else -np.log(-values)
        rows = np.array([trial.user_attrs["row"] for trial in measured], dtype=np.int64)
        violations = np.array([trial.constraints[_CONSTRAINT] for trial in measured])
        objective = self._fit(rows, outcomes, self._elsewhere(latency=values[0] < 0))
        slo = None
        if violations.max() > _NEAR_A_BOUND - 1:
            ratios = np.log(np.maximum(1 + violations, 1e-3))
            told = self._elsewhere(slo=True)
            slo = Surrogate(self._beliefs, rows, ratios, prior_mean=False, widen=_SLO_WIDER, elsewhere=told)
        return Outlook(self._encoding, objective, slo, self._memory, rows[violations <= 0], rows)

    def _elsewhere(self, *, latency: bool = False, slo: bool = False) -> Elsewhere | None:
        """What earlier tunings measured, as logs of the objective, or of the worst latency over its bound."""
        told = self._prior.measured
        values = [(1 - (one.slo_margin or 0.0)) if slo else abs(one.objective or 1.0) for one in told]
        if not told or min(values) <= 0:
            return None
        outcomes = np.log(values) * (-1 if latency and not slo else 1)
        groups = {name: number for number, name in enumerate(dict.fromkeys(one.tuning for one in told))}
        rows = self._encoding.rows([one.candidate for one in told])
        return Elsewhere(rows, outcomes, np.array([groups[one.tuning] for one in told]))

    def _fit(self, rows: Rows, outcomes: np.ndarray, told: Elsewhere | None) -> Surrogate:
        fitted = Surrogate(self._beliefs, rows, outcomes, elsewhere=told)
        if not len(self._pending):
            return fitted
        # Trials that still run count as if they had come out as expected, so that they are not drawn again beside.
        expected = fitted.at(self._pending).mean
        all_rows, all_outcomes = np.vstack([rows, self._pending]), np.concatenate([outcomes, expected])
        return Surrogate(self._beliefs, all_rows, all_outcomes, elsewhere=told)


def draw(
    space: Space,
    trials: Sequence[TrialRecord],
    profile: TrafficProfile | None,
    facts: ModelFacts,
    usable: Callable[[Candidate], bool],
    seed: int,
    prior: Prior | None = None,
) -> Draw | None:
    """The sampler's draw from a study of these trials; None while it knows nothing, or when nothing usable is left.

    Deterministic: equal input, equal draw.
    """
    seen, encoding, prior = observations(trials), Encoding(space), prior or Prior()
    if not space.axes or not any(one.objective is not None for one in seen):
        return None
    memory = MemoryModel(trials, encoding, facts, prior.memory)
    latency = any((one.objective or 0.0) < 0 for one in seen)
    beliefs = Beliefs(encoding, memory, profile, facts, latency=latency)
    known: dict[bytes, bool] = {}

    def usable_row(row: Rows) -> bool:
        key = row.tobytes()
        if key not in known:
            known[key] = usable(encoding.candidate(row))
        return known[key]

    pending = encoding.rows([trial.candidate for trial in trials if trial.outcome is None])
    unset = encoding.rows([space.tidy(space.fixed)])[0]
    sampler = KnobSampler(encoding, beliefs, memory, usable_row, [unset], pending, prior, seed)
    study = _study(space, seen, encoding, sampler)
    study.ask(distributions(space))
    if sampler.drawn is None:
        return None
    row, gain, sd = sampler.drawn
    return Draw(encoding.candidate(row), gain, sd)


def _study(
    space: Space, seen: Sequence[Observation], encoding: Encoding, sampler: optuna.samplers.BaseSampler
) -> optuna.Study:
    """What was seen, as Optuna keeps it. A candidate that never ran is a violated constraint, not a failed trial."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    wanted = distributions(space)
    floor = min((one.objective for one in seen if one.objective is not None), default=0.0)
    for one, row in zip(seen, encoding.rows([one.candidate for one in seen]), strict=True):
        study.add_trial(
            optuna.trial.create_trial(
                params={name: int(row[encoding.names.index(name)]) for name in wanted},
                distributions=wanted,
                value=floor if one.objective is None else one.objective,
                constraints={_CONSTRAINT: one.violation},
                user_attrs={"measured": one.objective is not None, "row": row.tolist()},
            )
        )
    return study


def distributions(space: Space) -> Distributions:
    """Optuna's distributions of positions on the axes."""
    found: Distributions = {}
    for axis in space.axes:
        if len(axis.values) > 1:
            indexes = range(len(axis.values))
            found[axis.name] = (
                optuna.distributions.IntDistribution(0, len(axis.values) - 1)
                if axis.ordered
                else optuna.distributions.CategoricalDistribution(tuple(indexes))
            )
    return found
