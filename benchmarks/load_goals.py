"""The goals of the load test's own error, judged on what was measured. The median of repeated runs counts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]


def goals(found: Mapping[str, Sequence[Case]]) -> list[dict[str, Any]]:
    """Each goal that the cases in `found` can judge: what it is, the figure, whether it is met."""
    judged: list[dict[str, Any]] = []
    for burst in (False, True):
        cases = [
            case
            for case in found["errors"]
            if (case["client"], case["streams"], case["burst"]) == ("ours", 256, burst) and "receive_error_ms" in case
        ]
        if not cases:
            continue
        where = f"256 streams x 20 ms{' in bursts' if burst else ''}"
        # In bursts the server reads a new request while it still sends the burst: that delay is real, and its own.
        ttft = "ttft_own_error_p99_ms" if burst else "ttft_p99_error_ms"
        judged += [
            _under(cases, f"{where}: error of TTFT p99", ttft, 0.5, "ms"),
            _under(cases, f"{where}: error of ITL p99", "itl_p99_error_ms", 0.05, "ms"),
            _under(cases, f"{where}: share of a core", "cpu_share", 0.25, ""),
        ]
    ours = [case for case in found["errors"] if case["client"] == "ours" and "delivered" in case]
    if ours:
        worst = max(abs(case["delivered"] - 1) for case in ours)
        judged.append(_goal("delivered within 1 % of asked, in every case", f"{worst:.2%} off", worst <= 0.01))
    levels = [case for case in found["highest"] if case["client"] == "ours"]
    good = max((case["tokens_per_second"] for case in levels if case["good"]), default=0.0)
    if any(case["asked_tokens_per_second"] >= 60_000 or not case["good"] for case in levels):
        text = f"{good:,.0f} tokens/s"
        judged.append(
            _goal(
                "60,000 tokens/s from one process with p99 error under 1 ms, of what was sent on time",
                text,
                good >= 59_400,
            )
        )
    stalls = [case for case in found["stall"] if (case["client"], case["loop"]) == ("ours", "open")]
    if stalls:
        off = max(abs(case["ttft_p99_ms"] / case["true_ttft_p99_ms"] - 1) for case in stalls)
        judged.append(_goal("TTFT p99 over a stalled engine within 5 %", f"{off:.1%} off", off <= 0.05))
    return judged


def _under(cases: Sequence[Case], goal: str, name: str, bound: float, unit: str) -> dict[str, Any]:
    values = [abs(case[name]) for case in cases]
    value = statistics.median(values)
    show: Callable[[float], str] = (lambda x: f"{x:.3f} {unit}") if unit else (lambda x: f"{x:.0%}")
    spread = f" ({show(min(values))} to {show(max(values))} in {len(values)} runs)" if len(values) > 1 else ""
    return _goal(f"{goal} under {show(bound)}", f"{show(value)}{spread}", value < bound)


def _goal(goal: str, figure: str, met: bool) -> dict[str, Any]:
    return {"goal": goal, "figure": figure, "met": met}
