"""What a million tokens cost before and after, with the arithmetic shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.telemetry.facts import best_known, gpus, number, percent, runs
from tunewright.telemetry.report.answer import compared
from tunewright.telemetry.report.markup import Raw, el, join, table


@dataclass(frozen=True)
class Cost:
    """One side: dollars for a million output tokens of a server that is as busy as in the load test."""

    label: str
    gpus: int
    price_per_hour: float
    tokens_per_second: float
    measured: int
    source: str

    @property
    def per_million(self) -> float:
        """Dollars for a million output tokens."""
        return self.price_per_hour * self.gpus / (self.tokens_per_second * 3600) * 1e6

    @property
    def arithmetic(self) -> str:
        """The same, written out."""
        return (
            f"{self.gpus} × ${self.price_per_hour:g}/h ÷ ({number(self.tokens_per_second)} tokens/s × 3600 s/h) "
            f"× 1,000,000 = {dollars(self.per_million)}"
        )


def costs(record: TuningRecord, trials: Sequence[TrialRecord]) -> list[Cost]:
    """Baseline and candidate, as far as they were measured and a price is given."""
    price, against = record.tuning.spec.objective.gpu_price_per_hour, compared(record, trials)
    if price is None or record.baseline is None:
        return []
    found = []
    for label, candidate in [("baseline", record.baseline), *([against] if against is not None else [])]:
        known = best_known(trials, candidate)
        rates = [t.measurement.output_tokens_per_second.value for t in known if t.measurement is not None]
        mean = sum(rates) / len(rates) if rates else 0.0
        if mean > 0 and known[-1].measurement is not None:
            source = str(known[-1].measurement.source)
            found.append(Cost(label, gpus(known[-1]), price, mean, len(rates), source))
    return found


def cost_section(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """Dollars for a million output tokens, against an API's price where one is given, and what the search cost."""
    objective = record.tuning.spec.objective
    if objective.gpu_price_per_hour is None:
        return el(
            "p", "No price is known: with ", el("code", "objective.gpuPricePerHour"), " in the tuning file the report "
            "tells what a million tokens cost; with ", el("code", "objective.apiPricePerMillionTokens"), " also "
            "against an API.", cls="soft",
        )  # fmt: skip
    sides = costs(record, trials)
    if not sides:
        return el("p", "Nothing has been measured yet.", cls="soft")
    rows = [
        (
            side.label.capitalize(),
            dollars(side.per_million),
            el("code", side.arithmetic),
            f"{side.source}, {'mean of ' if side.measured > 1 else ''}{runs(side.measured)}",
        )
        for side in sides
    ]
    parts: list[object] = [
        table("A million output tokens", ("", "Price", "GPUs × price ÷ output tokens in an hour", "Source"), rows, (1,))
    ]
    api = objective.api_price_per_million_tokens
    lines = []
    if len(sides) == 2 and sides[0].per_million > 0:
        change = sides[1].per_million / sides[0].per_million - 1
        lines.append(f"{sides[1].label.capitalize()} against baseline: {percent(change)}.")
    if api is not None:
        lines += [
            f"{side.label.capitalize()} against the API's {dollars(api)}: {dollars(side.per_million)} ÷ {dollars(api)} "
            f"- 1 = {percent(side.per_million / api - 1)}."
            for side in sides
        ]
        needed = sides[-1].price_per_hour * sides[-1].gpus / api * 1e6 / 3600
        lines.append(f"A server of one's own is cheaper than the API from {number(needed)} output tokens/s upwards.")
    if lines:
        parts.append(el("ul", join(el("li", line) for line in lines)))
    parts.append(
        el(
            "p",
            "Of a server that is as busy as in the load test; one that is half as busy costs twice as much per token. "
            "Prompts are not counted as tokens, and their work is in the price.",
            cls="note",
        )
    )
    held = sum(max(0.0, trial.gpu_seconds) * gpus(trial) for trial in trials)
    if held > 0:
        parts.append(
            el(
                "p",
                f"The tuning itself held the spare for {number(held / 3600)} GPU hours: {number(held / 3600)} × "
                f"${objective.gpu_price_per_hour:g}/h = {dollars(held / 3600 * objective.gpu_price_per_hour)}.",
            )
        )
    return join(parts)


def dollars(value: float) -> str:
    """A price with three significant digits: `$0.312`, `$12.4`, `$1,234`."""
    return f"${number(value)}" if value < 100 else f"${value:,.0f}"
