"""What each knob is worth, as far as the trials tell: shown by the metrics, the dashboards and the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import TrialPurpose, TrialRecord
from tunewright.domain.tuning import Objective
from tunewright.propose.effects import NOISE, Fit, effects_of, fit_effects

WIDTH = 1.645
"""Half-width in standard deviations: one effect in ten lies outside of its interval."""


@dataclass(frozen=True)
class KnobEffect:
    """One change against the baseline, and its gain by itself with a 90 % interval (0.1: 10 % better).

    `seen` counts the measured trials that made this change.
    """

    knob: str
    value: KnobValue | None
    gain: float
    low: float
    high: float
    seen: int


@dataclass(frozen=True)
class Rung:
    """One step of the ladder from the baseline to a candidate.

    `gain` is that of all changes up to here; `measured` is the mean of the trials of exactly this configuration, as a
    gain over the baseline, where there were any.
    """

    effect: KnobEffect
    gain: float
    measured: float | None


def knob_effects(objective: Objective, baseline: Candidate | None, trials: Sequence[TrialRecord]) -> list[KnobEffect]:
    """The effect of every change that was tried, the largest first; empty while nothing can be told."""
    fit = fit_effects(baseline, trials) if baseline is not None else None
    if fit is None or baseline is None or not fit.effects:
        return []
    counts = dict.fromkeys(fit.effects, 0)
    for trial in trials:
        if trial.objective is not None:
            for effect in effects_of(trial.candidate, baseline):
                if effect in counts:
                    counts[effect] += 1
    found = [_effect(objective, fit, index, counts[effect]) for index, effect in enumerate(fit.effects)]
    return sorted(found, key=lambda each: (-abs(each.gain), each.knob, str(each.value)))


def ladder(
    objective: Objective, baseline: Candidate, candidate: Candidate, trials: Sequence[TrialRecord]
) -> list[Rung]:
    """From the baseline to `candidate`, one change after another, the one worth most first.

    The effects come from an additive model of all trials: a rung that was never run by itself is the model's word,
    and effects that only show together can't be told apart. Empty where a change was never measured.
    """
    known = {(each.knob, each.value): each for each in knob_effects(objective, baseline, trials)}
    wanted = effects_of(candidate, baseline)
    if not wanted or any(effect not in known for effect in wanted):
        return []
    base = _mean([trial for trial in trials if trial.candidate.hash == baseline.hash])
    rungs, at, gain = [], baseline, 0.0
    for effect in sorted((known[e] for e in wanted), key=lambda each: -each.gain):
        at = at.with_value(effect.knob, effect.value)
        gain = together(objective, gain, effect.gain)
        here = _mean([trial for trial in trials if trial.candidate.hash == at.hash])
        measured = _ratio(objective, here, base) if here is not None and base is not None else None
        rungs.append(Rung(effect, gain, measured))
    return rungs


@dataclass(frozen=True)
class MeasuredRung:
    """One step of the measured ladder: what it changes, its own gain, and that of all up to here.

    The interval is at 90 %, by the noise between fresh starts; `runs` is how many of this configuration there were.
    """

    changes: tuple[str, ...]
    gain: float
    low: float
    high: float
    so_far: float
    runs: int


def measured_ladder(
    objective: Objective, baseline: Candidate, ladder: Sequence[Candidate], winner: Candidate,
    trials: Sequence[TrialRecord],
) -> list[MeasuredRung]:  # fmt: skip
    """From baseline to winner by what was measured; a step that could not be measured is one with the next.

    Empty unless both ends and at least one step between were measured.
    """
    fit = fit_effects(baseline, trials)
    noise = fit.noise if fit is not None else NOISE
    seen = [(c, _values(trials, c, confirmed=c.hash in (baseline.hash, winner.hash))) for c in (*ladder, winner)]
    known = [(candidate, values) for candidate, values in seen if values]
    first = _values(trials, baseline, confirmed=True)
    if not first or len(known) < 2 or known[-1][0] != winner:
        return []
    found, last, before = [], baseline, first
    base = sum(first) / len(first)
    for candidate, values in known:
        mean, old = sum(values) / len(values), sum(before) / len(before)
        step = _log_gain(objective, _ratio(objective, mean, old) or 0.0)
        reach = WIDTH * noise * math.sqrt(1 / len(values) + 1 / len(before))
        found.append(
            MeasuredRung(
                changes=tuple(candidate.differences(last)),
                gain=_gain(objective, step),
                low=_gain(objective, step - reach),
                high=_gain(objective, step + reach),
                so_far=_ratio(objective, mean, base) or 0.0,
                runs=len(values),
            )
        )
        last, before = candidate, values
    return found


def _values(trials: Sequence[TrialRecord], candidate: Candidate, *, confirmed: bool) -> list[float]:
    """Objectives of one configuration: of the ends from the confirming rounds, where they were measured in turns."""
    wanted = TrialPurpose.CONFIRM if confirmed else TrialPurpose.LADDER
    mine = [t for t in trials if t.candidate.hash == candidate.hash and t.purpose is wanted]
    return [t.objective for t in mine if t.objective is not None]


def together(objective: Objective, one: float, other: float) -> float:
    """The gain of two changes that do not meddle with each other: factors multiply."""
    return _gain(objective, _log_gain(objective, one) + _log_gain(objective, other))


def _effect(objective: Objective, fit: Fit, index: int, seen: int) -> KnobEffect:
    knob, value = fit.effects[index]
    mean, spread = float(fit.mean[index]), math.sqrt(max(0.0, float(fit.covariance[index, index])))
    low, high = mean - WIDTH * spread, mean + WIDTH * spread
    return KnobEffect(knob, value, _gain(objective, mean), _gain(objective, low), _gain(objective, high), seen)


def _gain(objective: Objective, log_gain: float) -> float:
    """As `domain.objective.gain` has it: for a latency, by how much it is shorter."""
    bounded = max(-50.0, min(50.0, log_gain))
    return -math.expm1(-bounded) if objective.minimize is not None else math.expm1(bounded)


def _log_gain(objective: Objective, gain: float) -> float:
    return -math.log1p(-min(gain, 1 - 1e-15)) if objective.minimize is not None else math.log1p(max(gain, -1 + 1e-15))


def _mean(trials: Sequence[TrialRecord]) -> float | None:
    values = [trial.objective for trial in trials if trial.objective is not None]
    return sum(values) / len(values) if values else None


def _ratio(objective: Objective, value: float, base: float) -> float | None:
    if not base:
        return None
    return 1 - value / base if objective.minimize is not None else value / base - 1
