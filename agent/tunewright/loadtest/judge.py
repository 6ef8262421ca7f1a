"""From what a run gathered to its measurement, with every reason why nothing may be decided on it."""

from collections.abc import Sequence

import numpy as np

from tunewright.domain.measurement import GeneratorHealth, Interim, Measurement
from tunewright.domain.profile import Source
from tunewright.domain.tuning import LATENCIES, PERCENTILES
from tunewright.loadtest import statistics
from tunewright.loadtest.counters import Counted, Scrape, ServerFacts, disagreements, window_counters
from tunewright.loadtest.job import LoadFailure, LoadJob, Overloaded
from tunewright.loadtest.measure import Answer, Samples, answers, in_flight_at, mean_concurrency, samples, token_flow
from tunewright.loadtest.recording import NANO
from tunewright.loadtest.session import Raw

# Budgets of the generator. The kernel's stamps keep latencies right on a busy machine, so these are wide.
LEAST_DELIVERED = 0.90
MOST_CPU = 0.95
MOST_STEAL, STEAL_SPAN = 0.20, 10.0  # over fewer seconds than that it comes and goes by chance
MOST_MERGED, MOST_MERGED_WITH_ITL_SLO = 0.50, 0.20
MOST_LAG, MOST_LAG_OF_TTFT = 0.05, 0.25  # open loop: seconds, and share of the TTFT at p99

SATURATED = "saturated"
"""How the reason begins why an open loop that the server can't keep up with is void."""

_IN_FLIGHT_EVENTS = 2  # events of one request that one side has counted and the other has not, at a scrape
_CUT_EVENTS = 8  # events that a server may still make of a request that was cut off


def interim(job: LoadJob, facts: ServerFacts, raw: Raw) -> Interim | None:
    """What a run that is under way can tell; None while nothing has completed. `raw` ends at the present moment."""
    try:
        measured, inside = _judge(job, facts, raw)
    except LoadFailure:
        return None
    least: dict[str, float] = {}
    for name in LATENCIES:
        for percentile in PERCENTILES:
            found = statistics.at_least(getattr(inside, name), int(percentile[1:]) / 100)
            if found is not None:
                least[f"{name}{percentile.upper()}"] = found
    return Interim(measurement=measured, at_least=least)


def measurement(job: LoadJob, facts: ServerFacts, raw: Raw) -> Measurement:
    """Judge a run. Raises `LoadFailure` when nothing completed in its window: that is never a number."""
    return _judge(job, facts, raw)[0]


def _judge(job: LoadJob, facts: ServerFacts, raw: Raw) -> tuple[Measurement, Samples]:
    epoch = raw.start_ns
    found = answers(raw.records, job.endpoint, epoch, from_intended=job.workload.open_loop)
    end = (raw.end_ns - epoch) / NANO
    inside = samples(found, job.slo, 0.0, end)
    if not inside.completed:
        kind = LoadFailure if inside.errors else Overloaded
        raise kind(_nothing(job, raw, found, inside))
    times, tokens = token_flow(found)
    output = statistics.rate(times, tokens, 0.0, end)
    health = _health(job, raw, found, inside, end)
    counters = window_counters(raw.window[0], raw.window[-1], raw.window[1:-1]) if len(raw.window) > 1 else None
    latencies = {name: statistics.latency(getattr(inside, name)) for name in LATENCIES}
    void = [
        *_unhealthy(job, health, inside),
        *_unsteady(job, raw, found, end),
        *_unreconciled(raw, found, epoch),
        *(
            f"the SLO bounds {name.upper()}, and there is no sample of it: outputs have one token"
            for name in dict.fromkeys(name for name, _, _ in job.slo.bounds())
            if not latencies[name].count
        ),
    ]
    measured = Measurement(
        started_at=epoch / NANO,
        duration=end,
        source=Source.of_version(facts.version),
        vllm_version=facts.version,
        seed=job.seed,
        warmup=(epoch - raw.load_started_ns) / NANO,
        warmup_settled=raw.settled and raw.moved is None,
        completed=inside.completed,
        failed=inside.failed,
        errors=inside.errors,
        output_tokens_per_second=output,
        input_tokens_per_second=inside.prompt_tokens / end,
        requests_per_second=inside.completed / end,
        goodput=inside.good / end if job.slo.bounds() else None,
        ttft=latencies["ttft"],
        tpot=latencies["tpot"],
        itl=latencies["itl"],
        e2e=latencies["e2e"],
        generator=health,
        server=counters,
        void=tuple(void),
    )
    return measured, inside


