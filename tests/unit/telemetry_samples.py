"""Records for the tests of what people see: one small tuning in every state."""

from hypothesis import HealthCheck, settings

from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Estimate, GeneratorHealth, Latency, Measurement, ServerCounters
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.state import (
    ConfirmStatus,
    Decision,
    Failure,
    FailureKind,
    Finalist,
    Gain,
    PhaseChange,
    PromotionState,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.tuning import Tuning
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading, Verdict

steady = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
"""For every property here: the same examples everywhere, and no verdict by the clock of a slow machine."""

T0 = 1_750_000_000.0
BASELINE = Candidate(values={"max_num_seqs": 64, "enable_prefix_caching": False, "gpu_memory_utilization": 0.9})
WINNER = Candidate(
    values={
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": 8192,
    }
)


def tuning(**spec):
    document = {
        "apiVersion": "tunewright.dev/v1alpha1",
        "kind": "Tuning",
        "metadata": {"name": "chat"},
        "spec": {
            "target": {"command": ["vllm", "serve", "m", "--port", "{port}"], "replicas": 2},
            "objective": {"maximize": "outputTokensPerSecond"},
            "slo": {"ttftP95": "500ms", "itlP95": "40ms", "errorRate": "1%"},
        }
        | spec,
    }
    return Tuning.model_validate(document)


def latency(p50):
    return Latency(count=400, mean=p50 * 1.1, p50=p50, p90=p50 * 1.5, p95=p50 * 1.8, p99=p50 * 2.6)


def measurement(rate=1000.0, ttft=0.2, at=T0, **changes):
    fields = {
        "started_at": at,
        "duration": 35.0,
        "source": Source.SIMULATED,
        "vllm_version": "0.32.0+simulated",
        "seed": 1,
        "warmup": 12.0,
        "warmup_settled": True,
        "completed": 400,
        "failed": 0,
        "output_tokens_per_second": Estimate(value=rate, low=rate * 0.98, high=rate * 1.02),
        "input_tokens_per_second": rate * 2,
        "requests_per_second": rate / 128,
        "goodput": rate / 130,
        "ttft": latency(ttft),
        "tpot": latency(0.012),
        "itl": latency(0.011),
        "e2e": latency(ttft + 1.6),
        "generator": GeneratorHealth(asked=64, achieved=63.9, schedule_lag_p99=0.001, cpu_share=0.2, merged_reads=0.01),
        "server": ServerCounters(
            prompt_tokens=50_000, generation_tokens=35_000, finished_requests=400, preemptions=0, prefix_hit_rate=0.3
        ),
    }
    return Measurement(**(fields | changes))


def trial(number, candidate, purpose=TrialPurpose.SEARCH, rate=1000.0, ttft=0.2, round_=0, **changes):
    """A finished trial: 60 s of starting, 12 s of warming, 35 s of measuring, 3 s of stopping."""
    start = T0 + 1000 + number * 120
    fields = {
        "id": f"{number:03d}-{candidate.hash}",
        "number": number,
        "purpose": purpose,
        "candidate": candidate,
        "round": round_,
        "phase": TrialPhase.DONE,
        "phase_since": start + 110,
        "created_at": start,
        "ready_at": start + 60,
        "load_started_at": start + 60,
        "finished_at": start + 110,
        "start_seconds": 58.0,
        "outcome": TrialOutcome.COMPLETE,
        "measurement": measurement(rate, ttft, at=start + 72),
        "objective": rate,
        "slo_margin": (0.5 - ttft * 1.8) / 0.5,
    }
    return TrialRecord(**(fields | changes))


def failed_trial(number, candidate, kind=FailureKind.OUT_OF_MEMORY, cause="torch.OutOfMemoryError: CUDA out of memory"):
    return trial(
        number,
        candidate,
        outcome=TrialOutcome.INFEASIBLE,
        measurement=None,
        objective=None,
        slo_margin=None,
        ready_at=None,
        load_started_at=None,
        start_seconds=None,
        failure=Failure(kind=kind, cause=cause, advice="Lower gpu_memory_utilization.", exit_code=1),
    )


def search_trials():
    rates = [1000, 1180, 900, None, 1350, 1290, 1530, 1440, None, 1610, 1580]
    values = [64, 96, 32, 1024, 128, 160, 192, 224, 2048, 256, 288]
    found = [trial(0, BASELINE, TrialPurpose.BASELINE, 990.0), trial(1, BASELINE, TrialPurpose.BASELINE, 1010.0)]
    for number, (rate, seqs) in enumerate(zip(rates[1:], values[1:], strict=True), start=2):
        candidate = WINNER if seqs == 256 else BASELINE.with_value("max_num_seqs", seqs)
        if rate is None:
            found.append(failed_trial(number, candidate))
        else:
            missed = seqs == 288
            found.append(
                trial(
                    number,
                    candidate,
                    rate=float(rate),
                    ttft=0.35 if missed else 0.15 + seqs / 4000,
                    reason=f"TPE: {seqs} sequences",
                    outcome=TrialOutcome.INFEASIBLE if missed else TrialOutcome.COMPLETE,
                )
            )
    return found


def confirm_trials(first=20):
    found = []
    for round_ in (1, 2, 3):
        number = first + 2 * round_
        found.append(trial(number, BASELINE, TrialPurpose.CONFIRM, 1000.0 + 8 * round_, round_=round_))
        found.append(trial(number + 1, WINNER, TrialPurpose.CONFIRM, 1580.0 + 15 * round_, 0.21, round_=round_))
    return found


def profile():
    return TrafficProfile(
        start=T0 - 1800,
        end=T0,
        replicas=2,
        via="direct scrape of 2 servers",
        source=Source.SIMULATED,
        finished_requests=4200,
        saturated=True,
        demand=1.2,
        burstiness=1.4,
        concurrency=58.0,
        concurrency_p95=64.0,
        running=50.0,
        waiting=8.0,
        prompt_tokens=Histogram(edges=(50, 100, 200, 500, 1000, 2000), counts=(20, 180, 900, 2100, 800, 200)),
        output_tokens=Histogram(edges=(10, 20, 50, 100, 200, 500), counts=(0, 60, 400, 1500, 1900, 300), overflow=40),
        prompt_tokens_mean=412.0,
        output_tokens_mean=131.0,
        prefix_reuse=0.32,
        error_rate=0.0,
        output_tokens_per_second=480.0,
        ttft_p95=0.9,
        itl_p95=0.03,
        e2e_p95=6.1,
        notes=("one counter reset on replica 2",),
    )


def gain():
    return Gain(
        estimate=Estimate(value=0.584, low=0.521, high=0.649),
        rounds=3,
        status=ConfirmStatus.BETTER,
        reason="+58.4% (from +52.1% to +64.9%) over 3 fresh starts",
    )


def reading(value, samples=180.0, query="histogram_quantile(0.95, ttft)"):
    return Reading(query=query, value=value, samples=samples, start=T0 + 5000, end=T0 + 5300)


def promotion(updated=2):
    return PromotionState(
        candidate=WINNER,
        baseline=BASELINE,
        replicas=2,
        updated=updated,
        canary_since=T0 + 4900,
        judged_from=T0 + 4960,
        rolled_at=T0 + 5600,
        verdict=Verdict(
            outcome=Outcome.PASS,
            reason="no metric is worse by more than 10 %",
            at=T0 + 5300,
            metrics=(
                MetricVerdict(
                    metric="TTFT p95", outcome=Outcome.PASS, reason="240 ms against 310 ms",
                    canary=reading(0.24), stable=reading(0.31, 540.0),
                ),
                MetricVerdict(
                    metric="error rate", outcome=Outcome.PASS, reason="0 of 180 against 0 of 540",
                    canary=reading(0.0, query="errors"), stable=reading(0.0, 540.0, query="errors"),
                ),
            ),
        ),
    )  # fmt: skip


def history(*phases):
    return tuple(
        PhaseChange(at=T0 + 600 * index, phase=phase, sentence=f"What happened in {phase}.")
        for index, phase in enumerate(phases)
    )


def record(phase=Phase.PENDING, **changes):
    fields = {
        "tuning": tuning(),
        "spec_hash": tuning().spec.spec_hash,
        "phase": phase,
        "phase_since": T0,
        "sentence": f"It is {phase}.",
    }
    return TuningRecord(**(fields | changes))


FORWARD = (
    Phase.PENDING, Phase.PROFILING, Phase.BASELINING, Phase.SEARCHING, Phase.CONFIRMING, Phase.AWAITING_APPROVAL,
    Phase.CANARY, Phase.ROLLING, Phase.WATCHING, Phase.PROMOTED,
)  # fmt: skip


def promoted():
    """A whole tuning that went well: its record and its trials."""
    decision = Decision(
        action="approve", at=T0 + 4800, by="sam", reason="looks right", candidate=WINNER.hash, spec="s", baseline="b"
    )
    done = record(
        Phase.PROMOTED,
        source=Source.SIMULATED,
        profile=profile(),
        baseline=BASELINE,
        baseline_noise=0.012,
        finalists=(Finalist(candidate=WINNER, gain=gain()),),
        winner=WINNER,
        promotion=promotion(),
        decisions=(decision,),
        history=history(*FORWARD),
        sentence="Both replicas run the winner; nothing got worse while it was watched.",
    )
    return done, [*search_trials(), *confirm_trials()]
