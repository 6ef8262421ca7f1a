"""Space, history and seed to the next candidate. The trials are the only state."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from tunewright.domain.candidate import Candidate, content_hash
from tunewright.domain.load import Load
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.state import Earlier, SearchInputs, TrialOutcome, TrialRecord
from tunewright.domain.tuning import Search
from tunewright.domain.workload import given_lengths
from tunewright.knobs.catalogue import is_lossy
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.validity import problems
from tunewright.ports import Proposal
from tunewright.propose.asked import read_asked
from tunewright.propose.effects import Effect, effects_of, fit_effects
from tunewright.propose.encoding import Encoding
from tunewright.propose.lessons import Lessons
from tunewright.propose.memory import MemoryModel
from tunewright.propose.model import Observation, best, draw, observations
from tunewright.propose.prior import Prior
from tunewright.propose.space import Space, build_space, check_search
from tunewright.propose.starts import starts

_EXHAUSTIVE = 20_000
"""Spaces up to this size are walked to their end before they are called exhausted."""

_RANDOM_TRIES = 2_000

_LIKELY_TO_START = 0.5
"""A candidate less likely to find memory for one request is clamped until it is likelier, or not tried."""

_UNITS = ({"speculative_method", "num_speculative_tokens"},)
"""Knobs that only mean something together."""


class OptunaProposer:
    """The proposer on an Optuna study. Raises `Refused` at once when the search names what does not exist.

    `facts` are of the model and the machine, or are asked for at each proposal where they come to be known later.
    `load` tells what the trials will send, where the spec says so and not the traffic.
    """

    def __init__(self, search: Search, facts: ModelFacts | Callable[[], ModelFacts], load: Load | None = None) -> None:
        check_search(search)
        for index, values in enumerate(search.candidates):
            read_asked(search, values, f"spec.search.candidates[{index}]")
        self._search = search
        self._told_facts = facts
        self._load = load or Load()
        self._exhausted: tuple[Candidate, tuple[TrialRecord, ...], ModelFacts] | None = None

    def propose(
        self,
        baseline: Candidate,
        trials: Sequence[TrialRecord],
        profile: TrafficProfile | None,
        earlier: Sequence[Earlier] = (),
    ) -> Proposal | None:
        """A candidate that was not tried yet and may run; None when the space is exhausted."""
        facts = self._facts_with(trials)
        asked = (baseline, tuple(trials), facts)
        if asked == self._exhausted:  # asked over and over while the last trials run, beside what is measured
            return None
        proposal = self._propose(baseline, trials, _as_sent(profile, self._load), facts, Prior.of(earlier, trials))
        self._exhausted = asked if proposal is None else None
        return proposal

    def _propose(
        self,
        baseline: Candidate,
        trials: Sequence[TrialRecord],
        profile: TrafficProfile | None,
        facts: ModelFacts,
        prior: Prior,
    ) -> Proposal | None:
        space = build_space(self._search, facts, baseline, trials)
        lessons = Lessons(trials, space.defaults)
        memory = MemoryModel(trials, Encoding(space), facts, prior.memory)
        searched = [axis.name for axis in space.axes]

        def fitted(candidate: Candidate) -> Candidate:
            return memory.lowered(lessons.clamp(candidate, searched), searched, _LIKELY_TO_START)

        def usable(candidate: Candidate) -> bool:
            fresh = candidate.hash not in lessons.tried and candidate != baseline
            known = not fresh or candidate.hash in prior.failed
            known = known or bool(lessons.objection(candidate) or problems(candidate, facts))
            return not known and memory.chance(candidate) >= _LIKELY_TO_START

        for proposal in self._ideas(space, usable, baseline, trials, profile, facts, prior):
            clamped = fitted(proposal.candidate)
            if usable(clamped):
                told = "" if clamped == proposal.candidate else ", within the bounds that earlier starts told"
                return Proposal(clamped, proposal.reason + told)
        return None

    def _ideas(
        self,
        space: Space,
        usable: Callable[[Candidate], bool],
        baseline: Candidate,
        trials: Sequence[TrialRecord],
        profile: TrafficProfile | None,
        facts: ModelFacts,
        prior: Prior,
    ) -> Iterator[Proposal]:
        """Everything worth asking about, the most promising first; finite."""
        if prior.best is not None:
            yield Proposal(space.tidy({**space.fixed, **prior.best.values}), "the best of an earlier tuning")
        if not prior.tells_enough:
            yield from starts(space, baseline, trials, profile, facts)
        seed = int(content_hash([self._search.seed, len(trials)]), 16) % 2**31
        drawn = draw(space, trials, profile, facts, usable, seed, prior)
        if drawn is not None:
            yield Proposal(drawn.candidate, f"expected to give {drawn.gain:+.0%} ± {drawn.sd:.0%} over the best so far")
        seen = observations(trials)
        yield from _neighbours(space, seen, random.Random(seed))
        yield from _everything(space, random.Random(seed))

    def inputs(self, baseline: Candidate, trials: Sequence[TrialRecord]) -> SearchInputs:
        """What is known and what is left alone, for people."""
        facts = self._facts_with(trials)
        space, flags = build_space(self._search, facts, baseline, trials), facts.flags
        return SearchInputs(
            version=facts.vllm_version or "",
            model=facts.told_model,
            gpu=facts.told_gpu,
            searched=tuple(axis.name for axis in space.axes),
            flags_unknown=facts.flags_unknown if flags is None else "",
            missing=tuple(flags.missing()) if flags is not None else (),
            renamed=flags.renamed() if flags is not None else {},
            not_tuned=tuple(flags.not_tuned()) if flags is not None else (),
        )

    def objection(self, candidate: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> str | None:
        """Why a candidate that a person asked for can't run here; None when it may.

        What is only unlikely, as for want of memory, is tried: a person may know better.
        """
        if candidate == baseline:
            return "it is what production runs"
        found = problems(candidate, self._facts_with(trials))
        return "; ".join(found) or None

    def simplify(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Candidate:
        """`winner` without the knobs that the trials show to be worth no more than the noise.

        A knob goes back to the baseline's value. It stays when the trials can't tell, when the rest could not run
        without it, or when what is left was tried and did worse.
        """
        facts = self._facts_with(trials)
        fit = fit_effects(baseline, trials)
        if fit is None:
            return winner
        space = build_space(self._search, facts, baseline, trials)
        lessons = Lessons(trials, space.defaults)
        current = winner
        dropped: list[str] = []
        units = _units(winner, baseline)
        for unit in sorted(units, key=lambda names: fit.upper(_effects(winner, baseline, names))):
            simpler = current
            for name in unit:
                simpler = simpler.with_value(name, baseline.values.get(name))
            names = [*dropped, *unit]
            within_noise = fit.upper(_effects(winner, baseline, names)) <= fit.noise
            if not within_noise or problems(simpler, facts) or lessons.objection(simpler):
                continue
            if _did_worse(simpler, winner, trials, fit.noise):
                continue
            current, dropped = simpler, names
        return current

    def rungs(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Sequence[Candidate]:
        """The ladder between baseline and winner, the change worth most first, as far as the trials tell.

        Knobs that only mean something together are one change; so is what vLLM would refuse without the next.
        """
        facts, fit = self._facts_with(trials), fit_effects(baseline, trials)
        units = _units(winner, baseline)
        if fit is not None:
            units.sort(key=lambda names: -fit.middle(_effects(winner, baseline, names)))
        found, current = [], baseline
        for unit in units[:-1]:
            for name in unit:
                current = current.with_value(name, winner.values.get(name))
            if not problems(current, facts):
                found.append(current)
        return found

    def lossy(self, candidate: Candidate, baseline: Candidate) -> Sequence[str]:
        """The knobs by which `candidate` can change answers where `baseline` does not."""
        changed = candidate.differences(baseline)
        return [name for name, (own, _) in changed.items() if own is not None and is_lossy(name, own)]

    def _facts_with(self, trials: Sequence[TrialRecord]) -> ModelFacts:
        """The facts, with what the trials' own servers told where it was not known before: version and GPU memory."""
        facts = self._told_facts if isinstance(self._told_facts, ModelFacts) else self._told_facts()
        versions = [trial.measurement.vllm_version for trial in trials if trial.measurement is not None]
        if facts.vllm_version is None and versions:
            facts = replace(facts, vllm_version=versions[-1])
        memory = [trial.memory.device_gib for trial in trials if trial.memory is not None and trial.memory.device_gib]
        if facts.gpu_memory_gib is None and memory:
            facts = replace(facts, gpu_memory_gib=memory[0])
        return facts