def notes(job: LoadJob, raw: Raw, result: Measurement) -> list[str]:
    """What a reader should know of a run, without being a fault of it."""
    found = list(raw.remarks)
    if not raw.settled:
        found.append(f"the warm-up had not settled after {result.warmup:.0f} s: the server may still be warming up")
        if 2 * result.e2e.mean > result.warmup:
            found.append(
                f"a warm-up is judged over two lives of a request, {2 * result.e2e.mean:.0f} s here: lengthen maxWarmup"
            )
    if raw.moved is not None:
        found.append(f"throughput moved by {raw.moved:+.0%} from the window's first half to its second: not steady")
    if job.workload.prefix_reuse > raw.reachable_reuse + 0.01:
        found.append(
            f"a prefix reuse of {job.workload.prefix_reuse:.0%} is out of reach: prompts this short fill too few "
            f"cache blocks; at most {raw.reachable_reuse:.0%} can be found again"
        )
    if result.generator.merged_reads > 0.01:
        found.append(
            f"{result.generator.merged_reads:.1%} of the reads held several tokens (a busy machine): the upper "
            "percentiles of ITL are upper bounds"
        )
    if raw.cut_short:
        found.append(f"{raw.cut_short} sessions were ended early: their next turn might not have fitted max_model_len")
    if raw.unstamped_reads:
        found.append(f"{raw.unstamped_reads} reads have no kernel time stamp (TLS has none): the loop's time was used")
    return found


def _nothing(job: LoadJob, raw: Raw, found: Sequence[Answer], inside: Samples) -> str:
    running = sum(1 for answer in found if answer.error is None and not answer.ramp)
    kinds = ", ".join(f"{kind} ({count}x)" for kind, count in sorted(inside.errors.items()))
    body = next((record.ending for record in reversed(raw.records) if record.error and record.ending), b"")
    hint = (
        f"errors: {kinds} {body[:300].decode(errors='replace')}".rstrip()
        if kinds
        else f"{running} were running; requests take longer than the window: lengthen it"
    )
    return f"no request completed in the window of {job.duration:g} s at {job.url}; {hint}"


def _health(job: LoadJob, raw: Raw, found: Sequence[Answer], inside: Samples, end: float) -> GeneratorHealth:
    in_window = [record for record in raw.records if raw.start_ns <= record.intended_ns < raw.end_ns]
    lags = [max(0, record.sent_ns - record.intended_ns) / NANO for record in in_window if record.sent_ns]
    rate = raw.asked_rate
    pauses = [((since - raw.start_ns) / NANO, (until - raw.start_ns) / NANO) for since, until in raw.pauses]
    achieved = len(lags) / end if rate is not None else mean_concurrency(found, 0.0, end, pauses)
    return GeneratorHealth(
        asked=rate if rate is not None else float(job.workload.concurrency or 0),
        achieved=achieved,
        schedule_lag_p99=float(np.percentile(lags, 99)) if lags else 0.0,
        cpu_share=raw.cpu_seconds / end,
        merged_reads=inside.merged,
        steal=raw.steal,
    )


