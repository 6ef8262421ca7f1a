"""What the canary's analysis catches, what it lets through, and how long it takes, on simulated request streams.

`python -m benchmarks.rollout --json FILE [--rollouts N] [--quick]`. The analysis is the real one at its defaults, on
the buckets that vLLM has; beside it, on the same streams, the rules that others use. With 1,000 rollouts per case some
ten minutes on two cores; `--quick` is 100 of the cases that have goals, in under a minute.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollout_rules import RULES, End
from benchmarks.streams import Case, case, sides
from scipy.special import betaincinv

from tunewright.domain.verdict import Outcome


def cases(quick: bool) -> list[tuple[Case, tuple[str, ...]]]:
    """Every case with the rules that are tried on it."""
    all_rules = tuple(RULES)
    main = [
        case("as good", bad=False),
        case("better by 10 %", bad=False, factor=0.9),
        case("latencies x 1.10", factor=1.10),
        case("latencies x 1.25", factor=1.25),
        case("errors 1 %", errors=0.01),
        case("slower than the SLO by 12 %", factor=1.12, slo_over_stable=1.0),
    ]
    if quick:
        return [(one, ("tunewright",)) for one in main]
    main += [
        case("errors 0.1 %", errors=0.001),
        case("tail only: 5 % of requests x 3", tail=0.05, tail_factor=3.0),
        case("tail only: 1 % of requests x 10", tail=0.01, tail_factor=10.0),
        case("latencies x 1.05", factor=1.05),
        case("SLO broken by 12 %, stable meets it by 10 %", factor=1.25, slo_over_stable=1.25 / 1.12),
        case("as good, meets the SLO by 10 %", bad=False, slo_over_stable=1.1),
    ]
    found = [(one, all_rules) for one in main]
    for name, traffic in (
        ("1 request/s", {"rate": 1.0}),
        ("100 requests/s", {"rate": 100.0}),
        ("log-sd 0.3", {"spread": 0.3}),
        ("log-sd 0.8", {"spread": 0.8}),
        ("load that swells by 30 %", {"swell": 0.3}),
    ):
        found += [(one, all_rules) for one in _beside(name, **traffic)]
    found += [(one, ("tunewright",)) for one in _beside("fine buckets", fine_buckets=True)]
    found += [
        (case("fine buckets: tail only: 5 % of requests x 3", tail=0.05, tail_factor=3.0, fine_buckets=True), all_rules)
    ]
    return found


def _beside(name: str, **traffic: Any) -> list[Case]:
    return [
        case(f"{name}: as good", bad=False, **traffic),
        case(f"{name}: latencies x 1.10", factor=1.10, **traffic),
        case(f"{name}: latencies x 1.25", factor=1.25, **traffic),
        case(f"{name}: errors 1 %", errors=0.01, **traffic),
    ]


def one_rollout(work: tuple[Case, tuple[str, ...], int]) -> dict[str, End]:
    """Every rule on the very same stream."""
    what, rules, seed = work
    canary, stable = sides(what, seed)
    return {name: RULES[name](what, canary, stable) for name in rules}


def interval(hits: int, of: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share."""
    low = float(betaincinv(hits, of - hits + 1, 0.025)) if hits else 0.0
    high = float(betaincinv(hits + 1, of - hits, 0.975)) if hits < of else 1.0
    return low, high


def figures(what: Case, rule: str, ends: Sequence[End]) -> dict[str, Any]:
    """What came of one rule on one case."""

    def share(hits: int) -> dict[str, float]:
        low, high = interval(hits, len(ends))
        return {"share": hits / len(ends), "low": low, "high": high}

    caught = [e.after for e in ends if e.outcome is Outcome.FAIL]
    passed = [e.after for e in ends if e.outcome is Outcome.PASS]
    shares = {
        "fail": share(len(caught)),
        **{f"fail_within_{m}_min": share(sum(a <= m * 60 for a in caught)) for m in (3, 10, 15)},
        "pass": share(len(passed)),
        "pass_within_15_min": share(sum(a <= 900 for a in passed)),
        "inconclusive": share(len(ends) - len(caught) - len(passed)),
    }
    served = what.canary.rate * statistics.fmean(e.after for e in ends)
    return {
        "case": what.name,
        "rule": rule,
        "bad": what.bad,
        "rollouts": len(ends),
        **shares,
        "median_seconds": statistics.median(e.after for e in ends),
        "canary_requests_until_verdict": served,
    }


def line(found: dict[str, Any]) -> str:
    """One row for people."""
    fail, passed, open_ = (found[k]["share"] for k in ("fail", "pass", "inconclusive"))
    early, later, good = (found[k]["share"] for k in ("fail_within_3_min", "fail_within_10_min", "pass_within_15_min"))
    timely = (
        f"fail within 3 min {early:6.1%}, 10 min {later:6.1%}"
        if found["bad"]
        else f"pass within 15 min {good:6.1%}, false alarms <= {found['fail']['high']:.1%}"
    )
    return (
        f"{found['case']:<46} {found['rule']:<30} fail {fail:6.1%}  pass {passed:6.1%}  open {open_:6.1%}  {timely}  "
        f"median {found['median_seconds'] / 60:4.1f} min, {found['canary_requests_until_verdict']:.0f} requests"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(prog="benchmarks.rollout", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rollouts", type=int, help="rollouts per case: 1,000, or 100 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts of the cases that have goals")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(argv)
    rollouts = given.rollouts or (100 if given.quick else 1000)
    began, found = time.monotonic(), []
    with multiprocessing.Pool(given.processes) as pool:
        for what, rules in cases(given.quick):
            if given.only not in what.name:
                continue
            ends = pool.map(one_rollout, [(what, rules, seed) for seed in range(rollouts)], chunksize=10)
            for rule in rules:
                row = figures(what, rule, [end[rule] for end in ends])
                found.append(row)
                print(line(row), flush=True)
    seconds = time.monotonic() - began
    print(f"{rollouts} rollouts per case, {seconds:.0f} s")
    if given.json:
        whole = {"rollouts": rollouts, "seconds": seconds, "cases": found}
        given.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
