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
from tunewright.propose.graphs import CAPTURED, slower, tokens_to_capture
from tunewright.propose.space import Space

_REUSE_THAT_MATTERS = 0.02
_MANY_STREAMS = 128  # whose Mamba states are a good part of what a decode step reads and writes
_LAUNCHES_MATTER = 0.5  # of a step's time, lost without a graph, is worth a trial

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
    if concurrency >= _MANY_STREAMS:
        yield from _halved(space, base, "mamba_ssm_cache_dtype", "float16")
    graphs = _larger_graphs(space, base, profile, facts, 0)
    if graphs is not None:
        told = f"CUDA graphs for steps of up to {graphs:,} tokens, with prompts in them"
        yield {"max_cudagraph_capture_size": graphs}, told
    depth = _at_least(space, "num_speculative_tokens", 1)
    if depth is not None and not base.values.get("num_speculative_tokens"):
        method = _own_drafter(space, base, facts)
        if method is not None:
            drafting: dict[str, KnobValue] = {"speculative_method": method, "num_speculative_tokens": depth}
            graphs = _larger_graphs(space, base, profile, facts, int(depth))
            if graphs is not None:  # what is drafted counts among a step's tokens
                drafting["max_cudagraph_capture_size"] = graphs
            told = f"speculation by {method}, one token"
            if _on_axis(space, "mamba_backend", "flashinfer"):  # every drafted token is one more update of the state
                drafting["mamba_backend"] = "flashinfer"
                told += ", on FlashInfer's Mamba kernels"
            yield drafting, told
    if _on_axis(space, "mamba_backend", "flashinfer") and _resolved(space, base, "mamba_backend") != "flashinfer":
        yield {"mamba_backend": "flashinfer"}, "other kernels for the Mamba state"
    if concurrency < _MANY_STREAMS:
        yield from _halved(space, base, "mamba_ssm_cache_dtype", "float16")
    yield from _halved(space, base, "kv_cache_dtype", "fp8")


def _halved(space: Space, base: Candidate, name: str, value: KnobValue) -> Iterator[Step]:
    if _on_axis(space, name, value) and is_lossy(name, value) and base.values.get(name) != value:
        yield {name: value}, f"half the memory by {name} {value}"


def _larger_graphs(
    space: Space, base: Candidate, profile: TrafficProfile | None, facts: ModelFacts, depth: int
) -> KnobValue | None:
    """The capture size for steps in which prompts ride along, where that matters and the base's is too small."""
    if profile is None or slower(facts) < _LAUNCHES_MATTER:
        return None
    seqs = _resolved(space, base, "max_num_seqs")
    running = min(profile.concurrency_p95, float(seqs) if seqs is not None else profile.concurrency_p95)
    tokens = tokens_to_capture(profile, running, depth)
    captured = _resolved(space, base, "max_cudagraph_capture_size") or CAPTURED
    if tokens is None or float(captured) >= tokens:
        return None
    size = _at_least(space, "max_cudagraph_capture_size", tokens)
    return size if size is not None and float(size) >= tokens else None


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
