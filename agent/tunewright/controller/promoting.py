"""From approval to promoted, or back: the only part that touches production, and only through the target port."""

from collections import Counter

from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.controller.decisions import go_back, live_approval
from tunewright.domain.phases import Phase
from tunewright.domain.promotion import PromotionMode
from tunewright.domain.state import PromotionState, TuningRecord
from tunewright.domain.step import Step, age, enter, say, start_anew, update
from tunewright.domain.tuning import Slo
from tunewright.domain.units import format_duration
from tunewright.domain.verdict import Outcome, Reading, Verdict
from tunewright.knobs.catalogue import gpus_of
from tunewright.observe.drift import drift
from tunewright.observe.learn import PROFILE_METRICS, learn_profile
from tunewright.observe.names import CANARY_METRICS
from tunewright.observe.window import join
from tunewright.ports import PortError, Refused, Replica, SeriesWindow, TargetStatus
from tunewright.rollout.analysis import ANALYSIS_METRICS, hold_to_slo, judge, readings
from tunewright.rollout.evidence import evidence
from tunewright.rollout.freshness import blind_spots, other_program, other_traffic, other_version
from tunewright.rollout.plan import plan_for, ready_canary, ready_on
from tunewright.rollout.watch import WATCH_METRICS, Compared, compare_with_before, told, with_before

REST = 60.0
"""Seconds between two looks while only a person is waited for: what they decide wakes the loop (in a cluster, by the
watches), or is looked for each second (on one machine)."""
POLL = 0.5
"""Seconds between two looks at production while something moves in it."""
HELD = 5.0
"""Seconds between two looks while nothing may move yet."""


def awaiting_approval(record: TuningRecord, context: Context) -> Step:
    """Wait for a person; then look once more before anything moves."""
    now, promotion = context.clock.now(), record.tuning.spec.promotion
    if record.winner is None or record.baseline is None:
        raise Refused("there is no winner to approve")
    approval = live_approval(record)
    if approval is not None and now - approval.at > promotion.approval_expiry:
        sentence = f"The approval by {approval.by} expired before anything could move. Production stays as it is."
        return Step(enter(record, Phase.REJECTED, sentence, now), None)
    current = context.target.baseline()
    if current.hash != record.baseline.hash:
        sentence = f"Production's configuration changed to {current.hash} meanwhile: starting anew."
        return Step(start_anew(record, sentence, now), 0.0)
    if promotion.mode is not PromotionMode.AUTO and approval is None:
        if age(record, now) > promotion.approval_expiry:
            sentence = "Nobody approved in time: the approval expired. Production stays as it is."
            return Step(enter(record, Phase.REJECTED, sentence, now), None)
        return Step(record, min(REST, promotion.approval_expiry - age(record, now) + 1.0))
    status = context.target.observe()
    stale = other_version(status, record.winner, context.store.trials(record.name))
    stale = stale or other_program(record.beside_knobs, context.target.beside_knobs())
    if stale:
        return Step(enter(record, Phase.FAILED, f"Can't be rolled out, and nothing was touched: {stale}", now), None)
    # Pods restart, and somebody may be rolling something out: what holds it may pass, or be put right in time.
    doubts = [*context.target.preflight(record.winner), *_doubts(record, status, context)]
    if doubts:
        since = approval.at if approval else record.approval_since or record.phase_since
        if now - since > promotion.canary.traffic_timeout:
            sentence = f"Can't be rolled out, and nothing was touched: {'; '.join(doubts)}"
            return Step(enter(record, Phase.FAILED, sentence, now), None)
        return Step(say(record, f"Held before anything moves: {'; '.join(doubts)}."), HELD)
    window = context.metrics.fetch(WATCH_METRICS, now - record.tuning.spec.metrics.window, now)
    state = PromotionState(
        candidate=record.winner, baseline=record.baseline, replicas=status.desired, before=told(window)
    )
    who = f"approved by {approval.by}" if approval else "mode auto"
    sentence = f"Starting the canary of {record.winner.hash} ({who})."
    return Step(enter(record, Phase.CANARY, sentence, now, promotion=state), 0.0)


