"""What several spares bring the search: `python -m benchmarks.search_parallel`.

The product's proposer in the worlds of `benchmarks.search`, with as many trials at a time as there are spares, in
virtual time. Told are the minutes, and the GPU minutes of all spares, until the best is within 5 % of the optimum.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Sequence

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices are small: threads only wait for each other

from benchmarks.search import BUDGET_MIN, WITHIN
from benchmarks.search_arms import incumbent
from benchmarks.search_world import CASES, SLO_TOLERANCE, Run, World

from tunewright.domain.state import TrialRecord
from tunewright.propose.proposer import OptunaProposer

UNKNOWN = (
    "outcome", "measurement", "failure", "objective", "slo_margin", "start_seconds", "memory", "finished_at",
)  # fmt: skip
"""What a trial that still runs does not tell."""


def search(world: World, optimum: float, seed: int, spares: int) -> tuple[float, float, int]:
    """Minutes and GPU minutes until it came within reach, and the starts; the budget's where it never did."""
    one = Run(world, random.Random(f"noise {seed}"))
    proposer = OptunaProposer(world.search.model_copy(update={"seed": seed}), world.facts)
    done, running = [one.trial(world.baseline, "what production runs now")], list[TrialRecord]()
    now = held = one.seconds
    while now / 60 < BUDGET_MIN:
        best = incumbent(done)
        if best is not None and world.value(world.truth(best), SLO_TOLERANCE) >= (1 - WITHIN) * optimum:
            return now / 60, held / 60, len(done) + len(running)
        while len(running) < spares:
            flying = [trial.model_copy(update={**dict.fromkeys(UNKNOWN), "effective": {}}) for trial in running]
            proposal = proposer.propose(world.baseline, [*done, *flying], world.traffic)
            if proposal is None:
                break
            before = one.seconds
            trial = one.trial(proposal.candidate, proposal.reason)
            running.append(trial.model_copy(update={"created_at": now, "finished_at": now + one.seconds - before}))
        if not running:
            break
        ended = min(running, key=lambda trial: trial.finished_at or 0.0)
        passed = (ended.finished_at or 0.0) - now
        now, held = now + passed, held + passed * len(running)
        running.remove(ended)
        done.append(ended)
    return BUDGET_MIN, held / 60, len(done) + len(running)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and print one line for each profile and number of spares."""
    parser = argparse.ArgumentParser(prog="benchmarks.search_parallel", description=__doc__)
    parser.add_argument("--only", action="append", help="only this profile; repeatable")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--spares", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args(argv)
    for case in (case for case in CASES if not given.only or case.profile in given.only):
        world = World(case)
        optimum = world.optimum()[1]
        for spares in given.spares:
            found = [search(world, optimum, seed, spares) for seed in range(1, given.seeds + 1)]
            minutes, held, starts = (statistics.median(column) for column in zip(*found, strict=True))
            told = f"{minutes:.0f} min, {held:.0f} GPU min, {starts:.0f} starts"
            print(f"{case.profile}, {spares} at a time, {given.seeds} seeds (medians): {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
