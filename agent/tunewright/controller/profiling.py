"""Pending and Profiling: look at production, and learn what its traffic looks like. Nothing is touched.

Where there is no production (`target.replicas: 0`), its command is the baseline and `load` is the traffic.
"""

from tunewright.controller import earlier
from tunewright.controller.context import Context
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Source
from tunewright.domain.state import TuningRecord
from tunewright.domain.step import Step, age, enter, say, update
from tunewright.domain.workload import given_profile
from tunewright.observe.learn import PROFILE_METRICS, learn_profile
from tunewright.ports import Refused, SeriesWindow

PATIENT = 15.0
"""Seconds between two looks, at most, while production or its traffic is waited for."""

COVERED = 0.8
"""A window is used once this share of it has samples: a half empty one shows only the latest traffic."""


def pending(record: TuningRecord, context: Context) -> Step:
    """Wait for production to be whole, and note what it runs."""
    now, status = context.clock.now(), context.target.observe()
    context.prompts()  # what is of no use ends the tuning here, not in its last phase
    if record.load_file is None and (file := context.load_file()) is not None:
        sentence = f"Every load test will read {file.told} (a copy, which later edits do not change)."
        return Step(update(record, load_file=file, sentence=sentence), 0.0)
    context.spare.sweep(keep=[])
    if trials := context.store.trials(record.name):
        kept = earlier.with_own(record, trials)
        if kept != record:  # written before they are forgotten: a crash between loses nothing
            return Step(kept, 0.0)
        context.store.clear_trials(record.name)
    ready = [r for r in status.replicas if r.ready and not r.canary]
    # One that was scaled to nothing is waited for, too: there is no traffic to learn from.
    least = 0 if record.tuning.spec.offline else 1
    if len(ready) < max(least, status.desired):
        sentence = f"Waiting for production: {len(ready)} of {status.desired} servers are ready ({status.detail})."
        return Step(say(record, sentence), min(PATIENT, max(1.0, age(record, now) / 10)))
    baseline = context.target.baseline()
    record = earlier.with_others(record, context)
    if record.tuning.spec.offline:
        sentence = "There is no production: the command is tuned on the spare alone."
        return Step(enter(record, Phase.PROFILING, sentence, now, baseline=baseline), 0.0)
    source = Source.of_version(ready[0].version or "")
    sentence = f"Learning the traffic of {context.target.describe()} from {context.metrics.describe()}."
    record = update(record, baseline=baseline, beside_knobs=context.target.beside_knobs(), source=source)
    return Step(enter(record, Phase.PROFILING, sentence, now), 0.0)


def profiling(record: TuningRecord, context: Context) -> Step:
    """Learn the traffic profile over one window; wait while there is too little of it."""
    now, metrics = context.clock.now(), record.tuning.spec.metrics
    if record.tuning.spec.offline:
        given = given_profile(record.tuning.spec.load, now)
        return Step(enter(record, Phase.BASELINING, f"The traffic: {given.summary()}.", now, profile=given), 0.0)
    window = context.metrics.fetch(PROFILE_METRICS, now - metrics.window, now)
    covered = _covered(window)
    if covered < COVERED and now - record.phase_since < metrics.window:
        sentence = f"Learning the traffic: {covered * metrics.window:.0f}s of {metrics.window:.0f}s are seen."
        missing = min((COVERED - covered) * metrics.window, metrics.window - (now - record.phase_since))
        return Step(say(record, sentence), min(PATIENT, max(1.0, missing)))
    try:
        profile = learn_profile(
            window,
            via=context.metrics.describe(),
            source=record.source or Source.GPU,
            min_requests=metrics.min_requests,
        )
    except Refused as refusal:
        return Step(say(record, f"The traffic can't be learned yet: {refusal}"), min(metrics.interval, 15.0))
    sentence = f"The traffic ({profile.source}, {profile.finished_requests:.0f} requests): {profile.summary()}."
    return Step(enter(record, Phase.BASELINING, sentence, now, profile=profile), 0.0)


def _covered(window: SeriesWindow) -> float:
    firsts = [series.samples[0][0] for series in window.series if series.samples]
    if not firsts:
        return 0.0
    return max(0.0, min(1.0, (window.end - min(firsts)) / (window.end - window.start)))
