"""A result as a table for people."""

from tunewright.domain.measurement import Latency, Measurement
from tunewright.domain.workload import Workload
from tunewright.loadtest.job import LoadJob, LoadResult


def table(job: LoadJob, result: LoadResult) -> str:
    """The result in lines; latencies in milliseconds."""
    measured = result.measurement
    if measured is None:
        return f"no result: {result.failure}"
    workload, generator = job.workload, measured.generator
    output = measured.output_tokens_per_second
    known = measured.vllm_version != "unknown"
    served = f"vLLM {measured.vllm_version}, {measured.source.value}" if known else "server of unknown version"
    lines = [
        f"{job.url}  {served}",
        f"{_asked(workload)}, {measured.duration:.1f} s after {measured.warmup:.1f} s of warm-up"
        + ("" if measured.warmup_settled else " (not settled)"),
        "",
        f"output tokens/s  {output.value:>10.1f}   95 % interval {output.low:.1f} to {output.high:.1f}",
        f"input tokens/s   {measured.input_tokens_per_second:>10.1f}",
        f"requests/s       {measured.requests_per_second:>10.2f}   {measured.completed} completed, "
        f"{measured.failed} failed",
    ]
    if measured.goodput is not None:
        lines.append(f"goodput          {measured.goodput:>10.2f}   requests/s within the SLO")
    lines += [f"  {count} x {kind}" for kind, count in sorted(measured.errors.items())]
    lines += ["", f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'samples':>10}"]
    for name, latency in _latencies(measured):
        figures = (latency.mean, latency.p50, latency.p90, latency.p95, latency.p99)
        shown = "".join(f"{value * 1e3:>10.2f}" if latency.count else f"{'-':>10}" for value in figures)
        lines.append(f"{name:<6}{shown}{latency.count:>10}")
    lines += [
        "",
        f"generator: {generator.achieved:.4g} of {generator.asked:.4g} delivered, {generator.cpu_share:.0%} of a core, "
        f"send lag p99 {generator.schedule_lag_p99 * 1e3:.2f} ms, {generator.merged_reads:.1%} merged reads"
        + _share(", CPU time stolen", generator.steal),
    ]
    if server := measured.server:
        lines.append(
            f"server: {server.generation_tokens:.0f} output tokens, {server.preemptions:.0f} preemptions"
            + _share(", prefix hits", server.prefix_hit_rate)
            + _share(", accepted drafts", server.acceptance_rate)
            + _share(", KV cache at most", server.kv_cache_usage_max)
        )
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"VOID: {reason}" for reason in measured.void]
    return "\n".join(lines)


def _asked(workload: Workload) -> str:
    if workload.sessions is not None:
        return f"{workload.concurrency} sessions of {workload.sessions.turns} turns"
    if workload.trace is not None:
        return f"{workload.trace.path} at {workload.trace.speed:g} times its speed"
    if workload.rate is None:
        return f"concurrency {workload.concurrency}"
    ramp = f" after a ramp from {workload.ramp.start_rate:g}" if workload.ramp is not None else ""
    return f"{workload.rate:g} requests/s{ramp}"


def _latencies(measured: Measurement) -> list[tuple[str, Latency]]:
    return [("TTFT", measured.ttft), ("TPOT", measured.tpot), ("ITL", measured.itl), ("E2E", measured.e2e)]


def _share(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.1%}"
