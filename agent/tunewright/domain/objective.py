"""The objective and the SLO, applied to one measurement."""

from typing import NamedTuple

from tunewright.domain.measurement import Measurement
from tunewright.domain.tuning import LATENCIES, PERCENTILES, Objective, Slo


class Judged(NamedTuple):
    """A measurement judged: `value` (larger is better), whether the SLO holds, its smallest margin, and what missed."""

    value: float
    feasible: bool
    margin: float
    missed: tuple[str, ...]


def objective_value(objective: Objective, measurement: Measurement) -> float:
    """The objective of one measurement; larger is better, so a latency that is minimized counts negative."""
    match objective.maximize:
        case "outputTokensPerSecond":
            return measurement.output_tokens_per_second.value
        case "goodput":
            return measurement.goodput if measurement.goodput is not None else measurement.requests_per_second
        case "tokensPerDollar":
            price = objective.gpu_price_per_hour or 0.0
            return measurement.output_tokens_per_second.value * 3600 / price
    for latency in LATENCIES:
        for percentile in PERCENTILES:
            if objective.minimize == f"{latency}{percentile.upper()}":
                return -measurement.latency(latency, percentile)
    raise ValueError(f"objective names nothing that is measured: {objective}")


def objective_unit(objective: Objective) -> str:
    """The unit of `objective_value`, for people."""
    if objective.minimize is not None:
        return "s"
    return {"outputTokensPerSecond": "output tokens/s", "goodput": "good requests/s"}.get(
        objective.maximize or "", "output tokens per dollar"
    )


def judge(objective: Objective, slo: Slo, measurement: Measurement) -> Judged:
    """Judge a sound measurement. One that completed nothing is infeasible whatever its percentiles say."""
    margins: list[tuple[float, str]] = []
    for latency, percentile, bound in slo.bounds():
        value = measurement.latency(latency, percentile)
        name = f"{latency.upper()} {percentile} {value * 1e3:.4g} ms against {bound * 1e3:.4g} ms"
        margins.append(((bound - value) / bound, name))
    allowed = max(slo.error_rate, 1e-9)
    errors = measurement.error_rate
    margins.append(((allowed - errors) / allowed, f"error rate {errors:.2%} against {slo.error_rate:.2%}"))
    missed = tuple(name for margin, name in margins if margin < 0)
    return Judged(
        value=objective_value(objective, measurement),
        feasible=not missed and measurement.completed > 0,
        margin=min(margin for margin, _ in margins),
        missed=missed,
    )


def gain(objective: Objective, value: float, baseline: float) -> float:
    """Relative gain over the baseline; for a latency, by how much it is shorter (0.5: half as long)."""
    if objective.minimize is not None:
        return 1 - value / baseline if baseline else 0.0
    return value / baseline - 1 if baseline else 0.0