def canary(record: TuningRecord, context: Context) -> Step:
    """One server of the winner takes a share of the requests; it is judged against the others."""
    now, promotion = context.clock.now(), _promotion(record)
    canary_spec, analysis = record.tuning.spec.promotion.canary, record.tuning.spec.promotion.analysis
    status = context.target.apply(plan_for(record, promotion))
    record = _noted(record, status, now)
    promotion = _promotion(record)
    if status.failure is not None:
        return _back(record, f"the canary failed: {status.failure.cause}", now)
    server = ready_canary(status)
    if server is None:
        return Step(say(record, f"The canary is starting ({status.detail})."), POLL)
    if promotion.canary_since is None:
        share = f"{canary_spec.share:.0%} of the requests"
        promotion = update(promotion, canary_since=now, judged_from=now + canary_spec.warmup)
        sentence = f"The canary answers and takes {share}; judged after {canary_spec.warmup:.0f}s of warm-up."
        return Step(say(update(record, promotion=promotion), sentence), POLL)
    judged_from = promotion.judged_from or now
    last_look = promotion.verdict.at if promotion.verdict else judged_from
    if now < last_look + analysis.interval:
        return Step(record, POLL)
    gpus = gpus_of(promotion.candidate.values), gpus_of(promotion.baseline.values)
    stored = _read(status, server, judged_from, now, context, gpus)
    verdict = judge(stored, record.tuning.spec.slo, analysis, at=now)
    record = update(record, promotion=update(promotion, verdict=verdict, readings=stored))
    watched = now - judged_from
    if verdict.outcome is Outcome.FAIL:
        return _back(record, f"the canary is worse: {verdict.reason}", now)
    if verdict.outcome is Outcome.PASS and watched >= analysis.min_duration and not status.foreign:
        sentence = f"The canary holds: {verdict.reason}. Rolling replica by replica."
        rolling_state = update(_promotion(record), updated=1, canary_verdict=verdict, judged_from=now)
        return Step(enter(record, Phase.ROLLING, sentence, now, promotion=rolling_state), 0.0)
    if evidence(stored)["canary"].finished == 0 and watched > canary_spec.traffic_timeout:
        return _back(record, f"no traffic reached the canary in {watched:.0f}s: {verdict.reason}", now)
    if watched > analysis.max_duration:
        return _back(record, f"no verdict after {watched:.0f}s: {verdict.reason}", now)
    held = f" Held, since {status.foreign}." if status.foreign else ""
    return Step(say(record, f"The canary after {watched:.0f}s: {verdict.outcome}, {verdict.reason}.{held}"), POLL)


def rolling(record: TuningRecord, context: Context) -> Step:
    """Replica by replica; each new one answers before the next goes, and the canary carries traffic meanwhile."""
    now, promotion = context.clock.now(), _promotion(record)
    status = context.target.apply(plan_for(record, promotion))
    record = _noted(record, status, now)
    promotion = _promotion(record)
    if status.failure is not None:
        return _back(record, f"a replica failed during the roll: {status.failure.cause}", now)
    verdict = _roll_verdict(record, status, context, now)
    if verdict is not None:
        promotion = update(promotion, verdict=verdict)
        record = update(record, promotion=promotion)
        if verdict.outcome is Outcome.FAIL:
            return _back(record, f"the new servers are worse: {verdict.reason}", now)
    done = ready_on(status, promotion.candidate.hash)
    if not status.settled or done < promotion.updated:
        return Step(say(record, f"Rolling: {done} of {promotion.replicas} replicas ({status.detail})."), POLL)
    if status.foreign:
        return Step(say(record, f"Held at {done} of {promotion.replicas} replicas: {status.foreign}."), POLL)
    if promotion.updated < promotion.replicas:
        after = update(promotion, updated=promotion.updated + 1)
        sentence = f"Rolling: {done} of {promotion.replicas} replicas are done."
        return Step(say(update(record, promotion=after), sentence), 0.0)
    if promotion.rolled_at is None:
        sentence = f"All {promotion.replicas} replicas run {promotion.candidate.hash}; the canary goes."
        return Step(say(update(record, promotion=update(promotion, rolled_at=now)), sentence), 0.0)
    watch = record.tuning.spec.promotion.watch
    sentence = f"All {promotion.replicas} replicas run {promotion.candidate.hash}; watching for {watch:.0f}s."
    judged = update(promotion, judged_from=now, verdict=None)
    return Step(enter(record, Phase.WATCHING, sentence, now, promotion=judged), 0.0)


