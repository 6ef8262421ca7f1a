"""The first trials: chosen by what is known to matter, not drawn at random.

vLLM's defaults, then a ladder from the better of baseline and defaults: one step at a time that is known to matter for
this kind of model and traffic, each on top of those that helped.
"""

from collections.abc import Iterator, Mapping, Sequence

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.state import TrialOutcome, TrialRecord
from tunewright.knobs.catalogue import is_lossy
from tunewright.knobs.facts import ModelFacts
from tunewright.ports import Proposal
from tunewright.propose.space import Space

_REUSE_THAT_MATTERS = 0.02

Step = tuple[dict[str, KnobValue], str]


def starts(
    space: Space,
    baseline: Candidate,
    trials: Sequence[TrialRecord],
    profile: TrafficProfile | None,
    facts: ModelFacts,
) -> Iterator[Proposal]:
    """The chosen candidates in order; those that were tried already are among them."""
    defaults = space.tidy({**space.fixed, **_explicit_defaults(space)})
    yield Proposal(defaults, "vLLM's defaults")
    base = _better(trials, baseline, defaults)
    known = True
    for values, reason in _steps(space, base, profile, facts):
        step = space.tidy({**base.values, **values})
        yield Proposal(step, reason)
        known = known and _objective(trials, base, float("-inf")) > float("-inf")
        if known and _objective(trials, step, float("-inf")) > _objective(trials, base, float("inf")):
            base = step


def _explicit_defaults(space: Space) -> dict[str, KnobValue]:
    """Knobs that production sets to just their default stay set: that is the same server."""
    return {
        axis.name: space.defaults[axis.name]
        for axis in space.axes
        if None not in axis.values and axis.name in space.defaults
    }


def _better(trials: Sequence[TrialRecord], baseline: Candidate, defaults: Candidate) -> Candidate:
    """The one to step from: the better as far as is known, the baseline while nothing is."""
    known = _objective(trials, defaults, float("-inf"))
    return defaults if known > _objective(trials, baseline, float("-inf")) else baseline


def _objective(trials: Sequence[TrialRecord], candidate: Candidate, unknown: float) -> float:
    values = [
        trial.objective
        for trial in trials
        if trial.candidate == candidate and trial.outcome is TrialOutcome.COMPLETE and trial.objective is not None
    ]
    return sum(values) / len(values) if values else unknown


def _steps(space: Space, base: Candidate, profile: TrafficProfile | None, facts: ModelFacts) -> Iterator[Step]:
    """Single steps worth a trial, the most telling first; only values that are on the axes."""
    concurrency = profile.concurrency_p95 if profile is not None else 0.0
    wanted = _at_least(space, "max_num_seqs", 2 * concurrency)
    if wanted is not None and _below(space, base, "max_num_seqs", 2 * concurrency):
        yield {"max_num_seqs": wanted}, f"room for twice the {concurrency:.0f} requests at a time"
    reuse = profile.prefix_reuse if profile is not None else None
    matters = reuse is None or reuse > _REUSE_THAT_MATTERS
    uncached = _resolved(space, base, "enable_prefix_caching") is not True
    if matters and uncached and _on_axis(space, "enable_prefix_caching", True):
        shared = "prompts may share prefixes" if reuse is None else f"{reuse:.0%} of prompt tokens are shared prefixes"
        yield {"enable_prefix_caching": True}, shared
    depth = _at_least(space, "num_speculative_tokens", 1)
    if depth is not None and not base.values.get("num_speculative_tokens"):
        method = _own_drafter(space, base, facts)
        if method is not None:
            yield {"speculative_method": method, "num_speculative_tokens": depth}, f"speculation by {method}, one token"
    if _on_axis(space, "mamba_backend", "flashinfer") and _resolved(space, base, "mamba_backend") != "flashinfer":
        yield {"mamba_backend": "flashinfer"}, "other kernels for the Mamba state"
    for name, value in (("mamba_ssm_cache_dtype", "float16"), ("kv_cache_dtype", "fp8")):
        if _on_axis(space, name, value) and is_lossy(name, value) and base.values.get(name) != value:
            yield {name: value}, f"half the memory by {name} {value}"


def _own_drafter(space: Space, base: Candidate, facts: ModelFacts) -> KnobValue | None:
    """A method that needs nothing more: production's own, or the model's MTP layers."""
    pinned = space.fixed.get("speculative_method") or base.values.get("speculative_method")
    if pinned is not None:
        return pinned
    axis = space.axis("speculative_method")
    if axis is None:
        return None
    foreign = [value for value in axis.values if value not in ("mtp", "ngram")]
    if foreign:
        return foreign[0]
    return "mtp" if facts.mtp_layers and "mtp" in axis.values else None


def _on_axis(space: Space, name: str, value: KnobValue) -> bool:
    axis = space.axis(name)
    return axis is not None and any(own is value or (own == value and type(own) is type(value)) for own in axis.values)


def _resolved(space: Space, base: Candidate, name: str) -> KnobValue | None:
    return base.values.get(name, space.defaults.get(name))


def _below(space: Space, base: Candidate, name: str, bound: float) -> bool:
    """Whether the base is known to be below, or may be."""
    value = _resolved(space, base, name)
    return value is None or float(value) < bound


def _at_least(space: Space, name: str, bound: float) -> KnobValue | None:
    axis = space.axis(name)
    if axis is None or bound <= 0:
        return None
    numbers: Mapping[float, KnobValue] = {float(value): value for value in axis.values if value is not None}
    above = [number for number in numbers if number >= bound]
    return numbers[min(above)] if above else numbers[max(numbers)] if numbers else None