def _as_sent(profile: TrafficProfile | None, load: Load) -> TrafficProfile | None:
    """The traffic as the trials send it: where the spec names streams or lengths, those count and not what was seen."""
    if profile is None:
        return None
    prompt, output = given_lengths(load)
    named: dict[str, float | None] = {
        "concurrency_p95": load.concurrency,
        "prompt_tokens_mean": prompt.average if prompt is not None else None,
        "output_tokens_mean": output.average if output is not None else None,
        "prefix_reuse": load.prefix_reuse,
    }
    if (sessions := load.sessions) is not None:
        named = {
            "concurrency_p95": sessions.concurrency,
            "prompt_tokens_mean": sessions.mean_prompt,
            "output_tokens_mean": sessions.output,
            "prefix_reuse": sessions.prefix_reuse,
        }
    return profile.model_copy(update={name: float(value) for name, value in named.items() if value is not None})


def _neighbours(space: Space, seen: Sequence[Observation], rng: random.Random) -> Iterator[Proposal]:
    """One step from the best candidate along each axis, in random order."""
    top = best(seen)
    if top is None:
        return
    here = space.positions(top.candidate)
    moves: list[tuple[str, int]] = []
    for axis in space.axes:
        places = range(len(axis.values))
        near = [p for p in places if abs(p - here[axis.name]) == 1] if axis.ordered else places
        moves.extend((axis.name, place) for place in near if place != here[axis.name])
    rng.shuffle(moves)
    for name, place in moves:
        yield Proposal(space.candidate({**here, name: place}), f"one step in {name} from the best so far")