def watching(record: TuningRecord, context: Context) -> Step:
    """Everything runs the winner: a regression within the window goes back by itself."""
    now, promotion = context.clock.now(), _promotion(record)
    spec = record.tuning.spec.promotion
    status = context.target.apply(plan_for(record, promotion))
    record = _noted(record, status, now)
    promotion = _promotion(record)
    if status.failure is not None:
        return _back(record, f"a replica failed after the roll: {status.failure.cause}", now)
    if promotion.verdict is None or now - promotion.verdict.at >= spec.analysis.interval or _watched(record, now):
        window = context.metrics.fetch(ANALYSIS_METRICS, promotion.judged_from or now, now)
        verdict = hold_to_slo(
            window,
            record.tuning.spec.slo,
            spec.analysis,
            at=now,
            horizon=spec.watch,
            before=promotion.canary_verdict,
        )
        verdict = with_before(verdict, _since_before(record, promotion, context, now))
        promotion = update(promotion, verdict=verdict)
        record = update(record, promotion=promotion)
        if verdict.outcome is Outcome.FAIL:
            return _back(record, f"worse than allowed after the roll: {verdict.reason}", now)
    if not _watched(record, now):
        return Step(record, POLL)
    if status.foreign:
        return Step(say(record, f"Not promoted while it is not what was rolled out: {status.foreign}."), HELD)
    seen = promotion.verdict.reason if promotion.verdict else "nothing was seen"
    if promotion.verdict is None or promotion.verdict.outcome is not Outcome.PASS:
        seen = f"nothing surely worse in {format_duration(spec.watch)}, and no more can be said: {seen}"
    sentence = f"{promotion.candidate.hash} is promoted: it serves all {promotion.replicas} replicas ({seen})."
    return Step(enter(record, Phase.PROMOTED, sentence, now), None)


def rolling_back(record: TuningRecord, context: Context) -> Step:
    """Back to the baseline, replica by replica. Never given up, but where somebody else has taken production over, or
    holds what is left to do."""
    now, promotion = context.clock.now(), _promotion(record)
    try:
        status = context.target.apply(plan_for(record, promotion))
    except Refused as refusal:  # the target is gone, or was made what can't be tuned
        return _refused_back(record, refusal, now)
    record = _noted(record, status, now)
    promotion = _promotion(record)
    done = ready_on(status, promotion.baseline.hash)
    if record.foreign_since is not None:
        if _held_too_long(record, now) and context.target.let_go():
            return Step(enter(record, Phase.FAILED, _left_to_them(record, promotion, status), now), REST)
        at = f"at {done} of {promotion.replicas} replicas"
        sentence = f"Going back ({promotion.back_reason}) is held {at}: {record.foreign}."
        return Step(say(record, sentence), HELD)
    if not status.settled or done < promotion.replicas:
        sentence = f"Going back ({promotion.back_reason}): {done} of {promotion.replicas} replicas ({status.detail})."
        return Step(say(record, sentence), POLL)
    sentence = f"Production runs the baseline again: {promotion.back_reason}."
    return Step(enter(record, Phase.ROLLED_BACK, sentence, now), 0.0)


def keep(record: TuningRecord, context: Context) -> tuple[TuningRecord, bool]:
    """Suspended half-way, or ended: production is kept as the last step left it. Also whether it is as planned."""
    now = context.clock.now()
    try:
        status = context.target.apply(plan_for(record, _promotion(record)))
    except Refused as refusal:  # the target is gone, or was made what can't be tuned: theirs, and told
        return _foreign(record, str(refusal), now), False
    return _noted(record, status, now), status.settled


