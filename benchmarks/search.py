"""How many GPU minutes a search needs: `python -m benchmarks.search --json FILE`, or `make bench-search`.

Tunewright's proposer against random search, Optuna's TPE, a grid and one knob at a time: the same space, the same
harness, the same budget, in virtual time (see `search_world`). Each profile is run as it is, and with its coefficients
moved for each seed. What counts is what the search would hand over: its best *measured* candidate, without the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices are small: threads only wait for each other

from benchmarks.search_arms import ARMS, WARM, WHOLE, incumbent, run
from benchmarks.search_plot import plot
from benchmarks.search_world import CASES, SLO_TOLERANCE, Case, Run, World, case_for

WITHIN = 0.05
BUDGET_MIN = 240.0
REGRET_AT = (60, 120, 240)
PERTURB = 0.2
"""Log-sd by which coefficients are moved in the second sweep."""


@dataclass(frozen=True)
class Result:
    """One search. Minutes and starts are the budget's where it never came within reach (`reached` is false)."""

    arm: str
    seed: int
    reached: bool
    minutes: float
    starts: int
    trials: int
    failed: int
    regret: dict[int, float]
    curve: list[tuple[float, float]]
    saved: float = 0.0  # GPU minutes that early stops spared


def score(arm: str, seed: int, one: Run, optimum: float, budget: float) -> Result:
    """What one search was worth over its time."""
    world, curve = one.world, []
    for count, trial in enumerate(one.trials, 1):
        best = incumbent(one.trials[:count])
        value = min(1.0, world.value(world.truth(best), SLO_TOLERANCE) / optimum) if best is not None else 0.0
        curve.append(((trial.finished_at or 0.0) - 1.0, value))
    inside = [(at / 60, value) for at, value in curve if at / 60 <= budget]
    hit = next((i for i, (_, value) in enumerate(inside) if value >= 1 - WITHIN), None)
    regret = {limit: 1 - max(0.0, next((v for at, v in reversed(inside) if at <= limit), 0.0)) for limit in REGRET_AT}
    failed = sum(trial.failure is not None for trial in one.trials[: len(inside)])
    return Result(
        arm, seed, hit is not None, inside[hit][0] if hit is not None else budget,
        hit + 1 if hit is not None else len(inside), len(inside), failed, regret,
        [(round(at, 2), round(value, 4)) for at, value in inside], round(one.saved / 60, 2),
    )  # fmt: skip


def one_seed(case: Case, perturb: float, seed: int, arms: Sequence[str], budget: float) -> list[Result]:
    """Every arm in one world: the searches are paired over seeds."""
    world = _world(case, perturb, seed if perturb else 0)
    _, optimum = world
    return [score(arm, seed, run(arm, world[0], seed, budget * 60), optimum, budget) for arm in arms]


_WORLDS: dict[tuple[str, float, int], tuple[World, float]] = {}


def _world(case: Case, perturb: float, seed: int) -> tuple[World, float]:
    key = (case.profile, perturb, seed)
    if key not in _WORLDS:
        if perturb:
            _WORLDS.clear()  # each is used by one seed alone
        world = World(case, perturb, seed)
        _WORLDS[key] = (world, world.optimum()[1])
    return _WORLDS[key]


