"""The study, rebuilt in memory from the trials at each proposal, and what its sampler draws next."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import optuna

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import TrialRecord
from tunewright.propose.lessons import machine_fault
from tunewright.propose.space import Space

optuna.logging.set_verbosity(optuna.logging.ERROR)

_CONSTRAINT = "slo"
_STARTUP = 4
"""With fewer observations the sampler draws at random; the chosen first trials supply them."""


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


def draws(space: Space, seen: Sequence[Observation], seed: int, count: int) -> Iterator[Mapping[str, int]]:
    """Up to `count` positions drawn by Optuna's TPE from what was seen; the same input gives the same draws."""
    if not space.axes:
        return
    distributions = _distributions(space)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=_STARTUP),
    )
    values = [one.objective for one in seen if one.objective is not None]
    floor = min(values, default=0.0)
    for one in seen:
        positions = space.positions(one.candidate)
        study.add_trial(
            optuna.trial.create_trial(
                params={name: positions[name] for name in distributions},
                distributions=distributions,
                value=floor if one.objective is None else one.objective,
                constraints={_CONSTRAINT: one.violation},
            )
        )
    for _ in range(count):
        trial = study.ask(distributions)
        yield {axis.name: int(trial.params.get(axis.name, 0)) for axis in space.axes}


def _distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for axis in space.axes:
        if len(axis.values) > 1:
            indexes = range(len(axis.values))
            found[axis.name] = (
                optuna.distributions.IntDistribution(0, len(axis.values) - 1)
                if axis.ordered
                else optuna.distributions.CategoricalDistribution(tuple(indexes))
            )
    return found
