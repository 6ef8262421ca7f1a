"""The searches that are compared: each proposes into a `Run` until its budget of GPU minutes is spent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import optuna
from benchmarks.search_world import Run, World

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import Earlier, TrialOutcome, TrialRecord
from tunewright.knobs.validity import problems
from tunewright.propose.proposer import OptunaProposer

optuna.logging.set_verbosity(optuna.logging.ERROR)

EARLIER_MOVED, EARLIER_LEVEL, EARLIER_S = 0.1, 0.7, 3600.0
"""Log-sd of coefficients, and level, by which an earlier tuning's world differed; its budget in seconds."""

MOST_TRIALS = 150
"""A run ends here too: at two minutes a trial no budget in use reaches it."""


def run(arm: str, world: World, seed: int, budget_s: float) -> Run:
    """One search: the baseline is measured first, whatever the arm, and paid for."""
    one = Run(world, random.Random(f"noise {seed}"), early_stop=arm in ("tunewright", WARM))
    one.trial(world.baseline, "what production runs now")
    for _ in ARMS[arm](one, seed):
        if one.seconds >= budget_s or len(one.trials) >= MOST_TRIALS:
            break
    return one


def ours(one: Run, seed: int, earlier: tuple[Earlier, ...] = ()) -> Iterator[TrialRecord]:
    """Tunewright's proposer, as the product runs it."""
    world = one.world
    proposer = OptunaProposer(world.search.model_copy(update={"seed": seed}), world.facts)
    while (proposal := proposer.propose(world.baseline, one.trials, world.traffic, earlier)) is not None:
        yield one.trial(proposal.candidate, proposal.reason)


def warm(one: Run, seed: int) -> Iterator[TrialRecord]:
    """The same after an earlier tuning of an hour, in a world whose coefficients and level were others."""
    before = Run(World(one.world.case, EARLIER_MOVED, 1000 + seed), random.Random(f"earlier {seed}"))
    before.trial(before.world.baseline, "what production ran")
    for _ in ours(before, 1000 + seed):
        if before.seconds >= EARLIER_S:
            break
    told = tuple(_earlier(trial) for trial in before.trials)
    yield from ours(one, seed, told)


def _earlier(trial: TrialRecord) -> Earlier:
    return Earlier(
        tuning="before", trial=trial.id, at=float(trial.number), candidate=trial.candidate,
        version=trial.measurement.vllm_version if trial.measurement else None,
        objective=trial.objective * EARLIER_LEVEL if trial.objective is not None else None,
        slo_margin=trial.slo_margin, failed=trial.failure is not None, memory=trial.memory,
    )  # fmt: skip


def at_random(one: Run, seed: int) -> Iterator[TrialRecord]:
    """Every flag drawn uniformly from its values."""
    rng, space = random.Random(f"random {seed}"), one.world.space
    drawn = [space.candidate({a.name: rng.randrange(len(a.values)) for a in space.axes}) for _ in range(MOST_TRIALS)]
    one.world.truths(drawn)
    for candidate in drawn:
        yield one.trial(candidate, "random")


def at_random_valid(one: Run, seed: int) -> Iterator[TrialRecord]:
    """The same, lent our static rules: what is known to be refused is not started."""
    rng, space = random.Random(f"random {seed}"), one.world.space
    while True:
        candidate = space.candidate({a.name: rng.randrange(len(a.values)) for a in space.axes})
        if not problems(candidate, one.world.facts):
            yield one.trial(candidate, "random")


def tpe(one: Run, seed: int) -> Iterator[TrialRecord]:
    """Optuna's TPE as it comes, over the same flags, from vLLM's defaults; a failed start is a failed trial."""
    space = one.world.space
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(space.positions(space.tidy(space.fixed)))
    while True:
        trial = study.ask()
        places = {axis.name: _suggest(trial, axis.name, len(axis.values), axis.ordered) for axis in space.axes}
        record = one.trial(space.candidate(places), "TPE")
        if record.objective is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            trial.set_constraint("slo", -(record.slo_margin or 0.0))
            study.tell(trial, record.objective)
        yield record


def _suggest(trial: optuna.Trial, name: str, count: int, ordered: bool) -> int:
    return trial.suggest_int(name, 0, count - 1) if ordered else int(trial.suggest_categorical(name, range(count)))


_SWEEP: tuple[tuple[str, tuple[KnobValue, ...]], ...] = (
    ("max_num_seqs", (64, 128, 256, 512)),
    ("max_num_batched_tokens", (2048, 4096, 8192, 16384)),
    ("enable_prefix_caching", (True, False)),
    ("num_speculative_tokens", (0, 1, 2)),
    ("async_scheduling", (True, False)),
)


def grid(one: Run, _: int) -> Iterator[TrialRecord]:
    """The product of a short list of values per flag, in order, as `vllm bench sweep` walks its parameter files."""
    method = _method(one.world)
    drafts = method not in (None, "ngram")  # nobody sweeps the depth of what needs a drafter without one
    searched = [(name, values) for name, values in _SWEEP if one.world.space.axis(name) is not None]
    axes = [(name, values) for name, values in searched if drafts or name != "num_speculative_tokens"]
    for values in product(*(values for _, values in axes)):
        chosen = dict(zip((name for name, _ in axes), values, strict=True))
        if chosen.get("num_speculative_tokens") and method is not None:
            chosen["speculative_method"] = method
        yield one.trial(one.world.space.tidy({**one.world.space.fixed, **chosen}), "sweep")


_LADDER = (
    "num_speculative_tokens", "async_scheduling", "mamba_backend", "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip


def one_at_a_time(one: Run, _: int) -> Iterator[TrialRecord]:
    """A ladder: every value of one knob, keep the best, then the next knob, as a published report went about it."""
    space, method = one.world.space, _method(one.world)
    names = [name for name in _LADDER if space.axis(name) is not None]
    names += [axis.name for axis in space.axes if axis.name not in (*_LADDER, "speculative_method")]
    base, best = one.world.baseline, one.trials[0]
    for name in names:
        axis = space.axis(name)
        for value in axis.values if axis is not None else ():
            values = {k: v for k, v in base.values.items() if k != name} | ({} if value is None else {name: value})
            if name == "num_speculative_tokens" and value and method is not None:
                values["speculative_method"] = method
            candidate = space.tidy(values)
            if candidate == base:
                continue
            record = one.trial(candidate, name)
            yield record
            if record.outcome is TrialOutcome.COMPLETE and (record.objective or 0) > (best.objective or 0):
                best = record
        base = best.candidate


def _method(world: World) -> KnobValue | None:
    axis = world.space.axis("speculative_method")
    return axis.values[0] if axis is not None and axis.values else None


WHOLE, WARM = "tunewright, whole windows", "tunewright, warm"
"""Ours without the early stop, and after an earlier tuning; only run where they are asked for."""

ARMS: dict[str, Callable[[Run, int], Iterator[TrialRecord]]] = {
    "tunewright": ours,     "random": at_random,
    "random, valid": at_random_valid,
 "tpe": tpe, "grid": grid, "one at a time": one_at_a_time,
    WHOLE: ours, WARM: warm,
}  # fmt: skip


def incumbent(trials: list[TrialRecord]) -> Candidate | None:
    """What a person would take after these trials: the best that was measured to meet the SLO."""
    met = [t for t in trials if t.outcome is TrialOutcome.COMPLETE and t.objective is not None]
    return max(met, key=lambda t: t.objective or 0.0).candidate if met else None