def clear(context: Context) -> bool:
    """Whether nothing of ours is left in production after going back was given up. Takes away what may go by now.

    Raises `PortError`, and `Refused` where there is no target any more.
    """
    if not any(replica.canary for replica in context.target.observe().replicas):
        return True
    context.target.let_go()
    return False


def _cleared(context: Context) -> bool:
    try:
        return clear(context)
    except (PortError, Refused):
        return False  # what ended it says what to do


def ended(record: TuningRecord, context: Context) -> Step:
    """An ended tuning: production is kept healthy, and `retune: onDrift` looks whether the traffic changed."""
    now, spec = context.clock.now(), record.tuning.spec
    if record.promotion is not None and record.phase in (Phase.PROMOTED, Phase.ROLLED_BACK):
        record, _ = keep(record, context)
    left = record.promotion is not None and record.phase is Phase.FAILED and not _cleared(context)
    if left:
        return Step(record, REST)
    if not trial.spare_is_free(context.store.trials(record.name), context):
        return Step(record, 1.0)
    # Without `onDrift` the drift is told all the same, but nobody needs to be woken for it.
    again = spec.metrics.window if spec.retune.mode == "onDrift" else None
    last = max(record.phase_since, record.drift_at or 0.0)
    learned = record.profile
    if learned is None or learned.given:
        return Step(record, None)
    if now - last < spec.metrics.window:
        return Step(record, again)
    record = update(record, drift_at=now)
    try:
        window = context.metrics.fetch(PROFILE_METRICS, now - spec.metrics.window, now)
        profile = learn_profile(window, via=learned.via, source=learned.source, min_requests=spec.metrics.min_requests)
    except (PortError, Refused):
        return Step(record, again)  # too little to tell; that the source fails is counted where it is asked
    found = drift(learned, profile)
    record = update(record, drift=found.value)
    if again is None or found.value <= spec.retune.drift:
        return Step(record, again)
    sentence = f"The traffic changed ({found.reason}): starting anew."
    return Step(start_anew(record, sentence, now), 0.0)


def _doubts(record: TuningRecord, status: TargetStatus, context: Context) -> list[str]:
    """Why nothing may move yet: servers whose metrics are not seen, traffic unlike what was tuned for."""
    now, metrics = context.clock.now(), record.tuning.spec.metrics
    found = [] if any(r.ready for r in status.replicas) else ["no server of production is ready"]
    for replica in (r for r in status.replicas if r.ready and not r.canary):
        window = context.metrics.fetch(CANARY_METRICS, now - max(60.0, 4 * metrics.interval), now, replica.labels)
        found += blind_spots(replica.name, window, record.tuning.spec.promotion.analysis)
    if found or record.profile is None:
        return found
    window = context.metrics.fetch(PROFILE_METRICS, now - metrics.window, now)
    via, source = record.profile.via, record.profile.source
    try:
        profile = learn_profile(window, via=via, source=source, min_requests=metrics.min_requests)
    except Refused as refusal:
        return [f"the traffic can't be compared with what was tuned for: {refusal}"]
    changed = other_traffic(record.profile, profile, record.tuning.spec.retune.drift)
    return [changed] if changed else []


def _roll_verdict(record: TuningRecord, status: TargetStatus, context: Context, now: float) -> Verdict | None:
    """The new servers' errors since the roll began; None when it is not time to look.

    Their latencies are not judged here: while a replica restarts, the others carry its load.
    """
    promotion, analysis = _promotion(record), record.tuning.spec.promotion.analysis
    since = promotion.judged_from or now
    last_look = promotion.verdict.at if promotion.verdict else since
    new = [r for r in status.replicas if r.ready and (r.canary or r.candidate_hash == promotion.candidate.hash)]
    if now < max(last_look, since) + analysis.interval or not new:
        return None
    window = join([context.metrics.fetch(ANALYSIS_METRICS, since, now, r.labels) for r in new])
    return hold_to_slo(window, Slo(), analysis, at=now)