def _unhealthy(job: LoadJob, health: GeneratorHealth, inside: Samples) -> list[str]:
    reasons = []
    asked, unit = health.asked, "requests/s" if job.workload.open_loop else "concurrency"
    if job.workload.rate is not None:
        # A short window holds few arrivals, and their number varies by chance: three standard deviations are allowed.
        asked -= 3 * (asked * job.workload.burstiness / job.duration) ** 0.5
    if health.achieved < LEAST_DELIVERED * asked:
        reasons.append(f"the generator delivered {unit} {health.achieved:.4g} instead of {health.asked:.4g}")
    if health.cpu_share > MOST_CPU:
        reasons.append(f"the generator used {health.cpu_share:.0%} of a core: it was the bottleneck")
    if health.steal is not None and health.steal > MOST_STEAL and job.duration >= STEAL_SPAN:
        reasons.append(f"the hypervisor gave {health.steal:.0%} of this machine's CPU time to others")
    bound = any(name == "itl" for name, _, _ in job.slo.bounds())
    if health.merged_reads > (MOST_MERGED_WITH_ITL_SLO if bound else MOST_MERGED):
        reasons.append(f"{health.merged_reads:.0%} of the reads held several tokens: ITL could not be seen")
    if job.workload.open_loop and len(inside.ttft):
        limit = max(MOST_LAG, MOST_LAG_OF_TTFT * float(np.percentile(inside.ttft, 99)))
        if health.schedule_lag_p99 > limit:
            reasons.append(f"requests were sent up to {health.schedule_lag_p99 * 1e3:.0f} ms later than intended")
    return reasons


def _unsteady(job: LoadJob, raw: Raw, found: Sequence[Answer], end: float) -> list[str]:
    reasons = []
    if raw.clock_jumps:
        reasons.append("the clock of this machine was set during the run: times can't be compared")
    if raw.asked_rate is not None:
        first, last = in_flight_at(found, 0.0), in_flight_at(found, end)
        sent = raw.asked_rate * end
        if last - first > max(0.1 * sent, 3 * (sent * max(1.0, job.workload.burstiness)) ** 0.5):
            reasons.append(
                f"{SATURATED}: requests in flight grew from {first} to {last} in the window, so its latencies depend "
                f"on its length; the server can't keep up with {raw.asked_rate:.4g} requests/s"
            )
    return reasons


def _unreconciled(raw: Raw, found: Sequence[Answer], epoch: int) -> list[str]:
    """Client against server: over the window by what was received, and over the whole run by what ended in it."""
    times, tokens = token_flow(found)
    each = float(tokens.sum()) / max(1.0, float(sum(answer.events.sum() for answer in found)))
    ended = np.array([answer.finished for answer in found if answer.finished is not None and answer.error is None])
    failed = sum(answer.error is not None for answer in found)
    cut = sum(answer.finished is None for answer in found)
    reasons = []
    if len(raw.window) > 1:
        first, last = raw.window[0], raw.window[-1]
        start, end = _middle(first, epoch), _middle(last, epoch)
        received = float(tokens[(times >= start) & (times < end)].sum())
        blur = (_width(first) + _width(last)) / 2 / max(end - start, 1e-9)
        running = max(in_flight_at(found, start), in_flight_at(found, end))
        completed = float(((ended >= start) & (ended < end)).sum())
        allowance = Counted(
            tokens=received,
            tokens_allowance=_IN_FLIGHT_EVENTS * each * running + blur * received,
            requests=completed,
            requests_allowance=running + failed + 2,
        )
        reasons += disagreements(first, last, allowance, "the window")
    if raw.before is not None and (len(raw.window) < 2 or raw.after is None):
        reasons.append("the server's /metrics stopped answering under load: the counts can't be checked")
    if raw.before is not None and raw.after is not None:
        total = Counted(
            tokens=float(tokens.sum()),
            tokens_allowance=(_CUT_EVENTS * cut + _IN_FLIGHT_EVENTS * failed) * each,
            requests=float(len(ended)),
            requests_allowance=cut + failed + 1,
        )
        reasons += disagreements(raw.before, raw.after, total, "the whole run")
    return reasons


def _middle(scrape: Scrape, epoch: int) -> float:
    return ((scrape.asked_ns + scrape.got_ns) / 2 - epoch) / NANO


def _width(scrape: Scrape) -> float:
    return (scrape.got_ns - scrape.asked_ns) / NANO