def _everything(space: Space, rng: random.Random) -> Iterator[Proposal]:
    """What is left: all of a small space, so that it is really exhausted; a bounded sample of a large one."""
    lengths = [len(axis.values) for axis in space.axes]
    names = [axis.name for axis in space.axes]
    if space.size <= _EXHAUSTIVE:
        places = list(product(*(range(length) for length in lengths)))
        rng.shuffle(places)
    else:
        places = [tuple(rng.randrange(length) for length in lengths) for _ in range(_RANDOM_TRIES)]
    for place in places:
        yield Proposal(space.candidate(dict(zip(names, place, strict=True))), "drawn at random")


def _units(winner: Candidate, baseline: Candidate) -> list[list[str]]:
    """The changed knobs, those that belong together as one."""
    changed = list(winner.differences(baseline))
    units = []
    for together in _UNITS:
        unit = [name for name in changed if name in together]
        if unit:
            units.append(unit)
            changed = [name for name in changed if name not in together]
    return [*units, *([name] for name in changed)]


def _effects(winner: Candidate, baseline: Candidate, names: Sequence[str]) -> list[Effect]:
    return [effect for effect in effects_of(winner, baseline) if effect[0] in names]


def _did_worse(simpler: Candidate, winner: Candidate, trials: Sequence[TrialRecord], noise: float) -> bool:
    """Whether the simpler candidate was tried itself, and failed, missed the SLO or was slower than noise explains."""
    own = [trial for trial in trials if trial.candidate == simpler and trial.outcome is not None]
    if any(trial.outcome is TrialOutcome.INFEASIBLE for trial in own):
        return True
    values = [trial.objective for trial in own if trial.objective is not None]
    others = [t.objective for t in trials if t.candidate == winner and t.objective is not None]
    if not values or not others:
        return False
    mine, best_known = sum(values) / len(values), sum(others) / len(others)
    return mine < best_known - noise * abs(best_known)
