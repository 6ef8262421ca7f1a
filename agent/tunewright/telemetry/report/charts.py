"""Inline SVG charts. Each has a title and a description that tell the same to who can't see it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.domain.measurement import Estimate
from tunewright.domain.profile import Histogram
from tunewright.telemetry.facts import SpareTime, number, percent, seconds
from tunewright.telemetry.report.markup import Raw, el

WIDTH = 520
LETTERS = 66
"""Of a chart's line of text, also where a phone shows them larger; the whole of it is in the description."""


@dataclass(frozen=True)
class Point:
    """One trial in the chart over time: its place, its value (None: not measured), whether it meets the SLO."""

    number: int
    value: float | None
    feasible: bool
    label: str


@dataclass(frozen=True)
class Step:
    """One bar of the ladder: from where to where (as gains over the baseline), and the ends it may have."""

    label: str
    worth: float
    start: float
    end: float
    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """One trial in the chart of speed against latency; `front`: no other feasible trial is better in both."""

    x: float
    y: float
    feasible: bool
    front: bool
    css: str
    label: str


@dataclass(frozen=True)
class Spread:
    """The percentiles of one latency on one side, in seconds."""

    label: str
    css: str
    values: Sequence[tuple[str, float]]


def figure(name: str, title: str, description: str, height: float, *parts: Raw, caption: str = "") -> Raw:
    """A chart with its text alternative; `name` makes the ids unique on the page."""
    svg = el(
        "svg",
        el("title", title, id=f"{name}-title"),
        el("desc", description, id=f"{name}-desc"),
        *parts,
        view_box=f"0 0 {WIDTH} {_n(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    return el("figure", svg, el("figcaption", caption) if caption else Raw(""))


def progress_chart(points: Sequence[Point], baseline: float | None, unit: str, larger_is_better: bool) -> Raw:
    """Every trial's objective in the order they ran, the best so far as a line, the baseline dashed."""
    known = [point.value for point in points if point.value is not None]
    values = known + ([baseline] if baseline is not None else [])
    if not points or not values:
        return Raw("")
    low, high, step = _scale(min(values), max(values))
    left, right, top, bottom = 62.0, WIDTH - 12.0, 16.0, 250.0
    first, last = min(p.number for p in points), max(p.number for p in points)

    def x(at: float) -> float:
        return left + 12 + (at - first) / max(1, last - first) * (right - left - 24)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = []
    for index in range(round((high - low) / step) + 1):
        at = low + index * step
        parts.append(_line(left, y(at), right, y(at), "grid"))
        parts.append(_text(left - 8, y(at) + 4, number(at), anchor="end"))
    for at in _ticks(first, last):
        parts.append(_text(x(at), bottom + 18, str(at), anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 38, "trial", anchor="middle"))
    if baseline is not None:
        parts.append(_line(left, y(baseline), right, y(baseline), "old line dash"))
        parts.append(_text(right, y(baseline) - 6, "baseline", anchor="end", css="old"))
    path, best = "", None
    for point in points:
        if point.value is None or not point.feasible:
            continue
        if best is None or (point.value > best if larger_is_better else point.value < best):
            path += f"{'L' if path else 'M'}{_n(x(point.number))} {_n(y(best if best is not None else point.value))}"
            path += f"L{_n(x(point.number))} {_n(y(point.value))}"
            best = point.value
    if path and best is not None:
        parts.append(el("path", d=f"{path}L{_n(x(last))} {_n(y(best))}", cls="new line"))
    for point in points:
        tip = el("title", point.label)
        if point.value is None:
            cx, cy = x(point.number), bottom - 8
            cross = f"M{_n(cx - 4)} {_n(cy - 4)}l8 8m0 -8l-8 8"
            parts.append(el("path", tip, d=cross, cls="dead"))
        else:
            css = "new" if point.feasible else "new hollow"
            parts.append(el("circle", tip, cx=_n(x(point.number)), cy=_n(y(point.value)), r="5", cls=css))
    measured = f"{len(known)} of {len(points)} trials were measured"
    ends = f"best {number(best)} {unit}" if best is not None else "none met the SLO"
    base = f", baseline {number(baseline)} {unit}" if baseline is not None else ""
    return figure(
        "progress",
        f"Objective of each trial in {unit}",
        f"{measured}; {ends}{base}. The table holds every value.",
        bottom + 46,
        *parts,
        caption=f"{unit}: ● meets the SLO, ○ misses it, ✕ not measured; the line is the best so far.",
    )


def ladder_chart(steps: Sequence[Step], confirmed: Estimate | None) -> Raw:
    """Each change as a bar that begins where the one before ended, and the confirmed gain below them."""
    rows = list(steps)
    if confirmed is not None:
        rows.append(
            Step("confirmed, all together", confirmed.value, 0.0, confirmed.value, confirmed.low, confirmed.high)
        )
    ends = [value for step in rows for value in (step.start, step.end)]
    # Whiskers that reach far say "unknown": they are cut, so that the bars stay readable.
    span = max(1e-9, max(ends) - min(0.0, *ends))
    low, high, pitch = _scale(min(0.0, *ends) - 0.15 * span, max(ends) + 0.3 * span)
    left, right, height = 30.0, WIDTH - 30.0, 44.0

    def x(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (right - left)

    bottom = height * len(rows) + 4
    parts = []
    for index in range(round((high - low) / pitch) + 1):
        at = low + index * pitch
        parts.append(_line(x(at), 2, x(at), bottom, "grid"))
        parts.append(_text(x(at), bottom + 16, f"{at * 100:+.4g}%" if abs(at) > pitch / 1e6 else "0%", anchor="middle"))
    for row, step in enumerate(rows):
        top, css = row * height, "bar2" if confirmed is not None and row == len(steps) else "bar"
        a, b = sorted((x(step.start), x(step.end)))
        together = f", together {percent(step.end)}" if step.start else ""
        worth = f": {percent(step.worth)}{together}"
        parts.append(_text(0, top + 15, _cut(step.label, LETTERS - len(worth)) + worth, css="ink"))
        parts.append(_rect(a, top + 22, max(2.0, b - a), 14, css if step.end >= step.start else "loss"))
        parts.append(_line(x(step.low), top + 29, x(step.high), top + 29, "whisker", 2))
    told = "; ".join(f"{step.label}: from {percent(step.start)} to {percent(step.end)}" for step in rows)
    return figure("ladder-chart", "Gain over the baseline, change by change", told, bottom + 24, *parts)


def pareto_chart(marks: Sequence[Mark], x_name: str, y_name: str) -> Raw:
    """Speed (upwards) against a latency (to the right): the best is at the top left, the line is the front."""
    if not marks:
        return Raw("")
    x_low, x_high, x_step = _scale(0.0, max(mark.x for mark in marks))
    y_low, y_high, y_step = _scale(min(0.0, *(mark.y for mark in marks)), max(mark.y for mark in marks))
    left, right, top, bottom = 62.0, WIDTH - 28.0, 16.0, 250.0

    def x(value: float) -> float:
        return left + (value - x_low) / (x_high - x_low) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - y_low) / (y_high - y_low) * (bottom - top)

    parts = []
    for index in range(round((y_high - y_low) / y_step) + 1):
        at = y_low + index * y_step
        parts.append(_line(left, y(at), right, y(at), "grid"))
        parts.append(_text(left - 8, y(at) + 4, number(at), anchor="end"))
    for index in range(round((x_high - x_low) / x_step) + 1):
        at = x_low + index * x_step
        parts.append(_text(x(at), bottom + 18, seconds(at), anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 38, x_name, anchor="middle"))
    front = sorted((mark for mark in marks if mark.front), key=lambda mark: (mark.x, mark.y))
    if len(front) > 1:
        path = "".join(f"{'L' if i else 'M'}{_n(x(mark.x))} {_n(y(mark.y))}" for i, mark in enumerate(front))
        parts.append(el("path", d=path, cls="line front"))
    for mark in marks:
        css = f"{mark.css} hollow" if not mark.feasible else mark.css
        tip = el("title", mark.label)
        parts.append(el("circle", tip, cx=_n(x(mark.x)), cy=_n(y(mark.y)), r="6" if mark.front else "4", cls=css))
    told = "On the front: " + "; ".join(mark.label for mark in front) if front else "No trial meets the SLO."
    return figure(
        "pareto", f"{y_name} against {x_name}", told, bottom + 46, *parts,
        caption=f"{y_name}, upwards, against {x_name}: the best is at the top left. ● meets the SLO, ○ misses it; "
        "large: on the front.",
    )  # fmt: skip


def latency_chart(name: str, title: str, sides: Sequence[Spread], bounds: Sequence[tuple[str, float]]) -> Raw:
    """One latency: per side a line from its lowest to its highest percentile with a dot at each, and the SLO."""
    everything = [value for side in sides for _, value in side.values] + [bound for _, bound in bounds]
    limit = max(everything, default=0.0) * 1.06
    if not limit > 0:
        return Raw("")
    left, right = 84.0, WIDTH - 16.0

    def x(value: float) -> float:
        return left + max(0.0, value) / limit * (right - left)

    top, pitch = 14.0 + 16 * len(bounds), 26.0
    bottom = top + pitch * len(sides)
    parts = [_line(left, bottom, right, bottom, "axis")]
    parts.append(_text(left, bottom + 17, "0"))
    parts.append(_text(right, bottom + 17, seconds(limit), anchor="end"))
    for row, (percentile, bound) in enumerate(bounds):
        at = x(bound)
        parts.append(_line(at, 4.0 + 16 * row, at, bottom, "slo", 2))
        anchor, gap = ("end", -6) if at > WIDTH / 2 else ("start", 6)
        parts.append(_text(at + gap, 13.0 + 16 * row, f"SLO {percentile} {seconds(bound)}", anchor=anchor, css="slo"))
    for row, side in enumerate(sides):
        cy = top + pitch * (row + 0.5)
        ends = [value for _, value in side.values]
        parts.append(_text(left - 8, cy + 4, side.label, anchor="end", css=side.css))
        parts.append(_line(x(min(ends)), cy, x(max(ends)), cy, side.css, 3))
        for percentile, value in side.values:
            tip = el("title", f"{side.label} {percentile}: {seconds(value)}")
            parts.append(el("circle", tip, cx=_n(x(value)), cy=_n(cy), r="5", cls=side.css))
    told = "; ".join(f"{s.label}: " + ", ".join(f"{p} {seconds(v)}" for p, v in s.values) for s in sides)
    return figure(name, title, told, bottom + 24, *parts, caption=title)


def histogram_chart(name: str, title: str, histogram: Histogram) -> Raw:
    """A distribution of token counts, bucket by bucket; empty ends are left out."""
    counts = [*histogram.counts, histogram.overflow]
    labels = [f"≤ {number(edge)}" for edge in histogram.edges]
    labels.append(f"> {number(histogram.edges[-1])}" if histogram.edges else "all")
    used = [index for index, value in enumerate(counts) if value > 0]
    if not used:
        return Raw("")
    shown = list(zip(labels, counts, strict=True))[used[0] : used[-1] + 1]
    total, largest, pitch = sum(counts), max(counts), 22.0
    parts = []
    for row, (label, value) in enumerate(shown):
        y, share = row * pitch + 4, value / total
        parts.append(_text(84, y + 13, label, anchor="end"))
        parts.append(_rect(92, y, max(1.0, value / largest * 350), 16, "bar"))
        parts.append(_text(98 + value / largest * 350, y + 13, f"{share:.0%}" if share >= 0.01 else "< 1%"))
    told = ", ".join(f"{label}: {value / total:.1%}" for label, value in shown)
    return figure(name, title, told, pitch * len(shown) + 8, *parts, caption=title)


def time_chart(time: SpareTime) -> Raw:
    """Where the spare's time went, as one bar."""
    uses = [(use, getattr(time, use)) for use in ("starting", "warming", "measuring", "other")]
    parts, at = [], 0.0
    for row, (use, value) in enumerate(uses, start=1):
        width = value / time.total * WIDTH
        parts.append(_rect(at, 2, width - 2, 26, f"s{row}", f"{use}: {seconds(value)}"))
        at += width
    for column, (use, value) in enumerate(uses):
        x = column * WIDTH / 4
        parts.append(_rect(x, 41, 11, 11, f"s{column + 1}"))
        parts.append(_text(x + 16, 51, f"{use} {value / time.total:.0%}", css="ink"))
    told = ", ".join(f"{use} {seconds(value)}" for use, value in uses)
    return figure("time", "Where the spare's time went", told, 58, *parts)


def interval_chart(estimate: Estimate, wanted: float) -> Raw:
    """The gain with its interval, against none at all and against the smallest gain that was asked for."""
    low, high, step = _scale(min(0.0, estimate.low), max(wanted, estimate.high))

    def x(value: float) -> float:
        return 24 + (value - low) / (high - low) * (WIDTH - 48)

    parts = []
    for index in range(round((high - low) / step) + 1):
        at = low + index * step
        parts.append(_line(x(at), 22, x(at), 66, "grid"))
        parts.append(_text(x(at), 82, f"{at * 100:+.4g}%" if abs(at) > step / 1e6 else "0%", anchor="middle"))
    parts.append(_line(x(wanted), 22, x(wanted), 66, "slo dash", 2))
    side = "end" if x(wanted) > WIDTH * 0.6 else "start"
    parts.append(_text(x(wanted), 14, f"asked for {percent(wanted)}", anchor=side, css="slo"))
    parts.append(_line(x(estimate.low), 44, x(estimate.high), 44, "new", 4))
    parts.append(el("circle", cx=_n(x(estimate.value)), cy="44", r="7", cls="new"))
    interval = f"from {percent(estimate.low)} to {percent(estimate.high)}"
    told = f"{percent(estimate.value)}, {interval}; asked for {percent(wanted)}"
    return figure("gain", "Gain over the baseline with its interval", told, 88, *parts)


def _line(x1: float, y1: float, x2: float, y2: float, css: str, width: int = 1) -> Raw:
    return el("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), cls=css, stroke_width=width)


def _rect(x: float, y: float, width: float, height: float, css: str, tip: str = "") -> Raw:
    title = el("title", tip) if tip else Raw("")
    return el("rect", title, x=_n(x), y=_n(y), width=_n(max(0.0, width)), height=_n(height), cls=css, rx="2")


def _text(x: float, y: float, text: str, anchor: str = "start", css: str | None = None) -> Raw:
    return el("text", text, x=_n(x), y=_n(y), text_anchor=anchor, cls=css)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Ends and step of an axis with about five round marks that holds both values."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * mark for mark in (1, 2, 2.5, 5, 10) if power * mark >= raw * 0.999)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def _ticks(first: int, last: int) -> list[int]:
    step = max(1, math.ceil((last - first) / 8))
    return list(range(first, last + 1, step))
