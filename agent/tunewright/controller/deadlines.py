"""How long a phase may take. Every phase has a deadline; waiting for a person costs none of it."""

from collections.abc import Sequence

from tunewright.domain.answers import MAX_PROMPTS, answering_time
from tunewright.domain.load import LoadMode
from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.workload import time_limit

SPARE_TIME = 1.5
"""Servers in production may take this much longer to start than the slowest start measured on the spare."""


def start_allowance(record: TuningRecord, trials: Sequence[TrialRecord]) -> float:
    """Seconds that one production server may take to start: from the starts measured, never less than a minute."""
    measured = [t.start_seconds for t in trials if t.start_seconds is not None]
    if not measured:
        return record.tuning.spec.target.start_timeout
    return min(record.tuning.spec.target.start_timeout, max(60.0, SPARE_TIME * max(measured)))


def deadline(record: TuningRecord, trials: Sequence[TrialRecord]) -> float | None:
    """Seconds that this phase may take; None where a person is waited for, or where giving up would be worse."""
    spec = record.tuning.spec
    highest = spec.load.mode is LoadMode.HIGHEST_RATE
    one_trial = spec.spare.start_timeout + time_limit(spec.load.duration, spec.load.max_warmup, highest) + 60
    replicas = record.promotion.replicas if record.promotion else spec.target.replicas
    one_server = start_allowance(record, trials) + spec.target.drain_timeout + 60
    match record.phase:
        case Phase.PENDING:
            return spec.target.start_timeout + 600
        case Phase.PROFILING:
            return 2 * spec.metrics.window + 600
        case Phase.BASELINING:
            return 3 * one_trial
        case Phase.SEARCHING:
            left = spec.budget.trials + sum(t.machine_faults for t in trials if t.purpose is TrialPurpose.SEARCH)
            return one_trial * (left + 1)
        case Phase.CONFIRMING:
            own = spec.quality.prompts_file or spec.quality.prompts_config_map
            one_trial += answering_time(MAX_PROMPTS if own else spec.quality.prompts, spec.quality.max_tokens)
            return 3 * one_trial * (spec.confirm.max_rounds * (spec.confirm.finalists + 1) + len(record.ladder))
        case Phase.CANARY:
            canary, analysis = spec.promotion.canary, spec.promotion.analysis
            return one_server + canary.warmup + canary.traffic_timeout + analysis.max_duration + 60
        case Phase.ROLLING:
            return one_server * (replicas + 1)
        case Phase.WATCHING:
            return spec.promotion.watch + 600
        case _:
            return None