def summary(results: list[Result]) -> dict[str, Any]:
    """Medians and quartiles of one arm."""
    regrets = {str(limit): _quartiles([r.regret[limit] for r in results]) for limit in REGRET_AT}
    return {
        "reached": sum(r.reached for r in results) / len(results),
        "gpu_minutes": _quartiles([r.minutes for r in results]),
        "starts": _quartiles([float(r.starts) for r in results]),
        "failed_share": sum(r.failed for r in results) / max(1, sum(r.trials for r in results)),
        "saved_minutes": _quartiles([r.saved for r in results]),
        "regret": regrets,
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [round(values[0], 4)] * 3
    return [round(q, 4) for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratio(mine: list[Result], others: list[Result], draws: int = 4000) -> dict[str, Any]:
    """Ours over the other's GPU minutes: of the medians, and the median of pairs with its bootstrap 95 % bound."""
    pairs = [a.minutes / b.minutes for a, b in zip(mine, others, strict=True)]
    rng = random.Random(1)
    boot = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(draws))
    medians = statistics.median(r.minutes for r in mine) / statistics.median(r.minutes for r in others)
    return {
        "of_medians": round(medians, 4),
        "median_of_pairs": round(statistics.median(pairs), 4),
        "upper_95": round(boot[int(0.95 * draws)], 4),
        "upper_97_5": round(boot[int(0.975 * draws)], 4),
    }


def measure(case: Case, perturb: float, seeds: int, arms: Sequence[str], budget: float, jobs: int) -> dict[str, Any]:
    """One row of the report: a profile, as it is or perturbed."""
    began = time.monotonic()
    arguments = [(case, perturb, seed, arms, budget) for seed in range(1, seeds + 1)]
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            rows = [r for group in pool.map(one_seed, *zip(*arguments, strict=True)) for r in group]
    else:
        rows = [r for each in arguments for r in one_seed(*each)]
    by_arm = {arm: [r for r in rows if r.arm == arm] for arm in arms}
    told: dict[str, Any] = {
        "profile": Path(case.profile).stem,
        "perturbed": perturb,
        "seeds": seeds,
        "budget_gpu_minutes": budget,
        "arms": {arm: summary(results) for arm, results in by_arm.items()},
        "seconds": round(time.monotonic() - began, 1),
        "runs": [asdict(r) for r in rows],
    }
    if "tunewright" in by_arm:
        told["ratios"] = {a: ratio(by_arm["tunewright"], by_arm[a]) for a in by_arm if a != "tunewright"}
        told["goals"] = goals(told)
    return told


def goals(row: dict[str, Any]) -> dict[str, bool]:
    """What the search is held to."""
    ratios, mine = row["ratios"], row["arms"]["tunewright"]
    held = {"failed starts < 5 %": mine["failed_share"] < 0.05}
    if "random" in ratios:
        held["<= 0.5 of random"] = ratios["random"]["of_medians"] <= 0.5
        held["bound of the ratio to random < 1"] = ratios["random"]["upper_95"] < 1
    if "tpe" in ratios:
        held["<= 0.7 of TPE"] = ratios["tpe"]["of_medians"] <= 0.7
    return held


def table(row: dict[str, Any]) -> str:
    """One profile for people."""
    moved = f", coefficients moved by {row['perturbed']:.0%} per seed" if row["perturbed"] else ""
    lines = [
        f"{row['profile']}{moved}: {row['seeds']} seeds, {row['seconds']:.0f} s",
        f"  {'search':<14}{'GPU min to 5 % (quartiles)':>28}{'starts':>18}{'reached':>9}{'failed':>8}"
        f"{'regret 60/120/240':>22}{'ours/its':>10}{'bound':>8}",
    ]
    for arm, told in row["arms"].items():
        low, mid, high = told["gpu_minutes"]
        first, starts, last = told["starts"]
        regrets = " / ".join(f"{told['regret'][str(limit)][1]:.1%}" for limit in REGRET_AT)
        against = row.get("ratios", {}).get(arm)
        versus = f"{against['of_medians']:>10.2f}{against['upper_95']:>8.2f}" if against else ""
        lines.append(
            f"  {arm:<14}{f'{mid:.0f} ({low:.0f} - {high:.0f})':>28}{f'{starts:.0f} ({first:.0f} - {last:.0f})':>18}"
            f"{told['reached']:>9.0%}{told['failed_share']:>8.1%}{regrets:>22}{versus}"
        )
    missed = [name for name, held in row.get("goals", {}).items() if not held]
    if "goals" in row:
        lines.append("  goals: " + ("all held" if not missed else "NOT held: " + "; ".join(missed)))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweeps and print their tables; exit code 1 when a goal is not held."""
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="where the plot goes (SVG)")
    parser.add_argument(
        "--profile", type=Path, action="append", help="a simulator profile instead of the five; repeatable"
    )
    parser.add_argument("--only", action="append", help="of the five, only this one; repeatable")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="only this search; repeatable")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=BUDGET_MIN, help="GPU minutes of each search")
    parser.add_argument(
        "--perturb", type=float, nargs="+", default=[0.0, PERTURB], help="a sweep for each; 0: as it is"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args(argv)
    cases = [case_for(path) for path in given.profile] if given.profile else list(CASES)
    cases = [case for case in cases if not given.only or case.profile in given.only]
    rows = []
    for perturb in given.perturb:
        for case in cases:
            row = measure(
                case,
                perturb,
                given.seeds,
                given.arm or [arm for arm in ARMS if arm not in (WHOLE, WARM)],
                given.budget,
                given.jobs,
            )
            rows.append(row)
            print(table(row), flush=True)
    if given.json:
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}) + "\n", encoding="utf-8")
    if given.plot:
        given.plot.write_text(plot(rows), encoding="utf-8")
    return int(any(not held for row in rows for held in row.get("goals", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
