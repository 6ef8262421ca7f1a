"""Confirming: finalists and baseline in turns, from fresh starts, until the gain is settled."""

from collections.abc import Sequence

from tunewright.controller import attributing, spares
from tunewright.controller import trials as trial
from tunewright.controller.context import Context
from tunewright.controller.gating import must_prove
from tunewright.controller.searching import advance_running, fault_of, stays
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.promotion import PromotionMode
from tunewright.domain.quality import judge_quality
from tunewright.domain.settle import settle
from tunewright.domain.state import (
    ConfirmStatus,
    Finalist,
    Gain,
    TrialOutcome,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.step import Step, enter, say, update


def confirming(record: TuningRecord, context: Context) -> Step:
    """Measure the members of this round; after each whole round, look whether the gains are settled."""
    step, trials, free = advance_running(record, context.store.trials(record.name), context)
    slots = spares.sound(trials, record.tuning.spec.spare.parallelism, context.clock.now())
    if step is not None and not free:
        return step
    record, confirm = step.record if step else record, record.tuning.spec.confirm
    if record.ladder:
        won = next(f for f in record.finalists if f.candidate == record.winner)
        return attributing.climb(record, trials, free, context) or step or _won(record, won, context)
    mine = [t for t in trials if t.purpose is TrialPurpose.CONFIRM]
    open_ = [f for f in record.finalists if f.gain is None or f.gain.status is ConfirmStatus.RUNNING]
    if not open_:
        return step or _conclude(record, mine, context)
    round_ = max((t.round for t in mine), default=1)
    missing = _missing(record, open_, mine, round_, slots, free)
    if missing is None and step is not None:
        return step
    if missing is None:
        looked = tuple(_look(record, f, mine) if f in open_ else f for f in record.finalists)
        after = update(record, finalists=looked)
        still = [f for f in looked if f.gain is not None and f.gain.status is ConfirmStatus.RUNNING]
        if not still or _decided(looked):
            return _conclude(after, mine, context)
        missing = _missing(after, still, mine, round_ + 1, slots, free)
        record, round_ = after, round_ + 1
        if missing is None:
            return _conclude(after, mine, context)
    sentence = f"Confirming, round {round_} of at most {confirm.max_rounds}: {_standing(record.finalists)}."
    candidate, slot = missing
    new = trial.new_trial(trials, candidate, TrialPurpose.CONFIRM, f"confirming, round {round_}", round_, slot)
    context.store.save_trial(record.name, new)
    return Step(say(record, sentence), 0.0)


def _missing(
    record: TuningRecord,
    open_: Sequence[Finalist],
    mine: Sequence[TrialRecord],
    round_: int,
    slots: Sequence[int],
    free: Sequence[int],
) -> tuple[Candidate, int] | None:
    """Who has not run in this round yet and can start now, and on which spare.

    The order turns round by round, and with it the spare of each: neither drift nor a slower GPU favours anybody.
    """
    members = [record.baseline or Candidate(), *(f.candidate for f in open_)]
    turn = (round_ - 1) % len(members)
    begun = {t.candidate.hash for t in mine if t.round == round_}
    order = [(c, slots[at % len(slots)]) for at, c in enumerate((*members[turn:], *members[:turn]))]
    return next(((c, slot) for c, slot in order if c.hash not in begun and slot in free), None)


def _look(record: TuningRecord, finalist: Finalist, mine: Sequence[TrialRecord]) -> Finalist:
    spec, confirm = record.tuning.spec, record.tuning.spec.confirm
    base = (record.baseline or Candidate()).hash
    old = {t.round: t for t in mine if t.candidate.hash == base}
    new = {t.round: t for t in mine if t.candidate.hash == finalist.candidate.hash}
    rounds = sorted(set(old) & set(new))
    pairs = [(old[r], new[r]) for r in rounds if old[r].objective and new[r].objective]
    minimizing = spec.objective.minimize is not None
    # A latency's objective is negative; the ratio of inverses says by how much it is shorter.
    values = [
        (-1 / (o.objective or 1), -1 / (n.objective or 1)) if minimizing else (o.objective or 1, n.objective or 1)
        for o, n in pairs
    ]
    gain = settle(
        [o for o, _ in values],
        [n for _, n in values],
        min_gain=confirm.min_gain,
        min_rounds=confirm.min_rounds,
        max_rounds=confirm.max_rounds,
    )
    # What the machine spoilt says nothing of either side: those rounds are run again, as far as there are rounds.
    spoilt = [t for r in rounds for t in (old[r], new[r]) if t.outcome is TrialOutcome.FAILED]
    sound = [r for r in rounds if TrialOutcome.FAILED not in (old[r].outcome, new[r].outcome)]
    broken = [r for r in sound if new[r].outcome is TrialOutcome.INFEASIBLE]
    base_broken = [r for r in sound if old[r].outcome is TrialOutcome.INFEASIBLE]
    if len(broken) * 2 > len(sound):
        reason = f"failed or missed the SLO in {len(broken)} of {len(sound)} rounds"
        gain = update(gain, status=ConfirmStatus.NOT_BETTER, reason=reason)
    elif len(base_broken) == len(sound) >= confirm.min_rounds and not broken:
        reason = f"meets the SLO, which the baseline missed in all of {len(sound)} rounds"
        if pairs:  # two rounds bound no ratio: its interval would tell nothing
            reason += f"; {gain.estimate.value:+.1%} on average"
        gain = update(gain, status=ConfirmStatus.BETTER, reason=reason)
    elif gain.status is ConfirmStatus.RUNNING and len(rounds) >= confirm.max_rounds:
        reason = f"too few sound rounds: {len(pairs)} of {len(rounds)}"
        if spoilt:
            reason += f", by the machine's fault ({fault_of(spoilt[-1])})"
        gain = update(gain, status=ConfirmStatus.NOT_SETTLED, reason=reason)
    return update(finalist, gain=gain)


def _decided(finalists: Sequence[Finalist]) -> bool:
    """Whether the best by its estimate is already better: the others need no more of the spare's time."""
    gains = [f.gain for f in finalists if f.gain is not None]
    best = max(gains, key=lambda g: g.estimate.value)
    return best.status is ConfirmStatus.BETTER


def _standing(finalists: Sequence[Finalist]) -> str:
    return "; ".join(f"{f.candidate.hash} {f.gain.reason if f.gain else 'not measured yet'}" for f in finalists)


def _conclude(record: TuningRecord, mine: Sequence[TrialRecord], context: Context) -> Step:
    now, spec = context.clock.now(), record.tuning.spec
    baseline = record.baseline or Candidate()
    better = [f for f in record.finalists if f.gain is not None and f.gain.status is ConfirmStatus.BETTER]
    better.sort(key=lambda f: f.gain.estimate.value if f.gain else 0.0, reverse=True)
    turned_down = []
    for finalist in better:
        if why := must_prove(record, finalist.candidate, context.proposer.lossy(finalist.candidate, baseline)):
            quality = judge_quality(baseline, finalist.candidate, mine, spec.quality)
            if not quality.passed:
                turned_down.append(f"{finalist.candidate.hash} does not keep the answers: {quality.reason}; {why}")
                continue
        laid = attributing.begin(record, finalist.candidate, context.store.trials(record.name), context)
        return laid or _won(record, finalist, context)
    reasons = "; ".join(turned_down) or _standing(record.finalists)
    spoilt = [t for t in mine if t.outcome is TrialOutcome.FAILED]
    unsettled = any(f.gain and f.gain.status is ConfirmStatus.NOT_SETTLED for f in record.finalists)
    if unsettled and spoilt and not turned_down:
        sentence = f"The finalists could not be measured: {reasons}.{stays(record)}"
        return Step(enter(record, Phase.FAILED, sentence, now), None)
    verdict = "The gain is not settled" if unsettled and not turned_down else "No finalist held"
    sentence = f"{verdict}: {reasons}.{stays(record)}"
    return Step(enter(record, Phase.NO_IMPROVEMENT, sentence, now), None)


def _won(record: TuningRecord, finalist: Finalist, context: Context) -> Step:
    now, promotion = context.clock.now(), record.tuning.spec.promotion
    gain: Gain | None = finalist.gain
    record = update(record, winner=finalist.candidate, recipe=context.target.recipe(finalist.candidate))
    claim = f"{finalist.candidate.hash} is better than the baseline: {gain.reason if gain else 'by an unknown gain'}"
    if promotion.mode is PromotionMode.RECOMMEND:
        sentence = f"{claim}. Recommended: apply it as the report says."
        return Step(enter(record, Phase.RECOMMENDED, sentence, now), None)
    record = update(record, notes=tuple(context.target.notes(finalist.candidate)))
    if promotion.mode is PromotionMode.AUTO:
        sentence = f"{claim}. Mode auto: it goes on without asking."
        return Step(enter(record, Phase.AWAITING_APPROVAL, sentence, now, approval_since=now), 0.0)
    sentence = f"{claim}. Waiting for approval: tunewright approve {record.name}"
    return Step(enter(record, Phase.AWAITING_APPROVAL, sentence, now, approval_since=now), 0.0)
