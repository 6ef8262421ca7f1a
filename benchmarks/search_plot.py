"""The plot of the search benchmark, as SVG: the best so far over GPU minutes, median and quartiles over seeds."""

from __future__ import annotations

import statistics
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 420, 250, 46, 34
COLUMNS = 2
FLOOR = 0.5  # of the optimum: the lower edge of each panel
COLOURS = {
    "tunewright": "#0b6e4f",
    "random": "#b3541e",
    "random, valid": "#e09f7d",
    "tpe": "#3d5a98",
    "grid": "#8a8a8a",
    "one at a time": "#a23b72",
}
STEP = 2.0  # GPU minutes between two points of a line


def plot(rows: list[dict[str, Any]]) -> str:
    """One panel for each row of the report."""
    high = TOP + ((len(rows) + COLUMNS - 1) // COLUMNS) * (HEIGHT + 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{COLUMNS * (WIDTH + 70)}" height="{high + 10}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (arm, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 130
        parts.append(
            f'<rect x="{x}" y="8" width="14" height="4" fill="{colour}"/><text x="{x + 20}" y="14">{arm}</text>'
        )
    for index, row in enumerate(rows):
        x, y = LEFT + (index % COLUMNS) * (WIDTH + 70), TOP + 20 + (index // COLUMNS) * (HEIGHT + 50)
        parts.append(f'<g transform="translate({x} {y})">{_panel(row)}</g>')
    return "".join([*parts, "</svg>\n"])


def _panel(row: dict[str, Any]) -> str:
    budget = row["budget_gpu_minutes"]
    moved = " (coefficients moved per seed)" if row["perturbed"] else ""
    parts = [f'<text x="0" y="-6" font-weight="bold">{row["profile"]}{moved}</text>']
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        y = _y(share)
        dash = ' stroke-dasharray="4 3"' if share == 0.95 else ""
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"{dash}/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for minutes in range(0, int(budget) + 1, 60):
        x = minutes / budget * WIDTH
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT + 15}" text-anchor="middle">{minutes}</text>')
    for arm in row["arms"]:
        curves = [run["curve"] for run in row["runs"] if run["arm"] == arm]
        times = [i * STEP for i in range(int(budget / STEP) + 1)]
        points = [[_at(curve, t) for curve in curves] for t in times]
        colour = COLOURS[arm]
        if len(curves) > 1:
            quarters = [statistics.quantiles(p, n=4, method="inclusive") for p in points]
            edge = [(t, q[0]) for t, q in zip(times, quarters, strict=True)]
            edge += [(t, q[2]) for t, q in reversed(list(zip(times, quarters, strict=True)))]
            parts.append(f'<polygon points="{_points(edge, budget)}" fill="{colour}" fill-opacity="0.1"/>')
        middle = [(t, statistics.median(p)) for t, p in zip(times, points, strict=True)]
        parts.append(f'<polyline points="{_points(middle, budget)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT + 28}" text-anchor="end">GPU minutes</text>')
    return "".join(parts)


def _at(curve: list[tuple[float, float]], minutes: float) -> float:
    return next((value for at, value in reversed(curve) if at <= minutes), 0.0)


def _points(values: list[tuple[float, float]], budget: float) -> str:
    return " ".join(f"{t / budget * WIDTH:.1f},{_y(v):.1f}" for t, v in values)


def _y(share: float) -> float:
    return HEIGHT * (1 - (min(1.0, max(FLOOR, share)) - FLOOR) / (1 - FLOOR))