def _since_before(record: TuningRecord, promotion: PromotionState, context: Context, now: float) -> Compared:
    """The values since the roll against those before the canary came; the first minutes are left out, as a canary's."""
    spec = record.tuning.spec.promotion
    since = (promotion.judged_from or now) + spec.canary.warmup
    if since >= now:
        return Compared(unjudged="the new servers are warming up")
    after = told(context.metrics.fetch(WATCH_METRICS, since, now))
    return compare_with_before(promotion.before, after, spec.analysis, horizon=spec.watch)


def _refused_back(record: TuningRecord, refusal: Refused, now: float) -> Step:
    """Going back where there is nothing to go back with: held, and with an end."""
    record = _foreign(record, str(refusal).rstrip("."), now)
    if _held_too_long(record, now):
        sentence = f"{_gave_up(record)} Production is theirs now."
        return Step(enter(record, Phase.FAILED, sentence, now), REST)
    return Step(say(record, f"Going back ({_promotion(record).back_reason}) is held: {record.foreign}."), HELD)


def _held_too_long(record: TuningRecord, now: float) -> bool:
    since = record.foreign_since if record.foreign_since is not None else now
    return min(now - since, age(record, now)) > record.tuning.spec.promotion.foreign_timeout


def _left_to_them(record: TuningRecord, promotion: PromotionState, status: TargetStatus) -> str:
    """What a person must know when going back ended without the baseline."""
    known = {promotion.baseline.hash: "the baseline", promotion.candidate.hash: "the winner"}
    runs = Counter(known.get(r.candidate_hash or "", "neither") for r in status.replicas if not r.canary)
    told = ", ".join(f"{count} × {what}" for what, count in sorted(runs.items())) or "no server"
    if {r.candidate_hash for r in status.replicas if not r.canary} == {promotion.baseline.hash}:
        return f"{_gave_up(record)} All replicas run the baseline; the canary is taken away when that has changed."
    return (
        f"{_gave_up(record)} Production is theirs now and "
        f"runs {told}; to have the baseline back, let them set {promotion.baseline.hash}, then start anew."
    )


def _gave_up(record: TuningRecord) -> str:
    waited = format_duration(record.tuning.spec.promotion.foreign_timeout)
    return f"Gave up going back ({_promotion(record).back_reason}) after {waited}: {record.foreign}."


def _noted(record: TuningRecord, status: TargetStatus, now: float) -> TuningRecord:
    """The record with what production's status says of others who change it: their edits, and how many servers it has.

    An autoscaler may scale production meanwhile; the roll is over when all servers that there are then run the winner.
    """
    promotion = record.promotion
    if promotion is not None and status.desired >= 1 and status.desired != promotion.replicas:
        updated = min(promotion.updated, status.desired)
        promotion = update(promotion, replicas=status.desired, updated=updated)
    return _foreign(update(record, promotion=promotion), status.foreign or "", now)


def _foreign(record: TuningRecord, told: str, now: float) -> TuningRecord:
    """What others did that holds it, and since when; empty: nothing does."""
    since = (record.foreign_since if record.foreign_since is not None else now) if told else None
    return update(record, foreign=told, foreign_since=since)


def _promotion(record: TuningRecord) -> PromotionState:
    if record.promotion is None:
        raise Refused("the record says nothing of the promotion it is in")
    return record.promotion


def _watched(record: TuningRecord, now: float) -> bool:
    return age(record, now) >= record.tuning.spec.promotion.watch


def _back(record: TuningRecord, why: str, now: float) -> Step:
    return Step(go_back(record, why, now), 0.0)


def _read(
    status: TargetStatus, server: Replica, start: float, now: float, context: Context, gpus: tuple[int, int]
) -> tuple[Reading, ...]:
    """Canary and stable servers over the same window."""

    def window(replica: Replica) -> SeriesWindow:
        return context.metrics.fetch(CANARY_METRICS, start, now, dict(replica.labels))

    return readings(window(server), [window(r) for r in status.replicas if not r.canary], gpus)
